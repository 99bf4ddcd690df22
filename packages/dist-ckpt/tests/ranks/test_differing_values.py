"""Values that are not the same on all ranks: none is lost without an error, and the remedies work."""

import argparse
import collections
import os
import random
import warnings
from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, MismatchError, PerRank, ShardedObject, ShardedTensor, ShardingError


def refused(state, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ShardingError) as told:
            dist_ckpt.save(state, folder, **options)
    return str(told.value)


def save_and_say(rank, ranks, folder):
    """What the first rank would have saved of each."""
    random.seed(rank)
    states = {
        "loader": {"loader": {f"dp_rank_{rank}": {"sample": 5}}},
        "rng": {"rng": random.getstate()},
        "bytes": {"blob": bytes([rank])},
        "position": {"position": 100 + rank},
        "alike": {"a.b": torch.full((1,), rank), "a": {"b": torch.zeros(1)}},
        "alike numbers": {"a.b": rank, "a": {"b": 1 - rank}},
    }
    return {name: refused(state, folder / "c") for name, state in states.items()}


@pytest.mark.slow
def test_values_that_would_be_lost_are_an_error_with_their_place(tmp_path):
    first, second = run_ranks(save_and_say, 2, tmp_path)
    assert first == second
    assert "loader.dp_rank_1.sample: ranks [1] hold it, ranks [0] do not have it" in first["loader"]
    for name, place in (("rng", "rng"), ("bytes", "blob"), ("position", "position"), ("alike", "a.b")):
        assert f"{place}: ranks [0], [1] hold different values" in first[name]
    assert first["alike numbers"].count("hold different values") == 2
    assert all("PerRank(value) keeps a value for each rank" in text for text in first.values())
    assert not (tmp_path / "c").exists()


def by_remedy(rank, ranks, folder):
    """Each rank's own by ShardedObject; what the first rank has is enough by the check that leaves it out."""
    random.seed(rank)
    own = {"loader": {f"dp_rank_{rank}": {"sample": rank}}, "rng": random.getstate()}
    state = {name: ShardedObject(name, value, (ranks,), (rank,)) for name, value in own.items()}
    dist_ckpt.save(state, folder / "c")
    asked = {name: ShardedObject(name, None, (ranks,), (rank,)) for name in own}
    assert dist_ckpt.load(asked, folder / "c") == own
    dist_ckpt.save(
        {"position": rank, "kept": 1}, folder / "d", preprocess_common_before_consistancy_check=lambda common: {}
    )
    return dist_ckpt.load({}, folder / "d")


def test_each_rank_gets_its_own_back_by_the_remedy(tmp_path):
    assert run_ranks(by_remedy, 2, tmp_path) == [{"position": 0, "kept": 1}] * 2


def kept_per_rank(rank, ranks, folder):
    """The remedy of the error, on the values that it names."""
    random.seed(rank)
    own = {
        "loader": {f"dp_rank_{rank}": {"sample": rank}},
        "rng": random.getstate(),
        "host": f"node{rank}",
        "loss": 0.5 + rank,
    }
    dist_ckpt.save({"own": {name: PerRank(value) for name, value in own.items()}, "step": 1}, folder / "c")
    asked = {"own": {name: PerRank(None) for name in own}, "step": 0}
    assert dist_ckpt.load(asked, folder / "c") == {"own": own, "step": 1}


def test_each_rank_gets_its_own_back_by_per_rank(tmp_path):
    run_ranks(kept_per_rank, 2, tmp_path)


class Loader:
    per_rank_state = True

    def __init__(self, position):
        self.position = position

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def save_loaders(rank, ranks, folder):
    dist_ckpt.save({"one": Loader(10 + rank), "other": PerRank(Loader(20 + rank)), "rows": PerRank([rank])}, folder)


