"""Starting ranks on this machine, and what becomes of them.

    cli.py, demo.py --> start_ranks (this file) --> forkserver with torch loaded --> N ranks, each target(*args)
                                                <-- one report per rank, signals, exit status

The ranks meet over a FileStore in a temporary folder: no port, no "address in use". They stay in the launcher's session
and die with it. The first failing rank's error is raised here, once; the others are ended within 5 s. The parent side
imports no torch.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from sixfold.gpt.errors import ConfigError, FinalError, TrainError, raised_inside
from sixfold.gpt.launch.stop_signals import ASK_TO_STOP, ENDED, STOPPED, Signals, is_free
from sixfold.pipeline.errors import PipelineTimeout

POLL_S = 0.1
GATHER_S = 0.3  # after the first failure: time for the reports that belong to the same moment
TERM_S = 1.0  # from SIGTERM to SIGKILL once the run has failed: there is nothing to save
END_S = 3.0  # for a finished rank to leave, and for the others once SIGTERM has ended one
# torch._dynamo: the first step of any torch optimizer imports it, over a second of CPU time in each rank.
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "sixfold.gpt.training.loop")
PR_SET_PDEATHSIG = 1
_HINTS = {
    signal.SIGKILL: "; the kernel does so when memory runs out",
    signal.SIGBUS: "; a file of data was cut or written over while it was read, a disk failed, or /dev/shm is full",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed, in its own words or, if it could not speak, in the launcher's."""

    rank: int
    time: float
    text: str
    exit_code: int = 1
    killed_by: signal.Signals | None = None
    final: bool = False  # it would fail again


