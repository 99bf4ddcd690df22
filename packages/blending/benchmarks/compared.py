"""Two ways to the same arrays, timed in turn (this file), for the files bench_*.py beside it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def compared(
    benchmark: Any,
    say: Callable[[str], None],
    what: str,
    ours: Callable[[], Sequence[Any]],
    theirs: Callable[[], Sequence[Any]],
    elements: int,
    rounds: int = 3,
) -> float:
    """Time both in CPU seconds, the least of ``rounds`` each, and assert that they return equal arrays.

    Says one line and returns how many times as fast ours is.
    """
    seconds, expected = [], []

    def their_turn() -> None:
        begin = time.process_time()
        expected[:] = theirs()
        seconds.append(time.process_time() - begin)

    benchmark._timer = time.process_time
    found = benchmark.pedantic(ours, setup=their_turn, rounds=rounds)
    assert len(found) == len(expected)
    assert all(map(np.array_equal, found, expected)), what
    our_ns, their_ns = benchmark.stats.stats.min / elements * 1e9, min(seconds) / elements * 1e9
    benchmark.extra_info.update(what=what, elements=elements, ns=our_ns, peer_ns=their_ns, ratio=their_ns / our_ns)
    say(f"{what}: {our_ns:.1f} ns, beside {their_ns:.1f} ns: {their_ns / our_ns:.1f}x")
    return their_ns / our_ns
