"""A file of frames as a stream: what a store without random access is written by.

    frames --> StreamFile (this file) --> Sink of a store: an upload, a buffer

A frame's head holds the CRC-32 of the bytes behind it, and a stream has no way back: the bytes of a large tensor are
read twice where they lie, once to hash them and once to send them. Nothing is copied, and there is no spool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol

from sixfold.dist_ckpt.files.crc import Piece, crc32, join_pieces
from sixfold.dist_ckpt.files.frame import Frame
from sixfold.dist_ckpt.files.integrity import BlockHasher, FileDigest, cut_at_blocks

_GATHER_BYTES = 1 << 20


class Sink(Protocol):
    """A file that is written from start to end, and appears when it is closed."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Take all of ``data``; its memory may change afterwards."""
        ...

    def close(self) -> None:
        """Make the file appear, whole and durable."""
        ...

    def discard(self) -> None:
        """Forget what was written; the file does not appear."""
        ...


class StreamFile:
    """A ``PartFile`` (store.py) over a sink. As a context it discards what was not finished.

    Args:
        moved: told of each part that the sink has taken, by its bytes.
    """

    def __init__(self, sink: Sink, moved: Callable[[int], None] | None = None) -> None:
        self._sink, self._moved = sink, moved or (lambda nbytes: None)
        self._hasher = BlockHasher()
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._is_finished = False

    @property
    def position(self) -> int:
        return self._hasher.size + self._gathered_bytes

    def add(self, parts: Sequence[bytes], nbytes: int) -> None:
        self._gathered += parts
        self._gathered_bytes += nbytes
        if self._gathered_bytes >= _GATHER_BYTES:
            self._flush()

    def add_large(
        self,
        head_bytes: int,
        parts: Callable[[], Iterable[tuple[memoryview, object]]],
        frame: Callable[[int], Frame],
    ) -> None:
        at, pieces = self.position + head_bytes, list[Piece]()
        for raw, _ in parts():
            for piece in cut_at_blocks(raw, at):
                pieces.append(Piece(crc32(piece), len(piece)))
                at += len(piece)
        head, tail = frame(join_pieces(pieces))
        self.add((head,), len(head))
        self._flush()
        self._hasher.add(pieces)
        for raw, _ in parts():
            for piece in cut_at_blocks(raw, 0):
                self._send(piece)
        self.add((tail,), len(tail))

    def append(self, data: bytes) -> None:
        self.add((data,), len(data))

    def finish(self) -> FileDigest:
        """Close the sink; the digests of what it took."""
        self._flush()
        self._sink.close()
        self._is_finished = True
        return self._hasher.finish()

    def _flush(self) -> None:
        if self._gathered:
            data = b"".join(self._gathered)
            self._gathered, self._gathered_bytes = [], 0
            self._hasher.update(data)
            self._send(data)

    def _send(self, data: bytes | memoryview) -> None:
        self._sink.write(data)
        self._moved(len(data))

    def __enter__(self) -> StreamFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_finished:
            self._sink.discard()
