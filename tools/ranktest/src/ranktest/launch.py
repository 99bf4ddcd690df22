"""Start a job, wait for it, and turn what happened into results or one exception.

    run_ranks (this file) --> server.py --> rank.py --> _collect (this file)

[Note: nothing outlives a job] Each rank leads a process group of its own. However a job ends, also by
Ctrl-C, every group that still lives is killed before run_ranks returns.
"""

import ast
import contextlib
import functools
import marshal
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

from ranktest.errors import RankFailed, RanksTimeout
from ranktest.messages import Call, Job, Report, enter_rank
from ranktest.server import RANK_ENVIRONMENT, hidden_main, start_server, wait_until_loaded

# Deadlines only end what hangs: on a quiet machine these waits take milliseconds, on a busy one seconds.
STACKS_WAIT_S = 5.0  # for the stack dumps after the deadline
EXIT_WAIT_S = 60.0  # for a released rank to leave
IN_MEMORY = "/dev/shm"
OTHERS_WAIT_S = 0.05  # after the first failure, for the failures of other ranks


JOBS: list[int] = []  # the number of ranks of each job that this process has run; plugin.py counts them


@dataclass(slots=True)
class _Rank:
    process: ForkServerProcess
    channel: Connection
    report: Report | None = None
    exit_code: int | None = None  # known only when it ended without a report; negative: a signal


@dataclass(slots=True)
class _Outcome:
    ranks: list[_Rank] = field(default_factory=list)

    def waiting(self) -> list[int]:
        return [r for r, state in enumerate(self.ranks) if state.report is None and state.exit_code is None]


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 120.0,
    allow_exit: Collection[int] = (),
) -> list[Any]:
    """Run ``function(rank, ranks, *args)`` in ``ranks`` processes that form a gloo process group.

    Args:
        function: a module-level function; the default process group is initialised when it is called.
        ranks: number of processes, >= 1.
        args: pickled; they may hold classes of the test module.
        timeout: seconds from the start of the processes to the last result. The server's loading of torch, which the
            first job waits for, is not part of it: on a busy machine that alone takes half a minute.
        allow_exit: ranks that may end without a result, for example by a signal.
    Returns:
        The results by rank; None for a rank of ``allow_exit`` that ended without one.
    Raises:
        RankFailed: a rank raised or ended without a result; the other ranks are killed at once.
        RanksTimeout: the deadline passed; holds the stack of every thread of every rank still running.
    Cost: about 0.1 s for two ranks.
    """
    __tracebackhide__ = True  # pytest then shows the test's line and the rank's traceback, and nothing between
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it is >= 1")
    call = _describe_call(function, args)
    start_server()
    wait_until_loaded()
    JOBS.append(ranks)
    # Not on pytest's path: names of sockets and stores stay short. In memory where that can be had: while others sync
    # much to a disk, a rank may wait half a minute for its first file there.
    with tempfile.TemporaryDirectory(
        prefix="ranktest-", dir=IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    ) as folder:
        environment = {**os.environ, **RANK_ENVIRONMENT}
        job = Job(ranks=ranks, folder=folder, cwd=os.getcwd(), environment=environment, timeout_s=timeout)
        outcome = _Outcome()
        try:
            _start(job, call, outcome)
            _collect(outcome, time.monotonic() + timeout, set(allow_exit), Path(folder), timeout)
            _release(outcome, Path(folder))
            return [pickle.loads(r.report.result) if r.report is not None else None for r in outcome.ranks]
        finally:
            _kill(outcome)
            _print_output(ranks, Path(folder))


def _describe_call(function: Callable[..., Any], args: Sequence[Any]) -> Call:
    qualname = getattr(function, "__qualname__", "<no name>")
    module = sys.modules.get(getattr(function, "__module__", ""))
    if module is None or "<" in qualname:
        raise TypeError(
            f"{qualname} cannot be sent to another process; give run_ranks a function of a module's top level"
        )
    path = getattr(module, "__file__", None) or ""
    is_test_file = type(module.__spec__.loader).__name__ == "AssertionRewritingHook" if module.__spec__ else bool(path)
    code = _rewritten_code(path, os.stat(path).st_mtime_ns) if is_test_file else b""
    return Call(module=module.__name__, path=path, code=code, qualname=qualname, arguments=pickle.dumps(args))


@functools.lru_cache(maxsize=64)
def _rewritten_code(path: str, modified_ns: int) -> bytes:
    """Compile a test file as pytest does, so that a failing assert in a rank shows its values too."""
    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path)
    return marshal.dumps(compile(tree, path, "exec", dont_inherit=True))


def _start(job: Job, call: Call, outcome: _Outcome) -> None:
    context = multiprocessing.get_context("forkserver")
    with hidden_main():
        for rank in range(job.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=enter_rank, args=(rank, job, call, theirs), name=f"rank {rank}")
            process.start()
            theirs.close()
            outcome.ranks.append(_Rank(process, ours))


def _collect(outcome: _Outcome, deadline: float, allow_exit: set[int], folder: Path, timeout_s: float) -> None:
    """Wait until every rank has reported or ended; raise at the first bad end or at the deadline."""
    __tracebackhide__ = True
    while waiting := outcome.waiting():
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not _receive(outcome, waiting, left_s):
            raise RanksTimeout(_deadline_text(outcome, folder, timeout_s))
        if _bad(outcome, allow_exit):
            _receive(outcome, outcome.waiting(), OTHERS_WAIT_S)
            _raise_bad(outcome, allow_exit)


