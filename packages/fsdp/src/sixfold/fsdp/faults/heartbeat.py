"""A thread that tells the other ranks that this one lives and where it is, and looks at one of them while it waits.

    deadlines.py --> Heartbeat (this file) --> the model's store --> the heartbeats of other ranks

Nothing is written while nobody waits. A rank that waits asks. Every heartbeat that sees a new question answers with a
*beat*: where its rank is, and what it launched. The asker reads the beat of the next rank. So a rank costs one small
read per beat, whatever the number of ranks, and what one finds it tells all by a key. A rank that waits looks more
often, at the store and at the processes of its machine; a step without such waits costs none of it. A rank that lives
and does not wait is *busy*: others wait for it longer than for one that gives no sign. Each rank looks at the next
one. So a busy rank is seen by the rank beside it that waits, and all learn of it by one key.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from sixfold.fsdp.faults.model_store import NoAnswer, PatientStore

# By communicator ("group role"): how many collectives, and what the last ones were.
Launched = dict[str, tuple[int, list[int]]]


_END_S = 0.2  # for the thread to end
_LOOK_S = 0.25  # between two looks of a rank that waits
_LOOKS_PER_S = 2048  # of all ranks together at one store, at most


class Cause(Enum):
    """How a fault was found."""

    LATE = "late"  # a deadline passed
    BROKEN = "broken"  # the back end raised: whoever lives and computes may be innocent
    LOST = "lost"  # by a process or by beats
    APART = "apart"  # two ranks wait for different collectives
    TOLD = "told"  # another rank signed before


class Place(NamedTuple):
    """What a rank waits for, or waited for last."""

    step: int | None
    unit: str | None
    op: str

    def __str__(self) -> str:
        unit = "" if self.unit is None else f" of {self.unit or '(root)'}"
        return f"{self.op}{unit}" + ("" if self.step is None else f" in step {self.step}")


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    count: int
    place: Place | None
    blocked: bool  # its host waits there
    launched: Launched
    waits: bool = False  # its host or its device does

    def text(self) -> str:
        """For the store."""
        return json.dumps([self.count, self.place, self.blocked, self.launched, self.waits])

    @staticmethod
    def read(text: bytes | str) -> Beat:
        """What ``text`` made."""
        count, place, blocked, launched, waits = json.loads(text)
        return Beat(count, None if place is None else Place(*place), blocked, launched, waits)


def contradict(mine: Launched, theirs: Launched, *, both_blocked: bool) -> bool:
    """Whether two ranks cannot both be right.

    Collectives of one communicator have one order on all its ranks: two different ones at one place are a fault. And
    where both hosts wait, each for something that the other has not launched, neither will ever launch it: of one
    group's gathers and reductions (what a reduction launches while it is waited for has no order among other groups').
    """
    both = mine.keys() & theirs.keys()
    for key in both:
        (count, recent), (their_count, their_recent) = mine[key], theirs[key]
        first, their_first = count - len(recent), their_count - len(their_recent)
        for at in range(max(first, their_first), min(count, their_count)):
            if recent[at - first] != their_recent[at - their_first]:
                return True
    if not both_blocked:
        return False
    for group in {key.partition(" ")[0] for key in both}:
        ahead = [mine[key][0] - theirs[key][0] for key in both if key.partition(" ")[0] == group]
        if min(ahead) < 0 < max(ahead):
            return True
    return False


class Heartbeat:
    """A thread that answers ranks that wait, and finds lost ranks while this rank waits.

    Args:
        store: the model's store.
        rank, size: position in the main mesh.
        interval: seconds between two beats of a rank that does not wait, asked each time.
        here: where this rank is: place, whether its host waits there, for how many seconds, what it launched.
        silent_s: after how many seconds without a beat the next rank counts as lost, asked each time.
        ended: ranks whose process is known to be no more; asked while this rank waits.
        found: called on the thread with how and what was found and the ranks at fault (empty: others know them); True
            ends it.
        busy: called on the thread while this rank waits: a rank lives and does not wait, where it was last, and
            whether this rank is the one that looked.
        late: called at each look: a chance to look at Works; True ends the thread.
    """

    def __init__(
        self,
        store: PatientStore | None,
        rank: int,
        size: int,
        *,
        interval: Callable[[], float],
        here: Callable[[], tuple[Place | None, bool, float, Launched]],
        silent_s: Callable[[], float],
        ended: Callable[[], Sequence[int]],
        found: Callable[[Cause, str, Sequence[int]], bool],
        busy: Callable[[int, Place | None, bool], None],
        late: Callable[[], bool],
    ) -> None:
        self._store = store
        self._rank, self._next = rank, (rank + 1) % size
        self._least_s = max(_LOOK_S, size / _LOOKS_PER_S)
        self._interval, self._here, self._silent_s = interval, here, silent_s
        self._ended, self._found, self._busy, self._late = ended, found, busy, late
        self._stop = threading.Event()
        self._store_ended = False
        self._count = 0
        self._answered: bytes = b""
        self._asks_at = 0.0
        self._seen: tuple[bytes, float] | None = None  # the neighbour's beat, and when it was new
        self._busy_told: bytes | None = None  # by others, last; what was there before this wait is old
        self._thread = threading.Thread(target=self._run, name="sixfold-fsdp-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread: a process must not end while it is inside a store's call."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _pause_s(self) -> float:
        return min(self._least_s, self._interval())

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s()):
            if self._late():
                return
            place, blocked, waited_s, launched = self._here()
            waits = waited_s > self._pause_s()
            if waits and self._gone():
                return
            if not waits and time.monotonic() < self._asks_at:
                continue
            self._asks_at = time.monotonic() + self._interval()
            try:
                if self._store is not None and self._beat(
                    self._store, Beat(self._count + 1, place, blocked and waits, launched, waits), waited_s
                ):
                    return
            except NoAnswer:  # a store that is stopped: deadlines hold without it
                self._store = None
            except RuntimeError:  # it ended, and with it the rank that serves it; asked again, torch prints each time
                self._store, self._store_ended = None, True

    def _gone(self) -> bool:
        """A process has ended; True if that ended the model."""
        ended = tuple(self._ended())
        if ended:
            return self._found(Cause.LOST, "while this rank waited", ended)
        return self._store_ended and self._found(Cause.LOST, "the store has ended", ())

    def _beat(self, store: PatientStore, mine: Beat, waited_s: float) -> bool:
        """Ask if this rank waits, answer if any does; True if a fault ended the model."""
        self._count = mine.count
        if mine.waits:
            store.set("ask", f"{self._rank} {mine.count}")
        if store.check(["ask"]):
            asked = store.get("ask")
            if asked != self._answered:
                self._answered = asked
                store.set(f"beat/{self._rank}", mine.text())
        if not mine.waits:
            self._seen = self._busy_told = None
            return False
        return self._look(store, mine, waited_s)

    def _look(self, store: PatientStore, mine: Beat, waited_s: float) -> bool:
        if store.check(["fault"]):
            return self._found(Cause.TOLD, "another rank reported a fault", ())
        key = f"beat/{self._next}"
        text = store.get(key) if store.check([key]) else b""
        new = self._seen is not None and text != self._seen[0]
        if self._seen is None or new:
            self._seen = text, time.monotonic()
        silent_s = time.monotonic() - self._seen[1]
        if silent_s > self._silent_s():
            return self._found(Cause.LOST, f"no beat for {silent_s:.1f} s", (self._next,))
        beat = Beat.read(text) if text else None
        if beat is not None and contradict(mine.launched, beat.launched, both_blocked=mine.blocked and beat.blocked):
            return self._found(Cause.APART, "ranks wait for different collectives", ())
        if waited_s > self._interval():
            self._look_for_busy(store, beat if new else None)
        return False

    def _look_for_busy(self, store: PatientStore, new: Beat | None) -> None:
        """``new``: the neighbour's beat, if it gave one since the last look."""
        if new is not None and not new.waits:
            store.set("busy", json.dumps([self._next, new.place, new.count]))
            self._busy(self._next, new.place, True)
        elif store.check(["busy"]):
            told = store.get("busy")
            if self._busy_told not in (None, told):
                rank, place, _ = json.loads(told)
                self._busy(rank, None if place is None else Place(*place), False)
            self._busy_told = told


def beats(store: PatientStore, ranks: Sequence[int]) -> dict[int, Beat]:
    """The last beats of ``ranks``, of those that ever gave one."""
    return {rank: Beat.read(store.get(f"beat/{rank}")) for rank in ranks if store.check([f"beat/{rank}"])}
