"""Boxes: axis-aligned blocks of an n-dimensional tensor, and row-major ranges as boxes.

    box.py (this file) --> records.py --> plan.py, shard_table.py

Pure integers: no tensors, no files, no ranks. A box of dimension 0 holds one element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

Ints = tuple[int, ...]


class Box(NamedTuple):
    """The elements ``offset[d] <= i[d] < offset[d] + size[d]`` for every axis d."""

    offset: Ints
    size: Ints

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def shifted(self, by: Sequence[int]) -> Box:
        """The same box moved by ``by``."""
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.size)

    def within(self, shape: Sequence[int]) -> bool:
        """Whether the box lies inside a tensor of ``shape``."""
        if not len(shape) == len(self.size) == len(self.offset):
            return False
        for start, length, end in zip(self.offset, self.size, shape, strict=True):  # each chunk of a file comes here
            if start < 0 or length < 0 or start + length > end:
                return False
        return True


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None where they share no element."""
    low = tuple(map(max, a.offset, b.offset))
    size = tuple(
        min(ao + an, bo + bn) - lo for ao, an, bo, bn, lo in zip(a.offset, a.size, b.offset, b.size, low, strict=True)
    )
    return Box(low, size) if all(n > 0 for n in size) else None


def subtract(a: Box, b: Box) -> list[Box]:
    """The elements of ``a`` outside ``b`` as at most 2n disjoint boxes."""
    common = intersect(a, b)
    if common is None:
        return [a] if a.volume else []
    rest: list[Box] = []
    offset, size = list(a.offset), list(a.size)
    for axis, (low, length) in enumerate(zip(common.offset, common.size, strict=True)):
        for start, stop in ((offset[axis], low), (low + length, offset[axis] + size[axis])):
            if stop > start:
                piece_offset, piece_size = list(offset), list(size)
                piece_offset[axis], piece_size[axis] = start, stop - start
                rest.append(Box(tuple(piece_offset), tuple(piece_size)))
        offset[axis], size[axis] = low, length
    return rest


def holes(shape: Sequence[int], boxes: Iterable[Box]) -> list[Box]:
    """What ``boxes`` leave uncovered of a tensor of ``shape``. Cost: boxes x pieces; for error reports."""
    left = [whole(shape)] if prod(shape) else []
    for box in boxes:
        left = [rest for piece in left for rest in subtract(piece, box)]
    return left


def overlaps(boxes: Sequence[Box]) -> list[tuple[int, int]]:
    """Pairs of indices of boxes that share an element, in ascending order.

    A sweep along the axis with the most distinct starts: near linear for grids and for flattened
    ranges, quadratic only where all boxes start together on every axis.
    """
    filled = [i for i, box in enumerate(boxes) if box.volume]
    if len(filled) < 2 or not boxes[filled[0]].size:
        return [(a, b) for n, a in enumerate(filled) for b in filled[n + 1 :]]
    axis = max(range(len(boxes[filled[0]].size)), key=lambda d: len({boxes[i].offset[d] for i in filled}))
    found: list[tuple[int, int]] = []
    active: list[int] = []
    for i in sorted(filled, key=lambda i: boxes[i].offset[axis]):
        start = boxes[i].offset[axis]
        active = [j for j in active if boxes[j].offset[axis] + boxes[j].size[axis] > start]
        found.extend((min(i, j), max(i, j)) for j in active if intersect(boxes[i], boxes[j]))
        active.append(i)
    return sorted(found)


def range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The row-major range ``[start, stop)`` of a tensor as boxes, in the order of the range.

    Partial first row (recursively), whole middle rows, partial last row: at most ``2n - 1`` boxes,
    each contiguous in the flat data. So a flattened shard needs no special shape on disk.
    """
    if not shape:
        return [Box((), ())] * (start < stop)
    row, tail = prod(shape[1:]), tuple(shape[1:])
    boxes: list[Box] = []
    while start < stop:
        index, at = divmod(start, row)
        if at or stop - start < row:
            end = min(row, at + stop - start)
            boxes += [Box((index, *box.offset), (1, *box.size)) for box in range_boxes(tail, at, end)]
            start += end - at
        else:
            rows = (stop - start) // row
            boxes.append(Box((index, *(0,) * len(tail)), (rows, *tail)))
            start += rows * row
    return boxes


def cuts(shape: Sequence[int], most: int) -> Iterator[tuple[slice, ...]]:
    """Indices that cut a tensor into parts of at most ``most`` >= 1 elements, each a row-major range, in its order."""
    row = prod(shape[1:])
    if not shape or 0 in shape or row * shape[0] <= most:
        yield (slice(None),) * len(shape)
    elif row <= most:
        step = most // row
        for low in range(0, shape[0], step):
            yield (slice(low, min(low + step, shape[0])), *(slice(None),) * (len(shape) - 1))
    else:
        for index in range(shape[0]):
            for inner in cuts(shape[1:], most):
                yield (slice(index, index + 1), *inner)


def first_element(part: Box, box: Box) -> int | None:
    """Row-major number in ``box`` of the first element of a part of it; None if the part is not one run of elements."""
    if part == box:
        return 0
    axis = next((axis for axis, length in enumerate(part.size) if length != 1), len(part.size))
    if part.size[axis + 1 :] != box.size[axis + 1 :]:
        return None
    number = 0
    for at, start, length in zip(part.offset, box.offset, box.size, strict=True):
        number = number * length + at - start
    return number


def describe(key: str, box: Box, shape: Sequence[int], flattened: tuple[int, int] | None = None) -> str:
    """Text form of a shard, ``decoder.qkv[512:1024, :]``; with its range ``{96:192}`` if flattened."""
    axes = [":" if (o, s) == (0, n) else f"{o}:{o + s}" for o, s, n in zip(box.offset, box.size, shape, strict=True)]
    text = f"{key}[{', '.join(axes)}]"
    return text if flattened is None else f"{text}{{{flattened[0]}:{flattened[1]}}}"


def cover_weight(box: Box) -> int:
    """A number that adds up: boxes that tile a box have its weight together; any hole or overlap gives another sum.

    As in shard_table.py's [Note: cover by hashes], for the few boxes of one read; here products and sums are exact.
    """
    weight = 1
    for axis, (start, length) in enumerate(zip(box.offset, box.size, strict=True)):
        # Of texts: Python's hash of small integers keeps their differences.
        weight *= hash(f"{axis} {start + length}") - hash(f"{axis} {start}")
    return weight
