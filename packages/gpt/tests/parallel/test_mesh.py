"""The groups of every mesh hold the ranks that the specification says, and wait no longer than the run does."""

from __future__ import annotations

import datetime
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sixfold.gpt.config.train_config import ParallelConfig
from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.parallel import mesh as meshes
from sixfold.gpt.parallel.mesh import RankMesh, make_mesh, pair_group

DEADLINE_S = 77.0


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def combinations(world: int) -> list[dict[str, int]]:
    """Every mesh of ``world`` ranks."""
    found = []
    for pp, dp, cp in product(divisors(world), repeat=3):
        if world % (pp * dp * cp) == 0:
            degrees = {"pp": pp, "dp": dp, "cp": cp, "tp": world // (pp * dp * cp)}
            found += [{**degrees, "ep": ep, "dp_replicate": n} for ep in divisors(dp * cp) for n in divisors(dp)]
    return found


def where(rank: int, degrees: dict[str, int]) -> dict[str, int]:
    """Coordinates of a rank: axes ("pp", "dp", "cp", "tp"), outermost first, so that tp varies fastest."""
    found = {}
    for axis in ("tp", "cp", "dp", "pp"):
        found[axis] = rank % degrees[axis]
        rank //= degrees[axis]
    data = found["dp"] * degrees["cp"] + found["cp"]
    # ep consecutive ranks of dp x cp hold all experts between them; dp_replicate splits dp, copies outermost.
    per_copy = degrees["dp"] // degrees["dp_replicate"] * degrees["cp"]
    found |= {"data": data, "ep": data % degrees["ep"], "edp": data // degrees["ep"]}
    return found | {"copy": data // per_copy, "shard": data % per_copy}


# Of each group: the coordinates that its members share, and those that order them.
GROUPS = {
    "pipeline": (("dp", "cp", "tp"), ("pp",)),
    "data": (("pp", "tp"), ("dp", "cp")),
    "tp": (("pp", "dp", "cp"), ("tp",)),
    "cp": (("pp", "dp", "tp"), ("cp",)),
    "ep": (("pp", "edp", "tp"), ("ep",)),
    "exchange": (("pp", "edp"), ("ep", "tp")),
    "statistics": (("pp", "dp"), ("cp", "tp")),
    "experts": (("pp", "ep", "tp"), ("edp",)),
    "copies": (("pp", "tp", "shard"), ("copy",)),
    "shards": (("pp", "tp", "copy"), ("shard",)),
}


def members(name: str, rank: int, degrees: dict[str, int]) -> list[int]:
    """Global ranks of the group ``name`` of ``rank``, in order: by trying all ranks."""
    shared, order = GROUPS[name]
    everyone = {r: where(r, degrees) for r in range(degrees["pp"] * degrees["dp"] * degrees["cp"] * degrees["tp"])}
    inside = [r for r, at in everyone.items() if all(at[axis] == everyone[rank][axis] for axis in shared)]
    return sorted(inside, key=lambda r: [everyone[r][axis] for axis in order])


def groups_of(mesh: RankMesh) -> dict[str, dist.ProcessGroup | None]:
    """Every group that a rank's mesh hands out, by the names above."""
    axes = mesh.axes
    return {
        "pipeline": mesh.pipeline,
        "data": mesh.data,
        "tp": axes.tp.group,
        "cp": axes.cp.group,
        "ep": axes.ep.group,
        "exchange": axes.exchange.group,
        "statistics": mesh.statistics,
        "experts": mesh.expert_data.get_group() if mesh.expert_data is not None else None,
        "copies": mesh.hybrid.get_group(0) if mesh.hybrid is not None else None,
        "shards": mesh.hybrid.get_group(1) if mesh.hybrid is not None else None,
    }


def check(rank: int, degrees: dict[str, int]) -> dict[str, dist.ProcessGroup]:
    """Make the mesh of ``rank`` and compare all of it; its groups."""
    world = degrees["pp"] * degrees["dp"] * degrees["cp"] * degrees["tp"]
    at = World(rank=rank, size=world, local_rank=rank, store=None, device=torch.device("cpu"))
    mesh = make_mesh(ParallelConfig(**degrees), at, at.device, DEADLINE_S)
    told, here = f"rank {rank} of {degrees}", where(rank, degrees)
    assert (mesh.pp_rank, mesh.dp_rank, mesh.data_rank) == (here["pp"], here["dp"], here["data"]), told
    assert {axis: getattr(mesh.axes, axis).rank for axis in ("tp", "cp", "ep")} == {
        axis: here[axis] for axis in ("tp", "cp", "ep")
    }, told
    assert mesh.layout == {axis: degrees[axis] for axis in ("pp", "dp", "cp", "tp", "ep")}, told
    made = groups_of(mesh)
    for name, group in made.items():
        expected: list[int] | None = members(name, rank, degrees)
        if name in ("copies", "shards"):
            expected = expected if degrees["dp_replicate"] > 1 else None
        elif name == "experts":
            expected = expected if degrees["ep"] > 1 else None
        elif len(expected) == 1:
            expected = None  # how the packages spell "this process alone"
        assert (None if group is None else dist.get_process_group_ranks(group)) == expected, f"{name} of {told}"
    for axis in (mesh.axes.tp, mesh.axes.cp, mesh.axes.ep, mesh.axes.exchange):
        assert axis.rank == (0 if axis.group is None else dist.get_rank(axis.group)), told
    assert dist.get_process_group_ranks(mesh.control) == list(range(world)), told
    pair = pair_group(mesh, 0, degrees["pp"] - 1)
    assert (pair is not None) == (degrees["pp"] > 1 and here["pp"] in (0, degrees["pp"] - 1)), told
    return {name: group for name, group in {**made, "control": mesh.control, "pair": pair}.items() if group is not None}


@pytest.fixture
def deadlines(monkeypatch):
    """Deadlines given to groups, by group: what has no back end keeps none."""
    given: dict[dist.ProcessGroup, datetime.timedelta] = {}
    monkeypatch.setattr(meshes, "_set_pg_timeout", lambda timeout, group: given.setdefault(group, timeout))
    return given


def chosen(config: pytest.Config) -> list[tuple[int, dict[str, int]]]:
    """(rank, mesh): all ranks of all meshes of 8, or some ranks of some of them."""
    everything = [(rank, degrees) for degrees in combinations(8) for rank in range(8)]
    if config.getoption("--all-meshes"):
        return everything + [(rank, degrees) for degrees in combinations(4) for rank in range(4)]
    return [(5, degrees) for degrees in combinations(8)[::3]] + [(2, degrees) for degrees in combinations(4)[::3]]


@pytest.mark.slow
def test_groups_hold_the_ranks_that_their_axes_say(request, deadlines):
    for rank, degrees in chosen(request.config):
        world = degrees["pp"] * degrees["dp"] * degrees["cp"] * degrees["tp"]
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            deadlines.clear()
            made = check(rank, degrees)
            made.pop("pair", None)  # made with its deadline
            late = [name for name, group in made.items() if group not in deadlines]
            assert not late, f"no deadline: {late} of rank {rank} of {degrees}"
            assert set(deadlines.values()) == {datetime.timedelta(seconds=DEADLINE_S)}
        finally:
            dist.destroy_process_group()