class RankError(TrainError):
    """A rank failed: the text is its error, led by its number; ``final``: starting the run anew does not help."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.rank = failure.rank
        self.exit_code = failure.exit_code
        self.killed_by = failure.killed_by
        self.final = failure.final


@dataclass(kw_only=True, slots=True)
class _Rank:
    rank: int
    process: BaseProcess
    channel: Connection
    result: int | None = None
    failure: Failure | None = None


@dataclass(kw_only=True, slots=True)
class StopRequests:
    """Signals to the launcher that ask for a stop: the first is forwarded, a later one ends the ranks at once.

    As stop_signals.py says in [Note: what a signal does].
    """

    ranks: list[_Rank] = field(default_factory=list)
    signals: Signals = field(default_factory=Signals)
    tell: Callable[[str], None] = lambda text: None
    forwarded: bool = False

    @property
    def asked(self) -> int:
        return self.signals.asked

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signals.count()

    def forward(self) -> None:
        if self.asked and not self.forwarded:
            self.forwarded = True
            self.tell("asked to stop: finishing this step and saving it. A second signal ends the run without a save")
            _signal(self.ranks, signal.SIGTERM)
        if self.asked > 1:
            _signal(self.ranks, signal.SIGKILL)


def warm_up() -> None:
    """Start the server that ranks are forked from, which loads torch meanwhile. Costs this process a few milliseconds.

    The server has SIGTERM and its like blocked for good: one sent to a whole process group, as Ctrl-C is, must
    reach the ranks, not kill what they were forked from. Its environment, and so the ranks', has one OpenMP thread
    unless the user's says otherwise.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    resource_tracker.ensure_running()  # it would unblock SIGTERM half way below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_STOP)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        forkserver.ensure_running()
    finally:
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_ranks(
    target: Callable[..., int],
    ranks: int,
    args: tuple[Any, ...] = (),
    *,
    watch: Callable[[], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Run ``target(*args)`` in ``ranks`` processes and wait for all of them.

    In each, ``rendezvous.detect`` finds the rank. What asks for a stop here is forwarded as SIGTERM; a signal that
    comes more than ``stop_signals.SAME_S`` later ends the ranks at once.

    Args:
        target: module-level function; returns 0, or 143 if it was asked to stop and has saved.
        watch: called here about ten times a second while ranks run; what it raises ends them.
        tell: is given a line when the ranks are asked to stop.
    Returns:
        0 if every rank finished, 143 if they were asked to stop and every step that they did is saved.
    Raises:
        RankError: the first failing rank's error; or that a rank was killed, with its number and signal; or, with
            exit_code 137, that a second signal ended the ranks without a save.
    """
    with tempfile.TemporaryDirectory(prefix="sixfold-") as folder, stop_requests() as stop:
        stop.tell = tell or stop.tell
        warm_up()
        context = multiprocessing.get_context("forkserver")
        started = stop.ranks
        try:
            for rank in range(ranks):
                here, there = context.Pipe(duplex=False)
                job = (rank, ranks, str(Path(folder) / "store"), there, target, args)
                process = context.Process(target=_rank_main, args=job, name=f"sixfold rank {rank}")
                process.start()
                there.close()
                started.append(_Rank(rank=rank, process=process, channel=here))
            _wait_for_end(started, stop, watch)
            stopped = [r.rank for r in started if r.result is None and r.failure is None and is_stopped(r.process)]
        finally:
            _end(started)
        return _outcome(started, stop, stopped)


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Take what asks for a stop while ranks run; a hang-up that nohup ignores stays ignored.

    Python handles signals in the main thread only; elsewhere they are left.
    """
    stop = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    taken = {signal.SIGTERM, signal.SIGINT} | {number for number in ASK_TO_STOP if is_free(number)}
    old = {number: signal.signal(number, stop.on_signal) for number in taken}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _wait_for_end(ranks: list[_Rank], stop: StopRequests, watch: Callable[[], None] | None) -> None:
    """Return when all ranks have ended, or a moment after the first has failed."""
    give_up_at: float | None = None
    while (running := [r for r in ranks if r.result is None and r.failure is None]) and (
        give_up_at is None or time.monotonic() < give_up_at
    ):
        wait([w for r in running for w in (r.channel, r.process.sentinel)], timeout=POLL_S)
        stop.forward()
        for rank in running:
            _hear(rank)
        if watch is not None:
            watch()
        if give_up_at is None and any(r.failure is not None for r in ranks):
            give_up_at = time.monotonic() + (END_S if stop.asked else GATHER_S)


def _hear(rank: _Rank) -> None:
    """Take what a rank reported; if it ended without a word, say so for it."""
    ended = not rank.process.is_alive()  # before the pipe is read: a report may come between
    if rank.channel.poll():
        try:
            message = rank.channel.recv()
        except EOFError:
            message = None
        if isinstance(message, Failure):
            rank.failure = message
        elif message is not None:
            rank.result = message
        if message is not None:
            return
        rank.process.join(END_S)  # the pipe closes a moment before the process has ended
        ended = not rank.process.is_alive()
    if ended and rank.result is None:
        rank.failure = silent_end(rank.rank, rank.process.exitcode)


def silent_end(rank: int, exit_code: int | None) -> Failure:
    now = time.time()
    if exit_code == ENDED:  # it was signalled twice itself
        return ended_at_once(rank)
    if exit_code is not None and exit_code < 0:
        number = signal.Signals(-exit_code)
        text = f"rank {rank} was killed by {number.name}{_HINTS.get(number, '')}"
        return Failure(rank=rank, time=now, text=text, killed_by=number)
    text = f"rank {rank} ended with exit status {exit_code} and no message"
    return Failure(rank=rank, time=now, text=text)


def _end(ranks: list[_Rank]) -> None:
    """Let finished ranks leave, end the others: SIGTERM, after a while SIGKILL, which also reaches a stopped one."""
    unfinished = [r for r in ranks if r.result is None]
    _signal(unfinished, signal.SIGTERM)
    for part, seconds in ((unfinished, TERM_S), (ranks, END_S)):
        deadline = time.monotonic() + seconds
        for rank in part:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        _signal(part, signal.SIGKILL)
    for rank in ranks:
        rank.process.join(END_S)  # SIGKILL ends it, unless the kernel holds it in a file system that hangs
        rank.channel.close()


def _signal(ranks: list[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.process.is_alive() and rank.process.pid is not None:
            try:
                os.kill(rank.process.pid, number)
            except ProcessLookupError:
                pass


def is_stopped(process: BaseProcess) -> bool:
    """Whether a signal such as SIGSTOP holds the process, which then answers nobody."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except (OSError, IndexError):
        return False


def _outcome(ranks: list[_Rank], stop: StopRequests, stopped: list[int]) -> int:
    failures = [r.failure for r in ranks if r.failure is not None]
    unfinished = [r for r in ranks if r.result is None]
    if stop.asked > 1 and unfinished:
        raise RankError(ended_at_once(unfinished[0].rank))
    # A rank takes SIGTERM over before its first step. One that it ends has done nothing, and took its peers with it.
    if any(f.killed_by == signal.SIGTERM for f in failures):
        return STOPPED
    if failures:
        first = _first(failures)
        held = "".join(f"; rank {rank} did not answer: a signal had stopped its process" for rank in stopped)
        # Whoever asked for a stop does not want the run to be started again.
        final = bool(stop.asked) or (not _is_killed(first) and any(f.final for f in failures))
        raise RankError(replace(first, text=first.text + held, final=final))
    return max(r.result or 0 for r in ranks)


def ended_at_once(rank: int) -> Failure:
    text = (
        "a second signal ended the run at once; the steps since the newest checkpoint are not saved. The same command "
        "resumes from it"
    )
    return Failure(rank=rank, time=time.time(), text=text, exit_code=ENDED, final=True)


def _first(failures: list[Failure]) -> Failure:
    """The cause among failures of one moment.

    A killed rank comes before errors, which are then its peers' closed connections; SIGABRT does not count, because
    torch aborts a process whose peers are gone. Among errors the earliest by the machine's clock.
    """
    killed = [f for f in failures if _is_killed(f)]
    return min(killed or failures, key=lambda f: f.time)


def _is_killed(failure: Failure) -> bool:
    return failure.killed_by not in (None, signal.SIGABRT)


def _rank_main(
    rank: int, ranks: int, store: str, channel: Connection, target: Callable[..., int], args: tuple[Any, ...]
) -> None:
    """Body of a rank's process."""
    prepare_process(rank)
    os.environ.update({"SIXFOLD_RANK": str(rank), "SIXFOLD_RANKS": str(ranks), "SIXFOLD_STORE": store})
    try:
        report: Any = target(*args)
    except BaseException as error:  # SystemExit too: the launcher must hear of it
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # begin at the target
        report = failure_of(error, rank, ranks)
    try:
        channel.send(report)
    except (OSError, pickle.PicklingError):
        os._exit(1)
    if isinstance(report, Failure):
        # See rendezvous.py [Note: a failed rank keeps its connections]: the launcher ends this process.
        signal.pause()


def prepare_process(rank: int, *, local: bool = True) -> None:
    """What every process that becomes a rank does first: signals, the end of its parent, warnings.

    Args:
        local: all ranks are on this machine.
    """
    _die_with_parent()
    for number in ASK_TO_STOP - {signal.SIGTERM}:  # they reach the launcher too, which asks all ranks to stop
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASK_TO_STOP)
    if local:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name may resolve to nothing
    name_in_warnings(rank)


def name_in_warnings(rank: int) -> None:
    """Warnings of this process are told as those of ``rank``."""
    warnings.showwarning = partial(_show_warning, rank)


def _show_warning(rank: int, message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
    """One line of a rank's warning, which begins where the launcher's progress line stands."""
    lead = "\r\x1b[K" if sys.stderr.isatty() else ""
    text = " ".join(str(message).split())
    print(f"{lead}sixfold: rank {rank} warns: {text} ({category.__name__})", file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """End this process with the server that forked it, which ends with the launcher."""
    # The server ends when nobody holds this pipe any more, and it hands its ranks the end that the launcher holds.
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it went before the line above
        os._exit(1)


def is_typed(error: BaseException) -> bool:
    """Whether an error is one that a sixfold package defines: its text says all, a traceback would not help."""
    return any(kind.__module__.startswith("sixfold.") for kind in type(error).__mro__)


def is_final(error: BaseException) -> bool:
    """Whether a run that ended so would end so again: what was asked or read is wrong, or the disk is full.

    Of what a stage raised inside a pipeline, that is judged. A message that did not come is a peer's fault.
    """
    if isinstance(error, PipelineTimeout):
        return False
    error = raised_inside(error)
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)
    stored = sys.modules.get("sixfold.dist_ckpt.errors")  # which loads torch; one of its errors has loaded it
    other = stored is not None and isinstance(error, stored.MismatchError | stored.UnsafeError)
    return full or other or isinstance(error, FinalError) or (is_typed(error) and isinstance(error, ValueError))


def failure_of(error: BaseException, rank: int, ranks: int) -> Failure:
    """How ``rank`` of ``ranks`` failed."""
    return Failure(
        rank=rank,
        time=time.time(),
        text=text_of(error, rank, ranks),
        exit_code=_exit_code(error),
        final=is_final(error),
    )


def text_of(error: BaseException, rank: int, ranks: int) -> str:
    """What a rank says of its failure: one line of an error that a sixfold package defines, else a traceback."""
    itself = str(error).startswith((f"rank {rank} ", f"rank {rank}:"))  # the text says whose it is
    lead = f"rank {rank}: " if ranks > 1 and not itself else ""
    inside = raised_inside(error)
    if is_typed(inside):
        return f"{lead}{error}"
    told = "" if inside is error else f"{error}\n"  # which action it was
    return lead + told + "".join(traceback.format_exception(inside)).strip()


def _exit_code(error: BaseException) -> int:
    return 2 if isinstance(error, ConfigError) else 1
