"""The trainer's watch over its own worker during one save: it notices that the worker died or hangs.

    Job --> worker process --> outcome --> WorkerWatch (this file) --> AsyncSave
                                               |
                                               +--> heartbeat in the status, progress of the caller

It runs in the thread of handle.py. What became of other ranks is lost_ranks.py.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

from sixfold.dist_ckpt.background import lost_ranks
from sixfold.dist_ckpt.background.lost_ranks import Job
from sixfold.dist_ckpt.background.status_and_heartbeats import Heartbeat, StallTimer
from sixfold.dist_ckpt.background.worker_process import Worker
from sixfold.dist_ckpt.collectives.exchange import Outcome
from sixfold.dist_ckpt.errors import CheckpointError, StorageError
from sixfold.dist_ckpt.progress import Meter, Progress

_GLANCE_S = 1.0  # between two looks at the counter, which cost nothing


class WorkerWatch:
    """One rank's worker and its job, from the hand-over to the outcome."""

    def __init__(
        self,
        worker: Worker,
        job: Job,
        heartbeat: Heartbeat | None,
        progress: Progress | None,
        settle: Callable[[Callable[[], object]], object],
    ) -> None:
        self._worker, self._job, self._heartbeat, self._progress = worker, job, heartbeat, progress
        self._settle = settle
        self._meter, self._file_bytes = Meter(None), 0  # made in the thread
        self._counter, self._stall, self._beat_at = worker.counter, StallTimer(), 0.0
        self._counter.reset()
        self._idle_moves = self._counter.moves
        self._look_s = min(_GLANCE_S, job.beat_s)

    def written_share(self) -> float:
        """Bytes that the worker has written, of those of this rank."""
        return self._counter.written / (self._file_bytes or 1)

    def outcome(self) -> Outcome:
        """Hand the job over and wait for its outcome; of a worker that died or hangs, what all ranks make of that."""
        worker, who = self._worker, self._job.who
        try:
            self._meter = Meter(self._progress, lambda: self._job.content.total_bytes, in_call=False)
            self._file_bytes = self._job.content.file_bytes
            # Pickled here, where the trainer does not wait for it.
            job = pickle.dumps(self._job, protocol=5)
            self._settle(self._settled_more)
            self._idle_moves = self._counter.moves
            worker.hand_over(job)
            while not worker.connection.poll(self._look_s):
                if not self._moves_on():
                    reason = "hangs and was killed"
                    break
            else:
                outcome = Outcome.decode(worker.connection.recv_bytes(), f"the worker of {who}")
                if outcome.error is None:
                    self._meter.finish()
                return outcome
        except (OSError, EOFError):
            reason = "died"
        except BaseException as error:  # of the caller's progress, or else this thread's own
            worker.kill()
            known = error_of_thread(error)
            kind = StorageError if isinstance(known, StorageError) else CheckpointError
            outcome = lost_ranks.report_dead_worker(self._job, f"{who}: {known}", self._counter, kind)
            return Outcome(error=outcome.error or CheckpointError(f"{known}. The checkpoint is committed all the same"))
        ending = worker.kill()
        return lost_ranks.report_dead_worker(self._job, f"the worker of {who} {reason} ({ending})", self._counter)

    def _settled_more(self) -> None:
        """A piece is in the arena: this rank is not standing still."""
        self._counter.add(0)
        self._moves_on()

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
        if still_s < job.patience_s(lost_ranks.OWN_WORKER):
            return True
        # The worker of another rank than the first that has done its share waits for the outcome.
        is_written = job.rank > 0 and lost_ranks.status_of(job).has(f"rank-{job.rank}")
        return is_written and still_s < job.patience_s(lost_ranks.END)

    def acknowledge(self) -> None:
        """This rank has the outcome: the other ranks need not wait for it, and the first one removes the status."""
        if self._heartbeat is None:
            return
        self._heartbeat.close()
        status = lost_ranks.status_of(self._job)
        if self._job.rank == 0:
            lost_ranks.remove(self._job, status)
        else:
            status.leave(self._job.rank)


def error_of_thread(error: BaseException) -> CheckpointError:
    """What the caller is told of an error that ended the thread of a watch."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"the thread that watches a background save: {type(error).__name__}: {error}")
