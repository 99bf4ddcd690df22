"""``dcp.Writer`` and ``dcp.Reader`` on two ranks: plans that torch keeps, and who hashes which block."""

import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_dcp_helpers import Meddling, dcp_load, dcp_save
from dist_ckpt_helpers import names
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ranktest import run_ranks
from sixfold.dist_ckpt import dcp, tools
from sixfold.dist_ckpt.checkpoint.opening import open_checkpoint
from sixfold.dist_ckpt.formats import compact_manifest
from sixfold.dist_ckpt.formats.integrity import BLOCK_BYTES
from sixfold.dist_ckpt.save_load import reader as engine


def sharded(value, axis, shape=(4, 6)):
    mesh, ranks = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_world_size()
    whole = torch.arange(float(shape[0] * shape[1])).view(shape) + value
    return DTensor.from_local(whole.chunk(ranks, axis)[dist.get_rank()].clone(), mesh, [Shard(axis)]), whole


def save_with_kept_plans(rank, ranks, folder):
    """Five saves whose plans are kept by torch after the first, the third of which fails on rank 1."""

    def broken():
        if rank == 1:
            raise ValueError("my own bug")

    class Kept(Meddling):
        def __init__(self, action):
            super().__init__(action)
            DefaultSavePlanner.__init__(self, enable_plan_caching=True)

    for step in range(1, 6):
        state = {"w": sharded(float(step), 0)[0], "of": {f"rank{rank}": torch.full((2,), float(step))}}
        try:
            dcp_save(state, dcp.Writer(folder / "c"), planner=Kept(broken if step == 3 else lambda: None))
        except CheckpointException:
            assert step == 3
        found = {"w": torch.zeros(4, 6), "of": {"rank0": torch.zeros(2), "rank1": torch.zeros(2)}}
        dist.barrier()
        dcp_load(found, FileSystemReader(folder / "c"))
        expected = step - (step == 3)
        assert torch.equal(found["w"], sharded(float(expected), 0)[1]), step
        assert [of.tolist() for of in found["of"].values()] == [[expected] * 2] * 2
        dist.barrier()
    return True


@pytest.mark.slow
def test_plans_that_torch_keeps_write_the_values_of_each_save(tmp_path):
    assert run_ranks(save_with_kept_plans, 2, tmp_path) == [True, True]
    found, listed = open_checkpoint(tmp_path / "c").manifest, without_compact(tmp_path / "c").manifest
    assert list(found.tensors) == ["of.rank0", "of.rank1", "w"]
    assert {key: [*tensor.chunks] for key, tensor in found.tensors.items()} == {
        key: sorted(tensor.chunks) for key, tensor in listed.tensors.items()
    }
    assert tools.verify(tmp_path / "c")["ok"]
    assert names(tmp_path) == ["c"]


def without_compact(folder):
    """A copy opened that has ``.metadata`` alone, as torch writes it."""
    plain = shutil.copytree(folder, folder.with_name("plain"))
    metadata = FileSystemReader(folder).read_metadata()
    del metadata.sixfold_save_id
    (plain / ".metadata").write_bytes(pickle.dumps(metadata))
    for name in ("metadata.json", "common.pt", "integrity.json", compact_manifest.FILE_NAME):
        (plain / name).unlink()
    found = open_checkpoint(plain)
    shutil.rmtree(plain)
    return found


def load_and_count(rank, ranks, folder):
    state, _ = sharded(1.0, 1, (2048, 1536))
    counted, real = [], engine.Reader._block
    engine.Reader._block = lambda self, file, number, wanted: (
        counted.append((file, number)),
        real(self, file, number, wanted),
    )
    found = DTensor.from_local(torch.zeros_like(state.to_local()), state.device_mesh, [Shard(1)])
    dcp_load({"w": found}, dcp.Reader(folder / "c"))
    return counted, torch.equal(found.to_local(), state.to_local())


def save_rows(rank, ranks, folder):
    dcp_save({"w": sharded(1.0, 0, (2048, 1536))[0]}, dcp.Writer(folder / "c"))


@pytest.mark.slow
def test_each_block_that_is_touched_is_hashed_by_one_rank(tmp_path):
    run_ranks(save_rows, 2, tmp_path)
    (first, equal), (second, also) = run_ranks(load_and_count, 2, tmp_path)
    assert equal
    assert also
    sizes = [(path.name, path.stat().st_size) for path in (tmp_path / "c").glob("*.distcp")]
    blocks = {(name, number) for name, size in sizes for number in range(-(-size // BLOCK_BYTES))}
    assert len(first) + len(second) == len(blocks)
    assert {*first, *second} == blocks
    assert first
    assert second


def write_again_in_flight(rank, ranks, folder):
    """One writer for two saves at once: one of them at least is told, and what lies there is whole."""
    writer, ends = dcp.Writer(folder / "a"), []

    def other():
        if rank == 0:
            writer.set_up_storage_writer(True, rank=0)
            plan = DefaultSavePlanner()
            plan.set_up_planner({"v": torch.zeros(3)}, is_coordinator=True)
            writer.prepare_global_plan([plan.create_local_plan()])

    try:
        dcp_save({"w": torch.ones(3), "x": torch.ones(3)}, writer, planner=Meddling(other, 1))
    except CheckpointException as caught:
        ends = [type(error).__name__ for error, _ in caught.failures.values()]
    return ends


def test_a_writer_that_begins_again_in_mid_save_commits_no_mixture(tmp_path):
    (ends,) = run_ranks(write_again_in_flight, 1, tmp_path)
    assert ends == ["StorageError"]
    assert names(tmp_path) == []
