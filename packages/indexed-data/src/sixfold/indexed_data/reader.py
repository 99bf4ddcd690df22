"""Reading a pair: sequences by number, as views of the file.

    index.py, pair_rules.py, storage.py --> IndexedDataset (this file) --> the user, merging.py, verifying.py

Opening is O(1) in time and memory, whatever the number of sequences; so is every read.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.companions import MASK, SOURCES, digest_of, map_if_there
from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.index import DAMAGED, Index
from sixfold.indexed_data.loss_mask import LossMask
from sixfold.indexed_data.manifest import beside_problems, recorded_beside
from sixfold.indexed_data.pair_rules import all_problems, open_problems
from sixfold.indexed_data.paths import AnyPath, anchored, input_prefix, is_url, path_text
from sixfold.indexed_data.provenance import Provenance
from sixfold.indexed_data.remote import RemoteOptions, RemoteStore
from sixfold.indexed_data.storage import (
    Bytes,
    FileBytes,
    IdSource,
    MappedIds,
    ObjectBytes,
    RangedIds,
    Readable,
    file_identity,
    map_file,
    missing,
)
from sixfold.indexed_data.view import VIEW, View, ViewIndex


class IndexedDataset:
    """The sequences of ``PREFIX.bin`` and ``PREFIX.idx``: ``dataset[i]`` is a read-only array of token ids.

    Or those of a view, ``PREFIX.view``, which ``filter_pair`` writes: some documents of a pair.

    Picklable (by path) and safe in forked and spawned workers. Arrays outlive the dataset they came from.

    Args:
        path_prefix: the pair's path without extension; or its URL, s3://, gs://, http(s):// or another of fsspec.
        multimodal: the pair was written with modes; every read then gives ``(ids, mode)``.
        mmap: map ``.bin``. False reads each request by position instead, without a map.
        open_bytes: for object stores, with ``mmap=False``: ``open_bytes(path)`` returns an object with
            ``size() -> int`` and ``read(offset, nbytes) -> bytes``. The .idx is then read whole, once.
        remote: how a URL is read: requests, cache, time-outs.
    Raises:
        IndexedDataError: a file is missing or cut, or breaks a rule that O(1) work can see.
    """

    def __init__(
        self,
        path_prefix: AnyPath,
        multimodal: bool = False,
        mmap: bool = True,
        *,
        open_bytes: Callable[[str], Readable] | None = None,
        remote: RemoteOptions | None = None,
    ) -> None:
        prefix = path_text("path_prefix", path_prefix)
        if open_bytes is None and is_url(prefix):
            open_bytes, mmap = RemoteStore(remote), False
        elif remote is not None:
            raise IndexedDataError(f"{prefix}: remote is given; it goes with a URL, such as s3://bucket/wiki")
        elif open_bytes is None:
            prefix = input_prefix(path_prefix)
        self._open(prefix, multimodal, mmap, open_bytes)

    def _open(self, prefix: str, multimodal: bool, mmap: bool, open_bytes: Callable[[str], Readable] | None) -> None:
        if mmap and open_bytes is not None:
            raise IndexedDataError(f"{prefix}: open_bytes reads without a map; it goes with mmap=False")
        self._arguments = (prefix, multimodal, mmap, open_bytes)
        # Where it is, whatever the current folder of a process is that unpickles it.
        self._whole_prefix = prefix if open_bytes is not None else anchored(prefix)
        source: FileBytes | ObjectBytes | None = None
        data = np.empty(0, np.uint8)
        view = None  # whose own prefix stays that of this object
        if open_bytes is None and os.path.exists(prefix + VIEW) and not os.path.lexists(prefix + ".idx"):
            view = View(prefix)
            prefix = view.pair
        self._pair_prefix = prefix if open_bytes is not None else anchored(prefix)
        self._idx_identity: tuple[int, ...] | None = None  # of a local pair
        if open_bytes is not None:
            try:
                raw = ObjectBytes(prefix + ".idx", open_bytes).read_all()
                source = ObjectBytes(prefix + ".bin", open_bytes)
            except FileNotFoundError as error:
                raise missing(prefix, error) from error
        else:
            before = self._idx_identity = file_identity(prefix + ".idx")
            raw = map_file(prefix + ".idx")
            if mmap:
                data = map_file(prefix + ".bin")
            else:
                source = FileBytes(prefix + ".bin")
            # A writer removes the old .idx before it touches .bin: the same .idx after opening .bin means one pair.
            if file_identity(prefix + ".idx") != before:
                raise IndexedDataError(f"{prefix}: the pair was replaced while it was being opened; open it again")
        index = Index(raw, prefix, data.size if source is None else source.size, multimodal)
        for problem in open_problems(index):
            raise IndexedDataError.broken(problem, DAMAGED)
        self._dtype = dtype = index.header.dtype
        ids: IdSource = MappedIds(data, dtype) if source is None else RangedIds(source, dtype)
        if view is not None:
            index = view.index_over(index, ids)
        self._index: Index | None = index
        self._document_indices = index.boundaries_D
        self._source: IdSource | None = ids

    # reading

    def __len__(self) -> int:
        """Number of sequences."""
        return self._opened()[0].sequences

    def __getitem__(self, idx: int | slice) -> Any:
        """Sequence ``idx``, negative from the end; or the list of sequences of a slice with step 1.

        With ``multimodal`` they are ``(ids, mode)`` and ``(list of ids, modes)``.

        Raises:
            IndexError: no such sequence.
            ValueError: the slice has a step.
            IndexedDataError: the index is damaged there.
        """
        if isinstance(idx, slice):
            return self._slice(idx)
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """``length`` tokens (default: the rest) of sequence ``idx`` from token ``offset``.

        Raises:
            IndexError: no such sequence.
            IndexedDataError: the part does not lie in the sequence, or the index is damaged there.
        """
        index, source = self._opened()
        if idx.__class__ is bool:
            raise TypeError(f"{self.path_prefix}: {idx!r} is not the number of a sequence")
        i = operator.index(idx)
        if i < 0:
            i += index.sequences
        if not 0 <= i < index.sequences:
            raise IndexError(
                f"{self.path_prefix}: there is no sequence {idx}: the pair has {index.sequences}, numbered from 0"
            )
        start, count = index.span(i)
        # As Python's integers: in numpy's narrow ones ``start + offset`` wraps.
        first = operator.index(offset)
        wanted = count - first if length is None else operator.index(length)
        if first < 0 or wanted < 0 or first + wanted > count:
            rest = "" if length is None else f" with length {wanted}"
            raise IndexedDataError(
                f"{self.path_prefix}: offset {first}{rest} lies outside of sequence {i}, which has {count} tokens"
            )
        ids = source.ids(start + first, wanted)
        return ids if index.modes_S is None else (ids, index.modes_S[i])

    def _slice(self, piece: slice) -> Any:
        index, source = self._opened()
        first, stop, step = piece.indices(index.sequences)
        if step != 1:
            raise ValueError(
                f"{self.path_prefix}: the step of a slice is {step}, and only 1 is read; take sequences one by one"
            )
        spans = [index.span(i) for i in range(first, stop)]
        sequences: list[npt.NDArray[Any]] = []
        if isinstance(index, ViewIndex):
            sequences = [source.ids(start, count) for start, count in spans]
        elif spans:
            begin = spans[0][0]
            whole = source.ids(begin, spans[-1][0] + spans[-1][1] - begin)
            sequences = [whole[start - begin : start - begin + count] for start, count in spans]
        return sequences if index.modes_S is None else (sequences, index.modes_S[first : max(first, stop)])

    # the index

    @property
    def path_prefix(self) -> str:
        """The pair's path without extension."""
        return self._arguments[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """dtype of the ids."""
        return self._dtype

    @property
    def tokens(self) -> npt.NDArray[Any] | None:
        """The whole .bin, flat, read-only and not copied; None without mmap."""
        source = self._opened()[1]
        return source.all if isinstance(source, MappedIds) else None

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """(S,) tokens of each sequence."""
        return self._opened()[0].lengths_S

    @property
    def sequence_pointers(self) -> npt.NDArray[np.int64]:
        """(S,) first byte of each sequence in .bin; a view has none, since its sequences do not follow each other."""
        index = self._opened()[0]
        if isinstance(index, ViewIndex):
            raise AttributeError(f"{self.path_prefix} is a view, whose sequences have gaps between them; take its base")
        return index.pointers_S

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """(documents + 1,): document d holds the sequences ``[d]`` to ``[d + 1]``."""
        self._opened()
        return self._document_indices

    @property
    def sequence_modes(self) -> npt.NDArray[np.int8]:
        """(S,) mode of each sequence; IndexedDataError unless opened with ``multimodal=True``."""
        modes_S = self._opened()[0].modes_S
        if modes_S is None:
            raise IndexedDataError(f"{self.path_prefix} was opened without modes; pass multimodal=True")
        return modes_S

    @property
    def trailing_bytes(self) -> int:
        """Bytes of .idx after its last array. Exactly S of them are probably modes: open with ``multimodal=True``."""
        return self._opened()[0].trailing_bytes

    # of a view

    @property
    def kept_sequences(self) -> npt.NDArray[np.int64] | None:
        """(S,) numbers that the sequences of a view have in its pair; None for a pair."""
        index = self._opened()[0]
        return index.kept_sequences if isinstance(index, ViewIndex) else None

    @cached_property
    def base(self) -> IndexedDataset:
        """The pair of a view, or the dataset itself."""
        if self.kept_sequences is None:
            return self
        pair = IndexedDataset(self._pair_prefix, *self._arguments[1:3])
        if pair._idx_identity != self._idx_identity:
            raise self._replaced()
        return pair

    # what lies beside the pair

    @cached_property
    def mask(self) -> LossMask | None:
        """Which tokens count in the loss; None if the pair has no mask, so that all do.

        Raises:
            IndexedDataError: the .mask is damaged, belongs to another pair, or is not there and the manifest names it;
                or the pair was replaced since it was opened.
        """
        index, ids = self._opened()
        self._refuse_replaced()
        found = LossMask.open(self._pair_prefix, _base(index), ids, self._load)
        self._check_beside(MASK, None if found is None else found.file.checksum)
        return found

    @cached_property
    def provenance(self) -> Provenance | None:
        """The file and line of each document; None if the pair was built without.

        Raises:
            IndexedDataError: as of ``mask``, for the .sources.
        """
        index, ids = self._opened()
        self._refuse_replaced()
        kept = index.kept_documents if isinstance(index, ViewIndex) else None
        found = Provenance.open(self._pair_prefix, _base(index), ids, kept, self._load)
        self._check_beside(SOURCES, None if found is None else found.file.checksum)
        return found

    def loss_mask(self, idx: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.bool_]:
        """Whether each token that ``get`` gives for the same arguments counts in the loss; all do without a mask."""
        ids = self.get(idx, offset, length)
        count = len(ids[0] if self._opened()[0].modes_S is not None else ids)
        if self.mask is None:
            return np.ones(count, np.bool_)
        index = self._opened()[0]
        begin = index.span(operator.index(idx) % index.sequences)[0] + operator.index(offset)
        return self.mask.of(begin, count)

    def _check_beside(self, ending: str, checksum: int | None) -> None:
        """The companion that was opened is that of this pair, and the one that its manifest names."""
        beside = recorded_beside(self._pair_prefix, self._load)
        self._refuse_replaced()  # a writer removes the old .idx before it touches what lies beside it
        for problem in beside_problems(self._pair_prefix, ending, beside, checksum):
            raise IndexedDataError.broken(problem, "Copy it from where the pair was built, or build the pair again")

    def _refuse_replaced(self) -> None:
        if self._idx_identity is not None and file_identity(self._pair_prefix + ".idx") != self._idx_identity:
            raise self._replaced()

    def _replaced(self) -> IndexedDataError:
        return IndexedDataError(
            f"{self._pair_prefix}: the pair was replaced since it was opened, and what lies beside it is of the new "
            "one; open it again"
        )

    def _load(self, path: str) -> Bytes | None:
        """A file beside the pair, None if there is none."""
        open_bytes = self._arguments[3]
        if open_bytes is None:
            return map_if_there(path)
        try:
            return ObjectBytes(path, open_bytes).read_all()
        except (FileNotFoundError, KeyError):
            return None

    def prefetch(self, begin_R: npt.ArrayLike, length_R: npt.ArrayLike) -> None:
        """Begin to bring tokens here that are read soon, and return at once: look-ahead for who knows the order.

        Of a URL, requests begin for what is not here. Of a local pair the kernel is told.

        Args:
            begin_R: (R,) tokens of .bin, as ``sequence_pointers`` divided by the size of one counts them.
            length_R: (R,) how many from each.
        Raises:
            IndexedDataError: a range does not lie in .bin, or all together are more than the cache holds.
        """
        index, source = self._opened()
        begin, length = np.asarray(begin_R, np.int64), np.asarray(length_R, np.int64)
        total = index.bin_bytes // index.itemsize
        wrong = np.flatnonzero((begin < 0) | (length < 0) | (length > total - begin))
        if wrong.size:
            first, count = int(begin[wrong[0]]), int(length[wrong[0]])
            raise IndexedDataError(
                f"{self.path_prefix}: {count} tokens from token {first} on are asked ahead; the pair has {total}"
            )
        source.prefetch(begin, begin + length)

    def get_document_indices(self) -> npt.NDArray[np.int64]:
        """``document_indices``, under megatron-core's older name."""
        return self.document_indices

    def set_document_indices(self, document_indices: npt.NDArray[np.int64]) -> None:
        """Replace ``document_indices`` in this object, as in megatron-core; the file stays as it is."""
        self._opened()
        self._document_indices = np.array(document_indices)  # a copy: the caller may go on to use its own

    def check(self) -> None:
        """Check every rule of the index, O(S); IndexedDataError for the first one broken."""
        for problem in all_problems(_base(self._opened()[0])):
            raise IndexedDataError.broken(problem, "Write the pair again")

    # lifetime

    def close(self) -> None:
        """Let go of the files. Arrays that were handed out stay valid. Twice is once."""
        self._index = self._source = None
        self._document_indices = np.empty(0, np.int64)

    def _opened(self) -> tuple[Index, IdSource]:
        if self._index is None or self._source is None:
            raise IndexedDataError(f"{self.path_prefix} is closed; open it again")
        return self._index, self._source

    def __enter__(self) -> IndexedDataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> tuple[Any, ...]:
        """The path, what tells this pair from one that has its name later, and document indices that were set."""
        if self._index is None:
            return self._arguments, self._whole_prefix, None, None
        given = None if self._document_indices is self._index.boundaries_D else self._document_indices
        return self._arguments, self._whole_prefix, self._facts(), given

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Open it again.

        Raises:
            IndexedDataError: another pair has that name now: whoever pickled this one counted its sequences.
        """
        (prefix, *options), whole_prefix, facts, document_indices = state
        self._open(whole_prefix, *options)
        self._arguments = (prefix, *options)
        found = self._facts()
        if facts is not None and found != facts:
            raise IndexedDataError(
                f"{whole_prefix}: the pair was replaced since it was pickled: it had {facts[0]} sequences in "
                f"{facts[3]} bytes, and has {found[0]} in {found[3]}, or other ids. Open it again, or give new "
                "data a new name"
            )
        if document_indices is not None:
            self._document_indices = document_indices

    def _facts(self) -> tuple[Any, ...]:
        """Counts, and a checksum of some lengths, boundaries and ids. O(1); of a store no id is read."""
        index, source = self._opened()
        digest = index.digest() if self._arguments[3] is not None else digest_of(index, source)
        return index.sequences, index.header.boundaries, self._dtype.name, index.bin_bytes, digest

    def __repr__(self) -> str:
        state = "closed" if self._index is None else f"{len(self)} sequences of {self._dtype}"
        return f"IndexedDataset({self.path_prefix!r}, {state})"

    @staticmethod
    def exists(path_prefix: AnyPath) -> bool:
        """Whether both files of the pair, or a view, are there; of a URL the store is asked."""
        prefix = path_text("path_prefix", path_prefix)
        if is_url(prefix):
            store = RemoteStore()
            try:
                return all(store(prefix + ending).size() >= 0 for ending in (".idx", ".bin"))
            except FileNotFoundError:
                return False
        prefix = input_prefix(path_prefix)
        if os.path.exists(prefix + VIEW) and not os.path.lexists(prefix + ".idx"):
            return IndexedDataset.exists(View(prefix).pair)
        return os.path.exists(prefix + ".idx") and os.path.exists(prefix + ".bin")


def _base(index: Index) -> Index:
    """The index of the pair, of a view too."""
    return index.base if isinstance(index, ViewIndex) else index
