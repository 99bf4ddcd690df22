"""Hanayo: stages in waves over the ranks, one-forward-one-backward of fused backwards (arXiv 2308.15762).

    ranks, microbatches, waves --> Program (this file) --> passes.lower

Two ranks, three microbatches, one wave:

    0: 0F0 0F1 0F2 3F0 3B0 3F1 3F2 3B1 3B2 0B0 0B1 0B2
    1: 1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 2B2 1B1 1B2

A wave is two chunks, so v = 2 waves. bubble_over_ideal is (p - 1) / (2 waves m) where that can
be reached: for one wave at m >= 2 p and p <= 4, and for two at p=4, m=8. At p = m = 4 the optimum
of one wave is 0.5 and not the paper's 0.375, and at m=8 0.1875 needs memory for all 8 (with five it is 0.25).
A rank holds at most m microbatches, mostly more than 1F1B's p; messages are 4 waves m (p - 1).
"""

from __future__ import annotations

from sixfold.pipeline.action import Kind
from sixfold.pipeline.placement import at_least_one, wave
from sixfold.pipeline.program import Program
from sixfold.pipeline.schedules.list_scheduling import list_schedule
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["hanayo"]


@schedule(placement=wave, chunks=None, searched=True)
def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Program:
    """The shortest of a few list schedules of ``2 * waves`` chunks; of equally short ones that which holds least.

    They differ in what a rank starts first, deepest forward or shallowest backward, and in how much it may hold.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches, waves=waves)
    placement = wave(ranks, 2 * waves)
    stages = len(placement)

    def deepest_forward(kind: Kind, stage: int) -> int:
        return -stage if kind is Kind.F else stages - stage

    def shallowest_backward(kind: Kind, stage: int) -> int:
        return stage if kind is Kind.B else 2 * stages - stage

    tried = []
    narrow, wide = ranks + ranks // 2, 2 * ranks
    for favour, most in (
        (deepest_forward, narrow),
        (deepest_forward, wide),
        (deepest_forward, microbatches),
        (shallowest_backward, wide),
    ):
        room = 2 * waves * min(most, microbatches)
        tried.append(list_schedule(placement, microbatches, favour, split=False, room=room))
    best = min(tried, key=lambda listed: (listed.makespan, listed.peak))
    return Program(best.rows, microbatches, placement, "hanayo")
