"""Background saves: the trainer stops for a copy of its tensors, a process of its own writes them.

    state dict --> agree --> copy into the arena --> Job --> worker process
                             (this file)                       |
    AsyncSave <-- watching thread <----------- outcome --------+

What is collective (agreeing on the plan, trying the shared folder) happens in the call, on the given group; after it
no rank needs the group. The worker is ``_worker.py``, what trainers and workers tell each other is ``control.py``.

[Note: the end of the trainer] An interpreter that ends in order, also by an exception, first waits for its saves
in flight, each until it ends or has stood still for its timeout_s: a last ``async_save`` without ``wait`` is a
checkpoint. A killed trainer takes its worker with it within a second; the save is lost, its staging folder goes, the
target stays.
"""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any
from weakref import WeakSet

from sixfold.dist_ckpt.background import control
from sixfold.dist_ckpt.background.arena import Arena, Place
from sixfold.dist_ckpt.background.channel import Channel, Gauge
from sixfold.dist_ckpt.background.control import Alive, ControlFolder, Job
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError, typed
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.ranks.exchange import Group, Outcome, told_to_all
from sixfold.dist_ckpt.road import saving
from sixfold.dist_ckpt.road.saving import SaveRequest
from sixfold.dist_ckpt.state.records import ShardedTensor
from sixfold.dist_ckpt.stores import local as storage
from sixfold.dist_ckpt.stores import paths
from sixfold.dist_ckpt.strategies.base import SaveEngine, save_engine

__all__ = ["AsyncSave", "AsyncSaver", "async_save"]

_WORKER = ("-P", "-m", "sixfold.dist_ckpt._worker")
_CLOSE_S = 5.0
_NEARLY = 0.99  # progress of what is written whole and not yet committed


class AsyncSave:
    """Handle of a save that ``async_save`` started.

    Attributes:
        checkpoint_dir: the folder; the checkpoint is there when ``wait`` returns.
        blocked_s: how long the call took, seconds; the wait for an earlier save included.
        worker_pid: process that writes for this rank.
    """

    def __init__(self, checkpoint_dir: Path, started: float, worker_pid: int, flight: _Flight) -> None:
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


