"""Groups of a mesh end a wait for a rank that does not come within the run's deadline, not torch's of 30 minutes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from run_helpers import world_of

from ranktest import run_ranks
from sixfold.gpt.config import ParallelConfig
from sixfold.gpt.mesh import make_mesh, pair_group

DEADLINE_S = 77.0


def deadlines(rank: int, ranks: int, degrees: dict[str, int]) -> dict[str, float]:
    """Seconds by group of this rank's mesh, as gloo has them."""
    mesh = make_mesh(ParallelConfig(**degrees), world_of(rank, ranks), torch.device("cpu"), DEADLINE_S)
    axes, hybrid, experts = mesh.axes, mesh.hybrid, mesh.expert_data
    groups = {
        "pipeline": mesh.pipeline, "data": mesh.data, "statistics": mesh.statistics, "control": mesh.control,
        "tp": axes.tp.group, "cp": axes.cp.group, "ep": axes.ep.group, "exchange": axes.exchange.group,
        "experts": experts and experts.get_group(), "pair": pair_group(mesh, 0, mesh.pp - 1),
        "copies": hybrid and hybrid.get_group(0), "shards": hybrid and hybrid.get_group(1),
    }  # fmt: skip
    for name, group in groups.items():
        if group is not None:
            dist.barrier(group)  # all of its members made it
            assert group.size() > 1 or name == "experts", f"{name} is a group of one"
    return {
        name: group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for name, group in groups.items()
        if group is not None
    }


def test_every_group_of_a_mesh_has_the_deadline_of_the_run():
    seen = set()
    for degrees in ({"dp": 2, "dp_replicate": 2, "cp": 2, "ep": 2}, {"pp": 2, "dp": 1, "tp": 2}):
        for found in run_ranks(deadlines, 4, degrees):
            assert set(found.values()) == {DEADLINE_S}, found
            seen |= set(found)
    assert seen == {
        "pipeline", "data", "statistics", "control", "tp", "cp", "ep", "exchange", "experts", "pair", "copies", "shards"
    }  # fmt: skip
