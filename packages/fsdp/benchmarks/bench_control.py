"""What a control exchange costs: through the group's store, beside an all-gather on a gloo group of the same ranks.

``checks="order"`` starts one per step and reads it a step later; ``checks="unit"`` waits for one before each
collective.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ranktest import run_ranks, store
from sixfold.fsdp.collectives.host_messages import Control, GroupControl, StoreControl, exchange

EXCHANGES = 200


def _wait(work: Any) -> None:
    work.wait(timedelta(seconds=30))


def _store(rank: int, kind: str) -> dist.Store:
    if kind == "file":
        return store()
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store().set("port", str(server.port))
        return server
    return dist.TCPStore("127.0.0.1", int(store().get("port")), timeout=timedelta(seconds=30))


def costs(rank: int, ranks: int, kind: str) -> dict[str, float]:
    """Microseconds: an exchange that is waited for, by both ways in turns, and what starting one takes the caller."""
    here = _store(rank, kind)  # the server lives as long as its ranks ask
    ways: dict[str, Control] = {"store": StoreControl(here, rank, ranks), "gloo": GroupControl([dist.group.WORLD])}
    best = dict.fromkeys([*ways, "start"], float("inf"))
    for _ in range(5):
        for name, control in ways.items():
            began = time.perf_counter()
            for step in range(EXCHANGES):
                exchange(control, [step, 1, 0, 4096, -1], _wait)
            best[name] = min(best[name], (time.perf_counter() - began) / EXCHANGES * 1e6)
        began = time.perf_counter()
        finish = ways["store"].start([rank], _wait)
        best["start"] = min(best["start"], (time.perf_counter() - began) * 1e6)
        finish()
    return best


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_control_exchange(benchmark: Any, kind: str, ranks: int) -> None:
    """Five values from every rank to every rank; the slowest rank's figure."""
    found = benchmark.pedantic(lambda: run_ranks(costs, ranks, kind, timeout=120.0), rounds=1)
    worst = {name: max(one[name] for one in found) for name in found[0]}
    benchmark.extra_info.update(ranks=ranks, store=kind, us=worst, against_gloo=worst["store"] / worst["gloo"])
