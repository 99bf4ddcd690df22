"""1F1B: as soon as a rank can run a backward it does (PipeDream-Flush, arXiv 2006.09503).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    0: 0F0 0F1 0B0 0F2 0B1 0B2
    1: 1F0 1B0 1F1 1B1 1F2 1B2

bubble_over_ideal is GPipe's (p - 1) / m, but rank r holds only min(m, p - r)
microbatches: rank 0 the most.
"""

from __future__ import annotations

from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.placement import at_least_one, linear, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["alternate", "one_f_one_b"]


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += (forward, backward)
    return (*actions, *backwards[len(forwards) - warmup :])


@schedule(placement=looped, aliases={"1F1B": ""})
def one_f_one_b(ranks: int, microbatches: int) -> Program:
    """p - 1 - r warm-up forwards on rank r, then F B in turn, then the drain; stage r on rank r.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    return Program(
        tuple(
            alternate(
                [Action(rank, Kind.F, k) for k in range(microbatches)],
                [Action(rank, Kind.B, k) for k in range(microbatches)],
                warmup=ranks - 1 - rank,
            )
            for rank in range(ranks)
        ),
        microbatches,
        linear(ranks),
        "one_f_one_b",
    )
