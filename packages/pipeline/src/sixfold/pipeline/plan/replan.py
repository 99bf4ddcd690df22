"""A better program for times that were measured, or the one there is.

    program that ran, Costs.fit(timeline) --> replan (this file) --> runner.agree --> the next steps

Torch-free, and run on one rank: what it finds depends on how far a search comes in its time. So all ranks take the
program of one. Stages stay where they are, and the number of microbatches stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from sixfold.pipeline.errors import ScheduleError, number
from sixfold.pipeline.plan.search import plan
from sixfold.pipeline.program.action import Kind
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.simulate import simulate

__all__ = ["Replan", "replan"]

_PLANNED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})


@dataclass(frozen=True, kw_only=True)
class Replan:
    """What to run next.

    Attributes:
        program: the better one, or the one that ran.
        changed: whether it is another.
        before, after: makespans by the same costs of the program that ran and of ``program``.
    """

    program: Program
    changed: bool
    before: float
    after: float


def replan(
    program: Program,
    costs: Costs,
    *,
    memory_cap: float | None = None,
    time_limit_s: float = 5.0,
    margin: float = 0.01,
) -> Replan:
    """Search a program for ``costs``; it replaces ``program`` only if its makespan is shorter by ``margin``.

    Args:
        program: compute actions alone (F, B, I, W, overlaps), as schedules and ``plan`` make them.
        costs: measured (``Costs.fit``).
        memory_cap: most activations of a rank, in the unit of ``costs.activation``; None allows what ``program`` takes.
        time_limit_s: of the search.
        margin: part of the makespan that a new program must save; noise of a measurement should not change programs.
    Raises:
        ScheduleError: the program has other actions, so that a plan would lose them; or as ``plan``.
    """
    if not 0 <= (margin := number("margin", margin)) < 1:
        raise ScheduleError(f"margin is {margin:g}; it is a part of the makespan, in 0..1")
    for rank, position, action in program.entries():
        if action.kind not in _PLANNED:
            raise ScheduleError(
                f"rank {rank} [{position}] {action}: a plan has no {action.kind}; replan the program before passes "
                "added to it, and apply them again",
                rank=rank,
                position=position,
                action=action,
            )
    now = simulate(program, costs)
    found = plan(
        costs,
        ranks=len(program.ranks),
        microbatches=program.microbatches,
        memory_cap=max(now.peak_activations) if memory_cap is None else memory_cap,
        placement=program.placement,
        time_limit_s=time_limit_s,
    )
    after = found.timeline.makespan
    if after >= now.makespan * (1 - margin):
        return Replan(program=program, changed=False, before=now.makespan, after=now.makespan)
    return Replan(program=found.program, changed=True, before=now.makespan, after=after)
