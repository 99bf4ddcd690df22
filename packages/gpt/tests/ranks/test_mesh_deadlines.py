"""Groups of a mesh end a wait for a rank that does not come within the run's deadline, not torch's of 30 minutes."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from run_helpers import world_of

import ranktest
from sixfold.gpt.config import ParallelConfig
from sixfold.gpt.context_parallel import RingPlan, ring
from sixfold.gpt.errors import TrainError
from sixfold.gpt.mesh import make_mesh, pair_group
from sixfold.gpt.row_parts import Part, seen_blocks

DEADLINE_S = 77.0
SHORT_S = 1.0


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
        for found in ranktest.run_ranks(deadlines, 4, degrees):
            assert set(found.values()) == {DEADLINE_S}, found
            seen |= set(found)
    assert seen == {
        "pipeline", "data", "statistics", "control", "tp", "cp", "ep", "exchange", "experts", "pair", "copies", "shards"
    }  # fmt: skip


def alone_in_the_ring(rank: int, ranks: int) -> tuple[float, str]:
    """Of two rings the second rank stays away, from a forward and from a backward: seconds that the first one waits."""
    mesh = make_mesh(
        ParallelConfig(dp=2, cp=2, cp_comm_type="p2p"), world_of(rank, ranks), torch.device("cpu"), SHORT_S
    )
    store, axis = ranktest.store(), mesh.axes.cp
    store.set(f"up{rank}", "")
    store.wait([f"up{other}" for other in range(ranks)])
    sees = torch.zeros(1, 8, dtype=torch.int64), torch.arange(8)
    plan = RingPlan(axis, seen_blocks(Part(axis.rank, axis.size), 16), *sees)
    rows = [torch.ones(1, 8, 2, 4, requires_grad=True) for _ in range(3)]
    out = ring(*rows, plan).sum()
    if axis.rank == 1:
        store.wait(["done0", "done1"], timedelta(seconds=30))
        return 0.0, ""
    begin = time.monotonic()
    with pytest.raises(TrainError) as caught:
        out.backward() if mesh.dp_rank else ring(*rows, plan)
    waited = time.monotonic() - begin
    store.set(f"done{mesh.dp_rank}", "")
    return waited, str(caught.value)


def test_a_ring_in_a_run_waits_for_the_runs_deadline_and_no_longer():
    found = ranktest.run_ranks(alone_in_the_ring, 4)
    assert all(0.8 * SHORT_S < seconds < 10 for seconds, _ in found[::2]), found
    assert re.match(
        r"ring of keys and values over cp of ranks 0, 1: rank 0 waited \d+\.\d s .* what rank 1 says", found[0][1]
    )
    assert re.match(
        r"ring of .*keys and values over cp of ranks 2, 3: rank 2 waited \d+\.\d s .* what rank 3 says", found[2][1]
    )
