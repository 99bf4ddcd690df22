"""Which elements of a flat buffer travel together, and what is copied to bring them together.

    Cut, bucket_bytes --> columns, copies (this file) --> gradients.py, engine/reduce.py

Pure integers: no tensor, no rank. A flat buffer is N rows (shards) of S elements; its tensors lie in the rows one
after the other. A *piece* is a range of columns: the same elements of every shard. So the reduce-scatter of a piece
gives a contiguous part of each rank's shard.

    N = 2, S = 6, tensors a (0..8) and b (8..11), one element of padding; the piece of columns 2..4:

        a a [a a] a a
        a a [b b] b .          two copies: a[2:4] to row 0, b[0:2] to row 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """A block of ``rows`` x ``columns`` elements of one tensor, to ``(row, column)`` of a piece.

    Its rows lie S elements apart in the flattened tensor, the first at ``start``. ``tensor`` None: padding, zeros.
    """

    tensor: int | None
    start: int
    row: int
    column: int
    rows: int
    columns: int


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return -(-value // multiple) * multiple


def columns(row_numel: int, rows: int, itemsize: int, bucket_bytes: int, *, unit: int) -> tuple[tuple[int, int], ...]:
    """Column ranges that cover a row: as few as keep a piece within ``bucket_bytes``, about equally wide.

    Borders fall on multiples of ``unit``; a piece is never narrower, whatever ``bucket_bytes`` is.
    """
    fitting = max(bucket_bytes // (rows * itemsize), 1)
    if row_numel <= fitting:
        return ((0, row_numel),) if row_numel else ()
    most = max(fitting // unit, 1)  # units in a piece
    units = -(-row_numel // unit)
    width = -(-units // -(-units // most)) * unit
    return tuple((start, min(start + width, row_numel)) for start in range(0, row_numel, width))


def copies(ranges: Sequence[tuple[int, int]], rows: int, row_numel: int, start: int, stop: int) -> tuple[Copy, ...]:
    """What fills the piece of columns ``[start, stop)``; ``ranges`` are the tensors' places in the whole."""
    found: list[Copy] = []
    at = 0
    for index in sorted(range(len(ranges)), key=lambda one: ranges[one]):
        first, last = ranges[index]
        if first == last:
            continue
        found += _blocks(None, at, first, row_numel, start, stop)
        found += _blocks(index, first, last, row_numel, start, stop)
        at = last
    found += _blocks(None, at, rows * row_numel, row_numel, start, stop)
    return tuple(found)


def _blocks(tensor: int | None, first: int, last: int, row_numel: int, start: int, stop: int) -> Iterator[Copy]:
    """The parts of elements ``[first, last)`` in the columns: at most a first, a middle and a last block."""
    row, end = first // row_numel, -(-last // row_numel)
    while row < end:
        low, high = max(row * row_numel + start, first), min(row * row_numel + stop, last)
        rows = 1
        if high - low == stop - start:  # whole rows go together
            rows = max((last - row * row_numel - stop) // row_numel + 1, 1)
        if low < high:
            yield Copy(tensor, low - first, row, low - row * row_numel - start, rows, high - low)
        row += rows
