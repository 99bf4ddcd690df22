"""Interleaved 1F1B: several chunks per rank (arXiv 2104.04473).

    ranks, microbatches, chunks --> Program (this file) --> passes.lower

Two ranks of two chunks, four microbatches:

    0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Megatron's table: microbatches in groups, each group through chunk 0, then
chunk 1, ...; backward through the chunks in reverse. bubble_over_ideal is
(p - 1) / (v m) for every m >= p. It is paid with memory (p + (p - 1) / v
microbatches against p) and with (p v - 1) / (p - 1) times 1F1B's messages: the
way from the last rank back to the first is new traffic.
"""

from __future__ import annotations

from itertools import pairwise

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.placement import at_least_one, looped
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.one_f_one_b import alternate
from sixfold.pipeline.schedules.registry import schedule

__all__ = ["interleaved", "near_equal"]


@schedule(placement=looped, chunks=None, aliases={"Interleaved1F1B": "m is a multiple of max(1, m // ranks)"})
def interleaved(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Program:
    """Interleaved 1F1B of ``chunks`` stages per rank; stage s on rank ``s % ranks``.

    Any m is taken. A short last group would double the bubble (m=6, p=4, v=2). So the microbatches are shared among
    ``max(1, m // group)`` groups of about equal size, larger ones first. The warm-up counts with the largest.

    Args:
        group: microbatches that pass a chunk before the next chunk's turn; None means ``ranks``.
    Raises:
        ScheduleError: an argument is below one, or ``group`` is below ``ranks``.
    """
    at_least_one(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if group is not None:
        at_least_one(group=group)
    if group is not None and group < ranks:
        raise ScheduleError(f"group is {group}; it is >= ranks ({ranks}), else the ranks wait for each other for ever")
    groups = near_equal(microbatches, max(1, microbatches // (group or ranks)))
    largest = len(groups[0])
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        rows.append(
            alternate(
                [Action(stage, Kind.F, k) for members in groups for stage in stages for k in members],
                [Action(stage, Kind.B, k) for members in groups for stage in reversed(stages) for k in members],
                warmup=2 * (ranks - 1 - rank) + (chunks - 1) * largest,
            )
        )
    return Program(tuple(rows), microbatches, looped(ranks, chunks), "interleaved")


def near_equal(count: int, groups: int) -> list[range]:
    """0..count in ``groups`` runs whose lengths differ by at most one, longer runs first."""
    base, longer = divmod(count, groups)
    starts = [g * base + min(g, longer) for g in range(groups + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
