"""Orders made by running a step: each rank takes what one of two rules favours among what can run.

    JobShop, an order or random numbers --> order (this file) --> tabu_search

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from sixfold.pipeline.job_shop.job_shop import ROUNDING, WAIT, JobShop, Order, Run

__all__ = ["greedy_order", "left_shifted"]

_WINDOW = 14  # operations of a rank that may overtake one that waits


def left_shifted(shop: JobShop, order: Order, go_on: Callable[[], bool] | None = None) -> Order | None:
    """``order`` with its gaps filled by operations from further down each list, within the cap.

    A rank runs the first operation of its list whose input is there; if none is there, the one that comes
    first. An F overtakes only if the F's it overtakes still find room. None if the lists hang.
    """
    rows = [list(row) for row in order]
    m = shop.microbatches

    def choose(run: Run, rank: int) -> int:
        row = rows[rank]
        overtaken = most = 0.0  # activations that the overtaken operations add, in all and at their worst
        for position, operation in enumerate(row[:_WINDOW]):
            memory = shop.memory[operation]
            fits = memory <= 0 or run.held[rank] + memory + most <= shop.memory_cap
            overtaken += memory
            most = max(most, overtaken)
            line = operation // m
            if not fits or run.turn[line] != operation - line * m:
                continue
            arrival = run.arrival(line)
            if arrival is not None and arrival <= run.now + ROUNDING:
                del row[position]
                return operation
        return WAIT

    return Run(shop).to_the_end(choose, go_on)


def greedy_order(shop: JobShop, random: Random, go_on: Callable[[], bool] | None = None) -> Order | None:
    """List scheduling under random rules: what comes first among F, I and W, and how long a gap W may not fill.

    A rank never starts what adds memory if it could not finish the microbatches it has begun after that, so that
    this order exists under every cap that any order fits.
    """
    priority = (random.uniform(0.0, 2.0), random.uniform(0.5, 2.5), random.uniform(-1.5, 0.5))
    slope = (random.uniform(-1.0, 2.0), random.uniform(-1.0, 1.0), 0.0)
    patience = random.choice((0.0, 0.25, 0.5, 1.0, 10.0))  # waiting, in durations of what is waited for
    noise = random.choice((0.0, 0.0, 0.2, 0.6))
    eager_to_free = random.choice((0.0, 1.0, 2.0))

    def choose(run: Run, rank: int) -> int:
        choices = _choices(run, rank)
        if not choices:
            return WAIT
        # What starts after another choice could have ended would leave a gap that the other one fills.
        done = min(start + shop.duration[operation] for start, operation in choices)
        earliest = min(start for start, _ in choices)
        best, worth, begin = WAIT, -math.inf, 0.0
        for start, operation in choices:
            if start >= done and start > earliest:
                continue
            kind, stage, _ = shop.name(operation)
            wait = start - run.now
            if wait > patience * shop.duration[operation]:
                value = -50.0 - wait
            else:
                full = kind == 2 and run.held[rank] + shop.activation[stage] / 2 >= shop.memory_cap
                value = priority[kind] + slope[kind] * stage / shop.stages + noise * random.random()
                value += eager_to_free if full else 0.0
            if value > worth:
                best, worth, begin = operation, value, start
        return best if begin <= run.now + ROUNDING else WAIT

    return Run(shop).to_the_end(choose, go_on)


def _choices(run: Run, rank: int) -> list[tuple[float, int]]:
    """(start, operation) of everything that ``rank`` could run next without endangering its oldest microbatch."""
    shop = run.shop
    found = []
    for stage in shop.stages_of[rank]:
        for kind in range(3):
            line = kind * shop.stages + stage
            arrival = run.arrival(line)
            if arrival is None or (shop.memory[line * shop.microbatches] > 0 and not run.safe(line)):
                continue
            found.append((max(arrival, run.now), line * shop.microbatches + run.turn[line]))
    return found
