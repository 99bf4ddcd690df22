"""Deadlines on every wait, and who is to blame when one ends.

    Work, control exchange --> Faults.wait (this file) --> the caller, or FsdpError with the rank

The survivors of a lost rank meet in a Store: each leaves a sign, and who left none is named.
Ranks are positions in the main mesh.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from sixfold.fsdp.errors import FsdpError

_SLICE = timedelta(seconds=1)  # between two looks into the store during a wait
_GRACE_S = 10.0  # for signs, when more than one rank is missing; the others may still compute
_AFTER_DEADLINE_S = 3.0  # the same once the deadline is over
_STORE_S = 3.0  # for one answer of the store during a wait


class PatientStore:
    """A Store whose calls end: one that gets no answer in time is the last.

    torch's TCPStore waits for its server without a deadline of its own, also in ``add`` and ``check``; a server that
    is stopped (SIGSTOP, a hung node) would hold every survivor. Calls run in a daemon thread that may be left behind.
    """

    def __init__(self, store: Store, answer_s: float) -> None:
        self._store = store
        self._answer_s = answer_s
        self._given_up = False

    def add(self, key: str, amount: int) -> int:
        """As Store's."""
        value: int = self._ask("add", key, amount)
        return value

    def set(self, key: str, value: str) -> None:
        """As Store's."""
        self._ask("set", key, value)

    def check(self, keys: list[str]) -> bool:
        """As Store's."""
        return bool(self._ask("check", keys))

    def _ask(self, name: str, *args: Any) -> Any:
        if self._given_up:
            raise RuntimeError("the store gave no answer before")
        answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((getattr(self._store, name)(*args), None))
            except BaseException as error:  # raised in the thread that asked
                answers.put((None, error))

        threading.Thread(target=run, name="sixfold-fsdp-store", daemon=True).start()
        try:
            value, error = answers.get(timeout=self._answer_s)
        except queue.Empty:
            self._given_up = True
            raise RuntimeError(f"the store gave no answer within {self._answer_s:g} s") from None
        if error is not None:
            raise error
        return value


class Faults:
    """Waits with a deadline for one model; raises FsdpError on all ranks that are left.

    Args:
        rank, size: position in the main mesh.
        store: where survivors meet, private to this model; None: only a pair can name the other.
        timeout_s: longest wait for one collective.
        host_waits: a Work's wait() blocks the host (gloo); else only a stream waits, and a watchdog thread
            calls ``abort`` at the deadline.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store | None,
        timeout_s: float,
        *,
        host_waits: bool = True,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._store = None if store is None else PatientStore(store, min(_STORE_S, timeout_s))
        self._host_waits = host_waits
        self._watchdog = None if host_waits or abort is None else Watchdog(timeout_s, self._expire)
        self._abort = abort

    def wait(self, work: Any, unit: str | None, step: int | None, op: str, *, on_host: bool = False) -> None:
        """Wait for ``work``; ``on_host``: it is a control message, which the host waits for on any device.

        Raises:
            FsdpError: it failed, ran out of time, or another rank met a fault meanwhile.
        """
        if work is None:
            return
        if not (self._host_waits or on_host):
            if self._watchdog is not None:
                self._watchdog.watch(work, f"op {op} of unit {unit or '(root)'} in step {step}")
            work.wait()
            return
        deadline = time.monotonic() + self.timeout_s
        while True:
            over = work.is_completed()  # asked before the wait: a Work may end well just after its wait gave up
            left = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            try:
                work.wait(min(_SLICE, left))
                return
            except RuntimeError as error:
                if over:
                    raise self._lost(unit, step, op, str(error).partition(". ")[0], deadline) from error
            if work.is_completed():
                continue
            if time.monotonic() >= deadline:
                raise self._lost(unit, step, op, f"no answer within {self.timeout_s:g} s", deadline)
            if self._others_failed():
                raise self._lost(unit, step, op, "another rank reported a fault", deadline)

    def _others_failed(self) -> bool:
        try:
            return self._store is not None and self._store.add("faults", 0) > 0
        except RuntimeError:  # the store died with its rank
            return True

    def _lost(self, unit: str | None, step: int | None, op: str, cause: str, deadline: float) -> FsdpError:
        text, missing = self._blame(deadline)
        return FsdpError(
            f"{text} ({cause}). Restart the job from its last checkpoint", unit=unit, step=step, op=op, ranks=missing
        )

    def _blame(self, deadline: float) -> tuple[str, tuple[int, ...]]:
        """What to say of the others, and the ranks that left no sign."""
        if self._store is None:
            missing: tuple[int, ...] = (1 - self.rank,) if self.size == 2 else ()
            nobody = "some rank is lost; give fault_store= to have it named"
        else:
            nobody = "all ranks are alive; they disagree about the collective"
            try:
                missing = self._meet(self._store, deadline)
            except RuntimeError:
                missing, nobody = (
                    (),
                    "fault_store does not answer: its process is probably lost or stopped",
                )
        return ("no sign of life from rank " + ", ".join(map(str, missing)) if missing else nobody), missing

    def _meet(self, store: PatientStore, deadline: float) -> tuple[int, ...]:
        """Leave a sign and wait for those of others; returns the ranks that left none."""
        store.set(f"alive/{self.rank}", "1")
        store.add("faults", 1)
        until = min(time.monotonic() + min(self.timeout_s, _GRACE_S), deadline + _AFTER_DEADLINE_S)
        missing = [rank for rank in range(self.size) if rank != self.rank]
        while time.monotonic() < until:
            missing = [rank for rank in missing if not store.check([f"alive/{rank}"])]
            if len(missing) <= 1:  # it is the one lost, or it is about to sign
                break
            time.sleep(0.02)
        if len(missing) == 1:  # a last look, a moment later: the last survivor may just have been slow
            until = time.monotonic() + min(1.5, self.timeout_s)
            while time.monotonic() < until:
                if store.check([f"alive/{missing[0]}"]):
                    return ()
                time.sleep(0.02)
        return tuple(missing)

    def _expire(self, what: str) -> None:
        """A deadline passed that only a stream was waiting for: say so, then end the communicator."""
        text, _ = self._blame(time.monotonic())
        print(f"sixfold.fsdp: {what}: no answer within {self.timeout_s:g} s; {text}", flush=True)
        if self._abort is not None:
            self._abort()

    def close(self) -> None:
        """Stop the watchdog."""
        if self._watchdog is not None:
            self._watchdog.close()


class Watchdog:
    """A thread that polls Works on which no host waits, and calls ``expired(text)`` once when one is too late."""

    def __init__(self, timeout_s: float, expired: Callable[[str], None], poll_s: float = 1.0) -> None:
        self._timeout_s = timeout_s
        self._expired = expired
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._watched: list[tuple[float, Any, str]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, work: Any, what: str) -> None:
        """Look at ``work`` until it is completed."""
        with self._lock:
            self._watched.append((time.monotonic() + self._timeout_s, work, what))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sixfold-fsdp-watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            with self._lock:
                self._watched = [item for item in self._watched if not item[1].is_completed()]
                late = [what for deadline, _, what in self._watched if deadline < time.monotonic()]
            if late:
                self._expired(late[0])
                return

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
