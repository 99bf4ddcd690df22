"""The one error of this package and its time-out form.

    every file --> ScheduleError (this file) --> the caller

Torch-free. An error knows where it arose: rank, place in that rank's list and
action; the proof of a deadlock also carries its cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sixfold.pipeline.program.action import Action

__all__ = ["PipelineTimeout", "ScheduleError", "number", "whole"]

_TRUTH = ("bool", "bool_")  # Python's and numpy's


class ScheduleError(ValueError):
    """A program, an argument or a stage broke a rule; the message says which and what to do.

    Attributes:
        rank: rank of the program that is at fault, or None.
        position: index in that rank's list, or None.
        action: the action there (or the missing one), or None.
        cycle: list of (rank, position, action), each of which waits for the next; empty if it is no deadlock.
        of_peer: another rank raised it first, and this one tells what it heard.
    """

    of_peer = False

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        position: int | None = None,
        action: Action | None = None,
        cycle: Sequence[tuple[int, int, Action]] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.position = position
        self.action = action
        self.cycle = list(cycle)


class PipelineTimeout(ScheduleError):
    """A peer did not answer before the deadline, or its connection ended."""


def whole(name: str, value: object, *, least: int | None = None) -> int:
    """``value`` as an int: Python's or numpy's integers are, truth values, floats and text are not.

    Raises:
        ScheduleError: it is none, or below ``least``; ``name`` says what.
    """
    rule = "a whole number" if least is None else f"a whole number >= {least}"
    if type(value).__name__ in _TRUTH or not hasattr(type(value), "__index__"):
        raise ScheduleError(f"{name} is {value!r}; it is {rule}")
    number = index(value)  # type: ignore[arg-type]
    if least is not None and number < least:
        raise ScheduleError(f"{name} is {number}; it is >= {least}")
    return int(number)


def number(name: str, value: object) -> float:
    """``value`` as a float, which may be infinite or NaN; truth values and text are no numbers.

    Raises:
        ScheduleError: it is none; ``name`` says what.
    """
    if type(value).__name__ in _TRUTH or isinstance(value, str | bytes):
        raise ScheduleError(f"{name} is {value!r}; it is a number")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(f"{name} is {value!r}; it is a number") from None