def _receive(outcome: _Outcome, waiting: list[int], seconds: float) -> bool:
    """Take what has come within ``seconds``; False when nothing has."""
    sources: dict[Any, int] = {}
    for rank in waiting:
        sources[outcome.ranks[rank].channel] = rank
        sources[outcome.ranks[rank].process.sentinel] = rank
    ready = {sources[source] for source in wait(list(sources), seconds)}
    for rank in ready:
        state = outcome.ranks[rank]
        try:
            if state.channel.poll():
                state.report = state.channel.recv()
                continue
        except (EOFError, ConnectionResetError):
            pass
        # Its end of the channel closes a moment before its status is known.
        state.process.join(EXIT_WAIT_S)
        state.exit_code = state.process.exitcode
    return bool(ready)


def _bad(outcome: _Outcome, allow_exit: set[int]) -> dict[int, _Rank]:
    return {
        rank: state
        for rank, state in enumerate(outcome.ranks)
        if (state.report is not None and state.report.kind != "result")
        or (state.exit_code is not None and rank not in allow_exit)
    }


def _raise_bad(outcome: _Outcome, allow_exit: set[int]) -> None:
    __tracebackhide__ = True
    bad = _bad(outcome, allow_exit)
    failed = {rank: state for rank, state in bad.items() if state.report is None or state.report.kind == "failed"}
    if not failed:
        skipped = next(iter(bad.values())).report
        assert skipped is not None, "a rank is bad without a report and without an exit"
        pytest.skip(skipped.text)
    # One that raised says more than one that died, and comes first.
    order = sorted(failed, key=lambda rank: (failed[rank].report is None, rank))
    texts = [_failure_text(rank, failed[rank], len(outcome.ranks)) for rank in order]
    raise RankFailed(order[0], "\n".join(texts))


def _failure_text(rank: int, state: _Rank, ranks: int) -> str:
    if state.report is not None:
        return f"rank {rank} of {ranks} failed:\n{state.report.text}"
    code = state.exit_code
    if code is not None and code < 0:
        return f"rank {rank} of {ranks} was killed by {signal.Signals(-code).name} before it gave a result"
    return f"rank {rank} of {ranks} exited with status {code} before it gave a result"


def _deadline_text(outcome: _Outcome, folder: Path, timeout_s: float) -> str:
    """Say where each rank stands: at a line, finished, or dead."""
    stacks = _stacks(outcome, outcome.waiting(), folder)
    lines = [f"{len(stacks)} of {len(outcome.ranks)} ranks gave no result within {timeout_s:g} s"]
    for rank, state in enumerate(outcome.ranks):
        if rank in stacks:
            lines.append(f"--- rank {rank} stands at\n{stacks[rank]}")
        elif state.report is not None:
            lines.append(f"--- rank {rank} had finished")
        else:
            lines.append(f"--- rank {rank} had ended with exit code {state.exit_code}")
    return "\n".join(lines)


def _stacks(outcome: _Outcome, ranks: list[int], folder: Path) -> dict[int, str]:
    """The Python stacks of all threads of some running ranks, by rank."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pid(outcome.ranks[rank]), signal.SIGUSR1)
    files = {rank: folder / f"rank-{rank}.stacks" for rank in ranks}
    until = time.monotonic() + STACKS_WAIT_S
    while time.monotonic() < until and not all(f.exists() and f.stat().st_size for f in files.values()):
        time.sleep(0.02)
    time.sleep(0.05)  # a dump is several writes
    texts = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
    return {rank: text or "(no stack: the process is stopped or in the kernel)" for rank, text in texts.items()}


def _release(outcome: _Outcome, folder: Path) -> None:
    """All have reported: let them leave their groups together."""
    __tracebackhide__ = True
    staying = {rank: state for rank, state in enumerate(outcome.ranks) if state.exit_code is None}
    for state in staying.values():
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            state.channel.send(None)
    until = time.monotonic() + EXIT_WAIT_S
    for state in staying.values():
        state.process.join(max(0.0, until - time.monotonic()))
    stuck = [rank for rank, state in staying.items() if state.process.is_alive()]
    if stuck:
        stacks = _stacks(outcome, stuck, folder)
        texts = [
            f"rank {rank} gave its result but did not end within {EXIT_WAIT_S:g} s\n{stacks[rank]}" for rank in stuck
        ]
        raise RanksTimeout("\n".join(texts))
    for rank, state in staying.items():
        # Where a rank may die, its peers may fail to leave a broken group.
        if state.process.exitcode and len(staying) == len(outcome.ranks):
            raise RankFailed(rank, f"rank {rank} gave its result and then ended with status {state.process.exitcode}")


def _kill(outcome: _Outcome) -> None:
    for state in outcome.ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_pid(state), signal.SIGKILL)  # also what the rank has started
        if state.process.is_alive():  # it had no time to make its group
            state.process.kill()
    for state in outcome.ranks:
        state.process.join(EXIT_WAIT_S)
        state.channel.close()


def _pid(state: _Rank) -> int:
    pid = state.process.pid
    assert pid is not None, f"{state.process.name} was not started"
    return pid


def _print_output(ranks: int, folder: Path) -> None:
    """Hand the ranks' output to pytest, which shows it with a failed test."""
    for rank in range(ranks):
        file = folder / f"rank-{rank}.out"
        if file.exists() and (text := file.read_text(errors="replace")):
            print(f"--- output of rank {rank}\n{text}", end="" if text.endswith("\n") else "\n")
