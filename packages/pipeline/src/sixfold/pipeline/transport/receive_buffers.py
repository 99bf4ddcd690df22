"""Receive buffers that are used again and again: fixed addresses, and no allocation once a step has run.

    shape, dtype --> a buffer that nobody holds (this file) --> process_groups.py

[Note: held memory] What is received lies in the buffer as long as anybody needs it: a graph that saved it, a send that
is on its way, a module that keeps its input. Each of them holds the memory, and the memory counts who does. So a
buffer is free when the ring alone holds it, and the first free one is taken: equal steps take equal buffers. On a
device what used it was enqueued before, and a receive comes after what the compute stream holds where it is posted.

[Note: free memory is NaN] With ``debug_memory`` all bytes of free memory are ones, which is NaN in every floating
type. Whoever reads memory that it does not hold, or before its message is there, then sees no plausible old message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from sixfold.pipeline.transport.specs import TensorSpec

__all__ = ["Ring"]

_uses: Callable[[int], int] = torch._C._storage_Use_Count
_ALONE = 2  # the tensor, and the object that is asked


class Ring:
    """The receive buffers of an edge, by shape and dtype.

    Args:
        debug_memory: what is free is filled at each ``take`` and ``check``. [Note: free memory is NaN]
    Attributes:
        made: buffers that were allocated.
    """

    def __init__(self, device: torch.device, *, debug_memory: bool = False) -> None:
        self._device, self._debug_memory = device, debug_memory
        self._buffers: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self.made = 0

    def take(self, spec: TensorSpec) -> Tensor:
        """A tensor of its own over the first buffer that is free. [Note: held memory]"""
        shape, dtype, _ = spec
        if self._debug_memory:
            self.fill_free()
        buffers = self._buffers.setdefault((shape, dtype), [])
        for buffer in buffers:
            if _uses(buffer.untyped_storage()._cdata) <= _ALONE:
                return buffer.detach()
        self.made += 1
        with torch.inference_mode(False):  # a step takes what an evaluation made
            buffers.append(torch.empty(shape, dtype=dtype, device=self._device))
        if self._debug_memory:
            fill(buffers[-1])
        return buffers[-1].detach()

    def fill_free(self) -> None:
        """[Note: free memory is NaN]"""
        for buffers in self._buffers.values():
            for buffer in buffers:
                if _uses(buffer.untyped_storage()._cdata) <= _ALONE:
                    fill(buffer)

    def forget(self, specs: Iterable[TensorSpec]) -> None:
        """No more of these come: whoever holds such memory is the last to."""
        for shape, dtype, _ in specs:
            self._buffers.pop((shape, dtype), None)


def fill(buffer: Tensor) -> None:
    """All its bytes are ones. [Note: free memory is NaN]"""
    buffer.flatten().view(torch.uint8).fill_(255)
