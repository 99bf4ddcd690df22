"""An error on one rank is the same error on all; a dead or late rank is named in time."""

import math
import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_helpers import flip_byte

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, LostPeerError, ShardedTensor, ShardedTensorFactory, ShardingError


def shard(rank, ranks, value=1.0):
    return ShardedTensor.from_rank_offsets("w", torch.full((3,), value), (0, rank, ranks))


def caught(action):
    try:
        action()
    except CheckpointError as error:
        return type(error).__name__, str(error)
    return None


def fail_in_many_ways(rank, ranks, folder):
    """Each way fails on one rank; returns what this rank saw, and the job goes on after each."""
    seen = {}

    def save(name, state, **options):
        seen[name] = caught(lambda: dist_ckpt.save(state, folder / name, **options))

    save("hole", {"w": shard(rank, ranks)} if rank != 1 else {})
    save("overlap", {"w": shard(0 if rank == 2 else rank, ranks)})
    save(
        "dtype",
        {
            "w": ShardedTensor.from_rank_offsets(
                "w", torch.zeros(3, dtype=torch.int64 if rank else None), (0, rank, ranks)
            )
        },
    )
    seen["folders"] = caught(lambda: dist_ckpt.save({"w": shard(rank, ranks)}, folder / f"of-{rank}"))
    save("nan", {"w": shard(rank, ranks, float("nan") if rank == 2 else 0.0)}, check_finite=True)

    def build(key, data, replica_id, flattened_range):
        if rank == 1:
            raise ValueError("my own bug")
        return shard(rank, ranks)

    save("factory", {"w": ShardedTensorFactory("w", None, build, lambda d: d)})
    dist_ckpt.save({"w": shard(rank, ranks)}, folder / "good", timeout_s=math.inf)
    if rank == 0:
        flip_byte(folder / "good" / "__2_0.distcp", 200)
    dist.barrier()
    asked = (
        {"w": shard(rank, ranks)}
        if rank
        else {"w": shard(rank, ranks), "x": ShardedTensor.from_rank_offsets("x", torch.zeros(1))}
    )
    seen["unexpected"] = caught(lambda: dist_ckpt.load(asked, folder / "good"))
    seen["corrupt"] = caught(lambda: dist_ckpt.load({"w": shard(rank, ranks)}, folder / "good"))
    policy = "bad" if rank == 1 else "exact"
    seen["policy"] = caught(lambda: dist_ckpt.load({"w": shard(rank, ranks)}, folder / "good", dtype_policy=policy))
    for number in range(ranks):
        dist_ckpt.save({"w": shard(rank, ranks)}, folder / "many" / str(number))
    seen["two saves"] = caught(lambda: dist_ckpt.load({"w": shard(rank, ranks)}, folder / "many" / str(rank)))
    return seen


@pytest.mark.slow
def test_every_rank_raises_the_same_type_and_text(tmp_path):
    results = run_ranks(fail_in_many_ways, 3, tmp_path)
    assert results[0] == results[1] == results[2]
    kinds = {name: seen and seen[0] for name, seen in results[0].items()}
    assert kinds == {
        "hole": "ShardingError",
        "overlap": "ShardingError",
        "dtype": "ShardingError",
        "nan": "ShardingError",
        "factory": "CheckpointError",
        "unexpected": "MismatchError",
        "corrupt": "CorruptError",
        "two saves": "CorruptError",
        "folders": "ShardingError",
        "policy": "CheckpointError",
    }
    texts = {name: seen[1] for name, seen in results[0].items()}
    assert "w[3:6]" in texts["hole"]
    assert "of rank 0 and w[0:3] of rank 2 overlap" in texts["overlap"]
    assert "w[6] is nan on rank 2" in texts["nan"]
    assert "rank 1: ValueError: my own bug" in texts["factory"]
    assert "x: asked for" in texts["unexpected"]
    assert "__2_0.distcp" in texts["corrupt"]
    assert "save into different folders" in texts["folders"]
    assert "dtype_policy is 'bad'" in texts["policy"]
    assert "ranks see different checkpoints" in texts["two saves"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "many"]


def save_after_a_death(rank, ranks, folder):
    state = {"w": shard(rank, ranks)}
    dist_ckpt.save(state, folder / "c")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    kind, text = caught(lambda: dist_ckpt.save(state, folder / "c", timeout_s=20))
    return kind, text.partition(" (")[0], time.monotonic() - start


def test_a_dead_rank_is_named_on_every_other(tmp_path):
    results = run_ranks(save_after_a_death, 3, tmp_path, allow_exit=(1,))
    for kind, text, seconds in (results[0], results[2]):
        assert kind == "LostPeerError"
        assert text.startswith("rank 1 of 3 is dead")
        assert seconds < 10
    assert dist_ckpt.load_plain_tensors(tmp_path / "c")["w"].tolist() == [1.0] * 9
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def save_while_one_sleeps(rank, ranks, folder):
    if rank == 1:
        time.sleep(0.6)
    try:
        dist_ckpt.save({"w": shard(rank, ranks)}, folder / "c", timeout_s=0.2)
    except LostPeerError as error:
        return str(error).partition(" (")[0]


def test_a_late_rank_ends_the_wait_at_the_deadline(tmp_path):
    first, late = run_ranks(save_while_one_sleeps, 2, tmp_path)
    assert first == "rank 1 of 2 is dead, absent or later than timeout_s=0.2"
    assert late.startswith("rank 0 of 2")
    assert list(tmp_path.iterdir()) == []


def save_unlike_common_data(rank, ranks, folder):
    own = {} if rank else {"seed": {"torch": 1.0}, "host": "node0"}
    state = {"w": shard(rank, ranks), "lr": 0.1, **own}
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        dist_ckpt.save(state, folder / "c")
        dist_ckpt.save(
            state,
            folder / "d",
            preprocess_common_before_consistancy_check=lambda common: {"lr": common["lr"]},
        )
    return [str(warning.message) for warning in caught_warnings]


def test_common_data_that_differs_is_named_once(tmp_path):
    first, second = run_ranks(save_unlike_common_data, 2, tmp_path)
    assert first == ["common data differs between ranks at host, seed.torch; the first rank's was saved"]
    assert second == []
    assert dist_ckpt.load_common_state_dict(tmp_path / "c")["host"] == "node0"


class Held:
    """A class of a user's own, allowed by add_safe_globals, that holds a tensor."""

    def __init__(self, values):
        self.values = values


def save_unlike_held_tensors(rank, ranks, folder):
    torch.serialization.add_safe_globals([Held])
    try:
        dist_ckpt.save({"a": Held(torch.full((2,), rank))}, folder / "c")
    except ShardingError as error:
        return str(error)


def test_tensors_inside_objects_of_a_users_class_that_differ_are_an_error(tmp_path):
    """Before, the first rank's were saved with a warning, and those of the others lost."""
    first, second = run_ranks(save_unlike_held_tensors, 2, tmp_path)
    assert first == second and "a: ranks [0], [1] hold different values" in first
    assert not (tmp_path / "c").exists()
