"""Batches read ahead by a thread, while the caller computes.

    positions of each batch --> Prefetcher (this file): get_batch on a thread --> next(), in order

The compiled kernels release the GIL, so reading a batch does not stop the training loop. There is no state. After a
restart, begin at the position of the first batch that was not trained on: what was read ahead is read again.

[Note: exact look-ahead] The order knows what the next batches read. If ids come from afar (a URL), the thread has the
sources fetch for ``ahead`` batches beyond the one that it reads. Nothing is fetched that no batch reads.

[Note: arrays in a ring] With ``make_out`` every batch is written into one of ``depth + 1`` dicts of arrays. Up to
``depth`` of them wait or are being filled, and one is with the caller. The caller has it until it takes the next batch;
then it is filled again. So wait for a copy to a device before you take the next batch.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from threading import Condition, Thread
from types import TracebackType
from typing import Protocol, Self

from sixfold.blending.batches.gpt_arrays import Batch
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import Positions, whole_number

_CLOSE_S = 60.0  # for the batch that is being read when the end is asked for


class Readable(Protocol):
    """What batches are read from: ``GPTDataset``, ``BlendedDataset``."""

    def get_batch(self, positions: Positions, *, out: Batch | None = None) -> Batch: ...


class Prefetcher:
    """Iterates over the batches of ``positions``, read ahead; a context manager that ends its thread.

    An error while reading is raised by the ``next()`` that would have given that batch, after all batches before it.
    The thread is a daemon and ends when the iterator is dropped. A process forked meanwhile has no such thread, and
    its ``next()`` says so.
    """

    def __init__(
        self,
        data: Readable,
        positions: Iterable[Positions],
        depth: int = 2,
        *,
        make_out: Callable[[], Batch] | None = None,
        timeout_s: float = 600.0,
        ahead: int = 8,
    ) -> None:
        """Start to read.

        Args:
            data: a dataset or a blend.
            positions: those of each batch, in order; ``PositionSampler`` or a generator. Only the thread uses it.
            depth: batches read ahead, >= 1.
            make_out: makes a dict of arrays for ``get_batch(out=)``, pinned memory for instance; called ``depth + 1``
                times, here. None: each batch has new arrays, the caller's for good.
            timeout_s: how long ``next()`` waits for a batch.
            ahead: batches whose ids are fetched beyond the one that is read, where they come from afar.
        Raises:
            BlendingError: ``depth`` or ``timeout_s`` is out of range.
        """
        whole_number("depth", depth, 1)
        whole_number("ahead", ahead, 0)
        if not timeout_s > 0:
            raise BlendingError(f"timeout_s is {timeout_s}; it is a number of seconds above 0")
        outs: list[Batch | None] = [None] * (depth + 1) if make_out is None else [make_out() for _ in range(depth + 1)]
        self._queue = queue = _Queue(outs)
        self._timeout_s = timeout_s
        self._process = os.getpid()
        self._thread = Thread(target=_read, args=(queue, data, positions, ahead), daemon=True, name="sixfold-prefetch")
        # The thread knows the queue alone, so that a prefetcher that nobody holds any more can end it.
        weakref.finalize(self, _stop_in, self._process, queue)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            StopIteration: ``positions`` has ended, or the prefetcher was closed.
            BlendingError: none came in ``timeout_s``.
            What ``get_batch`` or ``positions`` raised.
        """
        if os.getpid() != self._process:  # whose locks are as they were when it was forked
            raise BlendingError("this process was forked from the one that reads ahead; make a Prefetcher in each")
        return self._queue.take(self._timeout_s, self._thread)

    def close(self) -> None:
        """End the thread and wait for it. Twice is once.

        Raises:
            BlendingError: it did not end within a minute: a read hangs.
        """
        if os.getpid() != self._process:
            return
        self._queue.stop()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise BlendingError(f"the thread that reads ahead did not end within {_CLOSE_S} s; {self._queue.doing}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Queue:
    """What the thread and the caller share; every field is used with ``_changed`` held, but ``doing``."""

    def __init__(self, outs: list[Batch | None]) -> None:
        self.doing = "it has not begun"  # for messages
        self._changed = Condition()
        self._ready: deque[tuple[Batch, Batch | None]] = deque()
        self._free: deque[Batch | None] = deque(outs)
        self._taken: list[Batch | None] = []  # with the caller, at most one
        self._stopped = False
        self._ended = False  # nothing more will become ready
        self._error: BaseException | None = None

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def free(self) -> list[Batch | None]:
        """[arrays to fill], once there are some; [] when the end is asked for. The caller takes its time meanwhile."""
        with self._changed:
            while not self._free and not self._stopped:
                self._changed.wait(1.0)
            return [] if self._stopped else [self._free.popleft()]

    def put(self, batch: Batch, out: Batch | None) -> None:
        with self._changed:
            if not self._stopped:
                self._ready.append((batch, out))
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def take(self, timeout_s: float, thread: Thread) -> Batch:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._free.extend(self._taken)  # see [Note: arrays in a ring]
            self._taken.clear()
            self._changed.notify_all()
            while not self._ready:
                if self._error is not None:
                    raise self._error
                if self._ended or self._stopped:
                    raise StopIteration
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not thread.is_alive():
                    raise BlendingError(
                        f"no batch came in {timeout_s} s; {self.doing}: check its storage, or raise timeout_s"
                    )
                self._changed.wait(min(left_s, 1.0))
            batch, out = self._ready.popleft()
            self._taken.append(out)
            return batch


def _stop_in(process: int, queue: _Queue) -> None:
    if os.getpid() == process:
        queue.stop()


def _announced(positions: Iterable[Positions], data: Readable, ahead: int) -> Iterator[Positions]:
    """``positions``, of which ``ahead`` are told to the data before their turn; an error comes in its own turn."""
    if not ahead or not getattr(data, "looks_ahead", False):
        yield from positions
        return
    waiting: deque[Positions] = deque()
    try:
        for some in positions:
            data.look_ahead(some)  # type: ignore[attr-defined]
            waiting.append(some)
            if len(waiting) > ahead:
                yield waiting.popleft()
    except Exception:
        yield from waiting
        raise
    yield from waiting


def _read(queue: _Queue, data: Readable, positions: Iterable[Positions], ahead: int) -> None:
    """The thread."""
    error: BaseException | None = None
    try:
        for some in _announced(positions, data, ahead):
            outs = queue.free()
            if not outs:
                break
            queue.doing = f"it reads {len(some)} positions from {some[0] if len(some) else 'none'} on"
            queue.put(data.get_batch(some, out=outs[0]), outs[0])
            queue.doing = "it waits for positions"
    except BaseException as raised:
        error = raised
    queue.end(error)
