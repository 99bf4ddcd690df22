"""One communicator for all edges of a rank: messages that stand beside each other in a list start together.

    messages of a list --> begin, sends and receives, end --> one batch on the group (this file) --> process_groups.py

[Note: one communicator] What one NCCL communicator is given runs in order, so a receive that is asked for ahead of its
place can hold up a send that its own sender waits for. Hence nothing is posted ahead here: a receive stands at its
place though its shape must be waited for. And a program must pass ``verify`` as a rendezvous. Then an order of all
messages exists in which each is the next at both its ends. Batches of neighbours in a list keep that order possible,
since whatever is before a message in its list is in the same batch or an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

__all__ = ["OneCommunicator"]

_Operation = tuple[str, list[Tensor], int, int]


class OneCommunicator:
    """The group of all ranks, where each edge sees a group.

    Args:
        group: of all ranks; a batch is one launch where it can be (``supports_coalescing``: NCCL), else its messages
            one after another, which is the same to gloo. A single message is a batch too: NCCL would make a
            communicator of two ranks for it.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._coalesces = bool(getattr(group, "supports_coalescing", False))
        self._open = False
        self._waiting: list[tuple[_Operation, _Later]] = []
        self._ended = False

    def name(self) -> str:
        """Of the back end."""
        return str(self._group.name())

    def begin(self) -> None:
        """Messages from here to ``end`` start together."""
        self._open = True

    def end(self) -> None:
        """Start them."""
        self._open = False
        self.flush()

    def flush(self) -> None:
        """Start what is waiting."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if not self._coalesces:
            for operation, later in waiting:
                try:
                    later.work = self._start(operation)
                except RuntimeError as error:  # the connection has ended; who waits for the message says for which
                    later.work = _NeverStarted(error)
            return
        self._group._start_coalescing()
        for operation, _ in waiting:
            self._start(operation)
        work = self._group._end_coalescing()
        for _, later in waiting:
            later.work = work

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """As of a group."""
        return self._put(("send", tensors, peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """As of a group."""
        return self._put(("recv", tensors, peer, tag))

    def abort(self) -> None:
        """Once for all edges."""
        if not self._ended:
            self._ended = True
            self._group.abort()

    def _put(self, operation: _Operation) -> Any:
        later = _Later(self.flush)
        self._waiting.append((operation, later))
        if not self._open:
            self.flush()
        return later

    def _start(self, operation: _Operation) -> Any:
        name, tensors, peer, tag = operation
        start: Callable[[Sequence[Tensor], int, int], Any] = getattr(self._group, name)
        return start(tensors, peer, tag)


class _Later:
    """The work of a message whose batch may not have started."""

    __slots__ = ("_flush", "work")

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self.work: Any = None

    def is_completed(self) -> bool:
        """As of a work."""
        return self.work is not None and bool(self.work.is_completed())

    def wait(self, *limit: timedelta) -> Any:
        """As of a work; who waits has its batch started."""
        if self.work is None:
            self._flush()
        return self.work.wait(*limit)


class _NeverStarted:
    """The work of a message that could not start."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def is_completed(self) -> bool:
        """It never is."""
        return False

    def wait(self, *_: timedelta) -> Any:
        """Raises what was raised."""
        raise self._error
