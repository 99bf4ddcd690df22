"""Patterns for given costs: found on few microbatches, repeated for all.

    JobShop of few microbatches --> patterns, better and better --> orders of all microbatches (this file) --> search

Torch-free. What a step of many microbatches takes is its steady state, and a few show that. So each pattern is tried
on about two microbatches per rank. It is judged by the makespan that its last third promises for all. The best so far
is changed a little, or a new one drawn, again and again; only what promises more than the best is run in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from sixfold.pipeline.job_shop.job_shop import JobShop, Order
from sixfold.pipeline.job_shop.list_scheduling import Pattern, in_pattern, pattern_of_chain
from sixfold.pipeline.job_shop.patterns import random_table

__all__ = ["even_pattern", "few_microbatches", "repeated_orders"]

_STEPS = (1.0, 1.0, 1.0, 1.5, 2.0, 3.0)  # of a row, in mean durations with their messages
_GAPS = (0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
_PERIODS = (1.0, 1.0, 1.02, 1.05, 1.1)  # of the busiest rank's work
_AFTER = (math.inf, math.inf, 0.5, 1.0, 2.0)  # periods between I's turn and W's
_ENTRY = (0.0, 0.0, 0.5, 1.0)  # periods between microbatches that enter
_FRESH, _TABLES = 0.4, 0.8  # chances of a new pattern instead of a change, and then of a table instead of a chain


def few_microbatches(ranks: int, microbatches: int) -> int:
    """How many show the steady state; all of them where that saves little."""
    few = max(8, 2 * ranks)
    return few if 3 * few <= 2 * microbatches else microbatches


def repeated_orders(shop: JobShop, few: JobShop, random: Random, go_on: Callable[[], bool]) -> Iterator[Order | None]:
    """Orders of ``shop`` without end, each promising more than those before were; None for a pattern that does not.

    Args:
        few: the same costs, placement and cap with ``few_microbatches``.
        go_on: asked now and then; what is being made when it says no is given up.
    """
    best: Pattern | None = None
    least = math.inf
    while True:
        if best is None or random.random() < _FRESH:
            pattern = random_table(few, random) if random.random() < _TABLES else _chain(few, random)
        else:
            pattern = _changed(best, few, random)
        promise = math.inf if pattern is None else _promise(few, pattern, shop.microbatches, go_on)
        if pattern is None or promise >= least:
            yield None
            continue
        best, least = pattern, promise
        order = in_pattern(shop, pattern, go_on)
        if order is not None and (times := shop.play(order)) is not None:
            least = max(least, times.makespan)  # a few may promise too much
        yield order


def even_pattern(shop: JobShop) -> Pattern:
    """Every microbatch goes through without a pause, a new one as often as the busiest rank can take it."""
    units = _units(shop)
    return pattern_of_chain(shop, units, [0.0] * (len(units) - 1), period=max(shop.work) / shop.microbatches)


def _units(shop: JobShop) -> list[float]:
    """Of each row of stages the mean time of an operation and its message."""
    chain = [*range(shop.stages), *reversed(range(shop.stages, 2 * shop.stages))]
    times = [shop.duration[line * shop.microbatches] + shop.lag[line * shop.microbatches] for line in chain]
    rows = [times[at : at + shop.ranks] for at in range(0, len(times), shop.ranks)]
    return [sum(row) / len(row) for row in rows]


def _chain(shop: JobShop, random: Random) -> Pattern:
    """Rows of stages that a microbatch passes at an even pace each."""
    units = _units(shop)
    down, up = random.choice(_STEPS), random.choice(_STEPS)
    alike = random.random() < 0.7  # as the published patterns: rows down alike, rows up alike
    period = random.choice(_PERIODS) * max(shop.work) / shop.microbatches
    return pattern_of_chain(
        shop,
        [unit * ((down, up)[row % 2] if alike else random.choice(_STEPS)) for row, unit in enumerate(units)],
        [unit * random.choice(_GAPS) for unit in units[1:]],
        period=period,
        weight_after=random.choice(_AFTER) * period,
        entry=random.choice(_ENTRY) * period,
        burst=random.choice((0.5, 1.0, 2.0)) * shop.ranks * units[0],
    )


def _changed(pattern: Pattern, shop: JobShop, random: Random) -> Pattern:
    """``pattern`` with one to three changes: the rest of the chain moved from somewhere on, or a number drawn anew."""
    work = max(shop.work) / shop.microbatches
    for _ in range(random.choice((1, 1, 2, 3))):
        what = random.randrange(6)
        if what == 0:
            pattern = replace(pattern, period=random.choice(_PERIODS) * work)
        elif what == 1:
            pattern = replace(pattern, weight_after=random.choice(_AFTER) * work)
        elif what == 2:
            pattern = replace(pattern, entry=random.choice(_ENTRY) * work)
        else:
            chain = (*range(shop.stages), *reversed(range(shop.stages, 2 * shop.stages)))
            begin, by = list(pattern.begin), random.uniform(-0.3, 0.3) * work
            for line in chain[random.randrange(len(chain)) :]:
                begin[line] += by
            pattern = replace(pattern, begin=begin)
    return pattern


def _promise(few: JobShop, pattern: Pattern, microbatches: int, go_on: Callable[[], bool]) -> float:
    """The makespan of ``microbatches`` that the pattern's run of few of them promises."""
    order = in_pattern(few, pattern, go_on)
    times = few.play(order) if order is not None else None
    if times is None:
        return math.inf
    if microbatches == few.microbatches:
        return times.makespan
    # The last operation of the chain, the first stage's I, a third before the end and at the end of the steady state.
    line = few.stages * few.microbatches
    late = few.microbatches - 1 - few.microbatches // 8
    early = late - max(1, few.microbatches // 3)
    rate = (times.end[line + late] - times.end[line + early]) / (late - early)
    return times.makespan + (microbatches - few.microbatches) * max(rate, max(few.work) / few.microbatches)