def load_loaders(rank, ranks, folder):
    """At the same number of ranks each gets its own; at another one what a function makes of them, or an error."""
    one, other = Loader(0), Loader(0)
    state = {"one": one, "other": PerRank(other), "rows": PerRank(None)}
    if ranks == 2:
        loaded = dist_ckpt.load(state, folder)
        assert loaded == {"one": one, "other": other, "rows": [rank]}
        assert (one.position, other.position) == (10 + rank, 20 + rank)
        return
    with pytest.raises(MismatchError, match=f"(one|other|rows): 2 ranks saved a value each, and {ranks} load"):
        dist_ckpt.load(state, folder)
    assert (one.position, other.position) == (0, 0)

    def dealt(found, number, count):
        assert (number, count) == (rank, ranks)
        return [row for rows in found for row in rows][number::count]

    def least(found, number, count):
        return min(found, key=lambda state: state["position"])

    state = {"one": PerRank(one, least), "other": PerRank(other, least), "rows": PerRank(None, dealt)}
    loaded = dist_ckpt.load(state, folder)
    assert loaded["rows"] == ([0, 1] if ranks == 1 else [[0], [1], [], []][rank])
    assert (one.position, other.position) == (10, 20)

    def fails(found, number, count):
        if number == ranks - 1:
            raise ValueError("no such row")
        return found

    with pytest.raises((ValueError, CheckpointError), match="no such row"):
        dist_ckpt.load({"rows": PerRank(None, fails)}, folder)


@pytest.mark.parametrize("ranks", [2, 1, pytest.param(4, marks=pytest.mark.slow)])
def test_at_another_number_of_ranks_a_function_makes_the_values(ranks, tmp_path):
    run_ranks(save_loaders, 2, tmp_path / "c")
    run_ranks(load_loaders, ranks, tmp_path / "c")


def what_may_differ(rank, ranks, folder):
    state = {"same": 1} | ({"only_first": 1} if rank == 0 else {})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dist_ckpt.save(state, folder / "c")
    errors = [refused({"seen": one}, folder / "d") for one in (f"node{rank}", 0.5 + rank)]
    return [str(warning.message) for warning in told], errors, dist_ckpt.load({}, folder / "c")


def test_what_the_first_rank_alone_has_is_warned_of_and_texts_and_floats_that_differ_are_an_error(tmp_path):
    (first, errors, loaded), (second, _, _) = run_ranks(what_may_differ, 2, tmp_path)
    assert first == ["common data differs between ranks at only_first; the first rank's was saved"]
    assert second == []
    assert all("seen: ranks [0], [1] hold different values" in text for text in errors)
    assert loaded == {"same": 1, "only_first": 1}


def numbers(rank, ranks, folder):
    numpy = pytest.importorskip("numpy", reason="needs numpy, of which trainers' numbers are")
    dist_ckpt.save(
        {"loss": numpy.float64(0.5) if rank else 0.5, "host": numpy.str_("a") if rank else "a"}, folder / "c"
    )
    seen = numpy.int64(rank), numpy.bool_(rank), numpy.bytes_(bytes([65 + rank])), numpy.float32(rank)
    return [refused({"seen": one}, folder / "d") for one in seen]


def test_numbers_and_texts_of_numpy_are_what_pythons_are(tmp_path):
    errors, _ = run_ranks(numbers, 2, tmp_path)
    assert all("seen: ranks [0], [1] hold different values" in text for text in errors)


class Settings:
    def __init__(self, rank):
        self.name, self.parts, self.seed = "same", {"at": [1, rank]}, rank


def of_objects(rank, ranks, folder):
    from argparse import Namespace

    torch.serialization.add_safe_globals([Settings])
    args = Namespace(lr=0.1, local_rank=rank, layers=[1, 2], deep=Namespace(at=rank))
    states = {"args": args, "own": Settings(rank), "pair": (1, {"x": rank}), "few": (3,) * (1 + rank)}
    return {name: refused({name: value}, folder / "c") for name, value in states.items()}


