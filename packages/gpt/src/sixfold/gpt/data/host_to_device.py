"""What the host sends to its device: from pinned memory, beside the computation, awaited where it is used.

    arrays of token_stream.py, on its thread --> Transfer.put, .send (this file)
    loop.py, before a step                   --> Transfer.arrive (this file)

[Note: what a copy waits for] Tensors are allocated for the side stream that fills them. Queued computation may still
read a microbatch that the host has dropped, while the side stream may take its memory again. So the copies wait for all
computation that is queued when the last of their tensors is allocated. Every use of a dropped microbatch is queued
before. The copies still run beside the rest of that step. The step that reads them waits for their event.

On a CPU a tensor is the array, and nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt


class CopyStreams(Protocol):
    """A device's streams, as a parcel needs them."""

    def pinned(self, array: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory of the host."""
        ...

    def place(self, source: torch.Tensor) -> torch.Tensor:
        """Room for it on the device."""
        ...

    def hold(self) -> None:
        """Let the copies that follow wait for all that is queued for computation."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy; the host goes on."""
        ...

    def mark(self) -> Any:
        """The event behind all copies queued."""
        ...

    def wait(self, event: Any) -> None:
        """Let the computation that follows wait for ``event``."""
        ...


class CudaCopyStreams:
    """The streams of a CUDA device. Made on the thread that computes, whose stream it is that waits."""

    def __init__(self, device: torch.device) -> None:
        self._compute = torch.cuda.current_stream(device)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, array: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._side):  # and its device, else pinning opens a context on device 0
            return array.pin_memory()

    def place(self, source: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._side):
            return torch.empty_like(source, device=self._side.device, pin_memory=False)

    def hold(self) -> None:
        self._side.wait_stream(self._compute)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = self._side.record_event()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        self._compute.wait_event(event)


def copy_streams(device: torch.device) -> CopyStreams | None:
    """The streams of ``device``; None where the host's memory is the device's."""
    return CudaCopyStreams(device) if device.type == "cuda" else None


class Transfer:
    """Arrays that travel together; holds both ends of every copy until they are awaited."""

    def __init__(self, copies: CopyStreams | None = None) -> None:
        self._copies = copies
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sent: Any = None

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The tensor of ``array`` on the device, which has its values once the parcel has arrived."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        if self._copies is None:
            return source
        source = self._copies.pinned(source)
        self._pairs.append((self._copies.place(source), source))
        return self._pairs[-1][0]

    def send(self) -> None:
        """Queue all copies. [Note: what a copy waits for]"""
        if self._copies is not None:
            self._copies.hold()
            for target, source in self._pairs:
                self._copies.copy(target, source)
            self._sent = self._copies.mark()

    def arrive(self) -> None:
        """Before the tensors are read: queue the wait for them. Of the second time on nothing."""
        if self._sent is not None:
            assert self._copies is not None, "sent without streams"
            self._copies.wait(self._sent)
            self._sent = None
            self._pairs.clear()
