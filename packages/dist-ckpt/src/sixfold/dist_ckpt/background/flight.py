"""A save in flight, as its trainer sees it: a thread that watches the worker and shows that this rank lives.

Job --> worker process --> outcome --> Flight (this file) --> AsyncSave
                                          |
                                          +--> sign of life on the board
"""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

from sixfold.dist_ckpt.background import control
from sixfold.dist_ckpt.background.board import Sign, Stillness
from sixfold.dist_ckpt.background.control import Job
from sixfold.dist_ckpt.background.process import Worker
from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.ranks.exchange import Outcome

_GLANCE_S = 1.0  # between two looks at the gauge, which cost nothing
_TIDY_S = 2.0  # the longest that a wait for a save to a folder lasts beyond the commit
_NEARLY = 0.99  # progress of what is written whole and not yet committed


class Flight:
    """One save in flight: a thread hands the job to the worker and waits for what becomes of it.

    It keeps its saver alive, whoever else does: the end of the interpreter waits for the saves of all savers.
    """

    def __init__(
        self, saver: object, worker: Worker, job: Job, sign: Sign | None, progress: Progress | None = None
    ) -> None:
        self._progress, self._meter = progress, Meter(None)  # the first call is made in the thread
        self.ended = threading.Event()
        self.ended_at: float | None = None  # on the monotonic clock
        # Only an outcome takes it away: a thread that ends without one has not saved anything.
        self.error: CheckpointError | None = CheckpointError(
            f"the background save to {job.ticket.save.target} ended without an outcome; save again"
        )
        self.told = False
        self._saver: object | None = saver
        self._worker, self._job, self._sign = worker, job, sign
        target = job.ticket.save.target
        self._is_local = job.content.store.local_folder is not None
        self.target: Path | str = job.content.store.local_folder or target
        self.worker_pid = worker.process.pid
        self._gauge, self._still = worker.gauge, Stillness()
        self._gauge.reset()
        self._idle_moves = self._gauge.moves
        self._worker.channel.look_s, self._beat_at = min(_GLANCE_S, job.beat_s), 0.0
        self._mine = threading.Lock()  # of who begins the flight, or gives it up before it begins
        self._thread = threading.Thread(target=self._watch, name="sixfold-async-save", daemon=True)

    def start(self) -> None:
        """Begin; whoever calls this has recorded the flight before."""
        self._thread.start()

    def is_given_up(self) -> bool:
        """Whether an interrupt of ``start`` came before anything had begun; then nothing will."""
        return self._mine.acquire(blocking=False)

    def join(self) -> None:
        """Wait for the end, which has a deadline of its own; arena and worker are free then."""
        self.ended.wait()

    def leave(self) -> None:
        """Wait until the board is left too, or taken away."""
        self.join()
        self._thread.join()

    @property
    def has_left(self) -> bool:
        """Whether nothing of it goes on."""
        return self.ended.is_set() and not self._thread.is_alive()

    def written_share(self) -> float:
        """As the worker counts; what is written is neither on disk nor committed for that."""
        return min(_NEARLY, self._gauge.share)

    def raise_error(self) -> None:
        """What went wrong, if anything did."""
        self.told = True
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _watch(self) -> None:
        if not self._mine.acquire(blocking=False):
            return
        try:
            self.error = self._outcome().error or self._told_all()
        except BaseException as error:  # whatever it is, the trainer must hear of it
            self._worker.kill()  # the next call fills the arena anew
            self.error = _of_thread(error)
        finally:
            self.ended_at = time.monotonic()
            # The other ranks of this host acknowledge at once, so that a folder is left without the board; for those
            # that look now and then nobody waits.
            tidied = threading.Timer(_TIDY_S if self._is_local else 0.0, self.ended.set)
            try:
                tidied.start()
                self._acknowledge()
            finally:
                tidied.cancel()
                self.ended.set()
                self._saver = None

    def _outcome(self) -> Outcome:
        channel = self._worker.channel
        try:
            self._meter = Meter(self._progress, lambda: self._job.content.total_bytes, in_call=False)
            # Pickled here, where the trainer does not wait for it.
            if channel.send(pickle.dumps(self._job, protocol=5), lambda: self._moves_on(control.OWN_WORKER)):
                outcome = self._reported(control.OWN_WORKER)
                if outcome is None and self._has_record():
                    outcome = self._reported(control.END)
                if outcome is not None:
                    return outcome
            reason = "hangs and was killed"
        except (OSError, EOFError):
            reason = "died"
        except BaseException as error:  # of the caller's progress, or else this thread's own
            self._worker.kill()
            known = _of_thread(error)
            reason = f"rank {self._job.rank}: {known}"
            outcome = control.speak_for_worker(self._job, reason, self._gauge, CheckpointError)
            return Outcome(error=outcome.error or _of_committed(known))
        ending = self._worker.kill()
        reason = f"the worker of rank {self._job.rank} {reason} ({ending})"
        return control.speak_for_worker(self._job, reason, self._gauge)

    def _reported(self, steps: float) -> Outcome | None:
        """What the worker says of this save, as long as it moves; what it says of another one is passed over."""
        while (report := self._worker.channel.receive(lambda: self._moves_on(steps))) is not None:
            if (outcome := self._job.outcome_in(report)) is not None:
                return outcome
        return None

    def _moves_on(self, steps: float) -> bool:
        """Whether the worker has moved lately; shows its count, and that this rank lives, to the other ranks."""
        moves = self._gauge.moves
        if moves == self._idle_moves:  # it imports torch, or takes the job apart
            moves += self._worker.processor_ticks()
        self._gauge.hear()
        if self._sign is not None and time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + self._job.beat_s
            self._sign.beat(moves)
        self._count()
        return self._still.of(moves) < self._job.patience_s(steps)

    def _count(self) -> None:
        """Tell the caller's progress what the worker has counted, from this thread."""
        self._meter.reach(self._gauge.written)

    def _told_all(self) -> CheckpointError | None:
        """The last call of the caller's progress, after the commit."""
        try:
            self._count()
            self._meter.finish()
        except CheckpointError as error:
            return _of_committed(error)
        return None

    def _has_record(self) -> bool:
        """Whether the worker of another rank than the first has done its share and waits for the outcome."""
        return self._job.rank > 0 and control.board_of(self._job).has(f"rank-{self._job.rank}")

    def _acknowledge(self) -> None:
        if self._sign is None:
            return
        self._sign.close()
        board = control.board_of(self._job)
        if self._job.rank == 0:
            control.remove(self._job, board)
        else:
            board.leave(self._job.rank)


def _of_thread(error: BaseException) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"the thread that watches a background save: {type(error).__name__}: {error}")


def _of_committed(error: CheckpointError) -> CheckpointError:
    return CheckpointError(f"{error}. The checkpoint is committed all the same")
