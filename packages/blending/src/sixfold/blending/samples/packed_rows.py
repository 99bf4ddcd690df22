"""Which documents stand in a dataset's n-th row, where documents are packed and not cut.

    Part --> Windows: documents of a window --> best_fit.py --> PackedRows (this file): row --> batches/reader.py

The part's documents are dealt to windows once and for all, by the keyed permutation of its document shuffle. A window
is packed by itself, alike in every epoch. An epoch has every window once, in an order of its own, and the rows of each
window in an order of their own. What is stored is the number of rows of each window. S is the sequence length.

[Note: pieces] A document of n <= S tokens is one piece. A longer one is cut at multiples of S into ceil(n / S) pieces.
A piece takes as many columns as it has tokens. The label of its last token is the token behind it in its document, so a
cut loses no prediction and nothing is read twice. The last token of a document has no label: what would follow is
another document. So a document of n tokens has n - 1 labels, however it is cut.

[Note: padding] What has no id behind it is read from a source of padding, as a range like others: source 1 here, where
source 0 is the part. So every column of a row and its label has a range, and nothing is filled beforehand.

[Note: fixed windows] If windows had other documents in each epoch, each epoch would need a pass over all lengths. In a
row every document is by itself, so which documents share a row means nothing to training.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.documents.part import Part
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64, Kernels
from sixfold.blending.numbers.permutation import order_key, permute, permute_range
from sixfold.blending.samples.best_fit import best_fit, rows_of
from sixfold.blending.samples.range_table import (
    BEGIN,
    COLUMN,
    FIELDS,
    LABELS,
    LENGTH,
    OFFSET,
    ROW,
    SEQUENCE,
    SHOWN,
    SOURCE,
)
from sixfold.blending.samples.token_line import Ranges, block_size, no_tokens, runs

WINDOW_AT_LEAST = 2**14  # documents
_WINDOWS_KEPT = 2
_EPOCHS_KEPT = 4
FORMAT = "best_fit-1"  # in keys and in the names of files


def window_size(sequence_length: int) -> int:
    """Documents that are packed together: 16,384, or twice the sequence length rounded up to a power of two."""
    return max(WINDOW_AT_LEAST, 1 << (2 * sequence_length - 1).bit_length())


@dataclass(frozen=True)
class Windows:
    """The documents of a part in windows.

    Attributes:
        names: seed, name and part, as in the keys of a line.
        shuffle: "global": any documents meet; "block": runs of up to 256 neighbours stay together.
    """

    part: Part
    names: tuple[int, str, str]
    sequence_length: int
    shuffle: str

    def __post_init__(self) -> None:
        if self.part.tokens == 0:
            raise no_tokens(self.part, self.names[1], self.names[2])

    def key(self, *parts: str | int) -> int:
        """The key of (seed, name, part) and what follows."""
        return order_key(*self.names, FORMAT, *parts)

    @property
    def block(self) -> int:
        """Documents that stay together."""
        return 1 if self.shuffle == "global" else block_size(len(self.part))

    def __len__(self) -> int:
        blocks = -(-len(self.part) // self.block)
        return -(-blocks // self._blocks)

    @property
    def _blocks(self) -> int:
        return max(1, window_size(self.sequence_length) // self.block)

    def documents(self, window: int) -> I64:
        """Numbers in the source of the documents of a window, ascending in the part."""
        blocks, first = -(-len(self.part) // self.block), window * self._blocks
        some = np.empty(min(self._blocks, blocks - first), dtype=np.int64)
        permute_range(self.key(), blocks, first, some)
        some.sort()
        members = (some[:, None] * self.block + np.arange(self.block)).reshape(-1)
        return self.part.ids(members[: np.searchsorted(members, len(self.part))])

    def rows(self, windows: Iterable[int]) -> I64:
        """How many rows each of some windows fills."""
        S, counts = self.sequence_length, []
        for window in windows:
            length_D = self.part.lengths(self.documents(window))
            tail_D = length_D % S
            counts.append(int((length_D // S).sum()) + rows_of(tail_D[tail_D > 0], S))
        return np.array(counts, dtype=np.int64)

    def packed(self, window: int) -> "Packed":
        """A window's pieces in rows.

        Raises:
            The source's own error, or BlendingError: lengths that do not fit their pointers.
        """
        S = self.sequence_length
        sequence_D = self.documents(window)
        length_D = self.part.lengths(sequence_D)
        # Nearly every document is one piece; the L longer ones are cut apart.
        pieces_D, long_L = (length_D > 0).astype(np.int64), np.flatnonzero(length_D > S)
        pieces_D[long_L] = -(-length_D[long_L] // S)
        document_I = np.repeat(np.arange(length_D.size), pieces_D)
        place_I, there_I = np.zeros(document_I.size, dtype=np.int64), length_D[document_I]
        first_L = np.cumsum(pieces_D)[long_L] - pieces_D[long_L]
        which, at = runs(first_L, pieces_D[long_L])
        place_I[at] = at - first_L[which]
        there_I[at] -= place_I[at] * S
        item_I, row_I = best_fit(np.minimum(there_I, S), S)
        rows = int(row_I[-1]) + 1 if row_I.size else 0
        edge_R = np.concatenate([[0], np.cumsum(np.bincount(row_I, minlength=rows))])
        return Packed(self.part, S, sequence_D, document_I, place_I, there_I, item_I, edge_R)


@dataclass(frozen=True, slots=True)
class Packed:
    """The pieces of a window, I of them of D documents in R rows.

    Attributes:
        sequence_D: number of each document in the source.
        document_I, place_I, there_I: of each piece its document, its place among the document's pieces, and the tokens
            from its first one to the end of the document.
        item_I, edge_R: pieces row by row, and where each row begins there; behind the last row, I.
    """

    part: Part
    sequence_length: int
    sequence_D: I64
    document_I: I64
    place_I: I64
    there_I: I64
    item_I: I64
    edge_R: I64

    def table(self, row_R: I64) -> tuple[I64, I64]:
        """The range table of some rows, one after the other, and how many ranges each has."""
        S = self.sequence_length
        number_I, at_I = runs(self.edge_R[row_R], self.edge_R[row_R + 1] - self.edge_R[row_R])
        item_I = self.item_I[at_I]
        offset_I, there_I = self.place_I[item_I] * S, self.there_I[item_I]
        sequence_I, shown_I = self.sequence_D[self.document_I[item_I]], np.minimum(there_I, S)
        end_I, is_last_I = np.cumsum(shown_I), np.append(number_I[1:] != number_I[:-1], True)
        before_R = np.append(0, end_I[is_last_I])  # tokens of the rows before
        column_I = end_I - shown_I - before_R[number_I]
        first_token_I = self.part.first_token(sequence_I)

        table = np.zeros((2 * item_I.size, len(FIELDS)), dtype=np.int64)
        text, none = table[::2], table[1::2]
        text[:, SEQUENCE], text[:, OFFSET], text[:, COLUMN] = sequence_I, offset_I, column_I
        text[:, BEGIN] = -1 if first_token_I is None else first_token_I + offset_I
        text[:, LENGTH] = shown_I + (there_I > S)
        text[:, SHOWN] = shown_I
        text[:, LABELS] = text[:, LENGTH] - 1
        text[:, ROW] = none[:, ROW] = number_I
        # What has no id behind it, [Note: padding]: the label of a document's last token, and the rest of the row.
        none[:, SOURCE] = 1
        none[:, COLUMN] = column_I + shown_I
        none[:, SHOWN] = np.where(is_last_I, S - none[:, COLUMN], 0)
        none[:, LENGTH] = none[:, LABELS] = none[:, SHOWN] + 1
        cut_I = there_I > S
        table = np.delete(table, 2 * np.flatnonzero(cut_I) + 1, axis=0)
        return table, np.bincount(table[:, ROW], minlength=row_R.size)


class _Window:
    """One window of one epoch.

    [Note: ranges of all rows] A cold read wants few rows, and the ranges of all take as long as packing them. So the
    first read of a window makes the ranges of its own rows alone, and the second one those of all.

    Attributes:
        first: the dataset's sample that its first row is.
        rows: that it fills.
    """

    def __init__(self, first: int, packed: Packed, key: int) -> None:
        self.first, self.rows = first, packed.edge_R.size - 1
        self._packed, self._key = packed, key
        self._reads = 0
        self._whole: tuple[I64, I64, I64] | None = None  # table, and first range and ranges of each row

    def table(self, inside: I64) -> tuple[I64, I64]:
        """The range table of rows of this window in reading order, and how many ranges each has."""
        whole, self._reads = self._whole, self._reads + 1
        if whole is None and self._reads == 1:
            return self._packed.table(permute(self._key, self.rows, inside))
        if whole is None:
            order = np.empty(self.rows, dtype=np.int64)
            permute_range(self._key, self.rows, 0, order)
            table, count = self._packed.table(order)
            whole = self._whole = table, np.cumsum(count) - count, count
        table, begin_R, count_R = whole
        count = count_R[inside]
        _, piece = runs(begin_R[inside], count)
        return table.take(piece, axis=0), count


class PackedRows:
    """The rows of one dataset through all epochs; see the module.

    Attributes:
        rows: of an epoch, R.
    """

    def __init__(self, windows: Windows, rows_W: I64, *, one_epoch: bool = False) -> None:
        """Rows of ``windows``, of which each fills ``rows_W``; an endless stream of epochs, or one."""
        assert rows_W.shape == (len(windows),), f"rows of {rows_W.shape} for {len(windows)} windows"
        self.windows = windows
        self.rows = int(rows_W.sum())
        self._rows_W = rows_W
        self._one_epoch = one_epoch
        self._epochs: OrderedDict[int, tuple[I64, I64]] = OrderedDict()
        self._kept: OrderedDict[tuple[int, int], _Window] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_epochs": OrderedDict(), "_kept": OrderedDict()}

    @property
    def only_length(self) -> int:
        """Columns of every row."""
        return self.windows.sequence_length

    @property
    def document_shuffle(self) -> str:
        """How the documents are dealt to windows."""
        return self.windows.shuffle

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """No indices."""
        return {}

    def sequence_lengths(self, samples: I64) -> I64:
        """Columns of each row."""
        return np.full(samples.size, self.only_length, dtype=np.int64)

    def _epoch(self, epoch: int) -> tuple[I64, I64]:
        """The window in each place of an epoch (W,), and the rows before each place and behind the last (W + 1,)."""
        known = self._epochs.get(epoch)
        if known is None:
            window_W, before = np.empty(self._rows_W.size, dtype=np.int64), np.zeros(self._rows_W.size + 1, np.int64)
            permute_range(self.windows.key(epoch), window_W.size, 0, window_W)
            np.cumsum(self._rows_W[window_W], out=before[1:])
            known = self._epochs[epoch] = window_W, before
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return known

    def _window_of(self, sample: int) -> _Window:
        """The window that holds a sample, packed."""
        epoch, row = divmod(sample, self.rows)
        window_W, before = self._epoch(epoch)
        place = int(np.searchsorted(before, row, side="right")) - 1
        key = epoch, place
        known = self._kept.get(key)
        if known is not None:
            return known
        window = int(window_W[place])
        packed = self.windows.packed(window)
        rows = packed.edge_R.size - 1
        if rows != self._rows_W[window]:
            raise BlendingError(
                f"{self.windows.part.label}: window {window} fills {rows} rows of {self.only_length} tokens and was "
                f"counted with {self._rows_W[window]}; the data changed since: build the datasets again"
            )
        found = _Window(epoch * self.rows + int(before[place]), packed, self.windows.key(epoch, window))
        kept = OrderedDict([*self._kept.items(), (key, found)][-_WINDOWS_KEPT:])
        self._kept = kept  # a new one: two threads that pack at once lose a window at worst
        return found

    def table(self, samples: I64) -> I64:
        """The range table of ``samples``; rows count through them, source is 0 or padding.

        Raises:
            IndexError or BlendingError: a sample behind the one epoch, or damaged data.
        """
        if self._one_epoch and samples.size and int(samples.max()) >= self.rows:
            raise BlendingError(
                f"sample {samples.max()} of {self.windows.names[1]!r} is asked, which was made for one epoch of "
                f"{self.rows} samples; make it with a number as num_samples, not None"
            )
        left, parts = np.arange(samples.size), [np.empty((0, len(FIELDS)), dtype=np.int64)]
        while left.size:
            window = self._window_of(int(samples[left[0]]))
            inside = samples[left] - window.first
            here = (inside >= 0) & (inside < window.rows)
            whole = bool(here.all())  # nearly always
            row, inside = (left, inside) if whole else (left[here], inside[here])
            some, count = window.table(inside)
            some[:, ROW] = np.repeat(row, count)
            if whole and len(parts) == 1:
                return some
            parts.append(some)
            left = left[~here]
        return np.concatenate(parts)

    def ranges_of(self, sample: int) -> Ranges:
        """The tokens of one sample."""
        table = self.table(np.array([sample]))
        table = table[table[:, SOURCE] == 0]
        zero = np.zeros(len(table), dtype=np.int64)
        return Ranges(zero, zero + sample // self.rows, table[:, SEQUENCE], table[:, OFFSET], table[:, SHOWN])

    def finder(self, native: Kernels) -> object:
        """Rows are found here, for the kernels too. Raises TypeError, as data that they do not read."""
        raise TypeError("packed rows have no finder")

    def add(self, native: Kernels, finder: object, what: int) -> None:
        """There is no finder."""
        raise AssertionError(f"epoch {what} is asked of packed rows")
