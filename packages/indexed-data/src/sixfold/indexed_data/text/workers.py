"""Parts made by this process or by several, given back in order.

parts --> run_parts (this file) --> PartReport, PartReport, ...
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sixfold.indexed_data.errors import IndexedDataError
from sixfold.indexed_data.text.building_folder import part_prefix
from sixfold.indexed_data.text.fingerprints import differences, fingerprint
from sixfold.indexed_data.text.finished_part import PartReport, read_report
from sixfold.indexed_data.text.inputs import Slice
from sixfold.indexed_data.text.job import Job
from sixfold.indexed_data.text.parts import build_part
from sixfold.indexed_data.text.tokenizer import Tokenizer
from sixfold.indexed_data.text.tokenizers import load_tokenizer

if TYPE_CHECKING:  # most builds are small, and no reader of pairs needs processes
    from concurrent.futures import Future
    from multiprocessing.process import BaseProcess

Parts = Sequence[tuple[Slice, ...]]
_GONE_S = 10.0  # for the kernel to take a killed process away


def refuse_bootstrap(workers: int) -> None:
    """IndexedDataError in a worker that still loads the script which started it: it cannot start others then."""
    from multiprocessing import current_process

    if workers > 1 and getattr(current_process(), "_inheriting", False):
        raise IndexedDataError(
            "build with workers is called while a worker loads the script: put the call below "
            'if __name__ == "__main__":'
        )


def run_parts(
    parts: Parts, folder: str, job: Job, tokenizer: Tokenizer, workers: int, timeout_s: float
) -> Generator[PartReport, None, None]:
    """The reports of all parts in their order; finished ones are read, the others made.

    ``timeout_s`` is how long all workers may do nothing at all.

    Raises:
        IndexedDataError: a part could not be made, or a worker died. The message names the part.
    """
    missing = [number for number in range(len(parts)) if read_report(part_prefix(folder, number)) is None]
    if min(workers, len(missing)) <= 1:
        for number, slices in enumerate(parts):
            yield read_report(part_prefix(folder, number)) or _make(slices, part_prefix(folder, number), job, tokenizer)
    else:
        yield from _run_side_by_side(parts, missing, folder, job, min(workers, len(missing)), timeout_s)


def _run_side_by_side(
    parts: Parts, missing: list[int], folder: str, job: Job, workers: int, timeout_s: float
) -> Generator[PartReport, None, None]:
    # Imported here: most builds are small, and no reader of pairs needs processes.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    # spawn: the caller may run threads (torch does), and a fork would copy their locks as they stand.
    context: Any = _Recording(multiprocessing.get_context("spawn"))
    processes = _WorkerProcesses(context.processes, timeout_s)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker) as pool:
        futures = {n: pool.submit(_make_in_worker, parts[n], part_prefix(folder, n), job) for n in missing}
        try:
            for number, slices in enumerate(parts):
                if number not in futures:
                    report = read_report(part_prefix(folder, number))
                    assert report is not None, f"part {number} was finished and is not any more"
                    yield report
                    continue
                try:
                    yield processes.result(futures[number], part_name(slices))
                except BrokenProcessPool as error:
                    if processes.ended_by_themselves():
                        raise IndexedDataError(
                            f"a worker ended by itself before {part_name(slices)} was done; its own error is printed "
                            "above. Each worker runs your script again: put the call of build below "
                            'if __name__ == "__main__":, or pass workers=1'
                        ) from error
                    raise IndexedDataError(
                        f"a worker died before {part_name(slices)} was done (out of memory, or killed); finished parts "
                        "are kept: run the same command again"
                    ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            processes.leave()


class _Recording:
    """A multiprocessing context that keeps the processes a pool starts with it: the caller has others, of its own."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.processes: list[BaseProcess] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *args: Any, **kwargs: Any) -> BaseProcess:
        process: BaseProcess = self._context.Process(*args, **kwargs)
        self.processes.append(process)
        return process


