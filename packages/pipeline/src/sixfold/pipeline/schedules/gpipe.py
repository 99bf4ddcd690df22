"""GPipe: all forwards, then all backwards (arXiv 1811.06965).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    0: 0F0 0F1 0F2 0B0 0B1 0B2
    1: 1F0 1F1 1F2 1B0 1B1 1B2

bubble_over_ideal is (p - 1) / m; every rank holds m microbatches.
"""

from __future__ import annotations

from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.placement import at_least_one, linear, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["gpipe"]


@schedule(placement=looped, aliases={"GPipe": ""})
def gpipe(ranks: int, microbatches: int) -> Program:
    """m forwards, then m backwards in the same order; stage r on rank r.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    return Program(
        tuple(
            tuple(Action(rank, kind, k) for kind in (Kind.F, Kind.B) for k in range(microbatches))
            for rank in range(ranks)
        ),
        microbatches,
        linear(ranks),
        "gpipe",
    )
