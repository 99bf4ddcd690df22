"""Placements: which rank holds which stage.

    ranks, chunks --> stage -> rank (this file) --> schedules/*

Torch-free. A placement is a tuple: entry s is the rank of stage s. Programs take
any total map; these are the ones that the schedules use.
"""

from __future__ import annotations

from sixfold.pipeline.errors import whole

__all__ = ["at_least_one", "linear", "looped", "vee", "wave"]


def at_least_one(**arguments: int) -> None:
    """Refuse the first of ``arguments`` that is below one, or no whole number.

    Raises:
        ScheduleError: names the argument, its value and the rule.
    """
    for name, value in arguments.items():
        whole(name, value, least=1)


def linear(ranks: int) -> tuple[int, ...]:
    """Stage r on rank r: 0 1 2 3."""
    return looped(ranks, 1)


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank ``s % ranks``: 0 1 2 3 0 1 2 3. The way from the last rank to the first is traffic."""
    at_least_one(ranks=ranks, chunks=chunks)
    return tuple(stage % ranks for stage in range(ranks * chunks))


def vee(ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again: 0 1 2 3 3 2 1 0. The turn stays within the last rank."""
    return wave(ranks, 2)


def wave(ranks: int, chunks: int) -> tuple[int, ...]:
    """A V for two chunks, a wave for more (arXiv 2308.15762): 0 1 2 3 3 2 1 0 0 1 2 3 ... Every turn is local."""
    at_least_one(ranks=ranks, chunks=chunks)
    down = tuple(range(ranks))
    return tuple(rank for row in range(chunks) for rank in (down if row % 2 == 0 else down[::-1]))
