"""A function of every item, on threads with a deadline (this file) --> builder.py

The threads are daemons. One that hangs in a read stops neither the caller nor the end of the interpreter.
"""

from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, Thread
from typing import Generic, TypeVar

from sixfold.blending.errors import BlendingError

S = TypeVar("S")
T = TypeVar("T")


def on_threads(function: Callable[[S], T], items: Iterable[S], threads: int, deadline_s: float) -> list[T]:
    """``function`` of every item; an error ends the rest, and the one of the first item that has one is raised.

    Args:
        deadline_s: how long no item may be done while some are under way: it is about progress, not about the whole.
    Raises:
        BlendingError: the deadline passed; names the items under way.
        What ``function`` raised.
    """
    crew = _SharedWork(function, list(items))
    for number in range(min(threads, len(crew.items))):
        Thread(target=crew.work, daemon=True, name=f"sixfold-builder_{number}").start()
    return crew.wait(deadline_s)


class _SharedWork(Generic[S, T]):
    """What the threads and the caller share; every field is used with ``_changed`` held, but ``items``."""

    def __init__(self, function: Callable[[S], T], items: list[S]) -> None:
        self.items = items
        self._function = function
        self._changed = Condition()
        self._left = deque(range(len(items)))
        self._under_way: set[int] = set()
        self._done: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}

    def work(self) -> None:
        while True:
            with self._changed:
                if not self._left or self._errors:
                    return
                number = self._left.popleft()
                self._under_way.add(number)
            try:
                made = self._function(self.items[number])
            except BaseException as error:
                with self._changed:
                    self._errors[number] = error
                    self._end(number)
            else:
                with self._changed:
                    self._done[number] = made
                    self._end(number)

    def _end(self, number: int) -> None:
        self._under_way.discard(number)
        self._changed.notify_all()

    def wait(self, deadline_s: float) -> list[T]:
        with self._changed:
            while self._under_way or (self._left and not self._errors):
                ended = len(self._done) + len(self._errors)
                self._changed.wait_for(lambda: len(self._done) + len(self._errors) > ended, deadline_s)  # noqa: B023
                if len(self._done) + len(self._errors) == ended:
                    self._left.clear()
                    what = ", ".join(str(self.items[number]) for number in sorted(self._under_way)[:8])
                    raise BlendingError(
                        f"builder threads finished nothing for {deadline_s} s; they work on {what}: check the storage "
                        "of this data and of its cache"
                    )
            if self._errors:
                raise self._errors[min(self._errors)]
            return [self._done[number] for number in range(len(self.items))]
