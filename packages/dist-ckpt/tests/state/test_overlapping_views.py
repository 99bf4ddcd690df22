"""A load into views of one tensor: those that have no element in common, and those that have some."""

import pytest
import torch

from sixfold import dist_ckpt
from sixfold.dist_ckpt import MismatchError


def saved(folder, **tensors):
    dist_ckpt.save(tensors, folder / "c", group=None)
    return folder / "c"


def matrix():
    return torch.arange(24.0).reshape(4, 6)


APART = {
    "rows": lambda whole: (whole[:2], whole[2:]),
    "columns": lambda whole: (whole[:, :3], whole[:, 3:]),
    "every second column": lambda whole: (whole[:, ::2], whole[:, 1::2]),
    "bytes beside numbers": lambda whole: (whole[:2], whole[2:].view(torch.int16)),
}


@pytest.mark.parametrize("cut", APART)
def test_views_without_a_common_element_are_filled_each(tmp_path, cut):
    one, other = (part.clone() for part in APART[cut](matrix()))
    path, whole = saved(tmp_path, one=one, other=other), torch.zeros(4, 6)
    a, b = APART[cut](whole)
    dist_ckpt.load({"one": a, "other": b}, path, group=None)
    assert torch.equal(whole, matrix())


SHARED = {
    "ends": lambda whole: (whole.view(-1)[:14], whole.view(-1)[10:]),
    "columns": lambda whole: (whole[:, :4], whole[:, 3:]),
    "all and a part": lambda whole: (whole, whole[1:3, 2:4]),
    "a part and all": lambda whole: (whole[1:3, 2:4], whole),
    "numbers and their bytes": lambda whole: (whole[:3], whole.view(torch.int16)[2:]),
}


@pytest.mark.parametrize("cut", SHARED)
def test_views_with_common_elements_take_equal_values_and_refuse_others_by_both_names(tmp_path, cut):
    one, other = (part.clone() for part in SHARED[cut](matrix()))
    path, whole = saved(tmp_path / "equal", one=one, other=other), torch.zeros(4, 6)
    a, b = SHARED[cut](whole)
    dist_ckpt.load({"one": a, "other": b}, path, group=None)
    assert torch.equal(a, one) and torch.equal(b, other)
    path = saved(tmp_path / "unlike", one=one, other=other.bitwise_not() if cut.endswith("bytes") else other + 1)
    with pytest.raises(MismatchError, match="other: its tensor and that of one are views with elements in common"):
        dist_ckpt.load({"one": a, "other": b}, path, group=None)


def test_three_views_name_the_two_that_differ(tmp_path):
    path = saved(tmp_path, a=torch.zeros(4), b=torch.zeros(4), c=torch.ones(4))
    whole = torch.ones(8)
    with pytest.raises(MismatchError, match="c: its tensor and that of b are views"):
        dist_ckpt.load({"a": whole[:4], "b": whole[2:6], "c": whole[4:]}, path, group=None)


def test_a_view_that_is_not_stored_conflicts_with_none(tmp_path):
    path, whole = saved(tmp_path, a=torch.zeros(4)), torch.ones(8)
    dist_ckpt.load({"a": whole[:4], "b": whole[2:6]}, path, group=None, strict="log_unexpected")
    assert whole.tolist() == [0.0] * 4 + [1.0] * 4
