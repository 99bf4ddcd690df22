"""Which tokens of a pair a model learns to predict, as runs.

    add_document(ids, loss_mask=...) --> MaskRuns --> PREFIX.mask --> LossMask (this file) --> batches

A mask is true where a token counts in the loss. It begins true, and ``flips`` holds the tokens of .bin where it
changes, in order. Two equal flips undo each other. So a conversation costs 16 bytes per turn, and a pair without a mask
is a mask without flips.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.companions import MASK, Companion, Facts, map_if_there, pack, read_companion
from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.index import Index
from sixfold.indexed_data.storage import Bytes, IdSource

Mask = npt.NDArray[np.bool_]
_IN_ORDER = "a mask changes at tokens of the pair, in order"


class MaskRuns:
    """The flips of a pair that is being written."""

    def __init__(self) -> None:
        self.flips = array("q")

    def append(self, begin: int, mask: Mask) -> None:
        """The mask of the tokens from ``begin`` on; those before it that were not given are true."""
        counted = len(self.flips) % 2 == 0
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=np.int8(counted))) + begin
        self.flips.frombytes(edges.astype(np.int64).tobytes())

    def close(self, end: int) -> None:
        """What follows token ``end`` is true again, as of documents without a mask."""
        if len(self.flips) % 2:
            self.flips.append(end)

    def cut(self, end: int) -> None:
        """Forget what was said of the tokens from ``end`` on."""
        while self.flips and self.flips[-1] >= end:
            self.flips.pop()

    def append_pair(self, begin: int, mask: LossMask, end: int) -> None:
        """All of another pair, whose tokens lie at ``begin`` to ``end``."""
        self.close(begin)
        self.flips.frombytes((mask.flips + begin).tobytes())
        self.close(end)

    def pack(self, facts: Facts) -> list[Any]:
        return pack(MASK, facts, np.frombuffer(self.flips, np.int64) if self.flips else np.empty(0, np.int64))


class LossMask:
    """The mask of a pair, mapped."""

    def __init__(self, file: Companion) -> None:
        self.file, self.flips = file, file.array

    @classmethod
    def open(
        cls, prefix: str, index: Index, ids: IdSource, load: Callable[[str], Bytes | None] = map_if_there
    ) -> LossMask | None:
        """The mask beside a pair; None if it has none.

        Raises:
            IndexedDataError: it is damaged, or belongs to another pair.
        """
        found = read_companion(prefix, MASK, index, ids, 1, load)
        return None if found is None else cls(found)

    def problems(self, prefix: str, index: Index) -> Iterator[Problem]:
        """The rules that every mask keeps. O(flips)."""
        tokens = index.bin_bytes // index.itemsize
        edges = np.concatenate(([0], self.flips, [tokens]))
        wrong = np.flatnonzero(np.diff(edges) < 0)
        if wrong.size:
            at = int(wrong[0])
            found = f"token {edges[at + 1]} after {edges[at]}"
            yield Problem(_IN_ORDER, prefix + MASK, found, f"0 to {tokens}")

    def of(self, begin: int, count: int) -> Mask:
        """(count,) whether the tokens of .bin from ``begin`` on count. Cost: one search, then O(count).

        Raises:
            IndexedDataError: the flips that are read are not in order.
        """
        first, last = np.searchsorted(self.flips, [begin, begin + count], side="right").tolist()
        edges = np.concatenate(([begin], self.flips[first:last], [begin + count]))
        if last < first or (np.diff(edges) < 0).any():
            found, expected = f"flips {first} to {last} out of order", f"tokens {begin} to {begin + count}, in order"
            problem = Problem(_IN_ORDER, self.file.path, found, expected)
            raise IndexedDataError.broken(problem, "Run `sixfold-data verify`, then build the pair again")
        values = (np.arange(first, last + 1) % 2) == 0
        mask: Mask = np.repeat(values, np.diff(edges))
        return mask


def as_mask(values: Any, count: int) -> Mask:
    """``values`` as (count,) bools; IndexedDataError for anything but that many bools, or zeros and ones."""
    given = np.asarray(values)
    if count == given.size == 0:  # of an empty list numpy makes floats
        return np.zeros(0, np.bool_)
    if given.shape != (count,):
        raise IndexedDataError(f"loss_mask has shape {given.shape}, the document has {count} ids; each has one value")
    if given.dtype.kind not in "bui" or (given.dtype.kind != "b" and not np.isin(given, (0, 1)).all()):
        raise IndexedDataError(f"loss_mask has {given.dtype} values such as {given[0]!r}; it holds bools, or 0 and 1")
    return given.astype(np.bool_)
