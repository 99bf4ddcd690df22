"""The sequences of a source that one split takes, numbered from 0.

    DocumentSource --> Part (this file) --> samples/token_line.py, batches/gather.py

Nothing is copied. A part of a memory-mapped dataset reads its index where it lies. A part that is a
plain range opens in the same time whatever its size.
"""

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.documents.source import DocumentSource, pointers_of, several_sequences
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_numbers
from sixfold.blending.numbers.kernels import I64

_FINGERPRINT_STRIDE = 256
_RUNS, _RUN = 128, 1024  # pointers that a fingerprint reads
_SHORT_RUNS, _SHORT_RUN = 16, 64  # and those that a short one does
_IDS = 16  # ids of one place that both read


class Part:
    """The sequences of one source that one split takes, numbered from 0.

    Attributes:
        source: where the ids come from; of a view its pair.
        view: the view that was given, whose numbers of documents users have; None if it was none.
        indices: the numbers in the source, a range or (n,) int64.
        tokens: their tokens in all, T.
    """

    def __init__(self, source: DocumentSource, indices: "range | npt.ArrayLike") -> None:
        """Take ``indices`` of ``source``: numbers of sequences, or a mask with a bool for each.

        Raises:
            BlendingError: an index that the source does not have or that is no whole number, or pointers that run
                backwards.
        """
        self._see(source)
        held = len(self._lengths)
        self.indices: range | I64 = _as_range(indices, held, self.label)
        if len(self.indices):
            first, last = self._ends()
            if not 0 <= first <= last < held:
                raise BlendingError(f"{self.label}: sequences {first}..{last} are asked of the {held} it has")
        kept: I64 | None = getattr(source, "kept_sequences", None)
        self.view = None if kept is None else source
        if kept is not None:  # a view, whose sequences have gaps between them: some sequences of its pair
            self.indices = _as_range(kept[np.asarray(self.indices, dtype=np.int64)], held, self.label)
            self._see(getattr(source, "base"))  # noqa: B009 - of sources that have it
        if self._contiguous is not None:
            low, high = self._contiguous
            self.tokens: int = (self._pointer(high) - self._pointer(low)) // self._itemsize if high > low else 0
        else:
            members = np.asarray(self.indices, dtype=np.int64)
            self.tokens = int(np.asarray(self._lengths)[members].sum(dtype=np.int64))
        if self.tokens < 0:
            raise self.damage(self.indices[0], f"the part has {self.tokens} tokens by its pointers")

    def _see(self, source: DocumentSource) -> None:
        self.source = source
        self._lengths = source.sequence_lengths
        self._pointers: I64 | None = pointers_of(source)
        self._itemsize: int = np.dtype(source.dtype).itemsize

    def __getstate__(self) -> tuple[Any, ...]:
        """Without the index of the source, which knows it again wherever it is unpickled."""
        return self.source, self.view, self.indices, self.tokens, self.short_fingerprint

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Raises BlendingError if the source is not what it was: its data was replaced, and would be cut elsewhere."""
        source, self.view, self.indices, self.tokens, short_fingerprint = state
        self._see(source)
        last = self._ends()[1] if len(self.indices) else -1
        if last >= len(self._lengths) or self.short_fingerprint != short_fingerprint:
            raise BlendingError(
                f"{self.label}: the data was replaced since this dataset was pickled, and its samples would be others; "
                "build the datasets again, or give new data a new name"
            )

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def last(self) -> int:
        """The largest number in the source; -1 if the part is empty."""
        return self._ends()[1] if len(self.indices) else -1

    def shares_members(self, other: "Part") -> bool:
        """Whether a sequence of one source is in both."""
        if not len(self) or not len(other):
            return False
        (low, high), (begin, end) = self._ends(), other._ends()
        if isinstance(self.indices, range) and isinstance(other.indices, range):
            return low <= end and begin <= high
        if high < begin or end < low:
            return False
        return bool(np.isin(np.asarray(self.indices), np.asarray(other.indices)).any())

    def _ends(self) -> tuple[int, int]:
        if isinstance(self.indices, range):
            return self.indices[0], self.indices[-1]
        return int(self.indices.min()), int(self.indices.max())

    @property
    def label(self) -> str:
        """What to call the source in a message."""
        return str(getattr(self.source, "path_prefix", None) or type(self.source).__name__)

    @property
    def _contiguous(self) -> tuple[int, int] | None:
        """(first, behind the last) if the pointers of the source can stand for the lengths."""
        if self._pointers is None or not isinstance(self.indices, range):
            return None
        return self.indices.start, self.indices.stop

    def _pointer(self, idx: int) -> int:
        """Byte where sequence ``idx`` begins; one behind the last is the end of the data."""
        assert self._pointers is not None, "only sources with pointers come here"
        if idx < len(self._pointers):
            return int(self._pointers[idx])
        last = len(self._pointers) - 1
        return int(self._pointers[last]) + int(self._lengths[last]) * int(self._itemsize)

    def ids(self, members: I64) -> I64:
        """Numbers in the source of the part's ``members``."""
        return members + self.indices.start if isinstance(self.indices, range) else self.indices[members]

    def block_tokens(self, size: int) -> I64:
        """Tokens of every run of ``size`` members, the last run perhaps shorter.

        Cost: one pointer per run; the lengths are not read (they are when the run is).
        """
        members = len(self)
        if self._contiguous is not None and self._pointers is not None:
            low, high = self._contiguous
            edges = np.append(self._pointers[low:high:size], np.int64(self._pointer(high)))
            tokens: I64 = np.diff(edges) // self._itemsize
            if (tokens < 0).any():
                run = int(np.flatnonzero(tokens < 0)[0])
                raise self.damage(low + run * size, f"sequences {low + run * size}.. have {tokens[run]} tokens")
            return tokens
        lengths = np.asarray(self._lengths)[np.asarray(self.indices, dtype=np.int64)].astype(np.int64)
        return np.add.reduceat(lengths, np.arange(0, members, size))

    @property
    def has_pointers(self) -> bool:
        """Whether ``tokens_of_blocks`` reads two pointers per run, and not every length."""
        return self._contiguous is not None

    def tokens_of_blocks(self, size: int, number: I64) -> I64:
        """``block_tokens`` of the runs of these numbers alone. Cost: two pointers per run."""
        assert self._contiguous is not None and self._pointers is not None, "the caller asks has_pointers"
        low, high = self._contiguous
        begin = low + number * size
        end = np.minimum(begin + size, high)
        inner = np.minimum(end, len(self._pointers) - 1)
        bytes_end = np.asarray(self._pointers[inner], dtype=np.int64)
        bytes_end[end > inner] = self._pointer(high)  # behind the last sequence of the source
        tokens: I64 = (bytes_end - self._pointers[begin]) // self._itemsize
        if (tokens < 0).any():
            run = int(np.flatnonzero(tokens < 0)[0])
            raise self.damage(int(begin[run]), f"sequences {begin[run]}.. have {tokens[run]} tokens")
        return tokens

    def lengths(self, ids: I64) -> I64:
        """Lengths of sequences of the source, checked against their pointers.

        Raises:
            The source's own error (``IndexedDataError``), or BlendingError: they do not fit.
        """
        lengths = np.asarray(self._lengths[ids], dtype=np.int64)
        if self._pointers is not None:
            inner = np.minimum(ids + 1, len(self._pointers) - 1)
            begin, end = self._pointers[ids], self._pointers[inner]
            # The last sequence has no successor; its source checked it against the file when it was opened.
            wrong = np.flatnonzero((end - begin != lengths * self._itemsize) & (inner == ids + 1))
            if wrong.size:
                at = int(wrong[0])
                rule = f"pointers {begin[at]} and {end[at]} need {(end[at] - begin[at]) / self._itemsize} tokens"
                raise self.damage(int(ids[at]), f"sequence {ids[at]} has length {lengths[at]}; its {rule}")
        return lengths

    def every_length(self) -> I64:
        """``lengths`` of all members, in their order."""
        if self._contiguous is not None and self._pointers is not None:
            low, high = self._contiguous
            lengths = np.asarray(self._lengths[low:high], dtype=np.int64)
            steps = np.diff(self._pointers[low : high + 1])  # of the source's last sequence there is none
            if np.array_equal(steps, lengths[: steps.size] * self._itemsize):
                return lengths
        return self.lengths(self.ids(np.arange(len(self))))

    def damage(self, idx: int, problem: str) -> Exception:
        """The error to raise for a damaged index: the source's own if it finds the damage itself."""
        try:
            self.source.get(int(idx))
        except Exception as error:
            return error
        return BlendingError(
            f"{self.label}: {problem}; the index is damaged, build it again. If your source leaves gaps between "
            "sequences, as after a filter, give it no sequence_pointers: its lengths are then used"
        )

    def sequences_of(self, documents: Sequence[int]) -> I64:
        """Numbers in the source of the sequences of some documents; see [Note: numbers of a view].

        Raises:
            BlendingError: a document that the source does not have.
        """
        named = self.source if self.view is None else self.view
        numbers, boundaries = np.unique(np.asarray(documents, dtype=np.int64)), several_sequences(named)
        held = len(named.sequence_lengths) if boundaries is None else len(boundaries) - 1
        if numbers.size and int(numbers[-1]) >= held:
            label = getattr(named, "path_prefix", None) or self.label
            raise BlendingError(
                f"{label}: document {numbers[-1]} is dropped, and it has documents 0..{held - 1}; give numbers of "
                "documents, as why prints them"
            )
        if boundaries is not None:
            runs = [np.arange(boundaries[number], boundaries[number + 1]) for number in numbers.tolist()]
            numbers = np.concatenate([np.empty(0, dtype=np.int64), *runs])
        sequences: I64 = numbers if self.view is None else getattr(named, "kept_sequences")[numbers]  # noqa: B009
        return sequences

    def documents_of(self, sequences: I64) -> tuple[I64, I64 | None]:
        """(document of each sequence of the source, number of each sequence if documents have several).

        [Note: numbers of a view] Ids are read from the view's pair, by the pair's numbers. What a user gives and sees
        are the view's own, as ``IndexedDataset(view)`` and its provenance have them.
        """
        named, numbers = self.source, sequences
        if self.view is not None:
            named, kept = self.view, np.asarray(getattr(self.view, "kept_sequences"))  # noqa: B009
            numbers = np.searchsorted(kept, sequences)
            if not np.array_equal(kept[np.minimum(numbers, kept.size - 1)], sequences):  # one in another order
                order = np.argsort(kept, kind="stable")
                numbers = order[np.searchsorted(kept, sequences, sorter=order)]
        boundaries = several_sequences(named)
        if boundaries is None:
            return numbers, None
        return np.searchsorted(boundaries, numbers, side="right") - 1, numbers

    def first_token(self, ids: I64) -> I64 | None:
        """Place of each sequence's first token in the flat data; None without pointers."""
        return None if self._pointers is None else self._pointers[ids] // self._itemsize

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must find again: counts, type, and hashes of pointers, of the members, and of some ids.

        Up to 131,072 pointers are all hashed, of more 128 runs of 1,024 that are spread evenly. Pointers are running
        sums, so a length that changes moves every later one. Cost: 1 MiB read, 400 pages touched, whatever the size.
        An array of indices is read whole.
        """
        return self.fingerprint_of_lengths | {"ids": self._some_ids()}

    @cached_property
    def fingerprint_of_lengths(self) -> dict[str, Any]:
        """The same without the ids: what an index is built from."""
        return self.fingerprint_of_state_2 | {"members": self._members_fingerprint()}

    @cached_property
    def fingerprint_of_state_2(self) -> dict[str, Any]:
        """The same as states of version 2 have it: without the members and their ids."""
        return self._facts("sample", self._runs(_RUNS, _RUN))

    @cached_property
    def fingerprint_of_0_1(self) -> dict[str, Any]:
        """The same as release 0.1.0 made it: a hash of every 256th pointer. Cost: all pages of the pointers."""
        return self._facts("hash", [slice(0, len(self), _FINGERPRINT_STRIDE)])

    @cached_property
    def short_fingerprint(self) -> dict[str, Any]:
        """A fingerprint of a few pages, for what is looked at by every process: ranks of a build, workers."""
        facts = self._facts("sample", self._runs(_SHORT_RUNS, _SHORT_RUN))
        return facts | {"members": self._members_fingerprint(), "ids": self._some_ids()}

    def _runs(self, runs: int, length: int) -> list[slice]:
        """``runs`` stretches of ``length`` members, spread evenly; all members where they are no more."""
        if len(self) <= runs * length:
            return [slice(0, len(self))]
        begins = [number * (len(self) - length) // (runs - 1) for number in range(runs)]
        return [slice(begin, begin + length) for begin in begins]

    def _members_fingerprint(self) -> str:
        """Which sequences of the source they are."""
        if isinstance(self.indices, range):
            return f"{self.indices.start}..{self.indices.stop}" if len(self) else "none"
        return blake2b(np.ascontiguousarray(self.indices, dtype="<i8").tobytes(), digest_size=8).hexdigest()

    def _some_ids(self) -> str | None:
        """A hash of the first ids of a few members; None of a source without flat ids, whose reads may be dear."""
        tokens = getattr(self.source, "tokens", None)
        if tokens is None or self._pointers is None or not len(self):
            return None
        places = np.linspace(0, len(self) - 1, _SHORT_RUNS).astype(np.int64)
        begins = (np.asarray(self._pointers[self.ids(places)]) // self._itemsize).tolist()
        data = b"".join(np.ascontiguousarray(tokens[max(0, at) : max(0, at) + _IDS]).tobytes() for at in begins)
        return blake2b(data, digest_size=8).hexdigest()

    def _facts(self, name: str, some: Sequence[slice]) -> dict[str, Any]:
        """Counts, type, and under ``name`` a hash of ``some`` of the pointers, counted from the part's first."""
        if self._contiguous is not None and self._pointers is not None:
            low, high = self._contiguous
            held, base = self._pointers, self._pointers[low] if high > low else 0
            pieces = [held[low + run.start : low + run.stop : run.step] - base for run in some]
        else:
            lengths = np.asarray(self._lengths)[np.asarray(self.indices, dtype=np.int64)].astype(np.int64)
            pointers = (np.cumsum(lengths) - lengths) * self._itemsize
            pieces = [pointers[run] for run in some]
        data = b"".join(np.ascontiguousarray(piece, dtype="<i8").tobytes() for piece in pieces)
        return {
            "sequences": len(self),
            "tokens": self.tokens,
            "dtype": np.dtype(self.source.dtype).name,
            name: blake2b(data, digest_size=8).hexdigest(),
        }


def _as_range(indices: "range | npt.ArrayLike", held: int, label: str) -> range | I64:
    """``indices`` of ``held`` sequences as a range with step 1 if they are one."""
    if isinstance(indices, range) and (indices.step == 1 or len(indices) == 0):
        return range(indices.start, max(indices.start, indices.stop))
    array = np.asarray(indices)
    if array.dtype == np.bool_ and array.shape == (held,):
        array = np.flatnonzero(array)
    elif array.dtype == np.bool_ and array.size:
        raise BlendingError(
            f"{label}: a mask of shape {array.shape} is given for {held} sequences; a mask has one bool for each"
        )
    else:
        array = whole_numbers(f"{label}: indices", array if isinstance(indices, np.ndarray) else indices)
    if array.ndim != 1:
        raise BlendingError(f"{label}: indices are of shape {array.shape}; they are numbers of sequences in one row")
    array = np.array(array, dtype=np.int64)  # a copy: the caller may use its own again
    array.flags.writeable = False
    if array.size and (np.diff(array) == 1).all():
        return range(int(array[0]), int(array[-1]) + 1)
    return array if array.size else range(0)
