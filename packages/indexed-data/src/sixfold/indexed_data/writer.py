"""Writing a pair: temporary files first, then both names at once.

    ids.py --> IndexedDatasetBuilder --> publish (this file) --> PREFIX.bin, PREFIX.idx

[Note: whole or absent] Everything is written under temporary names in the folder of the final ones. ``publish``
is the only place that renames: it removes an old .idx, renames .bin, then .idx. So at no instant does an old .idx
stand beside a new .bin; a crash leaves the old pair, or no pair, never a mixed one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.format import DType, Header
from sixfold.indexed_data.ids import IdRange, checked_ids, whole_number
from sixfold.indexed_data.index import BLOCK
from sixfold.indexed_data.reader import IndexedDataset

LONGEST_SEQUENCE = 2**31 - 1  # lengths are int32
LOCK_TIMEOUT_S = 30.0
_BUFFER_BYTES = 1 << 20


class IndexedDatasetBuilder:
    """Writes one pair, document by document; the pair appears when it is finalized, whole.

    As a context manager it finalizes at the end of the block, or aborts if an error leaves it. A refused call
    changes nothing, so the builder can go on with the next document. Keeps about 14 bytes per sequence.

    Args:
        bin_path: the .bin to write; ``finalize`` puts the .idx beside it.
        dtype: dtype of the stored ids, one that ``DType`` has.
        multimodal: store a mode with every sequence.
        vocab_size: also refuse ids from it on, and negative ones.
    Raises:
        IndexedDataError: the dtype has no code, or the folder is not there.
    """

    def __init__(
        self,
        bin_path: str | os.PathLike[str],
        dtype: npt.DTypeLike = np.int32,
        multimodal: bool = False,
        *,
        vocab_size: int | None = None,
    ) -> None:
        DType.code_from_dtype(dtype)
        self.dtype: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")  # the format has one byte order
        self.multimodal = multimodal
        self._bin_path = os.fspath(bin_path)
        self._allowed = IdRange(self.dtype, vocab_size)
        self._lengths, self._documents, self._modes = array("i"), array("q", [0]), array("b")
        self._state = "open"
        self._temporary = temporary_name(self._bin_path)
        try:
            self._file = open(self._temporary, "xb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - lives with the builder
        except OSError as error:
            raise IndexedDataError(f"{self._bin_path}: cannot be written: {error.strerror}") from error

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence to the document that ``end_document`` closes."""
        self._write(tensor, None, None if mode == 0 else [mode])

    def add_document(
        self, tensor: Any, lengths: Sequence[int] | None = None, modes: Sequence[int] | None = None
    ) -> None:
        """Append the ids of a whole document and close it, together with items added since the last end.

        Args:
            tensor: (n,) ids: a list, an array of any integer type, or anything with ``.numpy()``.
            lengths: tokens of each of its sequences, with sum n; None is one sequence.
            modes: mode of each sequence; None is 0 for all.
        Raises:
            IndexedDataError: an id out of range (document, position, id), or lengths or modes that do not add up.
        """
        self._write(tensor, lengths, modes)
        self._documents.append(len(self._lengths))

    def end_document(self) -> None:
        """Close a document after its ``add_item`` calls; one without items is legal."""
        self._check_open()
        self._documents.append(len(self._lengths))

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append all documents of another pair of the same dtype and kind; its index is checked in full first."""
        self._check_open()
        self._check_documents_closed()
        with IndexedDataset(path_prefix, self.multimodal) as pair:
            if pair.dtype != self.dtype:
                raise IndexedDataError(
                    f"{pair.path_prefix} has dtype {pair.dtype}, {self._bin_path} has {self.dtype}; only pairs of one "
                    "dtype can be joined"
                )
            refuse_hidden_modes(pair)
            pair.check()
            nbytes = 0 if pair.tokens is None else pair.tokens.nbytes
            self._append_file(pair.path_prefix + ".bin", nbytes)
            for a, b in _blocks(1, len(pair.document_indices)):
                self._documents.frombytes((pair.document_indices[a:b] + len(self._lengths)).tobytes())
            self._lengths.frombytes(pair.sequence_lengths.tobytes())
            if self.multimodal:
                self._modes.frombytes(pair.sequence_modes.tobytes())

    def finalize(self, idx_path: str | os.PathLike[str] | None = None) -> None:
        """Write the index and give both files their names. Flushed to the disk when it returns.

        Args:
            idx_path: default is ``bin_path`` with .bin replaced by .idx.
        Raises:
            IndexedDataError: sequences belong to no document, or the disk refuses; there is then no new pair.
        """
        self._check_open()
        self._check_documents_closed()
        if idx_path is None:
            if not self._bin_path.endswith(".bin"):
                raise IndexedDataError(f"{self._bin_path} does not end in .bin; name the .idx: finalize(idx_path)")
            idx_path = self._bin_path.removesuffix(".bin") + ".idx"
        final_idx = os.fspath(idx_path)
        if os.path.abspath(final_idx) == os.path.abspath(self._bin_path):
            raise IndexedDataError(f"idx_path is {final_idx}, the .bin itself; the two files have two names")
        temporary_idx = temporary_name(final_idx)
        try:
            self._flush()
            with open(temporary_idx, "xb", buffering=_BUFFER_BYTES) as file:
                self._write_index(file)
                file.flush()
                os.fsync(file.fileno())
            publish(self._temporary, self._bin_path, temporary_idx, final_idx)
        except BaseException as error:
            _remove(temporary_idx)
            self.abort()
            if isinstance(error, OSError):
                raise IndexedDataError(f"{self._bin_path}: not written, {error.strerror}; no pair is left") from error
            raise
        self._state = "finalized"

    def abort(self) -> None:
        """Give up: the temporary file is removed, an old pair stays. After ``finalize`` it does nothing."""
        if self._state == "open":
            self._state = "aborted"
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                self._file.close()
            _remove(self._temporary)

    def __enter__(self) -> IndexedDatasetBuilder:
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

    def _write(self, tensor: Any, lengths: Sequence[int] | None, modes: Sequence[int] | None) -> None:
        """Append ids, their sequences and modes; nothing is changed before everything is checked."""
        self._check_open()
        try:
            ids = checked_ids(tensor, self._allowed)
            if lengths is None and modes is None and len(ids) <= LONGEST_SEQUENCE:
                counts, kinds = _one(len(ids))
            else:
                counts, kinds = self._split(len(ids), lengths, modes)
        except IndexedDataError as error:
            raise IndexedDataError(
                f"{self._bin_path}: document {len(self._documents) - 1}: {error}"
            ) from error.__cause__
        try:
            self._file.write(ids.data)
        except OSError as error:
            self.abort()
            raise IndexedDataError(f"{self._bin_path}: not written, {error.strerror}; no pair is left") from error
        if len(counts) == 1:
            self._lengths.append(counts[0])
        else:
            self._lengths.extend(counts)
        if self.multimodal:
            self._modes.extend(kinds)

    def _split(
        self, n: int, lengths: Sequence[int] | None, modes: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths and modes of the sequences of n ids, checked."""
        counts = (n,) if lengths is None else _whole_numbers("length", lengths)
        for i, count in enumerate(counts):
            if not 0 <= count <= LONGEST_SEQUENCE:
                raise IndexedDataError(f"length {i} is {count}; a sequence has 0 to {LONGEST_SEQUENCE} tokens")
        if sum(counts) != n:
            raise IndexedDataError(f"the lengths add up to {sum(counts)}, the document has {n} ids")
        if modes is not None and not self.multimodal:
            raise IndexedDataError(
                f"modes {list(modes)} in a pair without modes; make the builder with multimodal=True"
            )
        kinds = (0,) * len(counts) if modes is None else _whole_numbers("mode", modes)
        if len(kinds) != len(counts):
            raise IndexedDataError(f"{len(kinds)} modes for {len(counts)} sequences; each has one")
        for kind in kinds:
            if not -128 <= kind <= 127:
                raise IndexedDataError(f"mode {kind}; a mode is an int8, from -128 to 127")
        return counts, kinds

    def _append_file(self, path: str, nbytes: int) -> None:
        """Append ``nbytes`` bytes of ``path``: copied inside the kernel, never through this process's memory."""
        try:
            self._file.flush()
            end = os.fstat(self._file.fileno()).st_size
            with open(path, "rb") as source:
                copied = _copy(source.fileno(), self._file.fileno(), nbytes)
            if copied != nbytes:
                os.ftruncate(self._file.fileno(), end)
                self._file.seek(end)
                raise IndexedDataError(f"{path}: {copied} bytes, expected {nbytes}; it was cut while it was read")
        except OSError as error:
            self.abort()
            raise IndexedDataError(f"{self._bin_path}: not written, {error.strerror}; no pair is left") from error

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _write_index(self, file: Any) -> None:
        """The .idx: header, lengths, their prefix sum in bytes, document ends, modes. Vectorised, in blocks."""
        lengths_S = _view(self._lengths, np.int32)
        file.write(Header(self.dtype, len(self._lengths), len(self._documents)).pack())
        file.write(lengths_S)
        pointer = 0
        for a, b in _blocks(0, len(lengths_S)):
            ends = np.cumsum(lengths_S[a:b], dtype=np.int64)
            ends *= self.dtype.itemsize
            ends += pointer
            file.write(np.int64(pointer).tobytes())
            file.write(ends[:-1])
            pointer = int(ends[-1])
        file.write(_view(self._documents, np.int64))
        if self.multimodal:
            file.write(_view(self._modes, np.int8))

    def _check_open(self) -> None:
        if self._state != "open":
            raise IndexedDataError(f"{self._bin_path} is {self._state}; make a new builder")

    def _check_documents_closed(self) -> None:
        if self._documents[-1] != len(self._lengths):
            raise IndexedDataError(
                f"{self._bin_path}: sequences {self._documents[-1]} to {len(self._lengths) - 1} belong to no document; "
                "call end_document"
            )


