"""Files of frames, hashed in the same pass: on a local disk by threads, elsewhere as a stream.

    frames --> FrameFile (this file) --> a file of the staging folder
    frames --> StreamFile (this file) --> Sink of a store: an upload, a buffer

A stream has no way back, so the CRC-32 of a large tensor stands behind its bytes, in a data descriptor. There is no
spool.

[Note: what is hashed is written] The caller's tensors may change while they are saved, by a thread or a process that
shares them. So each byte is read from them once: a part is copied, and hashed and written where the copy lies. Only
memory of this package's own, such as the arena of a background save, is hashed and written where it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from sixfold.dist_ckpt.formats import frame
from sixfold.dist_ckpt.formats.integrity import BlockHasher, FileDigest, Piece, crc32, cut_at_blocks, join_pieces
from sixfold.dist_ckpt.interpreter import Pool

GATHER_BYTES = 1 << 20
_RESERVE_BYTES = 1 << 22  # files below are written without threads and without asking for space first
_SYNC_BYTES = 1 << 26  # of a file that are waited for at once
_SYNC_FILE_RANGE_WRITE, _SYNC_FILE_RANGE_ALL = 2, 7


class Sink(Protocol):
    """A file that is written from start to end, and appears when it is closed."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take all of ``data``; its memory may change afterwards."""

    def close(self) -> None:
        """Make the file appear, whole and durable."""

    def discard(self) -> None:
        """Forget what was written; the file does not appear."""


class PartFile(ABC):
    """A file of frames while it is filled, once from start to end.

    Small parts are gathered and written a megabyte at a time, all is hashed on the way.

    Args:
        moved: told of each part that is written, by its bytes.
    """

    def __init__(self, moved: Callable[[int], None] | None) -> None:
        self._moved = moved or (lambda nbytes: None)
        self._hasher = BlockHasher()
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0

    @property
    def position(self) -> int:
        """Bytes so far."""
        return self._hasher.size + self._gathered_bytes

    def add(self, parts: Sequence[bytes], nbytes: int) -> None:
        """Add small parts of ``nbytes`` together."""
        self._gathered += parts
        self._gathered_bytes += nbytes
        if self._gathered_bytes >= GATHER_BYTES:
            self._flush()

    def append(self, data: bytes) -> None:
        """Add bytes."""
        self.add((data,), len(data))

    @abstractmethod
    def add_large(
        self, dtype: torch.dtype, shape: tuple[int, ...], parts: Callable[[int], Iterable[tuple[memoryview, object]]]
    ) -> int:
        """Add a frame around the raw bytes of a tensor, which lie elsewhere; their CRC-32.

        Args:
            parts: gives the bytes in their order, each with the owner of its memory, from the byte of the file on at
                which they will lie. What it has given does not change while the owner is held.
        """

    def _flush(self) -> None:
        if self._gathered:
            data, start = b"".join(self._gathered), self._hasher.size
            self._gathered, self._gathered_bytes = [], 0
            self._hasher.update(data)
            self._write(data, start)

    @abstractmethod
    def _write(self, data: bytes | memoryview, at: int, owner: object = None) -> None:
        """Write bytes at their place, which ``owner`` keeps in memory."""


def hashed(
    parts: Iterable[tuple[memoryview, object]],
    at: int,
    write: Callable[[memoryview, int, object], None],
) -> list[Piece]:
    """The CRC-32s of bytes that will lie at byte ``at`` of a file, block by block; each is written then."""
    pieces = list[Piece]()
    for raw, owner in parts:
        for piece in cut_at_blocks(raw, at):
            pieces.append(Piece(crc32(piece), len(piece)))
            write(piece, at, owner)
            at += len(piece)
    return pieces


class StreamFile(PartFile):
    """A file over a sink. As a context it discards what was not finished."""

    def __init__(self, sink: Sink, moved: Callable[[int], None] | None = None) -> None:
        super().__init__(moved)
        self._sink, self._is_finished = sink, False

    def add_large(
        self, dtype: torch.dtype, shape: tuple[int, ...], parts: Callable[[int], Iterable[tuple[memoryview, object]]]
    ) -> int:
        template = frame.template(dtype, shape, self.position, streamed=True)
        self.append(template.head[0])
        self._flush()
        pieces = hashed(parts(self.position), self.position, self._write)
        self._hasher.add(pieces)
        crc = join_pieces(pieces)
        self.append(template.fill(crc).tail)
        return crc

    def finish(self) -> FileDigest:
        """Close the sink; the digests of what it took."""
        self._flush()
        self._sink.close()
        self._is_finished = True
        return self._hasher.finish()

    def _write(self, data: bytes | memoryview, at: int, owner: object = None) -> None:
        self._sink.write(data)
        self._moved(len(data))

    def __enter__(self) -> StreamFile:
        return self

    def __exit__(self, *failure: object) -> None:
        if not self._is_finished:
            self._sink.discard()


