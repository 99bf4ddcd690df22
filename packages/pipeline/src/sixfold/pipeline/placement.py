"""Placements: which rank holds which stage.

    ranks, chunks --> stage -> rank (this file) --> schedules/*

Torch-free. A placement is a tuple: entry s is the rank of stage s. Programs take
any total map; these are the two that the schedules use.
"""

from __future__ import annotations

from sixfold.pipeline.errors import ScheduleError

__all__ = ["at_least_one", "looped", "wave"]


def at_least_one(**arguments: int) -> None:
    """Refuse the first of ``arguments`` that is below one.

    Raises:
        ScheduleError: names the argument, its value and the rule.
    """
    for name, value in arguments.items():
        if value < 1:
            raise ScheduleError(f"{name} is {value}; it is >= 1")


def looped(ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """Stage s on rank ``s % ranks``: one line of stages (``chunks`` 1) or several loops."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def wave(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Down the ranks and up again: a V for two chunks, a wave for more (arXiv 2308.15762)."""
    down = tuple(range(ranks))
    return tuple(rank for row in range(chunks) for rank in (down if row % 2 == 0 else down[::-1]))
