"""Deadlines on every wait, and who is to blame when one ends: a model that failed once waits for nothing more.

    Work, control exchange --> Faults.wait (this file) --> the caller, or FsdpError with the rank

The heartbeat finds faults while this rank waits (heartbeat.py), and survivors agree on who is to blame (survivors.py).
Ranks are positions in the main mesh.

[Note: flag before abort] Where only a stream waits for a Work, its wait() returns at once. After an abort it returns
normally, although nothing was received. So a failure is noted first (``failed``), then told, then the communicators
are aborted, and ``check()`` stands before every use of a result.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from torch._C._distributed_c10d import Store

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.flight_recorder import active_collectives
from sixfold.fsdp.faults.heartbeat import Cause, Heartbeat, Launched, Place
from sixfold.fsdp.faults.local_processes import LocalProcesses
from sixfold.fsdp.faults.model_store import PatientStore
from sixfold.fsdp.faults.survivors import Meeting, Verdict, say_lost

_FIRST_SLICE = timedelta(seconds=0.05)
_SLICE_S = 0.25  # between two looks at what the heartbeat found
_BEAT_S = 1.0  # between two beats of a rank that does not wait
_BEATS = 12  # in a deadline
_TOLD_S = 20.0  # for all that will be known of a fault that is noted
_STORE_S = 3.0  # for one answer of the store during a wait
_SAID_S = 10.0  # of a wait for a busy rank, before a line tells of it


class Wait(Protocol):
    """Waits for a Work of the step that runs."""

    def __call__(self, work: Any, unit: str | None, op: str) -> None: ...


class Found(NamedTuple):
    """What the heartbeat found, in the wait that began then."""

    cause: Cause
    text: str
    ranks: tuple[int, ...]
    began: float


class Faults:
    """Waits with a deadline for one model; raises FsdpError on all ranks that are left.

    Args:
        rank, size: position in the main mesh.
        store: the model's store; None: only a pair can name the other. Errors call it ``store_name``.
        timeout_s: longest wait for one collective.
        busy_timeout_s: the same while the rank that has not come gives signs of life; the longer of the two holds.
        first_step_timeout_s: the same in step 0, where ranks compile; the longer of the two holds. A rank without a
            beat is lost after half of ``timeout_s`` in every step: compiling leaves the heartbeat its turns.
        host_waits: a Work's wait() blocks the host (gloo); else only a stream waits, and a thread looks at the Work
            and calls ``abort`` at its deadline.
        done_of: of a Work that a stream waits for, what tells later whether it is done. A Work that is kept keeps its
            tensors, and main gradients would look as if somebody held them.
        launched: what each communicator was asked to do so far.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store | None,
        timeout_s: float,
        *,
        first_step_timeout_s: float = 0.0,
        busy_timeout_s: float = 0.0,
        host_waits: bool = True,
        done_of: Callable[[Any], Callable[[], bool]] = lambda work: work.is_completed,
        abort: Callable[[], None] | None = None,
        launched: Callable[[], Launched] = dict,
        store_name: str = "fault_store",
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.first_step_timeout_s = first_step_timeout_s
        self.busy_timeout_s = busy_timeout_s
        self.step = -1  # the one that runs; -1: the model is being wrapped
        self.failed: FsdpError | None = None
        self.waited_s = 0.0  # of the host, for other ranks
        self.local_processes = LocalProcesses()  # known once ranks have met
        self._store = None if store is None else PatientStore(store, min(_STORE_S, timeout_s))
        self._meeting = None if self._store is None else Meeting(rank, size, self._store, timeout_s)
        self._host_waits = host_waits
        self._done_of = done_of
        self._abort = abort
        self._launched = launched
        self._store_name = store_name
        self._closes: list[Callable[[], None]] = []
        self._tidies: list[Callable[[], None]] = []
        self._told = threading.Event()  # ``failed`` says all that will be known
        self._lock = threading.Lock()
        # Where the host waits, and since when; made for each wait, so plain tuples until someone asks.
        self._at: tuple[tuple[int | None, str | None, str], float] | None = None
        self._last: tuple[int | None, str | None, str] | None = None
        # Of Works that a stream waits for: whether it is done, where, and since when.
        self._watched: deque[tuple[Callable[[], bool], Place, float]] = deque()
        self._found: Found | None = None
        self._busy_seen = float("-inf")  # when a rank that lives and does not wait was seen last
        self._say_after_s = min(_SAID_S, timeout_s / 4)
        self._heartbeat = self._start(store) if size > 1 and store is not None else None

    def _start(self, store: Store | None) -> Heartbeat:
        return Heartbeat(
            None if store is None else PatientStore(store, _STORE_S),
            self.rank,
            self.size,
            interval=lambda: min(_BEAT_S, self.timeout_s / _BEATS),
            here=self._here,
            silent_s=self._silent_s,
            ended=lambda: self.local_processes.ended(),
            found=self._find,
            busy=self._see_busy,
            late=self._look_at_works,
        )

    # ---- waiting

    def check(self) -> None:
        """Raise if an earlier fault ended this model. Stands before every use of what collectives brought."""
        if self.failed is not None:
            self._told.wait(_TOLD_S)
            first = self.failed
            raise FsdpError(
                f"this model ended with an earlier fault: {first}; make a new one",
                unit=first.unit,
                step=first.step,
                op=first.op,
                ranks=first.ranks,
            )

    def fail(
        self, message: str, unit: str | None, op: str, ranks: Sequence[int], *, step: int | None = None
    ) -> FsdpError:
        """End this model, unless it had ended before; returns what to raise. ``step``: None is the one that runs."""
        return self._note(FsdpError(message, unit=unit, step=self.step if step is None else step, op=op, ranks=ranks))

    def _note(self, error: FsdpError) -> FsdpError:
        with self._lock:
            if self.failed is None:
                self.failed = error
                self._told.set()
            return error

    def for_control(self, unit: str | None, op: str) -> Callable[[Any], None]:
        """Waits for the control messages of one exchange."""
        return lambda work: self.wait(work, unit, op, on_host=True)

    def wait(self, work: Any, unit: str | None, op: str, *, on_host: bool = False) -> None:
        """Wait for ``work``; ``on_host``: it is a control message, which the host waits for on any device.

        Raises:
            FsdpError: it failed, ran out of time, or another rank met a fault meanwhile.
        """
        if work is None:
            return
        place = None if self.step < 0 else self.step, unit, op
        if not (self._host_waits or on_host):
            work.wait()
            self._watched.append((self._done_of(work), Place(*place), time.monotonic()))
            if self._heartbeat is None:
                self._heartbeat = self._start(None)
            if self.failed is not None:  # [Note: flag before abort]
                self.check()
            return
        began = time.monotonic()
        self._at = place, began
        try:
            work.wait(_FIRST_SLICE)  # nearly always it ends here: what is late or broken is looked at below
        except RuntimeError:
            self._wait_on_host(work, Place(*place), began)
        finally:
            self._at, self._last = None, place
            self.waited_s += time.monotonic() - began

    def _wait_on_host(self, work: Any, place: Place, began: float) -> None:
        slice_s = min(_SLICE_S, max(self.timeout_s / _BEATS, 0.05))
        while True:
            over = work.is_completed()  # asked before the wait: a Work may end well just after its wait gave up
            left = began + self._limit_s(place) - time.monotonic()
            left = min(slice_s, max(left, 0.001)) if self._busy_seen < began else slice_s
            try:
                work.wait(timedelta(seconds=left))
                return
            except RuntimeError as error:
                if over:
                    raise self._lost_on_host(place, Cause.BROKEN, str(error).partition(". ")[0]) from error
            found = self._found
            if found is not None and found.began == began:
                raise self._lost_on_host(place, found.cause, found.text, found.ranks)
            if work.is_completed():
                continue
            if late := self._too_late(place, began):
                raise self._lost_on_host(place, Cause.LATE, late)

    def _limit_s(self, place: Place | None) -> float:
        if place is not None and place.step == 0:
            return max(self.first_step_timeout_s, self.timeout_s)
        return self.timeout_s

    def _too_late(self, place: Place | None, began: float) -> str:
        """What to say of a wait that has gone on for too long; empty: it may go on."""
        now, limit_s = time.monotonic(), self._limit_s(place)
        if now < began + limit_s:
            return ""
        if now - self._busy_seen < self._silent_s():
            limit_s = max(limit_s, self.busy_timeout_s)
        return "" if now < began + limit_s else f"no answer within {limit_s:g} s"

    def _silent_s(self) -> float:
        return self.timeout_s / 2

    # ---- on the heartbeat's thread

    def _place(self) -> Place | None:
        at, watched = self._at, self._watched
        if at is not None:
            return Place(*at[0])
        return watched[0][1] if watched else None if self._last is None else Place(*self._last)

    def _here(self) -> tuple[Place | None, bool, float, Launched]:
        at, now = self._at, time.monotonic()
        if at is not None:
            launched = self._launched()
            return Place(*at[0]), self._at is at, now - at[1], launched  # not blocked if it went on meanwhile
        oldest = self._watched[0] if self._watched else None
        return self._place(), False, now - oldest[2] if oldest is not None else 0.0, self._launched()

    def _look_at_works(self) -> bool:
        """Forget Works that are done; True when one is too late and the model was ended."""
        while self._watched and self._watched[0][0]():
            self._watched.popleft()
        if not self._watched:
            return False
        _, place, began = self._watched[0]
        late = self._too_late(place, began)
        if late:
            self._end(place, Cause.LATE, late, ())
        return bool(late)

    def _see_busy(self, rank: int, last: Place | None, beside: bool) -> None:
        """``rank`` lives and does not wait: it has time until ``busy_timeout_s``. The rank beside it says so, each time
        after twice as long."""
        self._busy_seen = time.monotonic()
        place, _, waited_s, _ = self._here()
        if beside and place is not None and waited_s > self._say_after_s:
            self._say_after_s *= 2
            limit_s = max(self._limit_s(place), self.busy_timeout_s)
            print(
                f"sixfold.fsdp: rank {self.rank} has waited {waited_s:.0f} s for {place}; rank {rank} lives and has "
                f"not come, it was last at {last or 'no collective'}. This ends after {limit_s:g} s",
                flush=True,
            )

    def _find(self, cause: Cause, text: str, ranks: Sequence[int]) -> bool:
        """The heartbeat found a fault: a waiting host raises it; where a stream waits, the model ends here (True)."""
        at = self._at
        if at is not None:
            self._found = Found(cause, text, tuple(ranks), at[1])
        elif self._watched:
            self._end(self._watched[0][1], cause, text, ranks)
            return True
        return False

    def _end(self, place: Place, cause: Cause, text: str, ranks: Sequence[int]) -> None:
        """[Note: flag before abort]"""
        with self._lock:
            if self.failed is None:
                self.failed = FsdpError(text, unit=place.unit, step=place.step, op=place.op, ranks=ranks)
        error = self._lost(place, cause, text, ranks)
        self.failed = error
        self._told.set()
        print("\n  ".join([f"sixfold.fsdp: {error}", *active_collectives()]), flush=True)
        if self._abort is not None:
            self._abort()

    # ---- blame

    def _lost_on_host(self, place: Place, cause: Cause, text: str, ranks: Sequence[int] = ()) -> FsdpError:
        """[Note: flag before abort] Where streams wait for Works, those would stay behind a control message's fault."""
        error = self._lost(place, cause, text, ranks)
        if not self._host_waits and self._abort is not None:
            self._abort()
        return error

    def _lost(self, place: Place, cause: Cause, text: str, ranks: Sequence[int]) -> FsdpError:
        """The error to raise, also noted; ``ranks``: whom the heartbeat found lost."""
        said, guilty = self._blame(place, cause, ranks)
        return self._note(
            FsdpError(
                f"{said} ({text}). Restart the job from its last checkpoint",
                unit=place.unit,
                step=place.step,
                op=place.op,
                ranks=guilty,
            )
        )

    def _blame(self, place: Place, cause: Cause, ranks: Sequence[int]) -> Verdict:
        """What to say of the others, and the ranks at fault."""
        if self._meeting is None:
            if self.size == 2:
                return say_lost([1 - self.rank], (), ())
            return "some rank is lost; give fault_store= to have it named", ()
        try:
            return self._meeting.judge(place, cause, self.local_processes, ranks)
        except RuntimeError:
            ended, stopped = self.local_processes.ended(), self.local_processes.stopped()
            text = f"{self._store_name} does not answer: its process is probably lost or stopped"
            if not ended and not stopped:
                return text, tuple(ranks)
            said, lost = say_lost(sorted({*ended, *stopped}), ended, stopped)
            return f"{said}; {text}", lost

    def at_end(self, close: Callable[[], None], tidy: Callable[[], None]) -> None:
        """What else ends with the model: ``close`` always, ``tidy`` where it ends before its process."""
        self._closes.append(close)
        self._tidies.append(tidy)

    def close(self) -> None:
        """The model is gone: stop the thread, and what was given to ``at_end``."""
        if self._heartbeat is not None:
            self._heartbeat.close()
        while self._closes:
            self._closes.pop()()

    def tidy(self) -> None:
        """The same, and leave nothing behind."""
        self.close()
        while self._tidies:
            self._tidies.pop()()
