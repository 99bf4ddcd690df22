"""A view: some documents of a pair, by their numbers, without a copy of the pair.

    filter_pair --> VIEW.view --> View (this file): ViewIndex --> reader.py

The .view names the pair by its path from the folder of the view, and says which pair it was as a companion does. Its
arrays are mapped: kept sequences, kept documents, first sequence of each kept document, lengths.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.companions import Facts, checksum_problems, with_checksum
from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.format import Header
from sixfold.indexed_data.index import LOOKED_AT, Index, places
from sixfold.indexed_data.storage import Bytes, IdSource, map_file

VIEW = ".view"
_MAGIC, _VERSION = b"SIXVIEW\0", 2
# Magic, version, checksum as of a companion, facts of the pair, kept sequences, kept documents, bytes of JSON.
_HEADER = struct.Struct("<8sII7Q")
_IN_ORDER = "what a view keeps follows its pair's order"
I64 = npt.NDArray[np.int64]


class View:
    """A .view file, mapped."""

    def __init__(self, prefix: str) -> None:
        """Open ``prefix``.view.

        Raises:
            IndexedDataError: it is no view, or is cut.
        """
        path = self.path = prefix + VIEW
        self.raw = map_file(path)
        self._parse(self.raw)
        self.pair = os.path.join(_folder_of(prefix), self.made_of["pair"])

    def _parse(self, raw: Bytes) -> None:
        import json  # only here: reading pairs should not load it

        path = self.path
        if raw.size < _HEADER.size or raw[: len(_MAGIC)].tobytes() != _MAGIC:
            raise _wrong_view(Problem("a view begins with its header", path, f"{raw.size} bytes", "its header"))
        _, version, _, *numbers = _HEADER.unpack(raw[: _HEADER.size].tobytes())
        self.facts, (sequences, documents, named) = Facts(*numbers[:4]), numbers[4:]
        if version != _VERSION:
            raise _wrong_view(
                Problem("the version of a view is known", path, f"version {version}", f"version {_VERSION}")
            )
        sizes = (_HEADER.size, 8 * sequences, 8 * documents, 8 * (documents + 1), 4 * sequences, named)
        ends = [*accumulate(sizes)]  # of Python's integers: a damaged header has any number
        if raw.size != ends[-1]:
            raise _wrong_view(
                Problem("a view has the size that its header says", path, f"{raw.size} bytes", f"{ends[-1]} bytes")
            )
        a, b, c, d, e, f = ends
        self.sequences_K: I64 = raw[a:b].view("<i8")
        self.documents_K: I64 = raw[b:c].view("<i8")
        self.boundaries_K: I64 = raw[c:d].view("<i8")
        self.lengths_K: npt.NDArray[np.int32] = raw[d:e].view("<i4")
        try:
            self.made_of: dict[str, Any] = json.loads(raw[e:f].tobytes())
            os.path.join("", self.made_of["pair"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise _wrong_view(Problem("a view names its pair", path, str(error), "the path of a pair")) from error

    def index_over(self, base: Index, ids: IdSource) -> ViewIndex:
        """The index of the view over that of its pair; IndexedDataError if it is another pair."""
        if Facts.of(base, ids) != self.facts:
            found = f"{base.sequences} sequences in {base.bin_bytes} bytes, or another index, or other ids"
            expected = f"{self.facts.sequences} in {self.facts.bin_bytes} bytes"
            raise _wrong_view(Problem("a view belongs to its pair", f"{self.path}: {self.pair}", found, expected))
        return ViewIndex(base, self)

    def problems(self, base: Index) -> Iterator[Problem]:
        """The rules that every view keeps. O(kept sequences)."""
        yield from checksum_problems(self.path, self.raw)
        for name, numbers, count in (
            ("sequences", self.sequences_K, base.sequences),
            ("documents", self.documents_K, self.facts.boundaries - 1),
        ):
            if numbers.size and (numbers.min() < 0 or numbers.max() >= count or (np.diff(numbers) <= 0).any()):
                found = f"{numbers.size} of {count} {name}"
                yield Problem(_IN_ORDER, self.path, found, f"numbers below {count}")
                return
        if not np.array_equal(self.lengths_K, base.lengths_S[self.sequences_K]):
            yield Problem("a view has the lengths of its pair", self.path, "other lengths", "those of the pair")


class ViewIndex(Index):
    """The index of a view: sequence ``i`` is one of its pair."""

    __slots__ = ("base", "kept_documents", "kept_sequences")

    def __init__(self, base: Index, view: View) -> None:
        self.base, self.kept_sequences, self.kept_documents = base, view.sequences_K, view.documents_K
        self.idx_path, self.bin_path = base.idx_path, base.bin_path
        self.header = Header(base.header.dtype, view.sequences_K.size, view.boundaries_K.size)
        self.lengths_S, self.boundaries_D = view.lengths_K, view.boundaries_K
        self.modes_S = None if base.modes_S is None else base.modes_S[view.sequences_K]
        self.sequences, self.itemsize = view.sequences_K.size, base.itemsize
        self.bin_bytes, self.trailing_bytes = base.bin_bytes, base.trailing_bytes

    def span(self, i: int) -> tuple[int, int]:
        kept = self.kept_sequences.item(i)
        if not 0 <= kept < self.base.sequences:
            found, expected = f"sequence {i} is {kept}", f"below {self.base.sequences}"
            raise _wrong_view(Problem(_IN_ORDER, f"a view of {self.idx_path}", found, expected))
        return self.base.span(kept)

    def digest(self) -> int:
        import zlib  # only here: most readers need none

        digest = self.base.digest()
        for array in (self.kept_sequences, self.lengths_S, self.boundaries_D):
            for at in places(array.size):
                digest = zlib.crc32(array[at : at + LOOKED_AT].tobytes(), digest)
        return digest


def _wrong_view(problem: Problem) -> IndexedDataError:
    return IndexedDataError.broken(problem, "Filter the pair again")


def _folder_of(prefix: str) -> str:
    """Where the files of ``prefix`` lie: ``..`` from a folder that is a symbolic link is another place."""
    return os.path.realpath(os.path.dirname(prefix) or os.curdir)


def pack_view(
    prefix: str, pair: str, base: Index, ids: IdSource, dropped_D: npt.NDArray[np.bool_], made_of: dict[str, Any]
) -> list[Any]:
    """The pieces of the .view of ``prefix`` that leaves out the documents of ``pair`` where ``dropped_D`` is set."""
    import json  # only here: reading pairs should not load it

    kept = np.flatnonzero(~dropped_D).astype(np.int64)
    begin_K, end_K = base.boundaries_D[kept], base.boundaries_D[kept + 1]
    boundaries = np.concatenate(([0], np.cumsum(end_K - begin_K))).astype(np.int64)
    inside = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], end_K - begin_K)
    sequences = (np.repeat(begin_K, end_K - begin_K) + inside).astype(np.int64)
    lengths = base.lengths_S[sequences]
    there = os.path.join(_folder_of(pair), os.path.basename(pair))
    named = json.dumps({"pair": os.path.relpath(there, _folder_of(prefix)), **made_of}).encode()
    facts = Facts.of(base, ids)
    numbers = (facts.sequences, facts.boundaries, facts.bin_bytes, facts.digest, sequences.size, kept.size, len(named))
    header = _HEADER.pack(_MAGIC, _VERSION, 0, *numbers)
    return with_checksum([header, sequences, kept, boundaries, lengths, named])
