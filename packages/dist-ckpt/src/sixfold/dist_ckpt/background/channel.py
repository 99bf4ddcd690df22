"""The line between a trainer and its worker: whole messages over a socket, and no wait without an end.

    trainer <-- Channel (this file) --> worker        jobs, outcomes
    trainer <-- Gauge (this file) --> worker          how much is written, who listens

A pipe's ``send`` blocks until the other side reads: a stopped worker held the trainer for ever as soon as a job was
larger than the socket's buffer. Here each wait asks its caller again and again whether it goes on.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

_HEADER = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20
GoesOn = Callable[[], bool]


class Channel:
    """One end of a connection; a message that is half sent or half received is gone on with by the next call.

    Args:
        end: of a stream socket. look_s: how often a wait asks whether it goes on, seconds.
    """

    def __init__(self, end: socket.socket, look_s: float = 0.5) -> None:
        self._end, self.look_s = end, look_s
        self._inbox = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, data: bytes, goes_on: GoesOn) -> bool:
        """Send a message; False if ``goes_on`` said no before all of it was taken.

        Raises:
            OSError: the other end is closed.
        """
        rest = memoryview(_HEADER.pack(len(data)) + data)
        while rest:
            if self._is_ready(select.POLLOUT):
                with suppress(BlockingIOError):
                    rest = rest[self._end.send(rest, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
            elif not goes_on():
                return False
        return True

    def receive(self, goes_on: GoesOn) -> bytes | None:
        """The next message; None if ``goes_on`` said no before all of it was there.

        Raises:
            EOFError, OSError: the other end is closed.
        """
        while (message := self._taken()) is None:
            if self._is_ready(select.POLLIN):
                with suppress(BlockingIOError):
                    data = self._end.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
                    if not data:
                        raise EOFError("the other end is closed")
                    self._inbox += data
            elif not goes_on():
                return None
        return message

    def close(self) -> None:
        """End the connection, also where a forked process holds a copy of this end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _taken(self) -> bytes | None:
        if len(self._inbox) < _HEADER.size:
            return None
        stop = _HEADER.size + _HEADER.unpack_from(self._inbox)[0]
        if len(self._inbox) < stop:
            return None
        message = bytes(memoryview(self._inbox)[_HEADER.size : stop])
        del self._inbox[:stop]
        return message

    def _is_ready(self, event: int) -> bool:
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(self.look_s * 1000))


class Gauge:
    """Numbers in one page of shared memory; the worker counts, the trainer looks, neither waits.

    Attributes:
        fd: handed to the worker when it is started.
    """

    _WRITTEN, _TOTAL, _MOVES, _HEARD_NS = range(4)

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("sixfold-gauge", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.truncate(self.fd, mmap.PAGESIZE)
        self._cells = memoryview(mmap.mmap(self.fd, mmap.PAGESIZE)).cast("q")
        self._lock = Lock()  # of the worker's threads that write

    def reset(self) -> None:
        """The trainer's, before a job."""
        self._cells[self._WRITTEN] = self._cells[self._TOTAL] = 0
        self.hear()

    def expect(self, nbytes: int) -> None:
        """The bytes of this rank's file, known before the first is written."""
        self._cells[self._TOTAL] = nbytes
        self.add(0)

    def add(self, nbytes: int) -> None:
        """So many bytes more are written; 0: something else has moved."""
        with self._lock:
            self._cells[self._WRITTEN] += nbytes
            self._cells[self._MOVES] += 1

    def hear(self) -> None:
        """The trainer's: it listens."""
        self._cells[self._HEARD_NS] = time.monotonic_ns()

    @property
    def silent_s(self) -> float:
        """For how long the trainer, whose clock is this host's, has not listened."""
        return (time.monotonic_ns() - self._cells[self._HEARD_NS]) / 1e9

    @property
    def moves(self) -> int:
        """Differs from what it was if anything has moved."""
        return self._cells[self._MOVES]

    @property
    def written(self) -> int:
        """Bytes written."""
        return self._cells[self._WRITTEN]

    @property
    def share(self) -> float:
        """Written of what is to be written, 0 to 1."""
        total = self._cells[self._TOTAL]
        return min(1.0, self._cells[self._WRITTEN] / total) if total else 0.0

    def close(self) -> None:
        """Give the descriptor back; the memory goes with its last mapping."""
        os.close(self.fd)
