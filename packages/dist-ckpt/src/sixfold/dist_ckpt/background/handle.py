"""The handle of a background save: what a trainer asks while the save goes on.

async_save --> AsyncSave (this file) --> flight.py
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from sixfold.dist_ckpt.background.flight import Flight
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError


class AsyncSave:
    """Handle of a save that ``async_save`` started.

    Attributes:
        checkpoint_dir: the folder, or a store's name; the checkpoint is there when ``wait`` returns.
        blocked_s: how long the call took, seconds; the wait for an earlier save included.
        worker_pid: process that writes for this rank.
    """

    def __init__(self, checkpoint_dir: Path | str, started: float, worker_pid: int, flight: Flight) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.blocked_s = time.monotonic() - started
        self._started = started
        self.worker_pid = worker_pid
        self._flight, self._pid = flight, os.getpid()

    def done(self) -> bool:
        """Whether the save has ended, well or not. Never blocks, no collective."""
        return self._flight.ended.is_set()

    @property
    def total_s(self) -> float | None:
        """Seconds from the call until the checkpoint was committed or the save had failed; None until then."""
        ended = self._flight.ended_at
        return None if ended is None else ended - self._started

    def progress(self) -> float:
        """Share of this rank's bytes that its worker has written, 0 to 1. Never blocks, never goes back.

        1.0 when the save has ended, well or not, and not before: at the end it waits for the disk and the other ranks.
        """
        return 1.0 if self.done() else self._flight.written_share()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is committed. May be called again, also after an error.

        Raises:
            LostPeerError: not committed ``timeout_s`` seconds from now, and it goes on; or a rank or worker is dead or
                has stood still for the ``timeout_s`` of the save.
            CheckpointError: what went wrong with the save, the same on every rank.
        """
        if self._pid != os.getpid():
            raise CheckpointError(f"the save to {self.checkpoint_dir} is of process {self._pid}; wait for it there")
        if not self._flight.ended.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            raise LostPeerError(
                f"the background save to {self.checkpoint_dir} has not ended within timeout_s={timeout_s:g}; "
                "it goes on, wait again"
            )
        self._flight.raise_error()

    def __repr__(self) -> str:
        return f"AsyncSave({str(self.checkpoint_dir)!r}, {'done' if self.done() else 'in flight'})"
