"""Writing a pair: temporary files first, then both names at once.

    token_ids.py --> IndexedDatasetBuilder (this file) --> atomic_files.py --> PREFIX.bin, PREFIX.idx

Two notes in atomic_files.py say what a crash leaves: whole or absent, and a killed writer.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.atomic_files import Temporary, copy, publish
from sixfold.indexed_data.companions import MANIFEST, MASK, SOURCES, Facts, checksum_in, refuse_foreign, replaced
from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.format import DType, Header
from sixfold.indexed_data.index import Index
from sixfold.indexed_data.loss_mask import Mask, MaskRuns, as_mask
from sixfold.indexed_data.manifest import Blocks, Manifest, blocks_of
from sixfold.indexed_data.pair_rules import BLOCK
from sixfold.indexed_data.paths import AnyPath, anchored, input_prefix, output_file
from sixfold.indexed_data.provenance import I64, SourceRuns
from sixfold.indexed_data.reader import IndexedDataset
from sixfold.indexed_data.storage import MappedIds, file_identity, identity_of, map_file
from sixfold.indexed_data.token_ids import IdRange, as_row, checked_ids, whole_number
from sixfold.indexed_data.verifying import ids_outside

LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32
_INDEX_BLOCK = 1 << 16  # sequences per step of ``finalize``


class IndexedDatasetBuilder:
    """Writes one pair, document by document. The pair appears when it is finalized, complete.

    As a context manager it finalizes at the end of the block, or aborts if the block raises. A refused call changes
    nothing, so you can add the next document. It keeps about 14 bytes per sequence in memory.

    Args:
        bin_path: the .bin to write. ``finalize`` puts the .idx next to it.
        dtype: dtype of the stored ids, one that ``DType`` has.
        multimodal: store a mode with every sequence.
        vocab_size: also refuse ids that are negative or not below it.
    Raises:
        IndexedDataError: the dtype has no code, or the folder is not there.
    """

    def __init__(
        self,
        bin_path: AnyPath,
        dtype: npt.DTypeLike = np.int32,
        multimodal: bool = False,
        *,
        vocab_size: int | None = None,
    ) -> None:
        DType.code_from_dtype(dtype)
        self.dtype: np.dtype[Any] = np.dtype(np.dtype(dtype).name)  # of native byte order, the only one of the format
        self.multimodal = multimodal
        self._bin_path = output_file("bin_path", bin_path)  # as given, for messages
        self._final_bin = anchored(self._bin_path)  # whatever the current folder is when it is finalized
        self._allowed = IdRange(self.dtype, vocab_size)
        self._lengths, self._documents, self._modes = array("i"), array("q", [0]), array("b")
        self._mask: MaskRuns | None = None
        self._sources: SourceRuns | None = None
        self._made_of: tuple[Blocks, list[dict[str, Any] | None]] | None = None  # by build and merge, for a manifest
        self._state = "open"
        try:
            self._temporary = Temporary(self._final_bin)
            self._file: Any = self._temporary.file  # numpy's arrays are buffers, its types do not say so
        except OSError as error:
            raise IndexedDataError(f"{self._bin_path}: cannot be written: {error.strerror}") from error

    def add_item(self, tensor: Any, mode: int = 0, *, loss_mask: Any = None) -> None:
        """Append one sequence to the document that ``end_document`` closes."""
        sequences, documents = len(self._lengths), len(self._documents)
        try:
            self._write(tensor, None, None if mode == 0 else [mode], loss_mask)
        except BaseException as error:
            self._undo(error, sequences, documents)
            raise

    def add_document(
        self,
        tensor: Any,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
        *,
        loss_mask: Any = None,
    ) -> None:
        """Append the ids of a whole document and close it, together with items added since the last end.

        Args:
            tensor: (n,) ids: a list, an array of any integer type, or anything with ``.numpy()``.
            lengths: tokens of each of its sequences, with sum n; None is one sequence.
            modes: mode of each sequence; None is 0 for all.
            loss_mask: (n,) whether each token counts in the loss; None is True for all. Stored beside the pair.
        Raises:
            IndexedDataError: an id out of range (document, position, id), or lengths, modes or a mask that do not add
                up.
        """
        sequences, documents = len(self._lengths), len(self._documents)
        try:
            self._write(tensor, lengths, modes, loss_mask)
            self._documents.append(len(self._lengths))
        except BaseException as error:
            self._undo(error, sequences, documents)
            raise

    def end_document(self) -> None:
        """Close a document after its ``add_item`` calls; one without items is legal."""
        self._check_open()
        self._documents.append(len(self._lengths))

    def add_index(self, path_prefix: AnyPath) -> None:
        """Append all documents of another pair of the same dtype and kind.

        Its index is checked in full first, and with ``vocab_size`` each of its ids.
        """
        self._add_index(path_prefix, None)

    def _add_index(self, path_prefix: AnyPath, sources: tuple[I64, list[str]] | None) -> None:
        """``add_index``, with runs of documents and their files in place of the pair's own provenance."""
        self._check_open()
        self._check_documents_closed()
        sequences, documents = len(self._lengths), len(self._documents)
        try:
            self._append_pair(path_prefix, sources)
        except BaseException as error:
            self._undo(error, sequences, documents)
            raise

    def _append_pair(self, path_prefix: AnyPath, sources: tuple[I64, list[str]] | None) -> None:
        # Looked at before it is opened: what is copied below has to be the file that is checked here.
        bin_path = input_prefix(path_prefix) + ".bin"
        before = file_identity(bin_path) if os.path.exists(bin_path) else ()
        with IndexedDataset(path_prefix, self.multimodal) as pair:
            if pair.dtype != self.dtype:
                raise IndexedDataError(
                    f"{pair.path_prefix} has dtype {pair.dtype}, {self._bin_path} has {self.dtype}; only pairs of one "
                    "dtype can be joined"
                )
            if pair.kept_sequences is not None:
                raise IndexedDataError(
                    f"{pair.path_prefix} is a view, which is not joined; join its pair, and filter the result"
                )
            mask, provenance = pair.mask, pair.provenance
            refuse_hidden_modes(pair)
            pair.check()
            ids = np.empty(0, self.dtype) if pair.tokens is None else pair.tokens
            if self._allowed.vocab_size is not None:
                for problem in ids_outside(pair._opened()[0], ids, self._allowed.vocab_size):
                    raise IndexedDataError.broken(problem, "Nothing of this pair was added")
            nbytes, begin, document = ids.nbytes, self._tokens(), len(self._documents) - 1
            self._append_file(pair.path_prefix + ".bin", nbytes, before)
            for a, b in _blocks(1, len(pair.document_indices), BLOCK):
                self._documents.frombytes((pair.document_indices[a:b] + len(self._lengths)).tobytes())
            self._lengths.frombytes(pair.sequence_lengths.tobytes())
            if self.multimodal:
                self._modes.frombytes(pair.sequence_modes.tobytes())
            if mask is not None:
                self._mask = self._mask or MaskRuns()
                self._mask.append_pair(begin, mask, begin + ids.size)
            if sources is None and provenance is not None:
                sources = provenance.runs, provenance.files
            if sources is not None:
                self._sources = self._sources or SourceRuns()
                self._sources.append(document, *sources, len(self._documents) - 1)

    def finalize(self, idx_path: AnyPath | None = None) -> None:
        """Write the index and give both files their names. Flushed to the disk when it returns.

        Args:
            idx_path: default is ``bin_path`` with .bin replaced by .idx.
        Raises:
            IndexedDataError: sequences belong to no document, or ``idx_path`` cannot be: the builder stays as it is. Or
                the disk refuses, or another process wrote into the file: there is then no new pair.
        """
        self._check_open()
        self._check_documents_closed()
        final_idx = self._idx_path(idx_path)
        made: dict[str, Temporary] = {}
        try:
            self._temporary.sync()
            index = made[".idx"] = Temporary(final_idx)
            self._check_size(self._write_index(index.file))
            index.sync()
            prefix = final_idx.removesuffix(".idx")
            for ending, pieces in self._companions(index.name):
                refuse_foreign(prefix, (ending,))
                made[ending] = Temporary(prefix + ending)
                for piece in pieces:
                    made[ending].file.write(piece)
                made[ending].sync()
            names = {ending: each.name for ending, each in made.items()}
            publish(self._temporary.name, self._final_bin, names.pop(".idx"), final_idx, replaced(prefix, names))
            self._state = "finalized"
            self._file.close()
        except TimeoutError as error:  # of the folder's lock: nothing is wrong with what was written
            again = "the builder stays as it is: finalize again when the folder is free"
            raise IndexedDataError(f"{self._bin_path}: not written, {error.strerror}; {again}") from error
        except OSError as error:
            self.abort()
            raise IndexedDataError(f"{self._bin_path}: not written, {error.strerror}; no new pair is left") from error
        except BaseException:
            self.abort()
            raise
        finally:
            for each in made.values():
                each.remove()

    def abort(self) -> None:
        """Give up: the temporary file is removed, an old pair stays. After ``finalize`` it does nothing."""
        if self._state == "open":
            self._state = "aborted"
            self._temporary.remove()

    def __enter__(self) -> IndexedDatasetBuilder:
        if not self._bin_path.endswith(".bin"):  # said before the work, which the end of the block could not finish
            self.abort()
            raise IndexedDataError(f"bin_path is {self._bin_path}; at the end of its block a pair is named PREFIX.bin")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state == "open" and error is None:
            try:
                self.finalize()
            finally:
                self.abort()
        else:
            self.abort()

    # steps

    def _not_written(self, error: OSError) -> IndexedDataError:
        return IndexedDataError(
            f"{self._bin_path}: not written, {error.strerror}; no new pair is made, and one of that name stays as it "
            "was"
        )

    def _undo(self, error: BaseException, sequences: int, documents: int) -> None:
        """A call that raises has added nothing, also where Ctrl-C came between its steps and the caller goes on."""
        if self._state != "open" or isinstance(error, IndexedDataError):  # raised before anything was changed
            return
        try:
            del self._lengths[sequences:], self._documents[documents:]
            if self.multimodal:
                del self._modes[sequences:]
            end = sum(self._lengths)
            self._file.seek(end * self.dtype.itemsize)
            self._file.truncate()
            if self._mask is not None:
                self._mask.cut(end)
            if self._sources is not None:
                self._sources.cut(documents - 1)
        except BaseException:  # a second Ctrl-C: what is in the file is not known
            self.abort()
            raise

    def _write(self, tensor: Any, lengths: Sequence[int] | None, modes: Sequence[int] | None, loss_mask: Any) -> None:
        """Append ids, their sequences and modes; nothing is changed before everything is checked."""
        self._check_open()
        try:
            row = as_row(tensor)
            n = len(row)
            # The call of one sequence, with its length or without, is the one of nearly every corpus.
            one = modes is None and n <= LONGEST_SEQUENCE and (lengths is None or _is_one_length(lengths, n))
            if not one:
                counts, kinds = self._split(n, lengths, modes)
            ids = checked_ids(row, self._allowed)
            masked = loss_mask is not None or self._mask is not None
            mask = as_mask(loss_mask, n) if loss_mask is not None else None
        except IndexedDataError as error:
            raise IndexedDataError(
                f"{self._bin_path}: document {len(self._documents) - 1}: {error}"
            ) from error.__cause__
        try:
            if masked:
                self._append_mask(mask)
            self._file.write(ids)
        except OSError as error:
            self.abort()
            raise self._not_written(error) from error
        if one:
            self._lengths.append(n)
            if self.multimodal:
                self._modes.append(0)
            return
        self._lengths.extend(counts)
        if self.multimodal:
            self._modes.extend(kinds)

    def _append_mask(self, mask: Mask | None) -> None:
        """The mask of the ids that are written next."""
        self._mask = self._mask or MaskRuns()
        if mask is None:
            self._mask.close(self._tokens())
        else:
            self._mask.append(self._tokens(), mask)

    def _tokens(self) -> int:
        """Ids that were written so far."""
        return int(self._file.tell()) // self.dtype.itemsize

    def _companions(self, idx_path: str) -> Iterator[tuple[str, list[Any]]]:
        """Ending and pieces of what lies beside the pair, whose new .idx is ``idx_path``."""
        if self._mask is None and self._sources is None and self._made_of is None:
            return
        raw = map_file(idx_path)
        index = Index(
            raw, self._bin_path.removesuffix(".bin"), sum(self._lengths) * self.dtype.itemsize, self.multimodal
        )
        facts = Facts.of(index, MappedIds(map_file(self._temporary.name), self.dtype))
        made: dict[str, list[Any]] = {}
        if self._mask is not None:
            made[MASK] = self._mask.pack(facts)
        if self._sources is not None:
            made[SOURCES] = self._sources.pack(facts, len(self._documents) - 1)
        yield from made.items()
        if self._made_of is not None:
            beside = {ending: checksum_in(pieces[0]) for ending, pieces in made.items()}
            yield MANIFEST, [Manifest(blocks_of(raw), *self._made_of, beside).text().encode()]

    def _split(
        self, n: int, lengths: Sequence[int] | None, modes: Sequence[int] | None
    ) -> tuple[array[int], array[int]]:
        """Lengths and modes of the sequences of n ids, checked."""
        counts = _numbers("i", "length", (n,) if lengths is None else lengths)
        if min(counts, default=0) < 0:
            raise IndexedDataError(f"length {counts.index(min(counts))} is {min(counts)}; it is >= 0")
        if sum(counts) != n:
            raise IndexedDataError(f"the lengths add up to {sum(counts)}, the document has {n} ids")
        if modes is not None and not self.multimodal:
            raise IndexedDataError(f"modes {modes} in a pair without modes; make the builder with multimodal=True")
        kinds = array("b", bytes(len(counts))) if modes is None else _numbers("b", "mode", modes)
        if len(kinds) != len(counts):
            raise IndexedDataError(f"{len(kinds)} modes for {len(counts)} sequences; each has one")
        return counts, kinds

    def _append_file(self, path: str, nbytes: int, identity: tuple[int, ...]) -> None:
        """Append ``nbytes`` bytes of the file ``path`` of that identity.

        Copied inside the kernel, never through this process's memory.
        """
        try:
            self._file.flush()
            end = os.fstat(self._file.fileno()).st_size
            with open(path, "rb") as source:
                same = identity_of(source.fileno()) == identity
                copied = copy(source.fileno(), self._file.fileno(), nbytes) if same else 0
                same = same and identity_of(source.fileno()) == identity  # nobody wrote into it meanwhile
            if copied != nbytes or not same:
                os.ftruncate(self._file.fileno(), end)
                self._file.seek(end)
            if not same:
                raise IndexedDataError(
                    f"{path}: the pair was replaced or written to while it was joined, and its index describes the old "
                    "one. Join it again when nobody writes to it"
                )
            if copied != nbytes:
                raise IndexedDataError(f"{path}: {copied} bytes, expected {nbytes}; it was cut while it was read")
        except OSError as error:
            self.abort()
            raise self._not_written(error) from error

    def _idx_path(self, idx_path: AnyPath | None) -> str:
        """Where the .idx goes; IndexedDataError for a place that cannot be, before anything is done."""
        if idx_path is None:
            if not self._bin_path.endswith(".bin"):
                raise IndexedDataError(f"{self._bin_path} does not end in .bin; name the .idx: finalize(idx_path)")
            return self._final_bin.removesuffix(".bin") + ".idx"
        given = output_file("idx_path", idx_path)
        final_idx = anchored(given)
        if final_idx == self._final_bin:
            raise IndexedDataError(f"idx_path is {given}, the .bin itself; the two files have two names")
        if final_idx == self._final_bin.removesuffix(".bin"):
            raise IndexedDataError(f"idx_path is {given}, the path prefix; the .idx of this pair is {given}.idx")
        if not os.path.isdir(os.path.dirname(final_idx) or os.curdir):
            raise IndexedDataError(f"idx_path is {given}; its folder is not there. Make it, then finalize again")
        return final_idx

    def _write_index(self, file: Any) -> int:
        """The .idx: header, lengths, their prefix sum in bytes, document ends, modes. Vectorised, in blocks.

        Gives back the bytes that the .bin has by it.
        """
        lengths_S = _view(self._lengths, np.int32)
        file.write(Header(self.dtype, len(self._lengths), len(self._documents)).pack())
        file.write(lengths_S)
        starts = np.zeros(
            min(len(lengths_S), _INDEX_BLOCK) + 1, np.int64
        )  # one for all blocks, small enough for the second cache
        for a, b in _blocks(0, len(lengths_S), _INDEX_BLOCK):
            np.multiply(lengths_S[a:b], self.dtype.itemsize, out=starts[1 : b - a + 1], dtype=np.int64)
            np.cumsum(starts[: b - a + 1], out=starts[: b - a + 1])
            file.write(starts[: b - a])
            starts[0] = starts[b - a]
        file.write(_view(self._documents, np.int64))
        if self.multimodal:
            file.write(_view(self._modes, np.int8))
        return int(starts[0])

    def _check_size(self, expected: int) -> None:
        """The .bin holds what this builder wrote, and nothing of a forked child that has the same file."""
        found = os.fstat(self._file.fileno()).st_size
        if found != expected:
            raise IndexedDataError(
                f"{self._bin_path}: {found} bytes are in the file, {expected} were expected: another process (a "
                "fork of this one) wrote into it, or a call was interrupted. Use a builder in one process only"
            )

    def _check_open(self) -> None:
        if self._state != "open":
            raise IndexedDataError(f"{self._bin_path} is {self._state}; make a new builder")

    def _check_documents_closed(self) -> None:
        if self._documents[-1] != len(self._lengths):
            raise IndexedDataError(
                f"{self._bin_path}: sequences {self._documents[-1]} to {len(self._lengths) - 1} belong to no document; "
                "call end_document"
            )


