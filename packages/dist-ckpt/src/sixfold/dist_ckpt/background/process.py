"""The worker process as its trainer holds it: started, given a job, asked whether it lives, ended.

AsyncSaver --> Worker (this file) --> python -m sixfold.dist_ckpt._worker
trainer <-- Gauge (this file) --> worker          how much is written
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from threading import Lock, Thread

_WORKER = ("-P", "-m", "sixfold.dist_ckpt._worker")
_CLOSE_S = 5.0


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


def _start_worker(fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, *_WORKER, *map(str, fds), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)


class Worker:
    """The process, started and not waited for: it imports torch while the trainer copies.

    Attributes:
        connection: jobs go there, outcomes come back; ``poll`` it before ``recv_bytes``.
    """

    def __init__(self, arena_fd: int) -> None:
        self.connection, theirs = Pipe()
        self.gauge, self._is_killed = Gauge(), False
        fds = theirs.fileno(), self.gauge.fd, arena_fd
        # Blocked in the worker for good, from its first instruction on: Ctrl-C and a launcher's SIGTERM reach a whole
        # process group, and a trainer answers them by ending in order, after its save in flight.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process = _start_worker(fds)
        except BaseException:
            self.connection.close()
            self.gauge.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def hand_over(self, job: bytes) -> None:
        """Send a job from a thread of its own: a stopped worker takes none, and that of a dead one is told of later."""

        def send() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
            with suppress(OSError):
                self.connection.send_bytes(job)

        Thread(target=send, daemon=True).start()

    def is_alive(self) -> bool:
        return not self._is_killed and self.process.poll() is None

    def processor_ticks(self) -> int:
        """Processor time that it has used, in clock ticks; 0 if it is gone."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])  # utime and stime of proc(5), counted from the state on

    def stop(self) -> None:
        """Tell it to end, and see that it does."""
        if self.is_alive():
            with suppress(OSError, subprocess.TimeoutExpired):
                self.connection.send_bytes(b"")
                self.process.wait(_CLOSE_S)
        self.kill()
        self.connection.close()
        self.gauge.close()

    def kill(self) -> str:
        """End it at once, if it has not ended; says how it ended."""
        self.process.kill()
        self._is_killed = True  # also if it hangs in the system, where SIGKILL waits
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)
        return f"exit code {self.process.poll()}"
