"""A file of frames as a stream: what a store without random access is written by.

    frames --> StreamFile (this file) --> Sink of a store: an upload, a buffer

A stream has no way back, so the CRC-32 of a large tensor stands behind its bytes, in a data descriptor. There is no
spool.

[Note: what is hashed is written] The caller's tensors may change while they are saved, by a thread or a process that
shares them. So each byte is read from them once: a part is copied, and hashed and written where the copy lies. Only
memory of this package's own, such as the arena of a background save, is hashed and written where it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from sixfold.dist_ckpt.formats import frame
from sixfold.dist_ckpt.formats.integrity import BlockHasher, FileDigest, Piece, crc32, cut_at_blocks, join_pieces

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
        self, dtype: torch.dtype, shape: tuple[int, ...], parts: Callable[[int], Iterable[tuple[memoryview, object]]]
    ) -> None:
        """Add a frame around the raw bytes of a tensor, which lie elsewhere.

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
    ) -> None:
        template = frame.template(dtype, shape, self.position, streamed=True)
        self.append(template.head[0])
        self._flush()
        pieces = hashed(parts(self.position), self.position, self._write)
        self._hasher.add(pieces)
        self.append(template.fill(join_pieces(pieces)).tail)

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