class FrameFile(PartFile):
    """A file of frames, written once from start to end, hashed in the same pass.

    Small parts are gathered and written a megabyte at a time. Large ones are written by threads from where they are,
    each piece right after it was hashed. At most ``4 * threads`` pieces of 4 MiB wait. The owner of a piece's memory
    is held until the piece is written, no longer. The kernel is asked for the whole length before the first byte. It
    starts to write each piece at once, so that the last fsync has little left to do. (O_DIRECT was no faster, and
    leaves the page cache cold for the load that follows.)

    Args:
        nbytes: an upper bound of what will come; 0 if that is not known.
        threads: how many write at once, >= 1; small files are written without.
        moved: told of each part that is written, by its bytes, and with 0 while the disk takes what was written; from
            any thread.
    """

    def __init__(
        self, folder: Path, name: str, nbytes: int = 0, threads: int = 1, moved: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(moved)
        self.name = name
        self._writing: deque[Future[None]] = deque()
        self._threads = threads
        self._pool: Pool | None = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = os.open(folder / name, flags, 0o666)
        self._reserved = nbytes >= _RESERVE_BYTES and _reserve(self._handle, nbytes)

    def add_large(
        self, dtype: torch.dtype, shape: tuple[int, ...], parts: Callable[[int], Iterable[tuple[memoryview, object]]]
    ) -> int:
        """As its base. The parts are taken one by one as the writing goes on."""
        self._flush()
        start = self.position
        template = frame.template(dtype, shape, start)
        pieces = hashed(parts(start + template.head_bytes), start + template.head_bytes, self._write)
        crc = join_pieces(pieces)
        head, tail = template.fill(crc)
        self._hasher.update(head)
        self._hasher.add(pieces)
        self._write(head, start)
        self.append(tail)
        return crc

    def _write(self, data: bytes | memoryview, at: int, owner: object = None) -> None:
        if self._pool is None and at + len(data) < _RESERVE_BYTES:
            self._write_now(data, at, owner)
            return
        self._pool = self._pool or Pool(self._threads)
        while len(self._writing) >= 4 * self._threads:
            self._writing.popleft().result()
        self._writing.append(self._pool.submit(self._write_now, data, at, owner))

    def _write_now(self, data: bytes | memoryview, at: int, _owner: object) -> None:
        """``_owner`` keeps the memory of ``data`` as long as this call waits or runs."""
        _write_at(self._handle, data, at)
        self._moved(len(data))

    def finish(self) -> FileDigest:
        """Put the bytes on disk and return size and digests."""
        self._flush()
        while self._writing:
            self._writing.popleft().result()
        if self._reserved:
            os.ftruncate(self._handle, self.position)
        # Part by part: a disk that is slow but takes bytes is told from one that hangs.
        for at in range(0, self.position, _SYNC_BYTES):
            _on_disk(self._handle, at, _SYNC_BYTES)
            self._moved(0)
        os.fsync(self._handle)
        return self._hasher.finish()

    def __enter__(self) -> FrameFile:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        os.close(self._handle)


def _write_at(handle: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count
    if len(data) >= GATHER_BYTES and (start_writing := libc("sync_file_range")) is not None:
        start_writing(handle, ctypes.c_int64(at - len(data)), ctypes.c_int64(len(data)), _SYNC_FILE_RANGE_WRITE)


def _on_disk(handle: int, at: int, nbytes: int) -> None:
    """Wait for the data of a range, where the system can; the kernel tells an error of the disk once, here or there."""
    wait = libc("sync_file_range")
    if wait is None or wait(handle, ctypes.c_int64(at), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_ALL) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
        raise OSError(code, os.strerror(code))


def _reserve(handle: int, nbytes: int) -> bool:
    """Ask for ``nbytes`` on disk; False where the file system cannot say. A full disk is told here already."""
    fallocate = libc("fallocate")  # not posix_fallocate, which writes zeros where it is not supported
    if fallocate is None or fallocate(handle, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
        return fallocate is not None
    code = ctypes.get_errno()
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))
    return False


@cache
def libc(name: str) -> ctypes._NamedFuncPointer | None:
    """A function of the C library; None if it has none of this name (renameat2 before glibc 2.28, musl)."""
    try:
        found = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    return found  # type: ignore[no-any-return]