class AsyncSaver:
    """A worker process and its arena, for one group of ranks; ``async_save`` keeps one per process.

    Threads that save by one saver take turns: there is one arena.

    Args:
        group: as in ``save``; every rank of it makes a saver and calls it together.
        timeout_s: longest wait, in a call, for a peer; after it, of a save that stands still. Seconds.
    """

    def __init__(self, group: Group = "world", *, timeout_s: float = 600.0) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._arena = Arena()
        self._worker: _Worker | None = None
        self._flight: _Flight | None = None
        self._is_closed, self._pid = False, os.getpid()
        self._turn, self._is_busy = threading.RLock(), False
        _open_savers(os.getpid()).add(self)

    def save(
        self,
        sharded_state_dict: Mapping[Any, Any],
        checkpoint_dir: str | Path,
        sharded_strategy: Any = None,
        common_strategy: Any = None,
        validate_access_integrity: bool = True,
        preprocess_common_before_consistancy_check: Callable[[dict[Any, Any]], Any] | None = None,
        content_metadata: dict[str, Any] | None = None,
        *,
        if_exists: str = "replace",
        check_finite: bool = False,
        progress: Progress | None = None,
    ) -> AsyncSave:
        """``async_save`` on this saver's group."""
        request = SaveRequest(
            state=sharded_state_dict,
            path=checkpoint_dir,
            preprocess=preprocess_common_before_consistancy_check,
            content_metadata=content_metadata,
            group=self._group,
            if_exists=if_exists,
            check_finite=check_finite,
            timeout_s=self._timeout_s,
            progress=progress,
        )
        return self._start(request, sharded_strategy, common_strategy)

    def close(self) -> None:
        """Wait for a save in flight, then end the worker and free the arena. May be called again.

        In a process that was forked it does nothing: saver and worker are the parent's.
        """
        if self._pid != os.getpid():
            return
        with self._in_turn():
            try:
                self._let_go()
            finally:
                if self._worker is not None:
                    self._worker.stop()
                self._worker = None
                if not self._is_closed:
                    self._arena.close()
                self._is_closed = True
                _open_savers(os.getpid()).discard(self)

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, request: SaveRequest, sharded_strategy: Any, common_strategy: Any) -> AsyncSave:
        start = time.monotonic()
        with told_to_all(request.group, request.timeout_s):
            self._check_is_usable()
            engine = _engine_for(request.path, sharded_strategy, common_strategy)
        with self._in_turn():
            flight = self._launched(request, engine)
        return AsyncSave(flight.target, start, flight.worker_pid, flight)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """One call at a time: of two, the second would copy its tensors over those of the first."""
        with self._turn:
            if self._is_busy:
                raise CheckpointError(
                    "a signal handler called this AsyncSaver in the middle of another call of it; let the handler set "
                    "a flag, and save when that call has returned"
                )
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    def _launched(self, request: SaveRequest, engine: SaveEngine) -> _Flight:
        with told_to_all(request.group, request.timeout_s):
            self._check_is_usable()  # it may have been closed meanwhile
            self._let_go()
            await_saves_to(paths.local(request.path, ""))
            worker = typed(self._ready_worker)
        agreed = saving.agree_on(request, engine)
        sign: list[Alive] = []
        try:
            job = self._hand_over(agreed, request.check_finite, request.timeout_s, sign)
        except BaseException:
            for alive in sign:
                alive.close()
                if agreed.exchange.rank == 0:
                    alive.remove_folder()
            agreed.abandon()
            raise
        self._flight = _Flight(self, worker, job, sign[0] if sign else None, request.progress)
        return self._flight

    def _check_is_usable(self) -> None:
        if self._is_closed:
            raise CheckpointError("this AsyncSaver is closed; make a new one")
        if self._pid != os.getpid():
            raise CheckpointError(
                f"this AsyncSaver is of process {self._pid}, its worker too; a process that was forked makes its own"
            )

    def _let_go(self) -> None:
        """Wait until the save in flight, if any, needs arena and worker no more."""
        if self._flight is None:
            return
        self._flight.join()
        flight, self._flight = self._flight, None  # before the warning, which may be an error (-W error)
        if flight.error is not None and not flight.told:
            warnings.warn(f"a background save failed and nobody waited for it: {flight.error}", stacklevel=5)

    def _ready_worker(self) -> _Worker:
        if self._worker is None or not self._worker.is_alive():
            old, self._worker = self._worker, None
            if old is not None:
                old.stop()
            self._worker = _Worker(self._arena.fd)
        return self._worker

    def _hand_over(self, agreed: saving.Agreed, check_finite: bool, timeout_s: float, sign: list[Alive]) -> Job:
        """Copy the tensors and try the shared folder, both on every rank or on none."""
        exchange, ticket = agreed.exchange, agreed.ticket
        rank, target = exchange.rank, Path(ticket.target)

        def make_folder(_: object) -> bytes:
            key = secrets.token_bytes(32)
            if exchange.ranks > 1:
                folder = ControlFolder(target, ticket.save_id, key)
                folder.path.mkdir()
                sign.append(Alive(folder, 0))
            return key

        def meet() -> tuple[None, bool]:
            storage.check_shared(Path(ticket.staging))
            if rank == 0:
                return None, True
            folder = ControlFolder(target, ticket.save_id, key)
            sign.append(Alive(folder, rank))
            return None, control.is_locked(folder, 0)

        (content, places), key = exchange.together(lambda: (self._copy(agreed.content), None), make_folder)
        locks_work = exchange.together(meet, all)[1] if exchange.ranks > 1 else True
        return Job(
            rank=rank,
            ranks=exchange.ranks,
            content=content,
            ticket=ticket,
            check_finite=check_finite,
            places=places,
            arena_bytes=self._arena.nbytes,
            key=key,
            locks_work=locks_work,
            timeout_s=timeout_s,
            stale_s=control.STALE_S,
        )

    def _copy(self, content: saving.Content) -> tuple[saving.Content, dict[int, Place]]:
        """The content without tensors, and where their values are now."""
        needed = sorted({write.record for write in content.writes})
        tensors = [content.records[index].data for index in needed]
        places = self._arena.take([tensor for tensor in tensors if tensor is not None])
        records = [_without_data(record) for record in content.records]
        # Common data is in common_bytes; as objects it could name classes that the worker cannot import.
        return replace(content, records=records, common={}), dict(zip(needed, places, strict=True))


