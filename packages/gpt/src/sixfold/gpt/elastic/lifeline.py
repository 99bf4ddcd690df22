"""What a member has started ends with the supervisor, also if a signal has stopped it.

    processes.py holds one end of a pipe --> its end --> the kernel kills the children of members   (this file)

A worker that writes snapshots outlives its rank, so that what was handed over is written. It sees the end of its rank
and ends, but not if it is stopped. The kernel tells the *owner* of a file by a signal when something happens to it, and
the signal may be SIGKILL, which a stopped process takes, too. Nobody writes to this pipe: all that happens is its end.
"""

from __future__ import annotations

import fcntl
import os
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path


@dataclass(slots=True)
class Lifeline:
    """The other end of the pipe, in a member."""

    end: Connection
    _tied: dict[int, int] = field(default_factory=dict)  # files, by the process that owns them

    def tie_children(self) -> None:
        """The children that this process has now end with the pipe."""
        try:
            found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        except OSError:  # a kernel that does not say
            return
        for child in map(int, found):
            if child not in self._tied:
                # Opened anew: an owner is of an open file, which all others of the pipe's end have in common.
                file = os.open(f"/proc/self/fd/{self.end.fileno()}", os.O_RDONLY | os.O_NONBLOCK)
                fcntl.fcntl(file, fcntl.F_SETOWN, child)
                fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGKILL)
                fcntl.fcntl(file, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
                self._tied[child] = file
        for gone in self._tied.keys() - {*map(int, found)}:  # its number may be another's one day
            os.close(self._tied.pop(gone))
