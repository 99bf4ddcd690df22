"""Looped breadth-first: every microbatch passes a chunk before the next chunk begins (arXiv 2211.05953).

    ranks, microbatches, chunks --> Program (this file) --> passes.lower

Two ranks of two chunks, two microbatches:

    0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

bubble_over_ideal is (p - 1) / (v m) for m >= p, memory GPipe's m microbatches on
every rank, messages 2 m (p v - 1). A sharded chunk is gathered twice per step, and
its gradients can be reduced as soon as its turn is over. PyTorch's ScheduleLoopedBFS
goes back through the microbatches in reverse, which changes the sums of gradients.
"""

from __future__ import annotations

from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.placement import at_least_one, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["looped_bfs"]


@schedule(
    placement=looped,
    chunks=None,
    aliases={"LoopedBFS": "backwards in descending microbatch order: sums differ in their last bits"},
)
def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Program:
    """m forwards of chunk 0, then of chunk 1, ...; backward through the chunks in reverse; stage s on rank ``s % p``.

    Raises:
        ScheduleError: an argument is below one.
    """
    at_least_one(ranks=ranks, microbatches=microbatches, chunks=chunks)
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, Kind.F, k) for stage in stages for k in range(microbatches)]
        backwards = [Action(stage, Kind.B, k) for stage in reversed(stages) for k in range(microbatches)]
        rows.append((*forwards, *backwards))
    return Program(tuple(rows), microbatches, looped(ranks, chunks), "looped_bfs")
