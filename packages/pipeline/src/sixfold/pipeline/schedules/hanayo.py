"""Hanayo: stages in waves over the ranks, one-forward-one-backward of fused backwards (arXiv 2308.15762).

    ranks, microbatches, waves --> Program (this file) --> passes.lower

Two ranks, three microbatches, one wave:

    0: 0F0 0F1 0F2 3F0 3B0 3F1 3B1 3F2 3B2 0B0 0B1 0B2
    1: 1F0 2F0 1F1 2F1 2B0 1F2 2B1 2F2 1B0 1B1 2B2 1B2

A wave is two chunks, so v = 2 waves. With memory for all microbatches (``memory_cap=m``) bubble_over_ideal is
(p - 1) / (2 waves m) where that can be reached: for one wave at m >= 2 p and p <= 4, and for two at p=4, m=8. At
p = m = 4 the optimum of one wave is 0.5 and not the paper's 0.375. By default less is held: at (p, m) = (4, 8)
five microbatches for 0.25 instead of eight for 0.1875, and at (8, 64) eight for 0.122 instead of 64 for 0.055.
Messages are 4 waves m (p - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sixfold.pipeline.job_shop.job_shop import JobShop, Order
from sixfold.pipeline.job_shop.list_scheduling import Pattern, in_pattern, room_for_one
from sixfold.pipeline.program.placement import at_least_one, wave
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.registry import schedule
from sixfold.pipeline.simulation.costs import Costs

__all__ = ["hanayo"]

_SLACK = 0.1  # of a rank's work that less memory may cost
_ROOMS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # microbatches that a rank may hold, of p


def _search(
    ranks: int,
    microbatches: int,
    waves: int = 1,
    memory_cap: float | None = None,
    *,
    go_on: Callable[[], bool] | None = None,
) -> Program | None:
    at_least_one(ranks=ranks, microbatches=microbatches, waves=waves)
    # GPipe's memory is all microbatches; those that 1F1B would hold too are none too many.
    most = float(max(ranks, microbatches - 1)) if memory_cap is None else room_for_one(memory_cap)
    rooms = {max(1.0, math.floor(2 * waves * part * ranks) / (2 * waves)) for part in _ROOMS}
    rooms = {min(most, room) for room in rooms} | ({most} if memory_cap is not None else set())
    few = min(microbatches, 4 * ranks)
    favours = (_deepest_forward, _shallowest_backward)
    tried = []
    for room in sorted(rooms):
        shop = _shop(ranks, few, waves, room)
        for favour in favours:
            if (order := _listed(shop, favour, go_on)) is None:
                return None
            times = shop.play(order)
            assert times is not None, "it ran"
            tried.append((times.makespan, shop.peak(order), room, favour, order))
    shortest = min(makespan for makespan, *_ in tried)
    slack = 0.0 if memory_cap is not None else _SLACK * 3 * few
    near = (one for one in tried if one[0] <= shortest + slack)
    _, _, room, favour, best = min(near, key=lambda one: (one[1], one[0]))
    shop = _shop(ranks, microbatches, waves, room)
    order = best if few == microbatches else _listed(shop, favour, go_on)
    return None if order is None else shop.program(order, shop.play(order), "hanayo")


@schedule(placement=wave, chunks=None, search=_search)
def hanayo(ranks: int, microbatches: int, waves: int = 1, memory_cap: float | None = None) -> Program:
    """Of several list schedules of ``2 * waves`` chunks, the least memory within 10 % of work of the shortest.

    They differ in what a rank begins first: the deepest forward or the shallowest backward. They also differ in how
    much a rank may hold: from p / 2 to 3 p microbatches, but fewer than all if it is more than p.

    Args:
        memory_cap: microbatches that a rank may hold; the shortest within it is taken, and m allows all. What more
            memory is worth, of one wave at p=16, m=64: with 16 held a bubble of 0.221, with 24 0.156, with 64 0.117.
    Raises:
        ScheduleError: an argument is below one.
    Cost: 14 list schedules of at most 4 p microbatches, and the chosen one for all.
    """
    program = _search(ranks, microbatches, waves, memory_cap)
    assert program is not None, "nothing told it to stop"
    return program


def _deepest_forward(stages: int) -> list[float]:
    return [*(-float(stage) for stage in range(stages)), *(float(stages - stage) for stage in range(stages))]


def _shallowest_backward(stages: int) -> list[float]:
    return [*(2.0 * stages - stage for stage in range(stages)), *(float(stage) for stage in range(stages))]


def _shop(ranks: int, microbatches: int, waves: int, room: float) -> JobShop:
    """B is an I that takes twice as long as F and frees all, with a W of no time behind it."""
    stages = 2 * waves * ranks
    share = [0.5 / waves] * stages
    costs = Costs(share, [2 * time for time in share], [0.0] * stages, activation=share, input_share=1.0)
    return JobShop(costs, wave(ranks, 2 * waves), microbatches, room)


def _listed(shop: JobShop, favour: Callable[[int], list[float]], go_on: Callable[[], bool] | None) -> Order | None:
    return in_pattern(shop, Pattern(begin=favour(shop.stages), period=0.0, weight_after=-math.inf), go_on)
