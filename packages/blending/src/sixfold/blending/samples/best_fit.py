"""Items into rows of one capacity, by best fit decreasing.

    lengths of the pieces of a window, capacity --> best_fit (this file): row of each --> packed_rows.py

The longest item goes first. Each goes to the row with the least room that holds it, of several to the first. If no row
holds it, it begins a new one. Pure: integers in, integers out. tests/samples/test_best_fit.py says it in twenty lines.

[Note: all of one length at once] Rows with the same room form a bucket, and items of one length are placed together.
If r is the least room that holds a length s, one row of that bucket takes r // s of them in turn: after each it has the
least room. So the work is in the number of (length, bucket) pairs, not of items. A bucket is a heap of runs of rows.
One whole number with a bit per room finds the least room. ``native/best_fit.c`` does the same, 15 times as fast.

Source: Ding et al. 2024, arXiv 2404.10830 (best fit decreasing for pretraining, with a tree over rooms).
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.numbers.kernels import I64, kernels

_RADIX_BELOW = 2**16  # numpy sorts 16 bits by radix, ten times as fast


def rows_of(length_I: I64, capacity: int) -> int:
    """How many rows ``best_fit`` fills."""
    native = kernels()
    if native is None:
        return _placed(length_I, capacity)[0]
    none = np.empty(0, dtype=np.int64)
    return native.best_fit(length_I, capacity, none, none)


def best_fit(length_I: I64, capacity: int) -> tuple[I64, I64]:
    """Which items stand in which row.

    Args:
        length_I: (I,) of the items, 1 .. ``capacity``, C-contiguous.
    Returns:
        items row by row, in a row the longest first (I,), and the row of each of those (I,), ascending.
    """
    native = kernels()
    if native is not None:
        item_I, row_I = np.empty_like(length_I), np.empty_like(length_I)
        native.best_fit(length_I, capacity, item_I, row_I)
        return item_I, row_I
    rows, filled = _placed(length_I, capacity)
    first_F, used_F, each_F = np.fromiter(filled, dtype=np.int64, count=len(filled)).reshape(-1, 3).T
    run = np.repeat(np.arange(first_F.size), used_F)
    row_R = np.arange(run.size) + np.repeat(first_F - np.cumsum(used_F) + used_F, used_F)
    row_I = np.repeat(row_R, each_F[run])
    by_length, by_row = _sorted_places(capacity - length_I, capacity), _sorted_places(row_I, rows)
    return by_length[by_row], row_I[by_row]


def _placed(length_I: I64, capacity: int) -> tuple[int, list[int]]:
    """How many rows there are, and (first row, rows, items in each) again and again; the longest items first."""
    rows, rooms, filled = 0, 0, list[int]()
    bucket: list[list[tuple[int, int]]] = [[] for _ in range(capacity + 1)]  # room --> heap of (first row, rows)
    for size, count in _by_length(length_I):
        while count:
            fitting = rooms >> size
            room = size + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            each = room // size
            if each > count:
                each = count
            used = count // each
            if fitting:
                first, there = heappop(bucket[room])
                if there > used:
                    heappush(bucket[room], (first + used, there - used))
                else:
                    used = there
                    if not bucket[room]:
                        rooms ^= 1 << room
            else:
                first = rows
                rows += used
            left = room - each * size
            if left:
                if not bucket[left]:
                    rooms |= 1 << left
                heappush(bucket[left], (first, used))
            filled += (first, used, each)
            count -= used * each
    return rows, filled


def _by_length(length_I: I64) -> Iterator[tuple[int, int]]:
    """(length, items of it), the longest first."""
    counts = np.bincount(length_I, minlength=1)
    sizes = np.flatnonzero(counts)[::-1]
    return zip(sizes.tolist(), counts[sizes].tolist(), strict=True)


def _sorted_places(values: I64, below: int) -> npt.NDArray[Any]:
    """Places of the least value, the next, ...; equal ones in their order."""
    return np.argsort(values.astype(np.uint16) if below < _RADIX_BELOW else values, kind="stable")
