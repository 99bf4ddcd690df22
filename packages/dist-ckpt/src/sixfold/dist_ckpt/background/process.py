"""The worker process as its trainer holds it: started, asked whether it lives, ended.

AsyncSaver --> Worker (this file) --> python -m sixfold.dist_ckpt._worker
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from sixfold.dist_ckpt.background.channel import Channel, Gauge

_WORKER = ("-P", "-m", "sixfold.dist_ckpt._worker")
_CLOSE_S = 5.0


def _start_worker(fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, *_WORKER, *map(str, fds), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)


class Worker:
    """The process, started and not waited for: it imports torch while the trainer copies."""

    def __init__(self, arena_fd: int) -> None:
        ours, theirs = socket.socketpair()
        self.channel, self.gauge = Channel(ours), Gauge()
        self._is_killed = False
        fds = theirs.fileno(), self.gauge.fd, arena_fd
        # Blocked in the worker for good, from its first instruction on: Ctrl-C and a launcher's SIGTERM reach a whole
        # process group, and a trainer answers them by ending in order, after its save in flight.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self.process = _start_worker(fds)
        except BaseException:
            self.channel.close()
            self.gauge.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

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
        """Close the connection, which ends it, and see that it does."""
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)
        self.kill()
        self.gauge.close()

    def kill(self) -> str:
        """End it at once, if it has not ended; says how it ended."""
        self.process.kill()
        self._is_killed = True  # also if it hangs in the system, where SIGKILL waits
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_S)
        return f"exit code {self.process.poll()}"