def test_what_differs_within_a_value_is_named(tmp_path):
    first, second = run_ranks(of_objects, 2, tmp_path)
    assert first == second
    for name, places in {
        "args": ".local_rank, .deep.at",
        "own": ".parts['at'][1], .seed",
        "pair": "[1]['x']",
        "few": "[1]",
    }.items():
        assert f"{name}: ranks [0], [1] hold different values (in {places})\n" in first[name]


def large_ones(rank, ranks, folder, background):
    """Each rank writes one of the tensors; in turn, each differs on one rank, in its last element alone."""

    def saved(state):
        if background:
            dist_ckpt.async_save(state, folder / "c").wait()
        else:
            dist_ckpt.save(state, folder / "c")

    def state(**others):
        base = torch.arange(300_000.0)
        own = {"flat": base.clone(), "half": base.view(600, 500).bfloat16(), "turned": base.view(500, 600).clone().t()}
        for name, at in others.items():
            own[name][(-1,) * own[name].dim()] *= 1 - 2 * (rank == at)
        return {"model": own, "step": 7}

    saved(state())
    texts = []
    for name in state()["model"]:
        for at in range(ranks):
            with pytest.raises(ShardingError) as told:
                saved(state(**{name: at}))
            texts.append(str(told.value))
    loaded = dist_ckpt.load({}, folder / "c")
    saved(state())
    return texts, all(map(torch.equal, loaded["model"].values(), state()["model"].values()))


def frozen(rank, ranks, folder):
    """What is linked is not written, and compared all the same: also a tensor whose writer has the older value."""
    state = {name: torch.arange(200_000.0) for name in ("a", "b")}
    dist_ckpt.save(state, folder / "1")
    dist_ckpt.save(state, folder / "2", since=folder / "1")
    texts = []
    for name in state:
        state[name][-1] += rank
        texts.append(refused(state, folder / "3", since=folder / "2"))
        state[name][-1] -= rank
    dist_ckpt.save(state, folder / "3", since=folder / "2")
    return texts


def test_a_large_tensor_that_is_linked_and_differs_is_an_error_too(tmp_path):
    first, second = run_ranks(frozen, 2, tmp_path)
    assert first == second
    for name, text in zip("ab", first, strict=True):
        assert f"  {name}: ranks [0], [1] hold different values" in text


@pytest.mark.parametrize("background", [False, True])
def test_a_large_tensor_that_differs_on_one_rank_is_an_error_before_the_commit(tmp_path, background):
    first, *others = run_ranks(large_ones, 3, tmp_path, background)
    texts, kept = first
    assert kept and os.listdir(tmp_path) == ["c"]
    assert all(other == first for other in others)
    holders = ["[0], [1, 2]", "[0, 2], [1]", "[0, 1], [2]"]
    for text, (name, ranks) in zip(texts, product(["flat", "half", "turned"], holders), strict=True):
        assert f"\n  model.{name}: ranks {ranks} hold different values\nDescribe tensors" in text


