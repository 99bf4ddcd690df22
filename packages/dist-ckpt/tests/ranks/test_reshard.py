"""Real processes: saved by one number of ranks at one layout, loaded by another at another."""

import random

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_helpers import Cut, expected_values, flat_shards

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import LocalNonpersistentObject, ShardedObject, ShardedTensor

SHAPES = {"a": (8,), "b": (4, 6), "c": (8, 2, 3)}


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def cut_for(key, tp, dp, seed):
    """The same uneven cut on every rank: TP over an axis that it divides, DP at random places."""
    rng = random.Random(f"{seed} {key}")
    shape = SHAPES[key]
    axis = rng.choice([d for d, n in enumerate(shape) if n % tp == 0])
    elements = torch.Size(shape).numel() // tp
    inner = sorted(rng.randint(0, elements) for _ in range(dp - 1))
    return Cut(axis, tp, (0, *inner, elements))


def my_state(rank, tp, dp, seed, *, fill):
    state = {}
    for key, whole in tensors().items():
        shards = flat_shards(key, whole, cut_for(key, tp, dp, seed), fill=fill)
        state[key] = shards[rank]  # the helper lists TP outside, DP inside
    return state


def save_layout(rank, ranks, folder, tp, seed):
    state = {
        "optimizer": my_state(rank, tp, ranks // tp, seed, fill=True),
        "tied": ShardedTensor.from_rank_offsets("tied", torch.arange(5.0), replica_id=(0, 0, rank)),
        "rng": ShardedObject("rng", {"rank": rank}, (ranks,), (rank,)),
        "iteration": 41,
        "names": ["x", {3: "y"}],
    }
    dist_ckpt.save(state, folder)
    return sorted(path.name for path in folder.iterdir())


def load_layout(rank, ranks, folder, tp, seed):
    asked = my_state(rank, tp, ranks // tp, seed, fill=False)
    state = {
        "optimizer": asked,
        "tied": ShardedTensor.from_rank_offsets("tied", torch.zeros(5), replica_id=rank),
        "here": LocalNonpersistentObject(rank),
        "iteration": -1,
    }
    loaded = dist_ckpt.load(state, folder)
    for key, whole in tensors().items():
        expected = expected_values(whole, cut_for(key, tp, ranks // tp, seed))[rank]
        assert torch.equal(loaded["optimizer"][key], expected), key
        assert loaded["optimizer"][key].data_ptr() == asked[key].data.data_ptr() or not expected.numel()
    assert loaded["tied"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    return loaded["iteration"], loaded["names"], loaded["here"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "tp", "new_ranks", "new_tp"), [(2, 1, 4, 2), (4, 2, 2, 2), (4, 4, 2, 1), (4, 1, 4, 4)]
)
@pytest.mark.slow
def test_flattened_shards_load_at_another_world_size_and_grid(tmp_path, ranks, tp, new_ranks, new_tp):
    listings = run_ranks(save_layout, ranks, tmp_path / "c", tp, 1)
    data_files = [f"__{rank}_0.distcp" for rank in range(ranks)]
    small = [".metadata", "common.pt", "integrity.json", "metadata.json", "shard_manifest.pt"]
    assert listings[0] == sorted([*data_files, *small])
    results = run_ranks(load_layout, new_ranks, tmp_path / "c", new_tp, 2)
    assert results == [(41, ["x", {3: "y"}], rank) for rank in range(new_ranks)]
    plain = dist_ckpt.load_plain_tensors(tmp_path / "c")
    assert all(torch.equal(plain[key], whole) for key, whole in tensors().items())


def half_of_the_job(rank, ranks, folder):
    """Ranks 1 and 3 save as a group of their own; the others do something else meanwhile."""
    odd = dist.new_group([1, 3])
    if rank % 2:
        shard = ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)), (0, rank // 2, 2))
        dist_ckpt.save({"w": shard, "by": "odd"}, folder / "odd", group=odd)
        shard.data = torch.zeros(2)
        return dist_ckpt.load({"w": shard}, folder / "odd", group=odd)["w"].tolist()
    alone = {"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), float(rank)))}
    dist_ckpt.save(alone, folder / f"alone-{rank}", group=None)
    return dist_ckpt.load_plain_tensors(folder / f"alone-{rank}")["w"].tolist()


@pytest.mark.slow
def test_a_subgroup_and_single_processes_save_beside_each_other(tmp_path):
    assert run_ranks(half_of_the_job, 4, tmp_path) == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert dist_ckpt.load_plain_tensors(tmp_path / "odd")["w"].tolist() == [1.0, 1.0, 3.0, 3.0]


def save_dtensor(rank, ranks, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(15.0).view(5, 3)
    uneven = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    dist_ckpt.save({"w": ShardedTensor.from_dtensor("w", uneven)}, folder)


@pytest.mark.slow
def test_dtensors_are_saved_with_their_replicas(tmp_path):
    run_ranks(save_dtensor, 4, tmp_path / "c")
    assert torch.equal(dist_ckpt.load_plain_tensors(tmp_path / "c")["w"], torch.arange(15.0).view(5, 3))


def guide_save(rank, ranks, folder):
    from sixfold import dist_ckpt as dist_checkpointing

    ckpt_root = folder
    dist_ckpt_root = ckpt_root / "dist_ckpt"
    dist_ckpt_root.mkdir(exist_ok=True, parents=True)
    world_size = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    num_elems_per_rank = 128 // world_size
    local_ten = torch.arange(start=num_elems_per_rank * rank, end=num_elems_per_rank * (rank + 1))
    sharded_state_dict = {
        "weight": dist_checkpointing.ShardedTensor.from_rank_offsets("weight", local_ten, (0, rank, world_size))
    }
    dist_checkpointing.save(sharded_state_dict, dist_ckpt_root)


def guide_load(rank, ranks, folder):
    from sixfold import dist_ckpt as dist_checkpointing

    dist_ckpt_root = folder / "dist_ckpt"
    world_size = torch.distributed.get_world_size()
    rank = torch.distributed.get_rank()
    num_elems_per_rank = 128 // world_size
    local_ten = torch.empty(num_elems_per_rank)  # float32, where int64 was saved
    sharded_state_dict = {
        "weight": dist_checkpointing.ShardedTensor.from_rank_offsets("weight", local_ten, (0, rank, world_size))
    }
    loaded_state_dict = dist_checkpointing.load(sharded_state_dict, dist_ckpt_root)
    expected_local_ten = torch.arange(start=num_elems_per_rank * rank, end=num_elems_per_rank * (rank + 1))
    assert torch.all(loaded_state_dict["weight"] == expected_local_ten)


@pytest.mark.slow
def test_the_reference_guides_first_example_runs_with_its_import_changed(tmp_path):
    run_ranks(guide_save, 2, tmp_path)
    run_ranks(guide_load, 4, tmp_path)
