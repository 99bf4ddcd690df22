"""A background save in flight, as its caller holds it.

async_save --> AsyncSave (this file) <-- outcome <-- worker_watch.py, in a thread <-- worker process
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from sixfold.dist_ckpt.background.fence import Fence
from sixfold.dist_ckpt.background.lazy_copy import LazyCopy
from sixfold.dist_ckpt.background.lost_ranks import Job
from sixfold.dist_ckpt.background.status_and_heartbeats import Heartbeat
from sixfold.dist_ckpt.background.worker_process import Worker
from sixfold.dist_ckpt.background.worker_watch import WorkerWatch, error_of_thread
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError
from sixfold.dist_ckpt.progress import Progress

_TIDY_S = 2.0  # the longest that a wait for a save to a folder lasts beyond the commit
_NEARLY = 0.99  # progress of what is written whole and not yet committed


class AsyncSave:
    """Handle of a save that ``async_save`` started.

    A thread gives the job to the worker and waits for the outcome. The thread keeps the saver alive. The interpreter
    waits at its end for the saves of all savers. A worker whose outcome the thread has not received is killed.

    Attributes:
        checkpoint_dir: the folder, or a store's name; the checkpoint is there when ``wait`` returns.
        blocked_s: how long the call took, seconds; the wait for an earlier save included.
        worker_pid: process that writes for this rank.
    """

    def __init__(
        self,
        saver: object,
        worker: Worker,
        job: Job,
        heartbeat: Heartbeat | None,
        progress: Progress | None,
        started: float,
        settle: Callable[[Callable[[], object]], object],
        lazy: LazyCopy | None = None,
    ) -> None:
        self._lazy = lazy
        worker.counter.fence = Fence.PASSED if lazy is None else Fence.AWAITED
        self.checkpoint_dir: Path | str = job.content.store.local_folder or job.ticket.save.target
        self.worker_pid = worker.process.pid
        self._saver: object | None = saver
        self._worker, self._watch = worker, WorkerWatch(worker, job, heartbeat, progress, settle)
        self._started, self._pid = started, os.getpid()
        self.blocked_s = time.monotonic() - started
        self._ended = threading.Event()
        self._total_s: float | None = None
        # Only an outcome takes it away: a thread that ends without one has not saved anything.
        self._error: CheckpointError | None = CheckpointError(
            f"the background save to {job.ticket.save.target} ended without an outcome; save again"
        )
        self._is_told, self._value = False, None  # what the job's ``commit`` gave, in this rank's worker
        self._mine = threading.Lock()  # of who begins the flight, or gives it up before it begins
        # No daemon: at its end Python from 3.12 on begins threads, as this one does, until those have ended.
        self._thread = threading.Thread(target=self._await_outcome, name="sixfold-async-save", daemon=False)

    def done(self) -> bool:
        """Whether the save has ended, well or not. Never blocks, no collective."""
        return self._ended.is_set()

    @property
    def total_s(self) -> float | None:
        """Seconds from the call until the checkpoint was committed or the save had failed; None until then."""
        return self._total_s

    def progress(self) -> float:
        """Share of this rank's bytes that its worker has written, 0 to 1. Never blocks, never goes back.

        1.0 when the save has ended, well or not, and not before: at the end it waits for the disk and the other ranks.
        """
        return 1.0 if self.done() else min(_NEARLY, self._watch.written_share())

    def fence(self) -> None:
        """Return when the values of a lazy save are copied; at once for another. Then tensors may change.

        Not collective; nothing is committed before it. Call it in the thread that changes the tensors.

        Raises:
            CheckpointError: a tensor was changed before; ``wait`` raises on all ranks, and nothing is committed.
        """
        if self._lazy is not None:
            self._lazy.pass_fence(self._told_worker)

    def fence_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the next ``optimizer.step()`` call ``fence`` before all else, once; of each optimizer that has a step.

        It is a step hook of torch, which optimizers of sixfold.fsdp and of torch's FSDP call, too.
        """

        def before(*_: object) -> None:
            hook.remove()
            self.fence()

        hook = optimizer.register_step_pre_hook(before)

    def _told_worker(self, fence: Fence) -> None:
        self._worker.counter.fence = fence

    def _await_end(self, timeout_s: float | None = None) -> bool:
        """Whether it has ended, well or not, within this time."""
        with suppress(CheckpointError):  # which the outcome has
            self.fence()
        return self._ended.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is committed. May be called again, also after an error.

        Raises:
            LostPeerError: not committed ``timeout_s`` seconds from now: the save goes on. Or a rank or worker is dead,
                or made no progress for the ``timeout_s`` of the save.
            CheckpointError: what went wrong with the save, the same on every rank.
        """
        if self._pid != os.getpid():
            raise CheckpointError(f"the save to {self.checkpoint_dir} is of process {self._pid}; wait for it there")
        if not self._await_end(timeout_s):
            raise LostPeerError(
                f"the background save to {self.checkpoint_dir} has not ended within timeout_s={timeout_s:g}; "
                "it goes on, wait again"
            )
        self._is_told = True
        if self._error is not None:
            raise self._error.with_traceback(None)

    def __repr__(self) -> str:
        return f"AsyncSave({str(self.checkpoint_dir)!r}, {'done' if self.done() else 'in flight'})"

    def _is_given_up(self) -> bool:
        """Whether an interrupt of its start came before anything had begun; then nothing will, and nobody waits."""
        if not self._mine.acquire(blocking=False):
            return False
        self._ended.set()
        return True

    def _await_outcome(self) -> None:
        if not self._mine.acquire(blocking=False):
            return
        try:
            self._value, self._error, _ = self._watch.outcome()
        except BaseException as error:  # whatever it is, the trainer must hear of it
            self._worker.kill()  # the next call fills the arena anew
            self._error = error_of_thread(error)
        finally:
            self._total_s = time.monotonic() - self._started
            # The other ranks of this host acknowledge at once, so that a folder is left without the status; for those
            # that look now and then nobody waits.
            tidied = threading.Timer(_TIDY_S if isinstance(self.checkpoint_dir, Path) else 0.0, self._ended.set)
            try:
                tidied.start()
                self._watch.acknowledge()
            finally:
                tidied.cancel()
                self._ended.set()
                self._saver = None
