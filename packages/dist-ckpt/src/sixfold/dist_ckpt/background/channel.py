"""The line between a trainer and its worker: whole messages over a socket, and no wait without an end.

    trainer <-- Channel (this file) --> worker        jobs, outcomes
    trainer <-- Gauge (this file) --> worker          how much is written

A pipe's ``send`` blocks until the other side reads: a stopped worker held the trainer for ever as soon as a job was
larger than the socket's buffer. Here each wait asks its caller again and again whether it goes on.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

_HEADER = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 20
GoesOn = Callable[[], bool]


class Channel:
    """One end of a connection; a message that is half received is gone on with by the next call.

    Args:
        end: of a stream socket. look_s: how often a wait asks whether it goes on, seconds.
    """

    def __init__(self, end: socket.socket, look_s: float = 0.5) -> None:
        self._end, self.look_s = end, look_s
        self._inbox = bytearray()

    def send(self, data: bytes, goes_on: GoesOn) -> bool:
        """Send a message; False if ``goes_on`` said no before all of it was taken.

        Raises:
            OSError: the other end is closed.
        """
        rest = memoryview(_HEADER.pack(len(data)) + data)
        self._end.settimeout(self.look_s)
        while rest:
            try:
                rest = rest[self._end.send(rest, socket.MSG_NOSIGNAL) :]
            except TimeoutError:
                if not goes_on():
                    return False
        return True

    def receive(self, goes_on: GoesOn) -> bytes | None:
        """The next message; None if ``goes_on`` said no before all of it was there.

        Raises:
            EOFError, OSError: the other end is closed.
        """
        self._end.settimeout(self.look_s)
        while len(self._inbox) < (stop := self._stop()):
            try:
                data = self._end.recv(_CHUNK_BYTES)
            except TimeoutError:
                if not goes_on():
                    return None
                continue
            if not data:
                raise EOFError("the other end is closed")
            self._inbox += data
        message = bytes(memoryview(self._inbox)[_HEADER.size : stop])
        del self._inbox[:stop]
        return message

    def close(self) -> None:
        """End the connection, also where a forked process holds a copy of this end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _stop(self) -> int:
        """Where the message ends that is being received; the end of its header, until that is there."""
        is_begun = len(self._inbox) >= _HEADER.size
        return _HEADER.size + (_HEADER.unpack_from(self._inbox)[0] if is_begun else 1)


class Gauge:
    """Numbers in one page of shared memory; the worker counts, the trainer looks, neither waits.

    Attributes:
        fd: handed to the worker when it is started.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("sixfold-gauge", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.truncate(self.fd, mmap.PAGESIZE)
        self._cells = memoryview(mmap.mmap(self.fd, mmap.PAGESIZE)).cast("q")
        self._lock = Lock()  # of the worker's threads that write

    def reset(self) -> None:
        """The trainer's, before a job."""
        self._cells[0] = 0

    def add(self, nbytes: int) -> None:
        """So many bytes more are written; 0: something else has moved."""
        with self._lock:
            self._cells[0] += nbytes
            self._cells[1] += 1

    @property
    def written(self) -> int:
        """Bytes written."""
        return self._cells[0]

    @property
    def moves(self) -> int:
        """Differs from what it was if anything has moved."""
        return self._cells[1]

    def close(self) -> None:
        """Give the descriptor back; the memory goes with its last mapping."""
        os.close(self.fd)
