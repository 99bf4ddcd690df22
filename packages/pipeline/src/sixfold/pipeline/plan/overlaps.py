"""Overlaps for a finished order: which neighbours of a rank's list run as one OVERLAP_F_B.

    Program, Costs.overlap < 1 --> pairs joined and parted while that helps (this file) --> plan

Torch-free. A pair is a forward and a backward (B, I or W) of another microbatch or stage that stand next to each
other. Joining them saves time on their rank. But both begin when the inputs of both are there, and hand on their
results at the end of both. So each change is simulated, and kept if the makespan is no longer. What hangs is not kept.
The order of the parts stays, and with it what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.simulate import simulate

__all__ = ["overlapped"]

_BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})
_Place = tuple[int, int]  # rank, position of the first of a pair


def overlapped(
    program: Program, costs: Costs, enough: float, random: Random, go_on: Callable[[], bool]
) -> tuple[float, Program]:
    """``program`` with the best pairs found until ``go_on()`` is false or the makespan is at most ``enough``.

    Args:
        program: compute actions only; its own overlaps count as joined.
    Returns:
        (makespan, program); never a longer one than the program given.
    """
    best, best_program = simulate(program, costs).makespan, program
    rows = [[part for entry in row for part in entry.each()] for row in program.ranks]
    pairs = [(rank, at) for rank, row in enumerate(rows) for at in range(len(row) - 1) if _may_join(row, at)]
    if not pairs:
        return best, best_program
    joined, length = _pairs_of(program), best
    for start in _starts(pairs, rows, joined):
        made, found = _timed(program, rows, start, costs)
        if found < length:
            joined, length = start, found
        if found < best:
            best, best_program = found, made
    while best > enough and go_on():
        change = joined ^ {random.choice(pairs)}
        rank, at = next(iter(change ^ joined))
        if (rank, at) in change:
            change -= {(rank, at - 1), (rank, at + 1)}
        made, found = _timed(program, rows, change, costs)
        if found <= length:
            joined, length = change, found
        if found < best:
            best, best_program = found, made
    return best, best_program


def _may_join(row: Sequence[Action], at: int) -> bool:
    first, second = row[at], row[at + 1]
    one_each = (first.kind is Kind.F) != (second.kind is Kind.F) and {first.kind, second.kind} & _BACKWARD
    return bool(one_each) and (first.stage, first.microbatch) != (second.stage, second.microbatch)


def _pairs_of(program: Program) -> frozenset[_Place]:
    """The overlaps of two that ``program`` has; longer ones are parted."""
    pairs = set()
    for rank, row in enumerate(program.ranks):
        at = 0
        for entry in row:
            if len(entry.parts) == 2:
                pairs.add((rank, at))
            at += max(1, len(entry.parts))
    return frozenset(pairs)


def _starts(
    pairs: Sequence[_Place], rows: Sequence[Sequence[Action]], own: frozenset[_Place]
) -> list[frozenset[_Place]]:
    """What the search may begin with: no pairs, the program's own, forwards first, backwards first."""
    starts = [frozenset(), own]
    for forward_first in (True, False):
        chosen: set[_Place] = set()
        for rank, at in pairs:  # ascending
            if (rows[rank][at].kind is Kind.F) == forward_first and (rank, at - 1) not in chosen:
                chosen.add((rank, at))
        starts.append(frozenset(chosen))
    return starts


def _timed(
    program: Program, rows: Sequence[Sequence[Action]], joined: frozenset[_Place], costs: Costs
) -> tuple[Program, float]:
    """``program`` with these pairs, and its makespan; infinite if it hangs."""
    made = []
    for rank, row in enumerate(rows):
        starts = {at for holder, at in joined if holder == rank}
        entries = []
        for at, (action, following) in enumerate(pairwise((*row, None))):
            assert action is not None, "only the last of a pair is None"
            if at in starts and following is not None:
                entries.append(Action.overlap(action, following))
            elif at - 1 not in starts:
                entries.append(action)
        made.append(tuple(entries))
    candidate = replace(program, ranks=tuple(made))
    try:
        return candidate, simulate(candidate, costs).makespan
    except ScheduleError:
        return candidate, float("inf")
