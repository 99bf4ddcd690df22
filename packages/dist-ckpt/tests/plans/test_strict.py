"""The eight modes of ``strict``, with a key too many on each side."""

import warnings

import pytest
import torch
from dist_ckpt_helpers import one

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, MismatchError, ShardedObject, ShardedTensorFactory, StrictHandling


@pytest.fixture
def folder(tmp_path):
    state = {"w": one("w", torch.ones(2)), "extra": one("extra", torch.ones(1)), "o": ShardedObject("o", 1, (1,), (0,))}
    dist_ckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def request():
    return {
        "w": one("w", torch.zeros(2)),
        "model": {"new": one("new", torch.zeros(3))},
        "list": [one("n2", torch.zeros(1)), one("w", torch.zeros(2), replica_id=1)],
        "p": ShardedObject("p", None, (1,), (0,)),
    }


@pytest.mark.parametrize("mode", ["assume_ok_unexpected", StrictHandling.RAISE_UNEXPECTED])
def test_unexpected_keys_are_all_listed(folder, mode):
    with pytest.raises(MismatchError, match=r"(?s)3 keys.*n2: .*new: .*p/shard_0_1: ") as caught:
        dist_ckpt.load(request(), folder, strict=mode)
    assert "extra" not in str(caught.value)


def test_raise_all_lists_missing_keys_too(folder):
    with pytest.raises(MismatchError, match=r"(?s)5 keys.*extra: in the checkpoint.*o/shard_0_1: in the checkpoint"):
        dist_ckpt.load(request(), folder, strict="raise_all")


@pytest.mark.parametrize(
    ("mode", "texts"),
    [
        ("log_unexpected", ["Unexpected keys (asked for, not found in the checkpoint): n2, new, p"]),
        ("log_all", ["Unexpected keys", "Missing keys (in the checkpoint, asked for by no rank): extra, o/"]),
    ],
)
def test_log_modes_log_each_time_and_leave_the_leaves_out(folder, mode, texts, caplog):
    for _ in range(2):  # a warning of Python's would be shown once
        caplog.clear()
        loaded = dist_ckpt.load(request(), folder, strict=mode)
        lines = [record.getMessage() for record in caplog.records if record.name == "sixfold.dist_ckpt"]
        assert len(lines) == len(texts)
        assert all(text in line for text, line in zip(texts, lines, strict=True))
    assert loaded["model"] == {}
    assert "p" not in loaded
    assert loaded["list"][0] is None
    assert torch.equal(loaded["list"][1], torch.ones(2))


@pytest.mark.parametrize(("mode", "missing"), [("return_unexpected", set()), ("return_all", {"extra", "o"})])
def test_return_modes_give_both_sets(folder, mode, missing):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded, lost, unexpected = dist_ckpt.load(request(), folder, strict=mode)
    assert torch.equal(loaded["w"], torch.ones(2))
    assert lost == missing
    assert unexpected == {"new", "n2", "p"}


def test_ignore_all_says_nothing(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(dist_ckpt.load(request(), folder, strict="ignore_all")["w"], torch.ones(2))


def test_another_mode_is_refused(folder):
    with pytest.raises(CheckpointError, match="strict is 'sometimes'; it is one of"):
        dist_ckpt.load({}, folder, strict="sometimes")


def test_a_factory_that_lost_all_its_records_is_left_out_as_a_record_is(folder):
    def factory(*keys):
        parts = [one(key, torch.zeros(2)) for key in keys]
        return ShardedTensorFactory("f", torch.zeros(2), lambda *_: parts, torch.cat)

    request = {"d": {"w": one("w", torch.zeros(2)), "f": factory("n1", "n2")}, "l": [factory("n3"), factory("w")]}
    loaded = dist_ckpt.load(request, folder, strict="ignore_all", validate_access_integrity=False)
    assert list(loaded["d"]) == ["w"]
    assert loaded["l"][0] is None
    assert loaded["l"][1].tolist() == [1.0, 1.0]
