"""ZB-H1: 1F1B whose weight gradients fill the drain (arXiv 2401.10241).

    ranks, microbatches --> Program (this file) --> passes.lower

Two ranks, three microbatches:

    0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

A neighbour waits for I only, so W may come later; the later the rank, the more of them
wait. bubble_over_ideal is (p - 1) (F + I - W) / (m (F + B)) at F = I = W and m >= p,
a third of 1F1B's. Every rank holds at most min(m, p) microbatches: 1F1B's rank 0.
"""

from __future__ import annotations

from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.placement import at_least_one, linear, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.one_f_one_b import alternate
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["with_late_weights", "zb_h1"]


@schedule(placement=looped, split=True)
def zb_h1(ranks: int, microbatches: int) -> Program:
    """1F1B's order of F and I; rank r runs the W of a microbatch r turns after its I; stage r on rank r.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches)
    rows = [with_late_weights(rank, microbatches, warmup=ranks - 1 - rank, late=rank) for rank in range(ranks)]
    return Program(tuple(rows), microbatches, linear(ranks), "zb_h1")


def with_late_weights(stage: int, microbatches: int, *, warmup: int, late: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then F I in turn, with W of microbatch k directly behind I of microbatch k + ``late``."""
    row: list[Action] = []
    forwards = [Action(stage, Kind.F, k) for k in range(microbatches)]
    for action in alternate(forwards, [Action(stage, Kind.I, k) for k in range(microbatches)], warmup):
        row.append(action)
        k = action.microbatch
        if action.kind is Kind.I and k is not None and k >= late:
            row.append(Action(stage, Kind.W, k - late))
    return (*row, *(Action(stage, Kind.W, k) for k in range(max(0, microbatches - late), microbatches)))
