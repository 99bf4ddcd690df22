"""Deadlines: no wait without one.

    work --> HostWait, StreamWait (this file) --> PeerLost, or the report of a watchdog thread

Waiting for gloo blocks the host, so the wait itself has the deadline. (gloo's ``is_completed`` stays False until
``wait``, so there is nothing to poll.) Waiting for NCCL only orders streams. There a thread looks at the works in the
order in which they were waited for. It ends the communicators when one is overdue.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from sixfold.pipeline.program.action import Action

__all__ = ["HostWait", "InFlight", "PeerLost", "Sent", "StreamWait", "within"]

_POLL_S = 0.05
_LOOK_S = 0.0005  # of a host that has nothing else to do than to wait for a device

Result = TypeVar("Result")


class Sent:
    """A tensor that was sent. ``work`` and ``tensor`` are None once it is known that the peer has it."""

    __slots__ = ("action", "tensor", "work")

    def __init__(self, work: Any, tensor: Any, action: Action | None) -> None:
        self.work, self.tensor, self.action = work, tensor, action


InFlight = deque[Sent]  # in order


class PeerLost(Exception):
    """The message of ``action`` did not come before the deadline, or its connection ended.

    Attributes:
        action: None where ranks wait for each other outside of a program's list.
        peer: rank that was waited for; None for all.
    """

    def __init__(self, action: Action | None, peer: int | None = None) -> None:
        super().__init__(str(action))
        self.action = action
        self.peer = peer


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """``call()`` on a thread of its own, which is left behind when it has not ended after ``seconds``.

    For calls that have no deadline of their own, or do not keep it. A store whose host is stopped answers nothing, and
    its client waits for ever (torch 2.13, whatever its timeout). The thread does not keep the interpreter alive, and
    what it gets later is dropped. If the call ends while the interpreter ends, the process aborts (exit status 134):
    Python then ends the thread on its way back from C++.

    Raises:
        TimeoutError: it has not ended; and whatever ``call`` raises.
    """
    ended = threading.Event()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=run, name="sixfold-pipeline-call", daemon=True).start()
    if not ended.wait(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


class HostWait:
    """Blocks until a work is done, at most ``timeout_s``."""

    def __init__(self, timeout_s: float) -> None:
        self._limit = timedelta(seconds=timeout_s)

    def __call__(self, work: Any, action: Action | None, peer: int | None = None) -> None:
        """Raises PeerLost with ``action`` when the work failed or is overdue."""
        try:
            work.wait(self._limit)
        except RuntimeError as error:
            raise PeerLost(action, peer) from error

    def release(self, in_flight: InFlight, window: int, peer: int) -> None:
        """Forget sends that are done: here the oldest of more than ``window``, which are waited for."""
        while len(in_flight) > window:
            self.let_go(in_flight[0], peer)
            in_flight.popleft()

    def let_go(self, sent: Sent, peer: int) -> None:
        """Wait until it was sent, and drop its tensor. Raises PeerLost."""
        if sent.work is not None:
            self(sent.work, sent.action, peer)
            sent.work = sent.tensor = None

    def check(self) -> None:
        """Nothing is ever overdue behind the caller's back."""

    def settle(self) -> None:
        """What was waited for is there."""


def _itself(work: Any) -> Any:
    return work


class StreamWait:
    """Lets the current stream wait for a work; a thread watches that it ends in time.

    Args:
        timeout_s: from the wait to the work's end.
        abort: ends the communicators; a method, called once, on the thread, when a work is overdue.
        mark: of a work that the current stream waits for, what tells (``is_completed``) that the stream is past it. A
            work holds the memory that it fills, and is itself that only where nothing else is at hand.
    """

    def __init__(self, timeout_s: float, abort: Callable[[], None], mark: Callable[[Any], Any] | None = None) -> None:
        self._timeout_s = timeout_s
        self._mark = _itself if mark is None else mark
        self._abort = weakref.WeakMethod(abort)  # so that the thread does not keep the owner alive
        self._watched: deque[tuple[float, Any, Action | None, int | None]] = deque()
        self._overdue: list[tuple[Action | None, int | None]] = []
        self._thread: threading.Thread | None = None

    def __call__(self, work: Any, action: Action | None, peer: int | None = None) -> None:
        """Order the stream behind ``work``; returns at once."""
        self.check()
        work.wait()
        self._watch(self._mark(work), action, peer)

    def _watch(self, work: Any, action: Action | None, peer: int | None) -> None:
        self._watched.append((time.monotonic() + self._timeout_s, work, action, peer))
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="sixfold-pipeline-watchdog", daemon=True)
            self._thread.start()

    def release(self, in_flight: InFlight, window: int, peer: int) -> None:
        """Forget sends that are done. The compute stream never waits for one: tensors are kept until it is sent.

        No ``window``: the host runs ahead of the device by as many sends as the list holds, and what it waits for
        on the device is its receives.
        """
        self.check()
        while in_flight and in_flight[0].work.is_completed():
            in_flight.popleft()

    def check(self) -> None:
        """Raises PeerLost if a work was found overdue; asks nobody."""
        if self._overdue:
            raise PeerLost(*self._overdue[0])

    def settle(self) -> None:
        """Let the host come after what streams were ordered behind: returns when all of it is there.

        A stream goes on when its communicator is aborted, with what was there instead of the message; so the host looks
        at the works, and at what the thread noted before it aborted anything.

        Raises:
            PeerLost: a work was found overdue.
        """
        for _, work, _, _ in tuple(self._watched):
            while not (self._overdue or work.is_completed()):
                time.sleep(_LOOK_S)
        self.check()

    def _look(self) -> None:
        while not self._overdue and self._abort() is not None:
            time.sleep(_POLL_S)
            while self._watched and self._watched[0][1].is_completed():
                self._watched.popleft()
            if self._watched and time.monotonic() > self._watched[0][0]:
                self._overdue.append(self._watched[0][2:])  # before the abort, after which every wait returns
                if (abort := self._abort()) is not None:
                    abort()
