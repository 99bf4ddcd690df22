"""DTensors as leaves of a state dict: saved at one mesh they load at another, here and by torch's own checkpoints."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked_worker import fork_workers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardingError
from sixfold.dist_ckpt.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy


def whole(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1


#: name -> mesh shape, global shape, placements; uneven and empty shards included
LAYOUTS = {
    "even": ((4,), (8, 3), (Shard(0),)),
    "uneven": ((4,), (7, 3), (Shard(0),)),
    "empty": ((4,), (5, 2), (Shard(0),)),
    "columns": ((4,), (3, 6), (Shard(1),)),
    "replicate": ((4,), (4, 3), (Replicate(),)),
    "scalar": ((4,), (), (Replicate(),)),
    "hsdp": ((2, 2), (5, 3), (Replicate(), Shard(0))),
    "mixed": ((2, 2), (6, 5), (Shard(1), Shard(0))),
    "twice": ((2, 2), (9, 2), (Shard(0), Shard(0))),
    "strided": ((2, 2), (8, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "fused": ((4,), (12, 2), (_StridedShard(0, split_factor=3),)),
    "scattered": ((2, 2), (8, 2), (_StridedShard(0, split_factor=2), Replicate())),
}


@functools.cache
def mesh_of(shape):
    """One mesh per shape and rank: each makes groups of its own."""
    return init_device_mesh("cpu", shape)


def state_of(fill):
    state = {}
    for name, (mesh_shape, shape, placements) in LAYOUTS.items():
        mesh = mesh_of(mesh_shape)
        value = whole(shape) if fill else torch.zeros(shape)
        state[name] = distribute_tensor(value, mesh, placements)
    return {"model": {"layers": [{"w": state.pop("even")}, state], "step": 3}, "lr": 0.5}


def save_and_load(rank, ranks, folder):
    fork_workers()
    parallel = (
        FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy()),
        FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy()),
    )
    dist_ckpt.save(state_of(fill=True), folder / "c")
    dist_ckpt.async_save(state_of(fill=True), folder / "async").wait()
    dist_ckpt.save(state_of(fill=True), folder / "parallel", parallel[0])
    return [
        load_and_compare(folder / name, parallel[1] if name == "parallel" else None)
        for name in ("c", "async", "parallel")
    ]


def load_and_compare(path, strategy):
    """The layouts that came back wrong, and the common data."""
    asked = state_of(fill=False)
    loaded = dist_ckpt.load(asked, path, strategy)
    found = {"even": loaded["model"]["layers"][0]["w"], **loaded["model"]["layers"][1]}
    wrong, layers = [], asked["model"]["layers"]
    for name, (_, shape, placements) in LAYOUTS.items():
        value, own = found[name], layers[0]["w"] if name == "even" else layers[1][name]
        expected = distribute_tensor(whole(shape), value.device_mesh, placements).to_local()
        same_memory = value.to_local().data_ptr() == own.to_local().data_ptr()
        same_kind = isinstance(value, DTensor) and value.placements == placements
        if not (same_kind and same_memory and torch.equal(value.to_local(), expected)):
            wrong.append(name)
    return wrong, loaded["lr"], loaded["model"]["step"]


@pytest.mark.slow
def test_dtensors_of_all_placements_come_back_on_every_rank(tmp_path):
    assert run_ranks(save_and_load, 4, tmp_path) == [[([], 0.5, 3)] * 3] * 4
    plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
    for name, (_, shape, _) in LAYOUTS.items():
        key = "model.layers.0.w" if name == "even" else f"model.layers.1.{name}"
        assert torch.equal(plain.pop(key), whole(shape)), name
    assert plain == {}


def other_mesh(fill):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = whole((7, 3)) if fill else torch.zeros(7, 3)
    return {
        "model": {"w": distribute_tensor(value, mesh, [Shard(0)]), "opt": [distribute_tensor(value, mesh, [Shard(1)])]}
    }


def both_ways_with_dcp(rank, ranks, folder, first):
    """DCP reads ours, ours reads DCP's: first saved at another number of ranks."""
    if first:
        dist_ckpt.save(other_mesh(fill=True), folder / "ours")
        dcp.save(other_mesh(fill=True), checkpoint_id=folder / "dcp")
        return None
    theirs, ours = other_mesh(fill=False), other_mesh(fill=False)
    dcp.load(theirs, checkpoint_id=folder / "ours")
    dist_ckpt.load(ours, folder / "dcp")
    expected = other_mesh(fill=True)
    return [
        torch.equal(state["model"]["w"].to_local(), expected["model"]["w"].to_local())
        and torch.equal(state["model"]["opt"][0].to_local(), expected["model"]["opt"][0].to_local())
        for state in (theirs, ours)
    ]


@pytest.mark.slow
def test_torch_dcp_reads_the_same_names_both_ways(tmp_path):
    run_ranks(both_ways_with_dcp, 2, tmp_path, True)
    assert run_ranks(both_ways_with_dcp, 3, tmp_path, False) == [[True, True]] * 3


def refusals(rank, ranks, folder):
    mesh = init_device_mesh("cpu", (ranks,))
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    shard = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(ranks)])
    legacy = sharded_tensor.zeros(spec, 4, 2)
    texts = []
    for state in (
        {"a": {"partial": partial}},
        {"legacy": [legacy]},
        {"pair": (1, shard)},
        {"differs": {"x": torch.full((2,), float(rank))}},
        {"tuple": (3, torch.full((2,), float(rank)))},
    ):
        with pytest.raises(ShardingError) as caught:
            dist_ckpt.save(state, folder / "c")
        texts.append(str(caught.value))
    rank_0s = {"differs": torch.tensor(rank)}
    dist_ckpt.save(rank_0s, folder / "d", preprocess_common_before_consistancy_check=lambda _: {})
    for state in ({"legacy": [legacy]}, {"pair": (1, shard)}):
        with pytest.raises(ShardingError):
            dist_ckpt.load(state, folder / "d")
    return texts, sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_leaves_of_one_rank_are_refused_by_name_on_every_rank(tmp_path):
    first, second = run_ranks(refusals, 2, tmp_path)
    assert first == second
    texts, names = first
    assert names == ["d"]
    assert "a.partial: the DTensor has the placement" in texts[0]
    assert "legacy[0] is torch's own ShardedTensor" in texts[1]
    assert "pair is a tuple that holds a DTensor" in texts[2]
    assert "differs.x" in texts[3] and "[0], [1]" in texts[3] and "PerRank" in texts[3]
    assert "tuple" in texts[4]


def on_a_mesh_of_the_last_rank(rank, ranks, folder):
    """As stages of a pipeline have it: the other ranks hold the DTensor, and nothing of it."""
    mesh = DeviceMesh("cpu", [ranks - 1])

    def of(values):
        local = values if rank == ranks - 1 else torch.empty(0)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,))

    dist_ckpt.save({"stage": {"t": of(torch.arange(4.0))}, "w": torch.ones(1)}, folder)
    asked = {"stage": {"t": of(torch.zeros(4))}, "w": torch.zeros(1)}
    loaded = dist_ckpt.load(asked, folder)
    assert loaded["w"].tolist() == [1]
    return loaded["stage"]["t"].to_local().tolist()


def test_a_dtensor_on_a_mesh_of_other_ranks_is_loaded_by_these(tmp_path):
    assert run_ranks(on_a_mesh_of_the_last_rank, 2, tmp_path / "c") == [[], [0, 1, 2, 3]]
