"""Ranges of a store's files, many in flight at once, those that fail asked for again.

    ranges --> in_flight (this file) --> (range, bytes), in the order of arrival --> mirror.py

[Note: a range that fails] is asked for again by the store, after a pause that grows, while others go on. One that gives
nothing for ``STALL_S``, or a quarter of the deadline, counts as failed.

[Note: threads at the end] A thread that nobody waits for may still run when the interpreter ends, after a load that
failed. Python ends such a thread where it asks for the interpreter next; inside of a call of torch that is an abort of
the process. So the interpreter first waits for them, ``_EXIT_S`` at most: one that waits for a server may be ended.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import cache, partial
from threading import Thread
from typing import Any
from weakref import WeakSet

from sixfold.dist_ckpt.errors import typed
from sixfold.dist_ckpt.formats.integrity import Span
from sixfold.dist_ckpt.geometry.manifest import ByteRange

AT_ONCE = 16
_EXIT_S = 2.0
_RUNNING: WeakSet[Thread] = WeakSet()
_LEAST_RANGE_BYTES, MOST_RANGE_BYTES = 4 << 20, 8 << 20
STALL_S = 60.0


def stall_s(timeout_s: float) -> float:
    """Longest time that one request may take. See [Note: a range that fails]."""
    return min(STALL_S, timeout_s / 4)


def in_flight(read: Callable[[ByteRange], bytes], ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
    """The bytes of all ranges, ``AT_ONCE`` of them in flight. See [Note: a range that fails]."""
    left, busy = deque(ranges), dict[Future[bytes], ByteRange]()
    while left or busy:
        while left and len(busy) < AT_ONCE:
            part = left.popleft()
            busy[begun(partial(read, part))] = part
        for future in wait(busy, None, FIRST_COMPLETED).done:
            yield busy.pop(future), future.result()


def at_once(actions: Sequence[Callable[[], Any]], limit_s: float, moves: Callable[[], int]) -> list[Any]:
    """The results of actions that may never return, each in a thread of its own; the first error of them.

    Raises:
        TimeoutError: for ``limit_s`` none has ended, and ``moves``, which grows with what is done, stood still.
    """
    futures = [begun(action) for action in actions]
    left, seen, since = set(futures), moves(), time.monotonic()
    while left:
        done, left = wait(left, limit_s / 8, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if done or moves() != seen:
            seen, since = moves(), time.monotonic()
        elif time.monotonic() - since > limit_s:
            raise TimeoutError
    return [future.result() for future in futures]


def begun(action: Callable[[], Any], future: Future[Any] | None = None) -> Future[Any]:
    """In a thread that nobody waits for: no pool, whose threads the interpreter joins. ``future``: to be used."""
    future = future or Future()
    _waits_at_exit()

    def act() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=act, daemon=True)
    _RUNNING.add(thread)
    typed(thread.start)
    return future


@cache
def _waits_at_exit() -> None:
    """See [Note: threads at the end]."""
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    until = time.monotonic() + _EXIT_S
    for thread in list(_RUNNING):
        with suppress(RuntimeError):  # it was never started
            thread.join(max(0.0, until - time.monotonic()))


def cut(name: str, start: int, stop: int, step: int) -> Iterator[ByteRange]:
    """Bytes [start, stop) of a file in ranges of ``step``."""
    for at in range(start, stop, step):
        yield ByteRange(name, at, min(step, stop - at))


def ranges_of(spans: Sequence[Span], sizes: Mapping[str, int], block_bytes: int) -> list[ByteRange]:
    """Spans as ranges: whole blocks, joined; enough of them to be in flight together."""
    total = sum(span.stop - span.first for span in spans) * block_bytes
    most = min(max(total // AT_ONCE, _LEAST_RANGE_BYTES), MOST_RANGE_BYTES)
    step, found = max(1, most // block_bytes) * block_bytes, list[ByteRange]()
    for span in spans:
        stop = min(span.stop * block_bytes, sizes[span.file])
        found += cut(span.file, span.first * block_bytes, stop, step)
    return found