class _WorkerProcesses:
    """The worker processes of one build, and how long one waits for them.

    [Note: a deadline on doing nothing] A part may take hours, so its time has no limit. What has one is the time in
    which no worker uses the processor: they were stopped (SIGSTOP), or wait for a dead file server or each other.
    Time in which this process was stopped itself (Ctrl-Z stops them all) does not count.
    """

    def __init__(self, processes: list[BaseProcess], timeout_s: float) -> None:
        self._processes, self._timeout_s = processes, timeout_s  # the list grows as the pool starts them
        self._poll_s = min(1.0, timeout_s / 4)
        self._seen: list[tuple[str, ...]] = []
        self._looked, self._idle_s = time.monotonic(), 0.0

    def result(self, future: Future[PartReport], part: str) -> PartReport:
        """The report of a part; IndexedDataError at the deadline, and no worker is left then."""
        self._idle_s = 0.0
        while True:
            try:
                return future.result(self._poll_s)
            except TimeoutError:
                if not self._stalled():
                    continue
            pids = ", ".join(str(worker.pid) for worker in self._workers())
            self._kill()
            raise IndexedDataError(
                f"no worker (processes {pids}) made progress for {self._timeout_s:g} s, and {part} is not done. "
                "They were stopped, or wait for a file system. All were killed; finished parts are kept: run the same "
                "command again"
            )

    def ended_by_themselves(self) -> bool:
        """Whether a worker ended with an error of Python, and none by a signal but the one that the pool sends then."""
        end = time.monotonic() + _GONE_S
        for process in self._processes:
            process.join(_GONE_S)
            # The pool joins it too, in its own thread: who comes second has no code until the first has noted it.
            while process.exitcode is None and time.monotonic() < end:
                time.sleep(0.01)
        codes = [process.exitcode for process in self._processes]
        return set(codes) <= {0, 1, -signal.SIGTERM} and 1 in codes

    def leave(self) -> None:
        """Wait until the workers have ended their parts and themselves, or do nothing, and then end them."""
        from multiprocessing.connection import wait

        self._idle_s = 0.0
        try:
            while (workers := self._workers()) and not self._stalled():
                wait([worker.sentinel for worker in workers], self._poll_s)
        finally:  # also at a second Ctrl-C
            self._kill()

    def _workers(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.is_alive()]

    def _kill(self) -> None:
        for worker in self._workers():
            worker.kill()  # SIGKILL, which a stopped process gets too
            worker.join(_GONE_S)

    def _stalled(self) -> bool:
        """Whether no worker has used, or waited for, a processor for ``timeout_s``."""
        activity, looked = [_activity(worker.pid) for worker in self._workers()], self._looked
        self._looked = time.monotonic()
        if activity != self._seen:
            self._seen, self._idle_s = activity, 0.0
        else:
            self._idle_s += min(self._looked - looked, 2 * self._poll_s)  # what is longer, this process was stopped
        return self._idle_s > self._timeout_s


def _activity(pid: int | None) -> tuple[str, ...]:
    """What changes while a process does something: the ticks that it has used, by /proc; nothing once it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
    except OSError:
        return ()
    user, system = numbers[10:12]
    waits_for_a_processor = state == "R"  # on a busy machine perhaps for long, which is no fault of its own
    return (user, system, str(time.monotonic())) if waits_for_a_processor else (user, system)


def _make_in_worker(slices: tuple[Slice, ...], prefix: str, job: Job) -> PartReport:
    return _make(slices, prefix, job, _loaded(job))


@lru_cache(maxsize=1)
def _loaded(job: Job) -> Tokenizer:
    """Once per worker: it works for one build, and tokenizers do not travel between processes.

    Raises:
        IndexedDataError: here it encodes otherwise than in the process of the build.
    """
    name, encoding = job.tokenizer, job.encoding
    loaded = load_tokenizer(name, job.eod_token, special_tokens=job.special_tokens, template=job.template)
    found = fingerprint(loaded)
    if found != encoding:
        raise IndexedDataError(
            f"tokenizer {name} differs in a worker process ({', '.join(differences(found, encoding))}): its files were "
            "edited after the build loaded them, or it depends on the process. Start the build in a new process, or "
            "with workers=1"
        )
    return loaded


def _make(slices: tuple[Slice, ...], prefix: str, job: Job, tokenizer: Tokenizer) -> PartReport:
    try:
        return build_part(slices, prefix, job, tokenizer)
    except (IndexedDataError, OSError) as error:
        raise IndexedDataError(f"{part_name(slices)}: {error}") from error


def part_name(slices: tuple[Slice, ...]) -> str:
    """How messages call a part."""
    more = f" and {len(slices) - 1} more" if len(slices) > 1 else ""
    return f"input part {slices[0]}{more}"


def _prepare_worker() -> None:
    """A worker finishes its part at Ctrl-C, and does not outlive the build that started it."""
    from multiprocessing import parent_process
    from multiprocessing.connection import wait

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None, "a worker is started by a build"

    def leave_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
