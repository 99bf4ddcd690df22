"""Naive model parallelism: one microbatch is in the pipeline at a time.

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    0: 0F0 0B0 0F1 0B1 0F2 0B2
    1: 1F0 1B0 1F1 1B1 1F2 1B2

The order of the plain loop. bubble_over_ideal is p - 1 whatever m is (the notes
that derive GPipe's formula for it are wrong); at most one microbatch is held.
"""

from __future__ import annotations

from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.placement import at_least_one, linear, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["naive"]


@schedule(placement=looped)
def naive(ranks: int, microbatches: int) -> Program:
    """F then B of one microbatch after another; stage r on rank r.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    return Program(
        tuple(
            tuple(Action(rank, kind, k) for k in range(microbatches) for kind in (Kind.F, Kind.B))
            for rank in range(ranks)
        ),
        microbatches,
        linear(ranks),
        "naive",
    )