def _without_data(record: ShardedTensor) -> ShardedTensor:
    """``record.without_data()``, not checked again: thousands of records are copied while the trainer waits."""
    twin = object.__new__(type(record))
    twin.__dict__.update(record.__dict__, data=None)
    return twin


def _start_worker(fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, *_WORKER, *map(str, fds), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)


class _Worker:
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


class _Flight:
    """One save in flight: a thread hands the job to the worker and waits for what becomes of it.

    It keeps its saver alive, whoever else does: the end of the interpreter waits for the saves of all savers.
    """

    def __init__(
        self, saver: AsyncSaver, worker: _Worker, job: Job, sign: Alive | None, progress: Progress | None = None
    ) -> None:
        self._progress, self._meter = progress, Meter(None)  # the first call is made in the thread
        self.ended = threading.Event()
        self.ended_at: float | None = None  # on the monotonic clock
        self.error: CheckpointError | None = None
        self.told = False
        self._saver: AsyncSaver | None = saver
        self._worker, self._job, self._sign = worker, job, sign
        self.target, self.worker_pid = Path(job.ticket.target), worker.process.pid
        self._gauge, self._still = worker.gauge, control.Stillness()
        self._gauge.reset()
        self._idle_moves = self._gauge.moves
        self._worker.channel.look_s = job.beat_s
        self._thread = threading.Thread(target=self._watch, name="sixfold-async-save", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, which has a deadline of its own."""
        self._thread.join()

    def written_share(self) -> float:
        """As the worker counts; what is written is neither on disk nor committed for that."""
        return min(_NEARLY, self._gauge.share)

    def raise_error(self) -> None:
        """What went wrong, if anything did."""
        self.told = True
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _watch(self) -> None:
        try:
            self.error = self._outcome().error or self._told_all()
        except Exception as error:  # whatever it is, the trainer must hear of it
            self.error = CheckpointError(f"the thread that watches a background save: {type(error).__name__}: {error}")
        finally:
            self.ended_at = time.monotonic()
            self._acknowledge()
            self.ended.set()
            self._saver = None

    def _outcome(self) -> Outcome:
        channel = self._worker.channel
        try:
            self._meter = Meter(self._progress, lambda: saving.file_bytes(self._job.content))
            # Pickled here, where the trainer does not wait for it.
            if channel.send(pickle.dumps(self._job, protocol=5), lambda: self._moves_on(control.OWN_WORKER)):
                report = channel.receive(lambda: self._moves_on(control.OWN_WORKER))
                if report is None and self._has_record():
                    report = channel.receive(lambda: self._moves_on(control.END))
                if report is not None:
                    return Outcome.decode(report)
            reason = "hangs and was killed"
        except (OSError, EOFError):
            reason = "died"
        except CheckpointError as error:  # of the caller's progress
            self._worker.kill()
            outcome = self._speak_for_worker(f"rank {self._job.rank}: {error}", CheckpointError)
            return Outcome(error=outcome.error or _of_committed(error))
        ending = self._worker.kill()
        return self._speak_for_worker(f"the worker of rank {self._job.rank} {reason} ({ending})")

    def _moves_on(self, steps: float) -> bool:
        """Whether the worker has moved lately; shows its count, and that this rank lives, to the other ranks."""
        moves = self._gauge.moves
        if moves == self._idle_moves:  # it imports torch, or takes the job apart
            moves += self._worker.processor_ticks()
        self._gauge.hear()
        if self._sign is not None:
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
        names = control.control_of(self._job).names() or ()
        return self._job.rank > 0 and f"rank-{self._job.rank}" in names

    def _speak_for_worker(self, reason: str, kind: type[CheckpointError] = LostPeerError) -> Outcome:
        """The worker is dead: say so to the other ranks, and find out what became of the save."""
        job, folder = self._job, control.control_of(self._job)
        if job.rank == 0:
            told = folder.get("outcome") if job.ranks > 1 else None
            if told is not None:
                return told
            outcome = _settled(job, reason, kind)
            if job.ranks > 1:
                return control.tell(job, folder, outcome)
            storage.discard(Path(job.ticket.staging))
            return outcome
        if not self._has_record():
            with suppress(OSError):
                folder.put(f"rank-{job.rank}", _settled(job, reason, kind))
        return control.await_outcome(job, self._gauge)

    def _acknowledge(self) -> None:
        if self._sign is None:
            return
        self._sign.close()
        if self._job.rank == 0:
            control.remove(self._job, control.control_of(self._job))


def _of_committed(error: CheckpointError) -> CheckpointError:
    return CheckpointError(f"{error}. The checkpoint is committed all the same")


def _settled(job: Job, reason: str, kind: type[CheckpointError]) -> Outcome:
    """``control.settle`` with an error of a kind."""
    outcome = control.settle(job, reason)
    return outcome if outcome.error is None else Outcome(error=kind(str(outcome.error)))


def async_save(
    sharded_state_dict: Mapping[Any, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[dict[Any, Any]], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    group: Group = "world",
    if_exists: str = "replace",
    check_finite: bool = False,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> AsyncSave:
    """``save`` that returns when the values are copied; a worker process writes and commits them.

    Collective over ``group`` like ``save``; afterwards the caller may change its tensors and needs to call nothing.
    Waits for this process's previous background save to end. The arena of a rank stays allocated, as large as
    the largest share it has saved.

    Args: as ``save``. timeout_s is of standing still: a save ends as an error when nothing of it has moved for so
        long, and goes on, however slowly, as long as it moves. progress is called in this process, from the thread
        that watches the worker, some times a second, with the total after the commit; an exception in it stops the
        worker and is raised by ``wait`` on all ranks.
    Returns:
        The handle; errors of writing, NaN with ``check_finite`` and dead peers are raised by its ``wait``.
    Raises:
        CheckpointError: what ``save`` raises before it writes, on every rank.
    """
    request = SaveRequest(
        state=sharded_state_dict,
        path=checkpoint_dir,
        preprocess=preprocess_common_before_consistancy_check,
        content_metadata=content_metadata,
        group=group,
        if_exists=if_exists,
        check_finite=check_finite,
        timeout_s=timeout_s,
        progress=progress,
    )
    return _saver_of(os.getpid())._start(request, sharded_strategy, common_strategy)


def _engine_for(path: str | Path, sharded_strategy: Any, common_strategy: Any) -> SaveEngine:
    """The built-in engine; CheckpointError for what only ``save`` can do."""
    paths.local(path, "background saves go to a local folder; use save for a URL")
    engine = save_engine(sharded_strategy, common_strategy)
    if engine is None:
        raise CheckpointError(
            f"the strategies {sharded_strategy}, {common_strategy} save by themselves, which only save can let them; "
            "background saves go with ('torch_dist', 1), also inside a FullyParallelSaveStrategyWrapper"
        )
    return engine


def await_saves_to(target: Path) -> None:
    """Wait until no background save of this process to a folder is in flight; their handles tell how they end."""
    for saver in list(_open_savers(os.getpid())):
        flight = saver._flight
        if flight is not None and flight.target == paths.resolved(target):
            flight.join()


@cache
def _saver_of(pid: int) -> AsyncSaver:
    """The saver of this process; a forked child must not use its parent's."""
    return AsyncSaver()


@cache
def _open_savers(pid: int) -> WeakSet[AsyncSaver]:
    """The savers of this process, closed when its interpreter ends; see [Note: the end of the trainer]."""
    savers: WeakSet[AsyncSaver] = WeakSet()
    # Of multiprocessing, whose children run no atexit; it takes care of forks, too.
    Finalize(None, _close_all, (savers,), exitpriority=100)
    return savers


def _close_all(savers: WeakSet[AsyncSaver]) -> None:
    for saver in list(savers):
        saver.close()
