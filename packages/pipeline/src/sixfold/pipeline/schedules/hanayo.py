"""Hanayo: stages in waves over the ranks, one-forward-one-backward of fused backwards (arXiv 2308.15762).

    ranks, microbatches, waves --> Program (this file) --> passes.lower

Two ranks, three microbatches, one wave:

    0: 0F0 0F1 0F2 3F0 3B0 3F1 3B1 3F2 3B2 0B0 0B1 0B2
    1: 1F0 2F0 1F1 2F1 2B0 1F2 2B1 2F2 1B0 1B1 2B2 1B2

A wave is two chunks, so v = 2 waves. For one wave and m > 2 p, bubble_over_ideal is the known (p - 1) / (2 m) with
(3 p - 1) / 2 microbatches held (``memory_cap=1.5 * p``), and by default 4/3 of it with p held, as 1F1B holds. At
p = m = 4 the optimum of one wave is 0.5 and not the paper's 0.375. Two waves reach (p - 1) / (4 m) at p=4, m=8 with
``memory_cap=8``. Messages are 4 waves m (p - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sixfold.pipeline.job_shop.job_shop import JobShop
from sixfold.pipeline.job_shop.list_scheduling import Pattern, in_pattern, pattern_of_chain, room_for_one
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
    patterns = (_deepest_forward, _shallowest_backward, *[_one_after_another] * (waves == 1))
    tried = []
    for room in sorted(rooms):
        shop = _shop(ranks, few, waves, room)
        for pattern in patterns:
            if (order := in_pattern(shop, pattern(shop), go_on)) is None:
                return None
            times = shop.play(order)
            assert times is not None, "it ran"
            tried.append((times.makespan, shop.peak(order), room, pattern, order))
    shortest = min(makespan for makespan, *_ in tried)
    slack = 0.0 if memory_cap is not None else _SLACK * 3 * few
    near = (one for one in tried if one[0] <= shortest + slack)
    _, _, room, pattern, best = min(near, key=lambda one: (one[1], one[0]))
    shop = _shop(ranks, microbatches, waves, room)
    order = best if few == microbatches else in_pattern(shop, pattern(shop), go_on)
    return None if order is None else shop.program(order, shop.play(order), "hanayo")


@schedule(placement=wave, chunks=None, search=_search)
def hanayo(ranks: int, microbatches: int, waves: int = 1, memory_cap: float | None = None) -> Program:
    """Of several list schedules of ``2 * waves`` chunks, the least memory within 10 % of work of the shortest.

    They differ in what a rank begins first: the deepest forward, the shallowest backward, or with one wave turns by
    microbatch. They also differ in how much a rank may hold: from p / 2 to 3 p microbatches, but fewer than all if it
    is more than p.

    Args:
        memory_cap: microbatches that a rank may hold; the shortest within it is taken, and m allows all. What more
            memory is worth, of one wave at p=16, m=64: with 16 held a bubble of 0.156, with 20 0.135, with 23.5 0.117.
    Raises:
        ScheduleError: an argument is below one.
    Cost: 21 list schedules of at most 4 p microbatches (14 of several waves), and the chosen one for all.
    """
    program = _search(ranks, microbatches, waves, memory_cap)
    assert program is not None, "nothing told it to stop"
    return program


def _deepest_forward(shop: JobShop) -> Pattern:
    stages = range(shop.stages)
    return _preferred([*(-float(stage) for stage in stages), *(float(shop.stages - stage) for stage in stages)])


def _shallowest_backward(shop: JobShop) -> Pattern:
    stages = range(shop.stages)
    return _preferred([*(2.0 * shop.stages - stage for stage in stages), *(float(stage) for stage in stages)])


def _preferred(begin: list[float]) -> Pattern:
    return Pattern(begin=begin, period=0.0, weight_after=-math.inf)


def _one_after_another(shop: JobShop) -> Pattern:
    """Turns of one wave by microbatch: on each rank both forwards and both backwards of a period fit side by side.

    In the second chunk a stage's turn comes two durations after the one before it, so that what comes back finds the
    rank free. The period is less than a microbatch's work of 3: forwards run ahead as far as there is room.
    """
    forward, backward = 0.5, 1.0
    steps = (forward, 2 * forward, 2 * backward, backward)
    return pattern_of_chain(shop, steps, (0.0, 0.0, 0.0), period=2.5, weight_after=-math.inf)


def _shop(ranks: int, microbatches: int, waves: int, room: float) -> JobShop:
    """B is an I that takes twice as long as F and frees all, with a W of no time behind it."""
    stages = 2 * waves * ranks
    share = [0.5 / waves] * stages
    costs = Costs(share, [2 * time for time in share], [0.0] * stages, activation=share, input_share=1.0)
    return JobShop(costs, wave(ranks, 2 * waves), microbatches, room)
