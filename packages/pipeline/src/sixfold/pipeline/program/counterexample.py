"""What is wrong with a program, as a reader can see it: one action, its rule and the grid around it.

    rank, position, rule --> ScheduleError (this file) --> verify, unit_rules, memory, lowering

Torch-free. A grid has ``_RANKS`` lines and ``_CELLS`` cells around the wrong one, which is marked ``>>1B0<<``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.program import Program

__all__ = ["broken", "check_size", "grid", "missing"]

_RANKS, _CELLS = 24, 11


def broken(program: Program, rank: int, position: int, action: Action, rule: str) -> ScheduleError:
    """``action`` of ``rank`` at ``position`` breaks ``rule``."""
    lines = (f"rank {rank} [{position}] {action}: {rule}", *grid(program, {(rank, position)}))
    return ScheduleError("\n".join(lines), rank=rank, position=position, action=action)


def missing(program: Program, rank: int, action: Action) -> ScheduleError:
    """``rank`` lacks ``action``; the grid shows it behind the last action of its stage and microbatch."""
    own = (action.stage, action.microbatch)
    row = program.ranks[rank]
    near = [i for i, entry in enumerate(row) if any((a.stage, a.microbatch) == own for a in entry.each())]
    place = (rank, near[-1] if near else len(row) - 1)
    first = f"rank {rank}: {action} is missing; the program needs it once"
    lines = (first, *grid(program, {place}, absent=str(action)))
    return ScheduleError("\n".join(lines), rank=rank, action=action)


def check_size(program: Program) -> None:
    """Refuse more microbatches than there are actions for, before any table of microbatches * stages is made.

    One wrong number in a text, such as ``0F999999999999``, makes that many microbatches.

    Raises:
        ScheduleError: names the first forward that is missing.
    """
    numbers = program.microbatches * program.stages
    if numbers <= sum(map(len, program.ranks)):
        return
    parts = [part for _, _, entry in program.entries() for part in entry.each()]
    if numbers <= len(parts):
        return
    there = {(part.stage, part.microbatch) for part in parts if part.kind is Kind.F}
    stage, k = next(
        divmod(n, program.microbatches) for n in range(numbers) if divmod(n, program.microbatches) not in there
    )
    raise missing(program, program.placement[stage], Action(stage, Kind.F, k))


def grid(program: Program, marks: Collection[tuple[int, int]], absent: str = "") -> Iterator[str]:
    """A line per rank, those around the marked ones, each with the cells around its mark.

    Args:
        marks: (rank, position) of the wrong cells.
        absent: an action that is not there; it is shown behind the mark, and the mark itself is not wrong.
    """
    position_of = dict(sorted(marks, reverse=True))  # of a rank with several marks the first
    first = max(0, min(position_of) - _RANKS // 4)
    for rank in range(first, min(first + _RANKS, len(program.ranks))):
        row = program.ranks[rank]
        middle = position_of.get(rank, min(position_of.values()))
        start = max(0, min(middle - _CELLS // 2, len(row) - _CELLS))
        cells = []
        for position, action in enumerate(row[start : start + _CELLS], start):
            here = (rank, position) in marks
            cells.append(f">>{action}<<" if here and not absent else str(action))
            if here and absent:
                cells.append(f">>no {absent}<<")
        if absent and not row and rank in position_of:
            cells.append(f">>no {absent}<<")
        dots = ("... " if start else "", " ..." if start + _CELLS < len(row) else "")
        yield f"    {rank} [{start}]: {dots[0]}{' '.join(cells)}{dots[1]}"
