"""Background saves in megatron-core's words: a request that is scheduled, and finalised on all ranks.

    save(..., async_sharded_save=True) --> AsyncRequest (this file) --> AsyncCallsQueue (this file) --> finalize_fns

The save itself runs already when the request is returned. It has the values of that moment, and runs in this
package's worker (background/saver.py). The request is its handle, and scheduling it puts it in the queue. A request
with a function of the caller's own runs it in a thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from sixfold.dist_ckpt.collectives.exchange import Exchange, Group
from sixfold.dist_ckpt.errors import CheckpointError, LostPeerError, typed

__all__ = ["AsyncCallsQueue", "AsyncRequest"]


class Running(Protocol):
    """Something that runs: a background save, or a function in a thread."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> None: ...


class AsyncRequest(NamedTuple):
    """Work that goes on, and what to do when it has ended on all ranks.

    Attributes:
        async_fn, async_fn_args, async_fn_kwargs: what is run when it is scheduled; None: nothing.
        finalize_fns: called in order on each rank after the work has ended well on all.
        preload_fn: called when it is scheduled; its result is the second argument of ``async_fn``.
        is_frozen: no function may be added any more.
        call_idx: its number in a queue.
        handle: a background save that runs already.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0
    handle: Running | None = None

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """One more function to call at the end.

        Raises:
            CheckpointError: the request is scheduled already.
        """
        if self.is_frozen:
            raise CheckpointError("the request is scheduled; add finalize functions before that")
        self.finalize_fns.append(fn)

    def execute_sync(self, group: Group = "world", timeout_s: float = 600.0) -> None:
        """Run it to its end, on all ranks of ``group``: an error of one is raised on all. Collective."""
        running = self.start()
        # A peer may wait all of timeout_s for its own.
        Exchange(group, 2 * timeout_s).run_on_all(lambda: running.wait(timeout_s))
        for fn in self.finalize_fns:
            fn()

    def freeze(self) -> AsyncRequest:
        """The same, to which no function can be added."""
        return self._replace(is_frozen=True)

    def start(self) -> Running:
        """Begin, unless it runs already."""
        if self.handle is not None:
            return self.handle
        arguments = list(self.async_fn_args)
        if self.preload_fn is not None:
            arguments[1:2] = [self.preload_fn()]
        fn, options = self.async_fn, self.async_fn_kwargs
        return _InThread((lambda: None) if fn is None else (lambda: fn(*arguments, **options)))


class _InThread:
    """A function in a thread."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._ended: Future[None] = Future()
        typed(threading.Thread(target=self._run, args=(fn,), name="sixfold-async-call", daemon=True).start)

    def _run(self, fn: Callable[[], Any]) -> None:
        try:
            fn()
            self._ended.set_result(None)
        except BaseException as error:  # told by wait
            self._ended.set_exception(error)

    def done(self) -> bool:
        return self._ended.done()

    def wait(self, timeout_s: float | None = None) -> None:
        if not futures.wait([self._ended], timeout_s).done:
            raise LostPeerError(f"the function of a request has not ended within timeout_s={timeout_s}; it goes on")
        if (error := self._ended.exception()) is not None:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error


class AsyncCallsQueue:
    """Requests in flight, finalised in the order in which they were scheduled, each on all ranks or on none.

    Args:
        persistent: accepted for the peer's sake; one worker process is kept in any case.
        group: the ranks that schedule and finalise together.
        timeout_s: longest wait for one request, and for one peer.
    """

    def __init__(self, persistent: bool = False, *, group: Group = "world", timeout_s: float = 600.0) -> None:
        self.persistent, self._group, self._timeout_s = persistent, group, timeout_s
        self._calls: deque[AsyncRequest] = deque()
        self._last = -1

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start it and put it in the queue; returns its number. Called on all ranks."""
        self._last += 1
        self._calls.append(async_request._replace(is_frozen=True, call_idx=self._last, handle=async_request.start()))
        return self._last

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalise what has ended on all ranks; returns the numbers of those requests. Called on all ranks.

        Args:
            blocking: wait for all of them.
            no_dist: ask this rank only.
        Raises:
            CheckpointError: a request failed, on any rank; it leaves the queue, and its functions are not called.
                What a finalize function raises is raised on its own rank alone.
        """
        ended, group = list[int](), None if no_dist else self._group

        def has_ended(request: AsyncRequest) -> bool:
            exchange = Exchange(group, self._timeout_s)
            return bool(exchange.all_reduce(lambda: (None, request.start().done()), all)[1])

        while self._calls and (blocking or has_ended(self._calls[0])):
            request = self._calls.popleft()
            request.execute_sync(group, self._timeout_s)
            ended.append(request.call_idx)
        return ended

    def get_num_unfinalized_calls(self) -> int:
        """How many requests are in the queue."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalise all that is in the queue, or drop it: saves in flight end by themselves, without their functions."""
        if abort:
            self._calls.clear()
        else:
            self.maybe_finalize_async_calls(blocking=True)
