"""The worker process as its trainer holds it: started, given a job, asked whether it lives, ended.

AsyncSaver --> Worker (this file) --> python -m sixfold.dist_ckpt._worker, or a fork of this process
trainer <-- ProgressCounter (this file) --> worker          how much is written
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread

from sixfold.dist_ckpt.background.arena import ProgressCounter

_WORKER = ("-P", "-m", "sixfold.dist_ckpt._worker")
_CLOSE_S = 5.0
_ASK_TO_STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def _start_worker(fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, *_WORKER, *map(str, fds), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)


class ForkedWorker:
    """What ``Worker`` uses of ``Popen``, of a fork of this process, which calls ``serve(*fds, trainer)``."""

    def __init__(self, fds: tuple[int, ...], serve: Callable[..., None]) -> None:
        self._status: int | None = None
        trainer = os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for name in os.listdir("/proc/self/fd"):  # as behind exec: its trainer's end of the line least of all
                    if int(name) > 2 and int(name) not in fds:
                        with suppress(OSError):
                            os.close(int(name))
                serve(*fds, trainer)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float) -> int:
        """The exit status, when it has ended."""
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked worker", timeout)
            time.sleep(0.002)
        return status

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Worker:
    """The process, started and not waited for: it imports torch while the trainer goes on.

    Args:
        serve: it is a fork of this process, which calls this; None: it starts as a program.
    Attributes:
        connection: jobs go there, outcomes come back; ``poll`` it before ``recv_bytes``.
    """

    def __init__(self, arena_fd: int, serve: Callable[..., None] | None = None) -> None:
        self.connection, theirs = Pipe()
        self.counter, self._is_killed = ProgressCounter(arena_fd), False
        fds = theirs.fileno(), arena_fd
        # Blocked in the worker for good, from its first instruction on: Ctrl-C, a hang-up, a launcher's SIGTERM and a
        # cluster's SIGUSR1 reach a whole process group, and a trainer answers them by ending in order, after its save
        # in flight.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # asked first: the call that blocks may itself raise
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, _ASK_TO_STOP)
            self.process = _start_worker(fds) if serve is None else ForkedWorker(fds, serve)
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

    def kill(self) -> str:
        """End it at once, if it has not ended; says how it ended."""
        self.process.kill()
        self._is_killed = True  # also if it hangs in the system, where SIGKILL waits
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)
        return f"exit code {self.process.poll()}"
