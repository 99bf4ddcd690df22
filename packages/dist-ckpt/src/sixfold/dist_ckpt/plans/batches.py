"""Whole tensors as batches of row-major ranges, so that what passes through memory is bounded.

whole tensors, as records --> batches (this file) --> records of ranges --> tools, exports

Pure: no values, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TypeVar

from sixfold.dist_ckpt.geometry.box import cuts
from sixfold.dist_ckpt.state.records import ShardedTensor

BATCH_BYTES = 256 * 2**20

Item = TypeVar("Item")


def nbytes_of(record: ShardedTensor) -> int:
    """Bytes of what a record holds."""
    return prod(record.local_shape) * record.dtype.itemsize


def grouped(items: Iterable[Item], nbytes: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """The items in order, as many at a time as take ``most`` bytes together, or one that takes more."""
    group: list[Item] = []
    filled = 0
    for item in items:
        if group and filled + nbytes(item) > most:
            yield group
            group, filled = [], 0
        group.append(item)
        filled += nbytes(item)
    if group:
        yield group


def batches(tensors: Iterable[ShardedTensor], most: int | None = None) -> Iterator[list[ShardedTensor]]:
    """Whole tensors in order, as records of row-major ranges, ``most`` bytes at a time (None: ``BATCH_BYTES``)."""
    most = BATCH_BYTES if most is None else most
    return grouped((part for record in tensors for part in _row_parts(record, most)), nbytes_of, most)


def _row_parts(record: ShardedTensor, most: int) -> Iterator[ShardedTensor]:
    shape = record.global_shape
    for cut in cuts(shape, max(1, most // record.dtype.itemsize)):
        ends = [axis.indices(length)[:2] for axis, length in zip(cut, shape, strict=True)]
        local, offset = tuple(stop - start for start, stop in ends), tuple(start for start, _ in ends)
        yield ShardedTensor(record.key, None, record.dtype, local, shape, offset, None)
