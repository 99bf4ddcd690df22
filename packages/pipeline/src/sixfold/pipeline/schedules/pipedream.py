"""PipeDream: 1F1B without flushes, an optimizer step after every backward (arXiv 1806.03377).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    weights: pipedream
    0: 0F0 0F1 0B0 0STEP0 0F2 0B1 0STEP1 0B2 0STEP2
    1: 1F0 1B0 1STEP0 1F1 1B1 1STEP1 1F2 1B2 1STEP2

The order is 1F1B's; its bubble, (p - 1) / m over the ideal, is paid once for all m
microbatches. A microbatch is forwarded and sent back with one version of a stage's weights,
so rank r keeps p - r versions, as many as microbatches are in flight there.
"""

from __future__ import annotations

from dataclasses import replace

from sixfold.pipeline.passes import optimizer_step
from sixfold.pipeline.program.placement import looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.one_f_one_b import one_f_one_b
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["pipedream"]


@schedule(placement=looped, flushed=False)
def pipedream(ranks: int, microbatches: int) -> Program:
    """1F1B with ``STEP k`` of a stage directly behind its backward of microbatch k; stage r on rank r.

    Raises:
        ScheduleError: an argument is below one.
    """
    order = one_f_one_b(ranks, microbatches)
    return replace(optimizer_step(order, when="pipedream", steps=microbatches), name="pipedream")
