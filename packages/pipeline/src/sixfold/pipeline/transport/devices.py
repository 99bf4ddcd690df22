"""What edges need where tensors are on a device: NCCL's deadline, marks on streams, and the way over host memory.

    process_groups.py --> a work of NCCL, or gloo's and a copy (this file) --> deadlines.py waits for it

[Note: over host memory] gloo moves CPU tensors, and torch does not look where a tensor is that it hands to gloo. Ranks
that share a device, which NCCL refuses, or have no NCCL, send copies: the host waits for the device at each SEND, and
at a RECV's consumer until the message is there.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["HostMemoryReceive", "StreamMark", "nccl_options", "wants_host_memory"]

_NCCL_MARGIN_S = 30.0  # by which NCCL's own watchdog comes behind ours, which says more


def nccl_options(timeout_s: float) -> Any:
    """NCCL's own watchdog, which ends the process, comes behind ours."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s + _NCCL_MARGIN_S)
    return options


class StreamMark:
    """Whether the current stream of a device is past the work that it just began to wait for."""

    def __init__(self, device: torch.device, _: Any) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self.is_completed: Callable[[], bool] = event.query


def wants_host_memory(group: Any, device: torch.device) -> bool:
    """The back end of ``group`` for ``device`` is gloo. [Note: over host memory]"""
    return device.type != "cpu" and isinstance(group._get_backend(device), dist.ProcessGroupGloo)


class HostMemoryReceive:
    """The work of a message that comes into host memory: to wait for it is to copy it to where it is needed."""

    __slots__ = ("_buffer", "_host", "_work")

    def __init__(self, work: Any, host: Tensor, buffer: Tensor) -> None:
        self._work, self._host, self._buffer = work, host, buffer

    def wait(self, *limit: timedelta) -> None:
        """As of a work; behind it the compute stream has the message, and ``host`` may be used again."""
        self._work.wait(*limit)
        self._buffer.copy_(self._host)
