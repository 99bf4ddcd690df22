"""Compressed saves of several ranks: other layouts, plain tensors, wrappers, and a rank that lacks the module."""

import sys
import time

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_helpers import one
from plain_tensors_helpers import all_dtypes, assert_same, by_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, PerRank, ShardedTensor, ShardingError, tools
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

pytest.importorskip("zstandard", reason="needs the module zstandard (extra zstd)")
ROWS, COLUMNS = 2048, 1024  # two blocks


def tensors():
    torch.manual_seed(0)
    return {
        "rows": torch.randn(ROWS, COLUMNS) * 0.02,
        "columns": torch.randn(ROWS, COLUMNS).bfloat16(),
        "flat": torch.arange(100_003) // 7,
        "tied": torch.randn(900, 30),
        **all_dtypes(),
    }


def cut(rank, ranks, fill):
    """Rows, columns and a flattened range of this rank; each of the others whole, as a replica."""
    state, whole = {}, tensors()
    bounds = [100_003 * r // ranks for r in range(ranks + 1)]
    for key, tensor in whole.items():
        if key in ("rows", "columns"):
            axis = int(key == "columns")
            part = tensor.chunk(ranks, axis)[rank].clone()
            state[key] = ShardedTensor.from_rank_offsets(
                key, part if fill else torch.zeros_like(part), (axis, rank, ranks)
            )
        elif key == "flat":
            part = slice(bounds[rank], bounds[rank + 1])
            data = tensor[part].clone() if fill else torch.zeros_like(tensor[part])
            state[key] = ShardedTensor.from_rank_offsets_flat(key, data, (100_003,), flattened_range=part)
        else:
            state[key] = one(key, tensor if fill else torch.zeros_like(tensor), replica_id=rank)
    return state


def save_cut(rank, ranks, folder, how):
    state = {
        **cut(rank, ranks, True),
        "plain": {"w": torch.arange(3_000_000.0)},
        "own": PerRank(torch.full((9000,), rank)),
    }
    if how == "in background":
        dist_ckpt.async_save(state, folder, compress="zstd").wait()
        return
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()) if how == "fully parallel" else None
    dist_ckpt.save(state, folder, strategy, compress="zstd")


def load_cut(rank, ranks, folder):
    asked, expected = cut(rank, ranks, False), cut(rank, ranks, True)
    state = {**asked, "plain": {"w": torch.zeros(3_000_000)}, "own": PerRank(None, lambda found, rank, ranks: found)}
    found = dist_ckpt.load(state, folder)
    assert torch.equal(found["plain"]["w"], torch.arange(3_000_000.0))
    assert_same({key: found[key] for key in expected}, {key: record.data for key, record in expected.items()})
    return [value.unique().tolist() for value in found["own"]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["plainly", "fully parallel", "in background"])
@pytest.mark.parametrize(("ranks", "others"), [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.slow
def test_any_number_of_ranks_loads_what_any_number_has_compressed(tmp_path, ranks, others, how):
    run_ranks(save_cut, ranks, tmp_path / "c", how)
    assert run_ranks(load_cut, others, tmp_path / "c") == [[[rank] for rank in range(ranks)]] * others
    assert tools.verify(tmp_path / "c")["ok"] and tools.inspect(tmp_path / "c")["compress"] == "zstd"
    found, expected = by_torch(tmp_path / "c"), tensors()
    assert_same({key: found[key] for key in expected}, expected)


def save_unequal(rank, ranks, folder, position):
    tensor = torch.zeros(3_000_000)
    tensor[position] = rank
    with pytest.raises(ShardingError, match="w"):
        dist_ckpt.save({"w": tensor}, folder, compress="zstd")
    tensor[position] = 0
    dist_ckpt.save({"w": tensor}, folder, compress="zstd")


@pytest.mark.parametrize("position", [0, 1_500_000, 2_999_999])
def test_copies_that_differ_in_any_block_are_told_and_equal_ones_are_not(tmp_path, position):
    run_ranks(save_unequal, 2, tmp_path / "c", position)


def save_slices(rank, ranks, folder):
    """Copies of a DTensor on the slices of a mesh, which ranks find by their digests."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    dist_ckpt.save({"w": distribute_tensor(whole, mesh["tp"], [Shard(0)])}, folder, compress="zstd")
    dist.barrier()
    found = dist_ckpt.load({"w": distribute_tensor(torch.zeros_like(whole), mesh["tp"], [Shard(1)])}, folder)["w"]
    assert torch.equal(found.full_tensor(), whole)


@pytest.mark.slow
def test_copies_on_slices_of_a_mesh_are_written_once(tmp_path):
    run_ranks(save_slices, 4, tmp_path / "c")
    assert sum(tensor["chunks"] for tensor in tools.inspect(tmp_path / "c")["tensors"]) == 2
    assert torch.equal(by_torch(tmp_path / "c")["w"].flatten(), torch.arange(float(ROWS * COLUMNS)))


def without_the_module_on_one(rank, ranks, folder):
    state, blank = {"w": one("w", torch.ones(9000), replica_id=rank)}, one("w", torch.zeros(9000), replica_id=rank)
    dist_ckpt.save(state, folder / "c", compress="zstd")
    if rank == 1:
        sys.modules["zstandard"] = None
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"pip install 'sixfold-dist-ckpt\[zstd\]'"):
        dist_ckpt.save(state, folder / "d", compress="zstd")
    with pytest.raises(CheckpointError, match=r"pip install 'sixfold-dist-ckpt\[zstd\]'"):
        dist_ckpt.load({"w": blank}, folder / "c")
    return time.monotonic() - began


def test_a_rank_that_lacks_the_module_is_told_on_all(tmp_path):
    assert max(run_ranks(without_the_module_on_one, 2, tmp_path)) < 10
