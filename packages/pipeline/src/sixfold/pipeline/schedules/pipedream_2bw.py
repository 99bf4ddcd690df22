"""PipeDream-2BW: 1F1B over several batches, two weight versions (arXiv 2006.09503).

    ranks, microbatches, steps --> Program (this file) --> passes.lower

Two ranks, two batches of two microbatches:

    weights: 2bw
    0: 0F0 0F1 0B0 0F2 0B1 0STEP0 0F3 0B2 0B3 0STEP1
    1: 1F0 1B0 1F1 1B1 1STEP0 1F2 1B2 1F3 1B3 1STEP1

Batch t runs with W(max(t - 1, 0)), the newest version that every rank has when the batch starts. It makes W(t + 1) =
W(t) - eta grad f_t(W(t - 1)): not the semantics of data parallelism. Two versions live on each rank. bubble_over_ideal
is (p - 1) / (steps m), paid once; rank r holds p - r microbatches.
"""

from __future__ import annotations

from dataclasses import replace

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.passes import optimizer_step
from sixfold.pipeline.program.placement import at_least_one, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.one_f_one_b import one_f_one_b
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["pipedream_2bw"]


@schedule(placement=looped, flushed=False)
def pipedream_2bw(ranks: int, microbatches: int, steps: int = 2) -> Program:
    """1F1B over ``steps * microbatches`` microbatches, a STEP behind each m-th backward; stage r on rank r.

    Args:
        microbatches: m of one batch; the program's ``microbatches`` is ``steps * m``.
    Raises:
        ScheduleError: an argument is below one, or m is below p - 1: such a pipeline has three batches
            in flight, which need three versions.
    """
    at_least_one(ranks=ranks, microbatches=microbatches, steps=steps)
    if microbatches < ranks - 1:
        raise ScheduleError(
            f"microbatches is {microbatches}; pipedream_2bw on {ranks} ranks takes at least {ranks - 1}, "
            "since fewer need a third weight version (the paper asks for as many as ranks)"
        )
    order = one_f_one_b(ranks, steps * microbatches)
    return replace(optimizer_step(order, when="2bw", steps=steps), name="pipedream_2bw")
