"""The fully parallel wrappers over NCCL: parts go by broadcasts from device to device."""

import pytest
import torch
import torch.distributed as dist

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices for NCCL; there are {DEVICES}"),
]


def state(rank, fill):
    device = torch.device("cuda", rank)
    wholes = {"big": torch.arange(3_000_000.0).view(3000, 1000), "odd": torch.arange(7, dtype=torch.bfloat16)}
    return {
        key: ShardedTensor.from_rank_offsets(key, (t if fill else t * 0).to(device), replica_id=rank)
        for key, t in wholes.items()
    }


def save_and_load(rank, ranks, folder):
    torch.cuda.set_device(rank)
    group = dist.new_group(list(range(ranks)), backend="nccl")
    dist_ckpt.save(state(rank, True), folder, FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), group))
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
    loaded = dist_ckpt.load(state(rank, False), folder, loader)
    return all(torch.equal(loaded[key], record.data) for key, record in state(rank, True).items())


def test_replicas_on_devices_share_the_work(tmp_path):
    assert run_ranks(save_and_load, 2, tmp_path / "c", timeout=120.0) == [True, True]
