"""Checks of numbers that callers give, before anything is computed from them.

    config, sizes, positions --> whole_number, whole_numbers, checked_positions (this file) --> everywhere

numpy cuts 1.5 to 1 where it is asked for integers; here it is refused.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError

Positions = Sequence[int] | range | npt.NDArray[Any]
FARTHEST = 2**40  # positions of an endless stream: with 2^22 tokens each, a place on the line stays below 2^63


def whole_number(what: str, value: object, least: int) -> int:
    """``value`` as an int; BlendingError if it is no whole number or below ``least``."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise BlendingError(f"{what} is {value!r}; it is a whole number >= {least}")
    return int(value)


def whole_numbers(what: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """``values`` as int64 in their shape, the same array if it is int64; BlendingError if one is not a whole number."""
    array = np.asarray(values)
    if isinstance(values, list | tuple) and any(isinstance(value, bool | np.bool_) for value in values):
        array = np.asarray(values, dtype=np.bool_)  # numpy takes True beside a number for 1
    if array.size and (array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.max() > 2**63 - 1)):
        raise BlendingError(f"{what} are {array.dtype} of shape {array.shape}; they are whole numbers below 2^63")
    return array.astype(np.int64, copy=False)


def plain(value: Any) -> Any:
    """A number of numpy as Python's, which JSON takes; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def first_repeated(items: Iterable[str], key: Callable[[str], str] | None = None) -> str | None:
    """The first item that was there before, by its ``key`` if there is one."""
    seen: set[str] = set()
    for item in items:
        seen_as = item if key is None else key(item)
        if seen_as in seen:
            return item
        seen.add(seen_as)
    return None


def checked_positions(positions: Any, end: int | None) -> npt.NDArray[np.int64]:
    """``positions`` as (P,) int64.

    Raises:
        BlendingError: not whole numbers in one dimension.
        IndexError: one is negative, or not below the end (None: ``FARTHEST``).
    """
    end = FARTHEST if end is None else end
    if isinstance(positions, range):
        ends = (positions[0], positions[-1]) if positions else (0, 0)
        if min(ends) >= 0 and max(ends) < end:
            return np.arange(positions.start, positions.stop, positions.step)
    position_P = np.ascontiguousarray(whole_numbers("positions", positions))
    if np.ndim(positions) != 1:
        raise BlendingError(f"positions are of shape {np.shape(positions)}; they are whole numbers in one row")
    if position_P.size and not 0 <= int(position_P.min()) <= int(position_P.max()) < end:
        wrong = position_P[(position_P < 0) | (position_P >= end)][0]
        raise IndexError(
            f"position {wrong} is not in 0..{end - 1}" if end else f"position {wrong}: there are no samples"
        )
    return position_P
