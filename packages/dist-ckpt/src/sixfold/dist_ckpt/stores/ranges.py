"""Ranges of a store's files, many in flight at once, those that fail asked for again.

    ranges --> in_flight (this file) --> (range, bytes), in the order of arrival --> mirror.py

[Note: a range that fails] waits for a pause that grows, and is asked for again while others go on. One that gives
nothing for ``STALL_S``, or a quarter of the deadline, counts as failed. From its first failure on a range has
``timeout_s``; then one error says what was asked, how often and for how long.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from sixfold.dist_ckpt.files.integrity import Span
from sixfold.dist_ckpt.geometry.manifest import ByteRange

AT_ONCE = 16
_LEAST_RANGE_BYTES, MOST_RANGE_BYTES = 4 << 20, 8 << 20
STALL_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_TICK_S = 0.05  # how often those that wait for their next try are looked at


@dataclass(slots=True)
class _Asked:
    """One range: its request under way, or its failures so far."""

    part: ByteRange
    begun: float = 0.0
    failures: int = 0
    first_failure: float = 0.0
    due: float = 0.0


def stall_s(timeout_s: float) -> float:
    """Longest time that one request may take. See [Note: a range that fails]."""
    return min(STALL_S, timeout_s / 4)


def in_flight(
    ask: Callable[[ByteRange], Future[Any]],
    ranges: Sequence[ByteRange],
    timeout_s: float,
    passes: Callable[[BaseException], bool],
    told: Callable[[BaseException, ByteRange, int, float], BaseException],
) -> Iterator[tuple[ByteRange, bytes]]:
    """The bytes of all ranges, ``AT_ONCE`` of them in flight. See [Note: a range that fails].

    Args:
        ask: begins to read a range.
        passes: whether asking again may help.
        told: makes the error that is raised from an error, its range, how often and for how many seconds it failed.
    """
    left, later, busy = deque(map(_Asked, ranges)), list[_Asked](), dict[Future[Any], _Asked]()
    longest_s = stall_s(timeout_s)

    def failed(asked: _Asked, error: BaseException) -> None:
        now = time.monotonic()
        asked.failures += 1
        asked.first_failure = asked.first_failure or now
        pause_s = min(_FIRST_PAUSE_S * 2 ** min(asked.failures - 1, 10), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
        if not passes(error) or now - asked.first_failure + pause_s > timeout_s:
            raise told(error, asked.part, asked.failures, now - asked.first_failure) from error
        asked.due = now + pause_s
        later.append(asked)

    try:
        while left or later or busy:
            now = time.monotonic()
            due = [asked for asked in later if asked.due <= now]
            while (due or left) and len(busy) < AT_ONCE:
                asked = due.pop() if due else left.popleft()
                if asked.failures:
                    later.remove(asked)
                asked.begun = now
                busy[ask(asked.part)] = asked
            if not busy:
                time.sleep(_TICK_S)
                continue
            done, _ = wait(busy, _TICK_S if later else min(1.0, longest_s / 4), FIRST_COMPLETED)
            for future in done:
                asked, error = busy.pop(future), future.exception()
                if error is not None:
                    failed(asked, error)
                else:
                    yield asked.part, future.result()
            for future, asked in list(busy.items()):
                if time.monotonic() - asked.begun > longest_s and not future.done():
                    del busy[future]
                    future.cancel()
                    failed(asked, TimeoutError(f"no answer within {longest_s:g} s"))
    finally:
        for future in busy:
            future.cancel()


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
