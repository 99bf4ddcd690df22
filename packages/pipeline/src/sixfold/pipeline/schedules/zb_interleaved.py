"""Interleaved 1F1B whose weight gradients fill the drain: torch's InterleavedZeroBubble, for any sizes.

    ranks, microbatches, chunks --> Program (this file) --> passes.lower

Two ranks of two chunks, three microbatches:

    0: 0F0 0F1 0F2 2F0 2F1 2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2
    1: 1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2

It relates to interleaved 1F1B as ZB-H1 to 1F1B; with one chunk it is ZB-H1. A rank warms up with one forward less than
in interleaved 1F1B, since a neighbour waits for I only. bubble_over_ideal is (p - 1) / (3 v m) at F = I = W and m >=
p, a third of interleaved's, in less memory: at most p microbatches on any rank if p divides m.
Messages are 2 m (p v - 1).
"""

from __future__ import annotations

from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.placement import at_least_one, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.interleaved import near_equal
from sixfold.pipeline.schedules.one_f_one_b import alternate
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["zb_interleaved"]


@schedule(
    placement=looped,
    chunks=None,
    split=True,
    aliases={"InterleavedZeroBubble": "needs m to be a multiple of max(1, m // ranks)"},
)
def zb_interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """Interleaved order of F and I; rank r runs each W r turns after its I; stage s on rank ``s % ranks``.

    Microbatches pass the chunks in groups as ``interleaved``'s do.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches, chunks=chunks)
    groups = near_equal(microbatches, max(1, microbatches // ranks))
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, Kind.F, k) for members in groups for stage in stages for k in members]
        backwards = [(stage, k) for members in groups for stage in reversed(stages) for k in members]
        inputs = [Action(stage, Kind.I, k) for stage, k in backwards]
        weights = iter([Action(stage, Kind.W, k) for stage, k in backwards])
        row: list[Action] = []
        late = rank  # turns of I that a W waits
        for action in alternate(forwards, inputs, warmup=ranks - 1 - rank + (chunks - 1) * len(groups[0])):
            row.append(action)
            if action.kind is Kind.I and (late := late - 1) < 0:
                row.append(next(weights))
        rows.append((*row, *weights))
    return Program(tuple(rows), microbatches, looped(ranks, chunks), "zb_interleaved")
