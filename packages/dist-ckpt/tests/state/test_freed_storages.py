"""Tensors whose storage was freed, as FSDP frees parameters between uses: an error that names them, never a crash."""

import pytest
import torch
from dist_ckpt_helpers import one
from torch.distributed.checkpoint.api import CheckpointException

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, ShardingError, dcp


def freed(length=4):
    tensor = torch.arange(float(length))
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("wrap", [lambda t: one("w", t), lambda t: t, lambda t: (t,), torch.nn.Parameter])
def test_a_save_of_freed_memory_is_refused_and_its_remedy_works(tmp_path, wrap):
    tensor = freed()
    with pytest.raises(ShardingError, match=r"storage (of data )?was freed"):
        dist_ckpt.save({"w": wrap(tensor)}, tmp_path / "c", group=None)
    assert list(tmp_path.iterdir()) == []
    tensor.untyped_storage().resize_(16)
    tensor.fill_(3.0)
    dist_ckpt.save({"w": wrap(tensor)}, tmp_path / "c", group=None)
    found = dist_ckpt.load_plain_tensors(tmp_path / "c") or {
        "w": dist_ckpt.load({}, tmp_path / "c", group=None)["w"][0]
    }
    assert found["w"].tolist() == [3.0] * 4


def test_a_background_save_of_freed_memory_is_refused_by_the_call(tmp_path):
    with pytest.raises(ShardingError, match="storage of data was freed"):
        dist_ckpt.async_save({"w": one("w", freed())}, tmp_path / "c", group=None)


def test_a_load_into_freed_memory_is_refused(tmp_path):
    dist_ckpt.save({"w": one("w", torch.ones(4)), "p": torch.ones(4)}, tmp_path / "c", group=None)
    with pytest.raises(ShardingError, match="storage of data was freed"):
        dist_ckpt.load({"w": one("w", freed())}, tmp_path / "c", group=None)
    target = freed()
    with pytest.raises(ShardingError, match=r"p\[:\]: the storage of data was freed"):
        dist_ckpt.load({"w": one("w", torch.zeros(4)), "p": target}, tmp_path / "c", group=None)
    target.untyped_storage().resize_(16)
    dist_ckpt.load({"w": one("w", torch.zeros(4)), "p": target}, tmp_path / "c", group=None)
    assert target.tolist() == [1.0] * 4


def test_functions_of_torch_are_refused_it_too(tmp_path):
    with pytest.raises(CheckpointException, match="storage of data was freed"):
        dcp.save({"w": freed()}, checkpoint_id=tmp_path / "c", no_dist=True)
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointException, match="storage of data was freed"):
        dcp.load({"w": freed()}, checkpoint_id=tmp_path / "c", no_dist=True)


def saves(rank, ranks, folder):
    try:
        dist_ckpt.save({"p": freed() if rank else torch.ones(4)}, folder)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_freed_memory_of_one_rank_is_an_error_on_all(tmp_path):
    texts = run_ranks(saves, 2, tmp_path / "c")
    assert texts[0] == texts[1]
    assert "p: ranks [0], [1] hold different values" in texts[0]
