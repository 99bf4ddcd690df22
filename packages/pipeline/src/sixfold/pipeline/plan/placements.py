"""Which maps of stages to ranks are worth a search.

    Costs, ranks, m, cap --> wave, looped, and better maps if there are any (this file) --> search

Torch-free. Waves and loops are best where stages and links are alike. Elsewhere maps are changed stage by stage, and
judged by what no schedule of them can beat (``lower_bound``), which takes a thousandth of a search's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.plan.bound import least_memory, lower_bound, lower_bound_of_any
from sixfold.pipeline.program import placement as placements
from sixfold.pipeline.simulation.costs import Costs

__all__ = ["placements_of"]

_TURNS = 300  # changes that are looked at per start
_MORE = 2  # maps beside wave and looped

Placement = tuple[int, ...]


def placements_of(
    costs: Costs, ranks: int, microbatches: int, cap: float, random: Random, go_on: Callable[[], bool]
) -> list[Placement]:
    """Wave and looped, and up to two maps that promise less than either.

    Raises:
        ScheduleError: there are fewer stages than ranks.
    """
    stages = len(costs.forward)
    if stages < ranks:
        raise ScheduleError(f"{stages} stages on {ranks} ranks: give costs for one stage per rank at least")
    rows = -(-stages // ranks)
    starts = dict.fromkeys((placements.wave(ranks, rows)[:stages], placements.looped(ranks, rows)[:stages]))

    def promise(place: Placement) -> tuple[bool, float, float]:
        sizes = costs.activation
        over = sizes is not None and least_memory(sizes, place) > cap
        messages = sum(costs.between(a, b) + costs.between(b, a) for a, b in pairwise(place))
        return over, lower_bound(costs, place, microbatches, cap), messages

    enough = lower_bound_of_any(costs, ranks, microbatches, cap)  # what reaches it need not be changed
    known = {place: promise(place) for place in starts}
    best = min(known.values())
    if best[:2] <= (False, enough * (1 + 1e-9)):
        return list(starts)
    better: dict[Placement, tuple[bool, float, float]] = {}
    for start in starts:
        place, value = start, known[start]
        for _ in range(_TURNS):
            if not go_on() or value[:2] <= (False, enough * (1 + 1e-9)):
                break
            other = _changed(place, ranks, random)
            if other is not None and (found := promise(other)) <= value:
                place, value = other, found
        if value < best and place not in known:
            better[place] = value
    return [*starts, *sorted(better, key=better.__getitem__)[:_MORE]]


def _changed(place: Placement, ranks: int, random: Random) -> Placement | None:
    """One stage on another rank, or two stages' ranks exchanged; None if that changes nothing or empties a rank."""
    row = list(place)
    first, second = random.randrange(len(row)), random.randrange(len(row))
    if random.random() < 0.5:
        row[first], row[second] = row[second], row[first]
    else:
        row[first] = random.randrange(ranks)
    return tuple(row) if row != list(place) and _holds_all(row, ranks) else None


def _holds_all(row: Sequence[int], ranks: int) -> bool:
    return len(set(row)) == ranks
