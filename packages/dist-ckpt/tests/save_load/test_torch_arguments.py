"""Arguments of torch.save, torch.load and torch DCP, given to this package, are one error that names ours."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sixfold import dist_ckpt
from sixfold.dist_ckpt.torch_arguments import ARGUMENTS

CALLS = {"save": dist_ckpt.save, "load": dist_ckpt.load, "async_save": dist_ckpt.async_save}


def names(call):
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name for name, one in inspect.signature(call).parameters.items() if one.kind not in kinds}


def test_every_argument_of_torchs_calls_is_in_the_table():
    theirs = {name for call in (dcp.save, dcp.load, dcp.async_save, torch.load) for name in names(call)}
    theirs |= {"obj", "f", "pickle_module"}  # of torch.save
    rare = {"mmap", "pickle_load_args"}
    assert theirs - rare - {name for call in CALLS.values() for name in names(call)} <= ARGUMENTS.keys()


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_torchs_is_told_what_to_write(call, tmp_path):
    for name in ARGUMENTS:
        with pytest.raises(dist_ckpt.CheckpointError, match=rf"^{name} is no argument of {call}; \w+"):
            CALLS[call]({"a": torch.ones(2)}, tmp_path / "x", group=None, **{name: None})
    assert list(tmp_path.iterdir()) == []


def test_torchs_own_calls_are_told_the_door_that_takes_them(tmp_path):
    state = {"a": torch.arange(3.0)}
    with pytest.raises(dist_ckpt.CheckpointError, match="checkpoint_id is no argument of save; give checkpoint_dir"):
        dist_ckpt.save(state, checkpoint_id=tmp_path / "x")
    with pytest.raises(dist_ckpt.CheckpointError, match=r"storage_writer .* sixfold\.dist_ckpt\.dcp\.save"):
        dist_ckpt.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "x"))
    from sixfold.dist_ckpt import dcp as door

    door.save(state, checkpoint_id=tmp_path / "x", no_dist=True)
    found = {"a": torch.zeros(3)}
    door.load(found, checkpoint_id=tmp_path / "x", no_dist=True)
    assert torch.equal(found["a"], state["a"])


@pytest.mark.parametrize("call", CALLS)
def test_a_deadline_that_is_no_number_is_told_to_be_one(call, tmp_path):
    with pytest.raises(dist_ckpt.CheckpointError, match="timeout_s is '60'; it is a number of seconds > 0"):
        CALLS[call]({"a": torch.ones(2)}, tmp_path / "x", group=None, timeout_s="60")