def _one(n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and modes of a document that is one sequence."""
    return (n,), (0,)


def _whole_numbers(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(whole_number(f"{what} {i}", value) for i, value in enumerate(values))
    except TypeError:
        raise IndexedDataError(f"{what}s is {values!r}; it is a sequence of whole numbers") from None


def refuse_hidden_modes(pair: IndexedDataset) -> None:
    """IndexedDataError if ``pair`` was opened without modes and probably has them: S bytes after its arrays."""
    if len(pair) and pair.trailing_bytes == len(pair):
        raise IndexedDataError(
            f"{pair.path_prefix}.idx: {len(pair)} bytes follow the last array, one for each sequence: probably the "
            "modes of a multimodal pair. Pass multimodal=True, or cut them off"
        )


def checked_prefix(output: str | os.PathLike[str]) -> str:
    """``output`` as the path prefix of a new pair; IndexedDataError for one that ends in no name."""
    prefix = os.fspath(output)
    if not os.path.basename(prefix):
        raise IndexedDataError(f"{prefix!r} ends in no name; an output is a path prefix, such as folder/wiki")
    return prefix


def files_of(prefix: str) -> list[str]:
    """Those of the two files of a pair that are there, in whatever state."""
    return [path for path in (prefix + ".bin", prefix + ".idx") if os.path.lexists(path)]


def publish(new_bin: str, bin_path: str, new_idx: str, idx_path: str) -> None:
    """Give a finished pair its names, in the order of the note above; both files are already on the disk."""
    folders = sorted({os.path.dirname(os.path.abspath(path)) for path in (bin_path, idx_path)})
    with ExitStack() as held:
        descriptors = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in folders]
        for descriptor in descriptors:
            held.callback(os.close, descriptor)
            _lock(descriptor)  # two writers of one pair take turns here, so that their files do not mix
        for path in (bin_path, idx_path):
            if os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, f"a folder is named {path}", path)
        if os.path.lexists(idx_path):
            os.unlink(idx_path)
            _sync(descriptors)
        os.replace(new_bin, bin_path)
        os.replace(new_idx, idx_path)
        _sync(descriptors)


def temporary_name(path: str) -> str:
    """A name in the folder of ``path`` that nobody else uses."""
    return f"{path}.tmp-{os.getpid()}-{os.urandom(4).hex()}"


def _copy(source: int, target: int, nbytes: int) -> int:
    """Append up to ``nbytes`` bytes from one descriptor to another at their positions; gives the number copied."""
    copied, step = 0, _copy_in_kernel
    while copied < nbytes:
        try:
            got = step(source, target, min(nbytes - copied, 1 << 30))
        except OSError:
            if step is _copy_by_read:
                raise
            step = _copy_by_read  # two file systems, or one that cannot
            continue
        if got == 0:
            break
        copied += got
    return copied


def _copy_in_kernel(source: int, target: int, nbytes: int) -> int:
    return os.copy_file_range(source, target, nbytes)


def _copy_by_read(source: int, target: int, nbytes: int) -> int:
    data = memoryview(os.read(source, min(nbytes, _BUFFER_BYTES)))
    got = len(data)
    while data:
        data = data[os.write(target, data) :]
    return got


def _blocks(start: int, stop: int) -> list[tuple[int, int]]:
    return [(a, b) for a, b in pairwise([*range(start, stop, BLOCK), stop]) if a < b]


def _view(values: array[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.frombuffer(values, dtype) if values else np.empty(0, dtype)


def _lock(descriptor: int) -> None:
    """Take the folder's lock, which writers hold for the length of two renames; OSError at the deadline."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                message = f"another process has held the lock of its folder for {LOCK_TIMEOUT_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, message) from None
            time.sleep(0.01)
        except OSError:
            return  # a file system without locks: two writers of one pair at once are then the caller's to avoid


def _sync(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.fsync(descriptor)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
