"""Samples of several datasets into one set of rows: searched together, read together.

    (dataset, sample) --> BatchReader (this file): ranges --> gather.py --> TokenRows

The compiled kernels find the ranges of all datasets of a batch in one call (``native/search.c``); where they cannot say
(no kernels, a source without pointers, damage, a left-over string) ``grid.py`` and ``line.py`` do, or raise. Handles
keep maps and indices open; they are made when a dataset is first read.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from sixfold.blending.gather import FIELDS, gather, open_map
from sixfold.blending.grid import Pieces
from sixfold.blending.line import Ranges
from sixfold.blending.native import I64, Kernels, kernels
from sixfold.blending.sample import TokenRows
from sixfold.blending.source import Part

_TOO_LITTLE_ROOM = -1  # of search.c; any other negative number leaves the batch to numpy
_ATTEMPTS = 10_000  # each adds an epoch or a dataset, or doubles the room


class Order(Protocol):
    """``grid.SampleOrder`` or ``megatron.index.IndexOrder``: which ranges a sample is."""

    def pieces(self, samples: I64, /) -> Pieces: ...
    def ranges(self, pieces: Pieces, more: int) -> tuple[I64, Ranges]: ...
    def finder(self, native: Kernels) -> object: ...
    def add_epoch(self, native: Kernels, finder: object, epoch: int) -> None: ...


class Readable(Protocol):
    """What is read here: ``MegatronDataset``."""

    @property
    def part(self) -> Part: ...
    @property
    def order(self) -> Order: ...


class BatchReader:
    """Reads D datasets; see the module."""

    def __init__(self, datasets: Sequence[Readable]) -> None:
        self._datasets = datasets
        self._parts = [dataset.part for dataset in datasets]
        self._finders: tuple[object | None, ...] = (None,) * len(self._datasets)
        self._maps: tuple[object | None, ...] = self._finders
        self._unsearched: frozenset[int] = frozenset()  # datasets that numpy has to search
        self._unmapped: frozenset[int] = frozenset()  # and those that it has to read
        self._room = 64  # ranges; it grows with what batches need

    def read(self, source_B: I64, sample_B: I64, rows: TokenRows) -> None:
        """Fill row b with sample ``sample_B[b]`` of dataset ``source_B[b]``, and mark where documents begin.

        Raises:
            The source's own error, or BlendingError: its data is damaged, or ids do not fit the rows.
        """
        native = kernels()
        ranges = None if native is None else self._searched(native, source_B, sample_B, rows.tokens.shape[1])
        if ranges is None:
            ranges = self._by_numpy(source_B, sample_B)
            if native is not None:
                for source in np.unique(source_B).tolist():
                    self._open_map(native, source)
        gather(self._parts, () if native is None else self._maps, ranges, rows, self._unmapped)

    def _searched(self, native: Kernels, source_B: I64, sample_B: I64, sequence_length: int) -> I64 | None:
        """The ranges by the kernel; None if it cannot say."""
        given: set[tuple[int, int, bool]] = set()
        for _ in range(_ATTEMPTS):
            ranges = np.empty((self._room, len(FIELDS)), dtype=np.int64)
            found = native.find_samples(self._finders, sequence_length, source_B, sample_B, ranges)
            if isinstance(found, tuple):
                source, epoch = found
                what = (source, epoch, self._finders[source] is None)
                if what in given:  # a batch of more epochs than a finder keeps would turn them over for ever
                    return None
                given.add(what)
                if source in self._unsearched or not self._open(native, source, epoch):
                    return None
            elif found >= 0:
                return ranges[:found]
            elif found == _TOO_LITTLE_ROOM:
                self._room *= 2
            else:
                return None
        return None

    def _open(self, native: Kernels, source: int, epoch: int) -> bool:
        """Give the kernel a dataset or an epoch that it lacks; False if it cannot be given."""
        order = self._datasets[source].order
        finder = self._finders[source]
        if finder is not None:
            order.add_epoch(native, finder, epoch)
            return True
        try:
            finder = order.finder(native)
        except (TypeError, ValueError, BufferError):  # such as lengths of another type
            self._unsearched |= {source}
            return False
        self._open_map(native, source)
        self._finders = (*self._finders[:source], finder, *self._finders[source + 1 :])
        return True

    def _open_map(self, native: Kernels, source: int) -> None:
        if self._maps[source] is not None or source in self._unmapped:
            return
        map_ = open_map(native, self._parts[source])
        if map_ is None:
            self._unmapped |= {source}
        self._maps = (*self._maps[:source], map_, *self._maps[source + 1 :])

    def _by_numpy(self, source_B: I64, sample_B: I64) -> I64:
        """The ranges, dataset by dataset."""
        tables = [np.empty((0, len(FIELDS)), dtype=np.int64)]
        for source in np.unique(source_B).tolist():
            at_B = np.flatnonzero(source_B == source)
            tables.append(self._table(source, sample_B[at_B], at_B))
        return np.concatenate(tables)

    def _table(self, source: int, sample_B: I64, at_B: I64) -> I64:
        """``gather.FIELDS`` of the samples of one dataset, which go to rows ``at_B``."""
        order, part = self._datasets[source].order, self._parts[source]
        pieces = order.pieces(sample_B)
        length_P, ranges = order.ranges(pieces, 1)
        first_P = np.cumsum(length_P) - length_P
        inside_R = np.cumsum(ranges.length) - ranges.length - first_P[ranges.piece]
        first_token_R = part.first_token(ranges.sequence)
        columns = {
            "source": source,
            "sequence": ranges.sequence,
            "offset": ranges.offset,
            "begin": -1 if first_token_R is None else first_token_R + ranges.offset,
            "length": ranges.length,
            "shown": np.clip(pieces.length[ranges.piece] - inside_R, 0, ranges.length),
            "row": at_B[pieces.row[ranges.piece]],
            "column": pieces.column[ranges.piece] + inside_R,
            "labels": ranges.length - (inside_R == 0),
        }
        table = np.empty((ranges.piece.size, len(FIELDS)), dtype=np.int64)
        for field, name in enumerate(FIELDS):
            table[:, field] = columns[name]
        return table
