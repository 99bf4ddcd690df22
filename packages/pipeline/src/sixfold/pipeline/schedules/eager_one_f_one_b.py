"""Eager 1F1B: twice the warm-up of 1F1B, so that tensors travel while ranks compute.

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, four microbatches (1F1B's rank 0 has one warm-up forward):

    0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1: 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

Without cost of communication the bubble_over_ideal is 1F1B's (p - 1) / m. With it
a rank does not wait for a round trip between two of its forwards: at p=4, m=8 and
a hop of 0.3 F it is 0.45 against 0.575. Rank r holds min(m, 2 (p - r) - 1)
microbatches. Source: arXiv 2211.05322.
"""

from __future__ import annotations

from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.placement import at_least_one, linear, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.one_f_one_b import alternate
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["eager_one_f_one_b"]


@schedule(placement=looped)
def eager_one_f_one_b(ranks: int, microbatches: int) -> Program:
    """2 (p - 1 - r) warm-up forwards on rank r, then F B in turn, then the drain; stage r on rank r.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    return Program(
        tuple(
            alternate(
                [Action(rank, Kind.F, k) for k in range(microbatches)],
                [Action(rank, Kind.B, k) for k in range(microbatches)],
                warmup=2 * (ranks - 1 - rank),
            )
            for rank in range(ranks)
        ),
        microbatches,
        linear(ranks),
        "eager_one_f_one_b",
    )
