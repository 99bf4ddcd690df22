"""flattened_range: every (TP, DP) over the divisors of 8 loads as every other, bit for bit, whatever the shapes.

DIST_CKPT_ALL_LAYOUTS=1 pytest packages/dist-ckpt/tests/plans/test_flattened.py    # all 256 pairs; else 16 of them
"""

import os

import pytest
import torch
from dist_ckpt_helpers import Cut, expected_values, flat_shards

from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor

DIVISORS = (1, 2, 4, 8)
LAYOUTS = [(tp, dp) for tp in DIVISORS for dp in DIVISORS]
ALL = bool(os.environ.get("DIST_CKPT_ALL_LAYOUTS"))
SAVED = LAYOUTS if ALL else [(1, 1), (1, 8), (2, 2), (2, 4), (4, 1), (4, 8), (8, 2), (8, 8)]
# key -> shape, axis that TP cuts; no DP above 1 divides the elements of some parts
TENSORS = {
    "vector": ((40,), 0),
    "matrix": ((24, 7), 0),
    "columns": ((5, 16), 1),
    "cube": ((3, 8, 5), 1),
    "last": ((3, 1, 5, 8), 3),
}


def loaded_as(tp, dp):
    """The layouts to load what (tp, dp) has saved: all, or two that differ from one saved layout to the next."""
    first = LAYOUTS.index((tp, dp))
    return LAYOUTS if ALL else [LAYOUTS[(first * 5 + step) % 16] for step in (1, 6)]


def whole(key):
    shape, _ = TENSORS[key]
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(key)))


def cut(key, tp, dp):
    shape, axis = TENSORS[key]
    elements = torch.Size(shape).numel() // tp
    return Cut(axis, tp, tuple(elements * i // dp for i in range(dp + 1)))


def state(tp, dp, *, fill):
    return {key: flat_shards(key, whole(key), cut(key, tp, dp), fill=fill) for key in TENSORS}


def unflattened(tp):
    made = {}
    for key, (_, axis) in TENSORS.items():
        parts = whole(key).chunk(tp, axis)
        made[key] = [ShardedTensor.from_rank_offsets(key, p * 0, (axis, i, tp)) for i, p in enumerate(parts)]
    return made


@pytest.mark.parametrize(("tp", "dp"), SAVED)
@pytest.mark.slow
def test_a_layout_saved_flattened_loads_as_every_other_layout(tmp_path, tp, dp):
    dist_ckpt.save(state(tp, dp, fill=True), tmp_path / "c")
    listed = dist_ckpt.load_tensors_metadata(tmp_path / "c")
    assert {key: record.global_shape for key, record in listed.items()} == {key: s for key, (s, _) in TENSORS.items()}
    for new_tp, new_dp in loaded_as(tp, dp):
        loaded = dist_ckpt.load(state(new_tp, new_dp, fill=False), tmp_path / "c")
        for key in TENSORS:
            expected = expected_values(whole(key), cut(key, new_tp, new_dp))
            assert all(torch.equal(a, b) for a, b in zip(loaded[key], expected, strict=True)), (key, new_tp, new_dp)
    loaded = dist_ckpt.load(unflattened(tp), tmp_path / "c")
    for key, (_, axis) in TENSORS.items():
        assert torch.equal(torch.cat(loaded[key], axis), whole(key))


@pytest.mark.parametrize("tp", DIVISORS)
def test_unflattened_tensors_load_as_every_flattened_layout(tmp_path, tp):
    asked = unflattened(tp)
    for key, (_, axis) in TENSORS.items():
        for record, part in zip(asked[key], whole(key).chunk(tp, axis), strict=True):
            record.data.copy_(part)
    dist_ckpt.save(asked, tmp_path / "c")
    for new_tp, new_dp in loaded_as(tp, 1):
        loaded = dist_ckpt.load(state(new_tp, new_dp, fill=False), tmp_path / "c")
        for key in TENSORS:
            expected = expected_values(whole(key), cut(key, new_tp, new_dp))
            assert all(torch.equal(a, b) for a, b in zip(loaded[key], expected, strict=True)), (key, new_tp, new_dp)
