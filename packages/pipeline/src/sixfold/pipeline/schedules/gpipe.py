"""GPipe: all forwards, then all backwards (arXiv 1811.06965).

    ranks, microbatches --> Program (this file) --> passes.lower

bubble_over_ideal is (p - 1) / m; every rank holds m microbatches.
"""

from __future__ import annotations

from sixfold.pipeline.action import Action, Kind
from sixfold.pipeline.placement import at_least_one, looped
from sixfold.pipeline.program import Program

__all__ = ["gpipe"]


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
        looped(ranks),
        "gpipe",
    )
