"""ZB-H2: twice ZB-H1's forwards in flight, and no rank ever idles between its first and last action (arXiv 2401.10241).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

At F = I = W and m >= 2 p - 1 the span of every rank is its work: span_over_ideal is 0.
Ranks start and end a forward apart, so from flush to flush (p - 1) F remains, which is
won only if the optimizer step does not synchronise the ranks (``passes.optimizer_step``).
At most 2 p - 1 microbatches are held.
"""

from __future__ import annotations

from sixfold.pipeline.program.placement import at_least_one, linear, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.registry import schedule
from sixfold.pipeline.schedules.zb_h1 import with_late_weights

__all__ = ["zb_h2"]


@schedule(placement=looped, split=True)
def zb_h2(ranks: int, microbatches: int) -> Program:
    """2 (p - r) - 1 forwards on rank r before its first I, and W 2 r turns after I; stage r on rank r.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    rows = [
        with_late_weights(rank, microbatches, warmup=2 * (ranks - 1 - rank), late=2 * rank) for rank in range(ranks)
    ]
    return Program(tuple(rows), microbatches, linear(ranks), "zb_h2")
