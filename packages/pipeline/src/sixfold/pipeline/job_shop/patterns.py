"""Orders that repeat one microbatch's pattern, as the controllable-memory schedules do.

    JobShop, random numbers --> pattern --> its order (this file) --> dispatch_rules, tabu_search

Torch-free. [Note: patterns] In the steady state every microbatch runs like the one before it, one period later. So the
operations of one microbatch are laid into a table of one period per rank. The chain of its F's and I's comes first,
then each W where it fits first. The time from a stage's F to its W, counted in periods, is the memory that it holds.
Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362, use regular patterns and equal costs.
Here patterns are random and costs are any. Compilers call this modulo scheduling.
"""

from __future__ import annotations

from random import Random

from sixfold.pipeline.job_shop.job_shop import ROUNDING, JobShop, Order
from sixfold.pipeline.job_shop.list_scheduling import Pattern

__all__ = ["pattern_order", "random_table"]

_STRETCH = (1.0, 1.0, 1.02, 1.05, 1.1, 1.2, 1.3)  # period over the busiest rank's work: unequal operations leave holes
_WIDE = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4)  # the same where turns are all that is wanted
_OVER = (1.0, 1.0, 1.3, float("inf"))  # of the cap, in the steady state
_TRIES = (1, 4, 16)  # patterns of which the shortest is taken
_CHANCE = (0.0, 0.1, 0.3, 0.6)  # of a delay before an operation of the chain
_DELAY = (0.5, 1.0, 1.0, 1.5, 2.0)  # in the operation's own duration


def pattern_order(shop: JobShop, random: Random) -> Order | None:
    """The shortest of a few random patterns, repeated; None if there was none that holds little enough.

    It may still be over the cap, since ``left_shifted`` can bring it under.
    """
    best: tuple[float, float, list[float]] | None = None
    most = shop.memory_cap * random.choice(_OVER)
    for _ in range(random.choice(_TRIES)):
        period = max(shop.work) / shop.microbatches * random.choice(_STRETCH)
        begin = _pattern(shop, period, random)
        if begin is None or max(_levels(shop, begin, period)) > most:
            continue
        length = (shop.microbatches - 1) * period + max(begin)
        if best is None or length < best[0]:
            best = (length, period, begin)
    if best is None:
        return None
    _, period, begin = best
    rows: list[list[tuple[float, int, int]]] = [[] for _ in range(shop.ranks)]
    for line, at in enumerate(begin):
        row = rows[shop.placement[line % shop.stages]]
        for microbatch in range(shop.microbatches):
            row.append((at + microbatch * period, line, line * shop.microbatches + microbatch))
    return [[operation for _, _, operation in sorted(row)] for row in rows]


def random_table(shop: JobShop, random: Random) -> Pattern | None:
    """Turns in which no operations of a rank collide; None if there was no such table that holds about the cap."""
    period = max(shop.work) / shop.microbatches * random.choice(_WIDE)
    begin = _pattern(shop, period, random)
    if begin is None or max(_levels(shop, begin, period)) > 1.3 * shop.memory_cap:
        return None
    return Pattern(begin=begin[: 2 * shop.stages], period=period)


def _levels(shop: JobShop, begin: list[float], period: float) -> list[float]:
    """Most activations that each rank holds in the steady state, counting each until its W ends."""
    levels = []
    for own in shop.stages_of:
        always, parts = 0.0, []  # parts: (phase of the F, how long beyond whole periods, activation)
        for stage in own:
            weight = 2 * shop.stages + stage
            held = begin[weight] + shop.duration[weight * shop.microbatches] - begin[stage]
            whole, rest = divmod(held + ROUNDING, period)
            always += whole * shop.activation[stage]
            parts.append((begin[stage] % period, rest - 2 * ROUNDING, shop.activation[stage]))
        levels.append(
            always + max(sum(a for other, rest, a in parts if (phase - other) % period < rest) for phase, _, _ in parts)
        )
    return levels


def _pattern(shop: JobShop, period: float, random: Random) -> list[float] | None:
    """When microbatch 0 runs each of its operations, by line (kind * stages + stage)."""
    tables: list[list[tuple[float, float]]] = [[] for _ in range(shop.ranks)]
    begin = [0.0] * (3 * shop.stages)

    def place(line: int, earliest: float) -> float | None:
        duration = shop.duration[line * shop.microbatches]
        table = tables[shop.placement[line % shop.stages]]
        at = _first_fit(table, earliest, duration, period)
        if at is None:
            return None
        begin[line] = at
        phase = at % period
        table.append((phase, phase + duration))
        if phase + duration > period:
            table.append((phase - period, phase + duration - period))
        return at + duration

    chance = random.choice(_CHANCE)
    now: float | None = 0.0
    for line in (*range(shop.stages), *reversed(range(shop.stages, 2 * shop.stages))):
        assert now is not None, "the loop ends at the first operation without a place"
        now += shop.lag[line * shop.microbatches]
        if chance and random.random() < chance:
            now += random.choice(_DELAY) * shop.duration[line * shop.microbatches]
        if (now := place(line, now)) is None:
            return None
    for stage in reversed(range(shop.stages)):
        line = shop.stages + stage
        if place(line + shop.stages, begin[line] + shop.duration[line * shop.microbatches]) is None:
            return None
    return begin


def _first_fit(table: list[tuple[float, float]], earliest: float, duration: float, period: float) -> float | None:
    """First time from ``earliest`` on at which ``duration`` is free in a table that repeats every ``period``."""
    at = earliest
    while at - earliest < period + ROUNDING:
        phase = at % period
        for begin, end in table:
            for shift in (0.0, period):
                if begin + shift < phase + duration - ROUNDING and end + shift > phase + ROUNDING:
                    at += end + shift - phase
                    break
            else:
                continue
            break
        else:
            return at
    return None
