"""A background save in flight: its handle, and the thread that watches its worker.

async_save --> AsyncSave (this file) <-- outcome <-- worker process
                      |
                      +--> heartbeat in the status
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path

from sixfold.dist_ckpt.background import lost_workers
from sixfold.dist_ckpt.background.lost_workers import Job
from sixfold.dist_ckpt.background.status_and_heartbeats import Heartbeat, StallTimer
from sixfold.dist_ckpt.background.worker_process import Worker
from sixfold.dist_ckpt.collectives.exchange import Outcome
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError
from sixfold.dist_ckpt.progress import Meter, Progress

_GLANCE_S = 1.0  # between two looks at the counter, which cost nothing
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
    ) -> None:
        self.checkpoint_dir: Path | str = job.content.store.local_folder or job.ticket.save.target
        self.worker_pid = worker.process.pid
        self._saver: object | None = saver
        self._worker, self._job, self._heartbeat, self._progress = worker, job, heartbeat, progress
        self._started, self._pid = started, os.getpid()
        self.blocked_s = time.monotonic() - started
        self._ended = threading.Event()
        self._total_s: float | None = None
        # Only an outcome takes it away: a thread that ends without one has not saved anything.
        self._error: CheckpointError | None = CheckpointError(
            f"the background save to {job.ticket.save.target} ended without an outcome; save again"
        )
        self._is_told = False
        self._meter, self._file_bytes = Meter(None), 0  # made in the thread
        self._counter, self._stall, self._beat_at = worker.counter, StallTimer(), 0.0
        self._counter.reset()
        self._idle_moves = self._counter.moves
        self._look_s = min(_GLANCE_S, job.beat_s)
        self._mine = threading.Lock()  # of who begins the flight, or gives it up before it begins
        # No daemon: at its end Python from 3.12 on begins threads, as this one does, until those have ended.
        self._thread = threading.Thread(target=self._watch, name="sixfold-async-save", daemon=False)

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
        return 1.0 if self.done() else min(_NEARLY, self._counter.written / (self._file_bytes or 1))

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is committed. May be called again, also after an error.

        Raises:
            LostPeerError: not committed ``timeout_s`` seconds from now: the save goes on. Or a rank or worker is dead,
                or made no progress for the ``timeout_s`` of the save.
            CheckpointError: what went wrong with the save, the same on every rank.
        """
        if self._pid != os.getpid():
            raise CheckpointError(f"the save to {self.checkpoint_dir} is of process {self._pid}; wait for it there")
        if not self._ended.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
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

    def _watch(self) -> None:
        if not self._mine.acquire(blocking=False):
            return
        try:
            self._error = self._outcome().error
        except BaseException as error:  # whatever it is, the trainer must hear of it
            self._worker.kill()  # the next call fills the arena anew
            self._error = _of_thread(error)
        finally:
            self._total_s = time.monotonic() - self._started
            # The other ranks of this host acknowledge at once, so that a folder is left without the status; for those
            # that look now and then nobody waits.
            tidied = threading.Timer(_TIDY_S if isinstance(self.checkpoint_dir, Path) else 0.0, self._ended.set)
            try:
                tidied.start()
                self._acknowledge()
            finally:
                tidied.cancel()
                self._ended.set()
                self._saver = None

    def _outcome(self) -> Outcome:
        worker, rank = self._worker, self._job.rank
        try:
            self._meter = Meter(self._progress, lambda: self._job.content.total_bytes, in_call=False)
            self._file_bytes = self._job.content.file_bytes
            # Pickled here, where the trainer does not wait for it.
            job = pickle.dumps(self._job, protocol=5)
            worker.hand_over(job)
            while not worker.connection.poll(self._look_s):
                if not self._moves_on():
                    reason = "hangs and was killed"
                    break
            else:
                outcome = Outcome.decode(worker.connection.recv_bytes(), f"the worker of rank {rank}")
                if outcome.error is None:
                    self._meter.finish()
                return outcome
        except (OSError, EOFError):
            reason = "died"
        except BaseException as error:  # of the caller's progress, or else this thread's own
            worker.kill()
            known = _of_thread(error)
            outcome = lost_workers.report_dead_worker(
                self._job, f"rank {rank}: {known}", self._counter, CheckpointError
            )
            return Outcome(error=outcome.error or CheckpointError(f"{known}. The checkpoint is committed all the same"))
        ending = worker.kill()
        return lost_workers.report_dead_worker(
            self._job, f"the worker of rank {rank} {reason} ({ending})", self._counter
        )

    def _moves_on(self) -> bool:
        """Whether the worker has moved lately; shows its count, and that this rank lives, to the other ranks."""
        moves = self._counter.moves
        if moves == self._idle_moves:  # it imports torch, or takes the job apart
            moves += self._worker.processor_ticks()
        if self._heartbeat is not None and time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + self._job.beat_s
            self._heartbeat.beat(moves)
        self._meter.reach(self._counter.written)
        still_s, job = self._stall.seconds(moves), self._job
        if still_s < job.patience_s(lost_workers.OWN_WORKER):
            return True
        # The worker of another rank than the first that has done its share waits for the outcome.
        is_written = job.rank > 0 and lost_workers.status_of(job).has(f"rank-{job.rank}")
        return is_written and still_s < job.patience_s(lost_workers.END)

    def _acknowledge(self) -> None:
        if self._heartbeat is None:
            return
        self._heartbeat.close()
        status = lost_workers.status_of(self._job)
        if self._job.rank == 0:
            lost_workers.remove(self._job, status)
        else:
            status.leave(self._job.rank)


def _of_thread(error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"the thread that watches a background save: {type(error).__name__}: {error}")
