"""Which stretch of its line a dataset's n-th sample is.

    TokenLine + sequence lengths --> SampleOrder (this file): sample --> pieces of the line --> batches/reader.py

The line is cut into chunks of S tokens from an origin on: the grid. The chunks of an epoch are read
in windows of 65,536, each window in an order of its own. After a change of the sequence length, the
rest of the current window is read first, as one string. Then a new grid begins after it. So
nothing is read twice and nothing is lost.

[Note: left-over] The string is the chunks not yet read, in their permuted order. The last sample of the
string may need more tokens: they come from the line after the window. Each chunk of the string is a
piece. Labels inside a piece are the next tokens on the line, and masks restart with a piece.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64, Kernels
from sixfold.blending.numbers.permutation import permute
from sixfold.blending.samples.range_table import range_table
from sixfold.blending.samples.token_line import Ranges, TokenLine

WINDOW = 65_536


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of a line, arrays of one length: tokens ``begin .. begin + length`` go to
    columns ``column ...`` of row ``row``."""

    row: I64
    column: I64
    begin: I64
    length: I64


class ChunkGrid:
    """One sequence length on one line, from one of the dataset's samples on.

    Attributes:
        number: how many changes of the sequence length came before (part of the key).
        sequence_length: S.
        left_over: tokens of the string read before the grid begins; 0 in the first grid.
        left_over_samples: samples that the string makes.
        origin: where on the line chunk 0 begins.
    """

    def __init__(
        self,
        line: TokenLine,
        number: int,
        sequence_length: int,
        *,
        chunks: int | None = None,
        before: tuple["ChunkGrid", int] | None = None,
    ) -> None:
        """See ``after`` for ``before``; ``chunks`` is set for a line of one epoch, cut into so many."""
        self.line = line
        self.number = number
        self.sequence_length = sequence_length
        self._chunks = chunks
        self._before = before
        self.left_over, self._resume = before[0]._remains(before[1]) if before else (0, 0)
        self.left_over_samples = -(-self.left_over // sequence_length)
        self.origin = self._resume + self.left_over_samples * sequence_length - self.left_over

    def after(self, taken: int, sequence_length: int) -> "ChunkGrid":
        """The grid that follows when ``taken`` samples of this one were given."""
        return ChunkGrid(self.line, self.number + 1, sequence_length, before=(self, taken))

    def _window(self, index: int) -> tuple[int, int]:
        """(first, behind the last) chunk of the window that holds chunk ``index`` in reading order."""
        epoch = (self.origin + index * self.sequence_length) // self.line.tokens
        first, stop = self._epoch_chunks(epoch)
        begin = first + (index - first) // WINDOW * WINDOW
        return begin, min(begin + WINDOW, stop)

    def _epoch_chunks(self, epoch: int) -> tuple[int, int]:
        """(first, behind the last) chunk that begins in ``epoch``."""
        if self._chunks is not None:
            return 0, self._chunks
        begin = epoch * self.line.tokens - self.origin
        # The epoch in which the grid begins has lost its head to what came before it.
        return max(0, -(-begin // self.sequence_length)), -(-(begin + self.line.tokens) // self.sequence_length)

    def _remains(self, taken: int) -> tuple[int, int]:
        """(tokens not yet read of the string or window in hand, where the line goes on behind it)."""
        S = self.sequence_length
        if taken < self.left_over_samples:
            return self.left_over - taken * S, self._resume
        index = taken - self.left_over_samples
        begin, stop = self._window(index)
        if index == begin:  # a window not begun is no left-over
            return 0, self.origin + index * S
        return (stop - index) * S, self.origin + stop * S

    def _remaining_pieces(self, taken: int) -> tuple[I64, I64]:
        """(begin, length) on the line of what ``_remains`` counts, in reading order."""
        S = self.sequence_length
        if taken < self.left_over_samples:
            _, begin, length = self._stretches
            inside = np.cumsum(length) <= self.left_over  # all but the part behind the window
            begin, length = begin[inside], length[inside]
            cut = np.minimum(length, np.maximum(0, taken * S - (np.cumsum(length) - length)))
            return (begin + cut)[length > cut], (length - cut)[length > cut]
        index = taken - self.left_over_samples
        begin_chunk, stop = self._window(index)
        if index == begin_chunk:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        chunks = self._chunk(np.arange(index, stop))
        return self.origin + chunks * S, np.full(chunks.size, S, dtype=np.int64)

    @cached_property
    def string(self) -> I64:
        """(stretches, 2) of the left-over, filled up to whole samples: place in the string, begin on the line.

        At most 1 MiB; see [Note: left-over].
        """
        assert self._before is not None, "only a grid with a left-over asks for it"
        begin, length = self._before[0]._remaining_pieces(self._before[1])
        if self.origin > self._resume:
            begin, length = np.append(begin, self._resume), np.append(length, self.origin - self._resume)
        return np.stack([np.cumsum(length) - length, begin], axis=1)

    @property
    def _stretches(self) -> tuple[I64, I64, I64]:
        """(place in the string, begin on the line, length) of ``string``."""
        place, begin = self.string.T
        return place, begin, np.diff(place, append=self.left_over_samples * self.sequence_length)

    def _chunk(self, index_B: I64) -> I64:
        """The chunk of the line that is read ``index_B``-th on this grid."""
        epoch_B = (self.origin + index_B * self.sequence_length) // self.line.tokens
        chunk_B = np.empty_like(index_B)
        for epoch in np.unique(epoch_B).tolist() if self._chunks is None else [0]:
            first, stop = self._epoch_chunks(epoch)
            here = epoch_B == epoch if self._chunks is None else slice(None)
            window, inside = np.divmod(index_B[here] - first, WINDOW)
            size = np.minimum(WINDOW, stop - first - window * WINDOW)
            numbers, which = np.unique(window, return_inverse=True)
            keys = np.array([self.line.key(self.number, epoch, number) for number in numbers.tolist()], dtype=np.uint64)
            chunk_B[here] = first + window * WINDOW + permute(keys[which], size, inside)
        return chunk_B

    def pieces(self, sample_B: I64) -> Pieces:
        """The stretches of samples counted from this grid's beginning; rows count through ``sample_B``."""
        S = self.sequence_length
        plain = np.flatnonzero(sample_B >= self.left_over_samples)
        chunk = self._chunk(sample_B[plain] - self.left_over_samples)
        grid = Pieces(plain, np.zeros_like(plain), self.origin + chunk * S, np.full(plain.size, S, dtype=np.int64))
        if plain.size == sample_B.size:
            return grid
        rows = np.flatnonzero(sample_B < self.left_over_samples)
        starts, begin, length = self._stretches
        low = sample_B[rows] * S
        first = np.searchsorted(starts, low, side="right") - 1
        count = np.searchsorted(starts, low + S, side="left") - first
        which = np.repeat(np.arange(rows.size), count)
        piece = np.arange(which.size) - (np.cumsum(count) - count)[which] + first[which]
        cut = np.maximum(0, low[which] - starts[piece])
        column = np.maximum(0, starts[piece] - low[which])
        string = Pieces(rows[which], column, begin[piece] + cut, np.minimum(length[piece] - cut, S - column))
        return Pieces(*(np.concatenate(pair) for pair in zip(_fields(string), _fields(grid), strict=True)))


def _fields(pieces: Pieces) -> tuple[I64, I64, I64, I64]:
    return pieces.row, pieces.column, pieces.begin, pieces.length


class SampleOrder:
    """The samples of one dataset through all changes of the sequence length.

    Args:
        line: the dataset's tokens.
        lengths: (first sample, sequence length), ascending, the first at sample 0.
        chunks: for one epoch alone, the number of its samples; else None.
    """

    def __init__(self, line: TokenLine, lengths: tuple[tuple[int, int], ...], *, chunks: int | None = None) -> None:
        assert lengths and lengths[0][0] == 0, f"the first sequence length is that of sample 0, not {lengths[:1]}"
        self.line = line
        self.chunks = chunks
        self._begins = [begin for begin, _ in lengths]
        self._grids = [ChunkGrid(line, 0, lengths[0][1], chunks=chunks)]
        for (before, _), (begin, sequence_length) in pairwise(lengths):
            self._grids.append(self._grids[-1].after(begin - before, sequence_length))

    @property
    def only_length(self) -> int | None:
        """The sequence length of every sample; None if it changes."""
        return self._grids[0].sequence_length if len(self._grids) == 1 else None

    @property
    def document_shuffle(self) -> str:
        """How the line shuffles its documents."""
        return self.line.shuffle

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Nothing is stored."""
        return {}

    def sequence_lengths(self, samples: I64) -> I64:
        """Sequence length of each sample."""
        lengths = np.array([grid.sequence_length for grid in self._grids], dtype=np.int64)
        return lengths[np.searchsorted(self._begins, samples, side="right") - 1]

    def pieces(self, samples: I64) -> Pieces:
        """The stretches of ``samples``, all of one sequence length; rows count through ``samples``.

        Raises:
            BlendingError: a sample after the one epoch that the dataset was made for.
        """
        if self.chunks is not None and samples.size and int(samples.max()) >= self.chunks:
            raise BlendingError(
                f"sample {samples.max()} of {self.line.names[1]!r} is asked, which was made for one epoch of "
                f"{self.chunks} samples; make it with a number as num_samples, not None"
            )
        numbers = np.searchsorted(self._begins, samples, side="right") - 1
        parts = []
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            pieces = self._grids[number].pieces(samples[here] - self._begins[number])
            parts.append((here[pieces.row], pieces.column, pieces.begin, pieces.length))
        if len(parts) == 1:
            return Pieces(*parts[0])
        return Pieces(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def ranges(self, pieces: Pieces, more: int) -> tuple[I64, Ranges]:
        """(tokens read of each piece, their ranges); ``more`` tokens behind each piece where there are."""
        length_P = pieces.length + more
        if self.chunks is not None:  # the line ends with its epoch
            length_P = np.minimum(length_P, self.line.tokens - pieces.begin)
        return length_P, self.line.ranges(pieces.begin, length_P)

    def table(self, samples: I64) -> I64:
        """The range table of ``samples``, each with the token behind it; rows count through them, source is 0."""
        pieces = self.pieces(samples)
        read_P, ranges = self.ranges(pieces, 1)
        return range_table(self.line.part, pieces.row, pieces.column, pieces.length, read_P, ranges)

    def ranges_of(self, sample: int) -> Ranges:
        """The tokens of one sample."""
        return self.ranges(self.pieces(np.array([sample])), 0)[1]

    def finder(self, native: Kernels) -> object:
        """A handle of these grids and their line for ``Kernels.find_samples``.

        Raises:
            TypeError, ValueError or BufferError: arrays of another type than the kernel reads.
        """
        grids = [
            (begin, grid.number, grid.sequence_length, grid.origin, grid.left_over_samples)
            for begin, grid in zip(self._begins, self._grids, strict=True)
        ]
        return self.line.finder(native, WINDOW, self.chunks, np.array(grids, dtype=np.int64))

    def add(self, native: Kernels, finder: object, what: int) -> None:
        """Give ``finder`` what ``Kernels.find_samples`` missed: epoch ``what``, or of grid -2 - ``what`` the string."""
        if what >= 0:
            self.line.add_epoch(native, finder, what)
        else:
            native.add_string(finder, -2 - what, self._grids[-2 - what].string)
