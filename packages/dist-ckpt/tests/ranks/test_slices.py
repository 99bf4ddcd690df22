"""DTensors on slices of a mesh: DDP or FSDP with tensor parallelism as trainers write it, and stages of a pipeline."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor, ShardingError, dcp
from sixfold.dist_ckpt.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy


class Block(nn.Module):
    """What a layer of torchtitan has: linear layers that are cut, a norm that tensor parallelism leaves plain."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def trained(kind, seed):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Block(seed)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "fsdp":
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(3, 8)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def whole(state):
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist() for name, value in state}


def of(model, optimizer):
    moments = [(n, part["exp_avg"]) for n, part in optimizer.state_dict()["state"].items()]
    return whole(model.state_dict().items()) | whole(moments)


def saved_and_loaded(rank, ranks, folder, kind):
    parallel = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), do_cache_distribution=True)
    model, optimizer = trained(kind, 0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dist_ckpt.save(state, folder / "c")
    for _ in range(2):
        dist_ckpt.save(state, folder / "parallel", parallel)
    expected, same = of(model, optimizer), []
    for name in ("c", "parallel"):
        model, optimizer = trained(kind, 1)
        loaded = dist_ckpt.load(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / name, strict="raise_all"
        )
        optimizer.load_state_dict(loaded["optimizer"])
        same.append(of(model, optimizer) == expected)
    return same, {name: value for name, value in expected.items() if isinstance(name, str)}


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_tensor_parallelism_on_a_slice_of_the_mesh_is_saved_once_and_loads_again(tmp_path, kind):
    found = run_ranks(saved_and_loaded, 4, tmp_path, kind)
    assert found == [([True, True], found[0][1])] * 4
    for name in ("c", "parallel"):
        plain = {
            key.removeprefix("model."): value for key, value in dist_ckpt.load_plain_tensors(tmp_path / name).items()
        }
        assert {key: plain[key].tolist() for key in found[0][1]} == found[0][1]
        assert dist_ckpt.tools.verify(tmp_path / name)["problems"] == []


def stages(rank, ranks, folder):
    """A pipeline of two stages, whose optimizers count their parameters from 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = rank // 2

    def state(differing=True, names="same"):
        prefix = "0" if names == "same" else f"stage{stage}"
        values = torch.arange(8.0) + (stage if differing else 0)
        many = {f"same{n}": distribute_tensor(torch.ones(4), mesh["tp"], [Shard(0)]) for n in range(80)}
        return {"optim": {prefix: distribute_tensor(values, mesh["tp"], [Shard(0)])}, **many}

    told = []
    for options in ({}, {"validate_access_integrity": False}):
        with pytest.raises(ShardingError) as caught:
            dist_ckpt.save(state(), folder / "c", **options)
        told.append(str(caught.value))
    assert not (folder / "c").exists()
    dist_ckpt.save(state(names="own"), folder / "c")
    dist_ckpt.save(state(differing=False), folder / "d")
    asked = state()["optim"]["0"]
    by_hand = ShardedTensor.from_dtensor("optim.0", asked, replica_id=stage)
    dist_ckpt.save({"by hand": by_hand}, folder / "e", validate_access_integrity=False)
    return told


def test_stages_whose_names_collide_are_an_error_and_with_names_of_their_own_all_is_saved(tmp_path):
    told = run_ranks(stages, 4, tmp_path)
    assert all(texts == told[0] for texts in told)
    compared, unlooked = told[0]
    assert "optim.0 from (0,): ranks [0], [2] of different slices of a mesh hold different values" in compared
    assert "same" not in compared
    assert "give each a name of its own" in compared
    assert "overlap, and both are main replicas" in unlooked
    plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
    assert plain["optim.stage0"].tolist() == [*range(8)]
    assert plain["optim.stage1"].tolist() == [*range(1, 9)]
    for name in ("d", "e"):
        assert dist_ckpt.load_plain_tensors(tmp_path / name)["optim.0"].tolist() == [*range(8)]


def through_the_door(rank, ranks, folder):
    torch.manual_seed(rank)
    stage = nn.Linear(3, 2)
    model, told = {f"stage{rank}": stage.state_dict()}, []
    collides = {"model": model, "shared": torch.ones(2), "optim": {"state": {0: {"m": stage.weight}}}}
    for save in (dcp.save, dcp.async_save):
        with pytest.raises(ShardingError) as caught:
            save(collides, checkpoint_id=folder / "c")
        told.append(str(caught.value))
    assert not (folder / "c").exists()
    own = {"model": model, "optim": {f"stage{rank}": {"m": stage.weight.detach()}}, "shared": torch.ones(2)}
    dcp.save(own, checkpoint_id=folder / "c")
    asked = {"optim": {f"stage{rank}": {"m": torch.zeros(2, 3)}}}
    dcp.load(asked, checkpoint_id=folder / "c")
    assert torch.equal(asked["optim"][f"stage{rank}"]["m"], stage.weight)
    planner = torch.distributed.checkpoint.DefaultSavePlanner()
    dcp.save({"statistics": torch.full((2,), rank)}, checkpoint_id=folder / "d", planner=planner)
    return told


def test_plain_tensors_of_one_name_that_differ_are_an_error_through_the_door_and_its_remedies_work(tmp_path):
    for told in run_ranks(through_the_door, 2, tmp_path):
        assert told[0] == told[1]
        assert "optim.state.0.m: ranks 0 and 1 hold different tensors" in told[0]
        assert "shared" not in told[0]
    assert dist_ckpt.load_plain_tensors(tmp_path / "d")["statistics"].shape == (2,)


def stages_through_the_door(rank, ranks, folder):
    """FSDP2 over two ranks in each of two stages, whose optimizers call their only parameter 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(rank // 2)
    model = nn.Linear(4, 6, bias=False)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.full((2, 4), 1.0 + rank // 2)).sum().backward()
    optimizer.step()
    told = []
    for save in (dcp.save, dcp.async_save):
        with pytest.raises(ShardingError) as caught:
            save({"optim": optimizer.state_dict()}, checkpoint_id=folder / "c")
        told.append(str(caught.value))
    assert not (folder / "c").exists()
    own = {f"stage{rank // 2}": optimizer.state_dict()}
    dcp.save(own, checkpoint_id=folder / "c")
    moments = optimizer.state[model.weight]["exp_avg"]
    copies = DTensor.from_local(torch.full((1,), rank % 2), mesh["dp"], [Shard(0)], run_check=False)
    dcp.save({"copies": copies}, checkpoint_id=folder / "d")
    return told, moments.full_tensor()


def test_moments_of_fsdp_stages_whose_names_collide_are_an_error_through_the_door(tmp_path):
    found = run_ranks(stages_through_the_door, 4, tmp_path)
    assert len({text for told, _ in found for text in told}) == 1
    assert "optim.state.0.exp_avg from (0, 0): ranks 0 and 2 hold different tensors" in found[0][0][0]
    plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
    for stage in (0, 1):
        assert torch.equal(plain[f"stage{stage}.state.0.exp_avg"], found[2 * stage][1])
    assert dist_ckpt.load_plain_tensors(tmp_path / "d")["copies"].tolist() == [0, 1]