def replicas(rank, ranks, folder, kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    drift = float(rank == 3)
    if kind == "replicate":
        local, placements = torch.ones(4000), [Replicate(), Replicate()]
    else:
        local, placements = torch.ones(5, 7), [Replicate(), Shard(0)]
    local[-1] += drift
    state = {"w": DTensor.from_local(local, mesh, placements, run_check=False)}
    if kind == "records":
        dp, tp = divmod(rank, 2)
        state = {"w": ShardedTensor.from_rank_offsets("w", local, (0, tp, 2), replica_id=dp)}
    told = refused(state, folder / "c")
    dist_ckpt.save(state, folder / "c", validate_access_integrity=False)
    local[-1] -= drift
    dist_ckpt.save(state, folder / "d")
    return told, dist_ckpt.load_plain_tensors(folder / "c")["w"].sum().item()


@pytest.mark.parametrize("kind", ["replicate", "hsdp", "records"])
@pytest.mark.slow
def test_replicas_that_disagree_are_an_error_and_can_be_saved_by_its_remedy(tmp_path, kind):
    for told, total in run_ranks(replicas, 4, tmp_path, kind):
        assert "hold different values of one shard" in told
        assert "[3]" in told
        assert total == (4000 if kind == "replicate" else 70)


def test_a_key_of_the_callers_is_not_overwritten_by_content_metadata(tmp_path):
    state = {"content_metadata": {"mine": 1}}
    with pytest.raises(ShardingError, match="has a key 'content_metadata' of its own"):
        dist_ckpt.save(state, tmp_path / "c", content_metadata={"theirs": 2}, group=None)
    dist_ckpt.save(state, tmp_path / "c", group=None)
    assert dist_ckpt.load({}, tmp_path / "c", group=None) == state


def test_names_that_collide_on_one_rank_are_told_to_be_renamed(tmp_path):
    def two(**fields):
        return {
            "a": ShardedTensor.from_rank_offsets("w", torch.zeros(2)),
            "b": ShardedTensor.from_rank_offsets("w", torch.ones(2), **fields),
        }

    with pytest.raises(ShardingError, match="Two tensors of one rank have this key: rename one") as told:
        dist_ckpt.save(two(), tmp_path / "c", group=None)
    assert "replica_id" not in str(told.value)
    with pytest.raises(ShardingError, match="name this shard and hold different values"):
        dist_ckpt.save(two(replica_id=1), tmp_path / "c", group=None)


def of_other_types(rank, ranks, folder):
    """What passes though its type differs, and what does not; each as the second rank has it."""
    import numpy as np  # ranks import this file, and numpy is no dependency

    ordered = collections.OrderedDict
    alike = {
        "int": (np.int64(1), 1),
        "float": (np.float32(1), np.float64(1)),
        "dict": ({"a": 1, "b": 2}, ordered(b=2, a=1)),
        "deque": (collections.deque([1], 3), collections.deque([1], 4)),
    }
    dist_ckpt.save({name: pair[rank] for name, pair in alike.items()}, folder)
    for first, second in ((1, 1.0), (True, 1), (0.0, -0.0), (np.float32(0.1), np.float64(0.1)), ([1], (1,))):
        assert "x" in refused({"x": (first, second)[rank]}, folder)
    loaded = dist_ckpt.load({}, folder)
    return [type(loaded[name]).__name__ for name in alike] + [loaded["deque"].maxlen]


def test_types_that_are_not_compared_come_back_as_the_first_rank_has_them(tmp_path):
    pytest.importorskip("numpy", reason="it is no dependency")
    assert run_ranks(of_other_types, 2, tmp_path / "c") == [["int64", "float32", "dict", "deque", 3]] * 2


def in_order(names):
    return {name: ord(name) for name in names}


#: By kind: a value with its names in an order, and one in which they have changed places.
WITH_NAMES = {
    "tuple": (lambda names: (in_order(names),), lambda: ({"a": 98, "b": 97},)),
    "deque": (lambda names: collections.deque([in_order(names)]), lambda: collections.deque([{"a": 98, "b": 97}])),
    "namespace": (lambda names: argparse.Namespace(**in_order(names)), lambda: argparse.Namespace(a=98, b=97)),
    "counter": (lambda names: collections.Counter(in_order(names)), lambda: collections.Counter(a=98, b=97)),
    "ordered": (
        lambda names: (collections.OrderedDict(in_order(names)), 1),
        lambda: (collections.OrderedDict(a=98, b=97), 1),
    ),
    "kinds": (
        lambda names: ((collections.OrderedDict if names == "ab" else dict)(in_order(names)),),
        lambda: ({"a": 98, "b": 97},),
    ),
}


def in_another_order(rank, ranks, folder):
    told = []
    for of, other in WITH_NAMES.values():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist_ckpt.save({"v": of("ba" if rank else "ab")}, folder)
        told.append(refused({"v": other() if rank else of("ab")}, folder))
    return told


def test_the_order_of_names_within_values_of_any_kind_may_differ_and_what_they_name_may_not(tmp_path):
    first, second = run_ranks(in_another_order, 2, tmp_path / "c")
    assert first == second
    assert all("v: ranks [0], [1] hold different values" in text for text in first)
