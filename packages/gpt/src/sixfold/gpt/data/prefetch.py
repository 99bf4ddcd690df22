"""Work that a thread does while the rank computes, and that is waited for no longer than a deadline.

    what to read --> Prefetch (this file) --> loop.py

A thread that hangs in a read (a disk, a network file system) cannot be stopped. It is a daemon: neither the run nor
the end of the process waits for it, which an executor of the standard library would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """One call on a thread of its own, begun when this is made."""

    def __init__(self, task: Callable[[], T]) -> None:
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(task,), name="sixfold-data", daemon=True).start()

    def _run(self, task: Callable[[], T]) -> None:
        try:
            self._result.append(task())
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Whether the call ended within ``seconds``."""
        return self._done.wait(seconds)

    def result(self, seconds: float) -> T:
        """What the call gave.

        Raises:
            TimeoutError: it did not end within ``seconds``. Else what the call raised.
        """
        if not self._done.wait(seconds):
            raise TimeoutError(f"nothing after {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._result[0]
