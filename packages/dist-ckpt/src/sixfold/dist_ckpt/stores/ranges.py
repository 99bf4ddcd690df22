"""Ranges of a store's files, many in flight at once, those that fail asked for again.

    ranges --> in_flight (this file) --> (range, bytes), in the order of arrival --> mirror.py

[Note: a range that fails] is asked for again by the store, after a pause that grows, while others go on. One that gives
nothing for ``STALL_S``, or a quarter of the deadline, counts as failed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from sixfold.dist_ckpt.files.integrity import Span
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.stores.pool import Pool

AT_ONCE = 16
_LEAST_RANGE_BYTES, MOST_RANGE_BYTES = 4 << 20, 8 << 20
STALL_S = 60.0


def stall_s(timeout_s: float) -> float:
    """Longest time that one request may take. See [Note: a range that fails]."""
    return min(STALL_S, timeout_s / 4)


def in_flight(read: Callable[[ByteRange], bytes], ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
    """The bytes of all ranges, ``AT_ONCE`` of them in flight. See [Note: a range that fails]."""
    left, busy = deque(ranges), dict[Future[bytes], ByteRange]()
    pool = Pool(AT_ONCE)
    try:
        while left or busy:
            while left and len(busy) < AT_ONCE:
                part = left.popleft()
                busy[pool.submit(read, part)] = part
            for future in wait(busy, None, FIRST_COMPLETED).done:
                yield busy.pop(future), future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def at_once(actions: Sequence[Callable[[], Any]], limit_s: float, moves: Callable[[], int]) -> list[Any]:
    """The results of actions that may never return, each in a thread of its own; the first error of them.

    Raises:
        TimeoutError: for ``limit_s`` none has ended, and ``moves``, which grows with what is done, stood still.
    """
    ended: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()

    def act(number: int, action: Callable[[], Any]) -> None:
        try:
            ended.put((number, action(), None))
        except BaseException as error:
            ended.put((number, None, error))

    for number, action in enumerate(actions):
        Thread(target=act, args=(number, action), daemon=True).start()
    results, seen, since = dict[int, Any](), moves(), time.monotonic()
    while len(results) < len(actions):
        try:
            number, value, error = ended.get(timeout=limit_s / 8)
        except Empty:
            if moves() != seen:
                seen, since = moves(), time.monotonic()
            if time.monotonic() - since > limit_s:
                raise TimeoutError from None
            continue
        if error is not None:
            raise error
        results[number], since = value, time.monotonic()
    return [results[number] for number in range(len(actions))]


def cut(name: str, start: int, stop: int, step: int) -> Iterator[ByteRange]:
    """Bytes [start, stop) of a file in ranges of ``step``."""
    for at in range(start, stop, step):
        yield ByteRange(name, at, min(step, stop - at))


def ranges_of(spans: Sequence[Span], sizes: Mapping[str, int], block_bytes: int) -> list[ByteRange]:
    """Spans as ranges: whole blocks joined, or parts of large ones; enough of them to be in flight together."""
    total = sum(span.stop - span.first for span in spans) * block_bytes
    most = min(max(total // AT_ONCE, _LEAST_RANGE_BYTES), MOST_RANGE_BYTES)
    step, found = most if block_bytes > most else most // block_bytes * block_bytes, list[ByteRange]()
    for span in spans:
        stop = min(span.stop * block_bytes, sizes[span.file])
        found += cut(span.file, span.first * block_bytes, stop, step)
    return found
