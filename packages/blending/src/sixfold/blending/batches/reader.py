"""Samples of several datasets into one set of rows: searched together, read together.

    (dataset, sample) --> BatchReader (this file): ranges --> gather.py --> TokenRows

The compiled kernels find the ranges of all datasets of a batch in one call (``native/search.c``). Without kernels, for
a source without pointers, or after damage, ``samples/chunk_grid.py`` and ``samples/token_line.py`` find them or raise.
Handles keep maps and indices open. They are made when a dataset is first read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sixfold.blending.batches.gather import announce, counted_labels, fetches, gather, open_map
from sixfold.blending.batches.gpt_arrays import TokenRows
from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import ListSource
from sixfold.blending.numbers.kernels import I64, Kernels, kernels
from sixfold.blending.samples.range_table import COLUMN, FIELDS, ROW, SEQUENCE, SHOWN, SOURCE

_TOO_LITTLE_ROOM = -1  # of search.c; any other negative number leaves the batch to numpy
_ATTEMPTS = 10_000  # each adds an epoch, a string or a dataset, or doubles the room


class Order(Protocol):
    """Which ranges a sample is; see ``orders/interface.py:Samples``."""

    def table(self, samples: I64, /) -> I64: ...
    def finder(self, native: Kernels) -> object: ...
    def add(self, native: Kernels, finder: object, what: int) -> None: ...


class OrderedPart(Protocol):
    """What is read here: ``MegatronDataset``."""

    @property
    def part(self) -> Part: ...
    @property
    def order(self) -> Order: ...


@dataclass(frozen=True)
class Drop:
    """Sequences of one dataset that are not read from one of its samples on."""

    source: int
    first: int
    sequences: I64


@dataclass(frozen=True)
class _Handles:
    """What the kernels have open of D datasets; a value, so that threads that open at once lose at worst an opening."""

    finders: tuple[object | None, ...]
    maps: tuple[object | None, ...]  # None: not yet; False: its source has none
    unsearched: frozenset[int] = frozenset()  # datasets that numpy has to search
    unmapped: frozenset[int] = frozenset()  # and those that it has to read


class BatchReader:
    """Reads D datasets; see the module."""

    def __init__(self, datasets: Sequence[OrderedPart], *, pads: bool = False, drops: Sequence[Drop] = ()) -> None:
        """Read ``datasets`` without ``drops``; ``pads``: their tables have ranges of padding, as of one part more."""
        self._datasets = datasets
        self._drops = drops
        self._pads = pads
        self._parts = [dataset.part for dataset in datasets]
        none: tuple[object | None, ...] = (None,) * (len(datasets) + pads)
        self._handles = _Handles(none, none)
        self._masked: list[int] | None = None  # the parts whose source has a loss mask, once that was asked
        self._room = 64  # ranges; it grows with what batches need

    def read(self, source_B: I64, sample_B: I64, rows: TokenRows) -> TokenRows:
        """Fill row b with sample ``sample_B[b]`` of dataset ``source_B[b]``, and mark where documents begin.

        Returns:
            the rows, and which labels count.
        Raises:
            The source's own error, or BlendingError: its data is damaged, or ids do not fit the rows.
        """
        native = kernels()
        ranges: I64 | None = None
        if self._pads and len(self._parts) == len(self._datasets):
            padding = ListSource([[rows.pad] * (rows.tokens.shape[1] + 1)])  # packed rows have one length
            self._parts = [*self._parts, Part(padding, range(1))]
        if native is None:
            return self._gather((), self._by_numpy(source_B, sample_B), sample_B, rows)
        handles = self._handles
        if not self._pads:  # there is no kernel for packed rows
            ranges, handles = self._searched(native, handles, source_B, sample_B, rows.tokens.shape[1])
        if ranges is None:
            ranges = self._by_numpy(source_B, sample_B)
            for source in [*_sources(source_B), *range(len(self._datasets), len(self._parts))]:
                handles = self._with_map(native, handles, source)
        self._handles = handles
        return self._gather(handles.maps, ranges, sample_B, rows, handles.unmapped)

    @property
    def looks_ahead(self) -> bool:
        """Whether some dataset's ids come from afar; see ``look_ahead``."""
        return any(fetches(dataset.part) for dataset in self._datasets)

    def look_ahead(self, source_B: I64, sample_B: I64) -> None:
        """Have sources whose ids come from afar begin to fetch what ``read`` of these samples takes."""
        far = [source for source in _sources(source_B) if fetches(self._datasets[source].part)]
        if not far:
            return
        mine_B = np.isin(source_B, far)
        ranges = self._by_numpy(source_B[mine_B], sample_B[mine_B])
        for source in far:
            announce(self._parts[source], ranges[ranges[:, SOURCE] == source])

    def _gather(
        self,
        maps: tuple[object | None, ...],
        ranges: I64,
        sample_B: I64,
        rows: TokenRows,
        unmapped: frozenset[int] = frozenset(),
    ) -> TokenRows:
        """Read what is not dropped. What is has no id, and is no part of the document before it."""
        if not self._drops:
            gather(self._parts, maps, ranges, rows, unmapped)
            return self._counted(ranges, rows)
        dropped = np.zeros(len(ranges), dtype=np.bool_)
        for drop in self._drops:
            mine = (ranges[:, SOURCE] == drop.source) & (sample_B[ranges[:, ROW]] >= drop.first)
            dropped |= mine & np.isin(ranges[:, SEQUENCE], drop.sequences)
        kept = np.ascontiguousarray(ranges[~dropped])
        gather(self._parts, maps, kept, rows, unmapped)
        holes = ranges[dropped & (ranges[:, SHOWN] > 0)]
        rows.begins[holes[:, ROW], holes[:, COLUMN]] = True
        return self._counted(kept, rows)

    def _counted(self, ranges: I64, rows: TokenRows) -> TokenRows:
        """The rows, and which labels count where a source has a mask."""
        if self._masked is None:
            self._masked = [n for n, part in enumerate(self._parts) if getattr(part.source, "mask", None) is not None]
        if not self._masked:
            return rows
        return replace(rows, counted=counted_labels(self._parts, self._masked, ranges, rows.labels.shape))

    def _searched(
        self, native: Kernels, handles: _Handles, source_B: I64, sample_B: I64, sequence_length: int
    ) -> tuple[I64 | None, _Handles]:
        """The ranges by the kernel, None if it cannot say; and what is open now."""
        given: set[tuple[int, int, bool]] = set()
        for _ in range(_ATTEMPTS):
            ranges = np.empty((self._room, len(FIELDS)), dtype=np.int64)
            found = native.find_samples(handles.finders, sequence_length, source_B, sample_B, ranges)
            if isinstance(found, tuple):
                source, what = found
                finder = handles.finders[source]
                missing = (source, what, finder is None)
                if missing in given or source in handles.unsearched:
                    break  # a batch of more epochs than a finder keeps would turn them over for ever
                given.add(missing)
                if finder is None:
                    handles = self._with_finder(native, handles, source)
                else:
                    self._datasets[source].order.add(native, finder, what)
            elif found >= 0:
                return ranges[:found], handles
            elif found == _TOO_LITTLE_ROOM:
                self._room *= 2
            else:
                break
        return None, handles

    def _with_finder(self, native: Kernels, handles: _Handles, source: int) -> _Handles:
        """With a dataset's finder and map, or the dataset among the unsearched."""
        try:
            finder = self._datasets[source].order.finder(native)
        except (TypeError, ValueError, BufferError):  # such as lengths of another type
            return replace(handles, unsearched=handles.unsearched | {source})
        finders = (*handles.finders[:source], finder, *handles.finders[source + 1 :])
        return self._with_map(native, replace(handles, finders=finders), source)

    def _with_map(self, native: Kernels, handles: _Handles, source: int) -> _Handles:
        """With a dataset's map, if it is not there."""
        if handles.maps[source] is not None:
            return handles
        map_ = open_map(native, self._parts[source])
        unmapped = handles.unmapped if map_ is not None else handles.unmapped | {source}
        maps = (*handles.maps[:source], False if map_ is None else map_, *handles.maps[source + 1 :])
        return replace(handles, maps=maps, unmapped=unmapped)

    def _by_numpy(self, source_B: I64, sample_B: I64) -> I64:
        """The ranges, dataset by dataset."""
        tables = [np.empty((0, len(FIELDS)), dtype=np.int64)]
        sources = _sources(source_B)
        for source in sources:
            at_B = np.arange(source_B.size) if len(sources) == 1 else np.flatnonzero(source_B == source)
            table = self._datasets[source].order.table(sample_B[at_B])
            if self._pads:
                table[:, SOURCE] *= len(self._datasets) - source
            table[:, SOURCE] += source
            if len(sources) == 1:
                return table
            table[:, ROW] = at_B[table[:, ROW]]
            tables.append(table)
        return np.concatenate(tables)


def _sources(source_B: I64) -> list[int]:
    """The datasets of a batch, ascending."""
    found: list[int] = np.flatnonzero(np.bincount(source_B)).tolist()
    return found
