"""Ranks that are threads of this process: one function on each, results by rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from sixfold.pipeline.transport import Transport, threads


def on_threads(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    transports: Sequence[Transport] | None = None,
    timeout_s: float = 60.0,
) -> list[Any]:
    """``function(transport, *args)`` on every rank; what it returned or raised, by rank.

    A thread that has not ended after ``timeout_s`` is an AssertionError.
    """
    results: list[Any] = [None] * ranks

    def run(rank: int, transport: Transport) -> None:
        try:
            results[rank] = function(transport, *args)
        except BaseException as error:
            results[rank] = error

    started = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(transports or threads(ranks))]
    for thread in started:
        thread.start()
    for rank, thread in enumerate(started):
        thread.join(timeout_s)
        assert not thread.is_alive(), f"rank {rank} hangs"
    return results


def values_or_raise(results: list[Any]) -> list[Any]:
    """``results`` when no rank raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
