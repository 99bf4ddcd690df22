"""A file of frames as a stream: what a store without random access is written by.

    frames --> StreamFile (this file) --> Sink of a store: an upload, a buffer

A frame's head holds the CRC-32 of the bytes behind it, and a stream has no way back: the bytes of a large tensor are
read twice where they lie, once to hash them and once to send them. Nothing is copied, and there is no spool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from sixfold.dist_ckpt.files.crc import Piece, crc32, join_pieces
from sixfold.dist_ckpt.files.frame import Frame
from sixfold.dist_ckpt.files.integrity import BlockHasher, FileDigest, cut_at_blocks

GATHER_BYTES = 1 << 20


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
        self,
        head_bytes: int,
        parts: Callable[[], Iterable[tuple[memoryview, object]]],
        frame: Callable[[int], Frame],
    ) -> None:
        """Add a frame around raw bytes that lie elsewhere.

        Args:
            parts: gives the bytes in their order, each with the owner of its memory; may be called twice. They do
                not change until the file is finished.
            frame: makes head, of ``head_bytes``, and tail from the CRC-32 of the raw bytes.
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
    write: Callable[[memoryview, int, object], None] | None = None,
) -> list[Piece]:
    """The CRC-32s of bytes that will lie at byte ``at`` of a file, block by block; each is written then."""
    pieces = list[Piece]()
    for raw, owner in parts:
        for piece in cut_at_blocks(raw, at):
            pieces.append(Piece(crc32(piece), len(piece)))
            if write is not None:
                write(piece, at, owner)
            at += len(piece)
    return pieces


class StreamFile(PartFile):
    """A file over a sink. As a context it discards what was not finished."""

    def __init__(self, sink: Sink, moved: Callable[[int], None] | None = None) -> None:
        super().__init__(moved)
        self._sink, self._is_finished = sink, False

    def add_large(
        self,
        head_bytes: int,
        parts: Callable[[], Iterable[tuple[memoryview, object]]],
        frame: Callable[[int], Frame],
    ) -> None:
        pieces = hashed(parts(), self.position + head_bytes)
        head, tail = frame(join_pieces(pieces))
        self.append(head)
        self._flush()
        self._hasher.add(pieces)
        for raw, _ in parts():
            for piece in cut_at_blocks(raw, 0):
                self._write(piece, 0)
        self.append(tail)

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
