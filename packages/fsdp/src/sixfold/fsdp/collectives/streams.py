"""Side streams for gathers and reductions; a null object where there are none.

    device --> make_stream (this file) --> engine/gather.py, engine/reduce.py

[Note: one code path] The engine always says "on the gather stream", "the compute stream waits"; on a CPU
these words do nothing. They are chosen once, by the device, so no other file asks which device it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import RLock
from typing import Any, Protocol

import torch


class SideStream(Protocol):
    """A queue of device work beside the compute queue."""

    @property
    def inside(self) -> AbstractContextManager[Any]:
        """To enter: work launched inside runs here, after all that the compute stream holds so far."""

    @property
    def joined(self) -> AbstractContextManager[Any]:
        """The same, and at its end the compute stream waits for what was launched; the host does not."""

    def mark(self) -> Any:
        """An event after the work launched here so far (None where work is done at once)."""

    def join(self, event: Any) -> None:
        """The compute stream waits for ``event``; the host does not."""


class NullStream:
    """The host is the only queue: everything is done when the call returns."""

    def __init__(self) -> None:
        self.inside = RLock()  # which nobody else holds: its enter and exit are C, those of nullcontext() Python
        self.joined = self.inside

    def mark(self) -> None:
        """Nothing to wait for."""
        return

    def join(self, event: Any) -> None:
        """Nothing to wait for."""


class CudaStream:
    """A CUDA stream that always follows the compute stream at the moment of use.

    Of high priority: what it runs is short and others wait for it, so its blocks go before those of compute kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def inside(self) -> AbstractContextManager[Any]:
        """[Note: one code path] Order against compute by events, never by the host."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    @property
    @contextmanager
    def joined(self) -> Iterator[None]:
        """[Note: one code path]"""
        with self.inside:
            yield
            event = self.mark()
        self.join(event)

    def mark(self) -> torch.cuda.Event:
        """An event at the end of what was launched here."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def join(self, event: Any) -> None:
        """The compute stream waits for ``event``."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def make_stream(device: torch.device) -> SideStream:
    """A stream of ``device``, or the null object."""
    return CudaStream(device) if device.type == "cuda" else NullStream()


def done_behind(device: torch.device) -> Callable[[], bool]:
    """Tells later whether the current stream of a CUDA ``device`` is through with what it was asked to do until now."""
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event.query