def _is_one_length(lengths: Sequence[int], n: int) -> bool:
    """Whether ``lengths`` is a plain [n]."""
    return type(lengths) is list and len(lengths) == 1 and type(lengths[0]) is int and lengths[0] == n


def _numbers(code: Literal["i", "b"], what: str, values: Sequence[int]) -> array[int]:
    """``values`` as an array of int32 ("i") or int8 ("b"); IndexedDataError for the first that is none."""
    try:
        given = list(values)  # once: a generator has no numbers for a second look
    except TypeError:
        raise IndexedDataError(f"{what}s is {values!r}; it is a sequence of whole numbers") from None
    if bool not in set(map(type, given)):
        with suppress(TypeError, OverflowError):
            return array(code, given)
    numbers = [whole_number(f"{what} {i}", value) for i, value in enumerate(given)]
    low, high = (0, LONGEST_SEQUENCE) if code == "i" else (-128, 127)
    for i, number in enumerate(numbers):
        if not low <= number <= high:
            raise IndexedDataError(f"{what} {i} is {number}; a {what} is from {low} to {high}")
    return array(code, numbers)


def refuse_hidden_modes(pair: IndexedDataset) -> None:
    """IndexedDataError if ``pair`` was opened without modes and probably has them: S bytes after its arrays."""
    if len(pair) and pair.trailing_bytes == len(pair):
        raise IndexedDataError(
            f"{pair.path_prefix}.idx: {len(pair)} bytes follow the last array, one for each sequence: probably the "
            "modes of a multimodal pair. Pass multimodal=True, or cut them off"
        )


def _blocks(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    return [(a, b) for a, b in pairwise([*range(start, stop, size), stop]) if a < b]


def _view(values: array[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.frombuffer(values, dtype) if values else np.empty(0, dtype)
