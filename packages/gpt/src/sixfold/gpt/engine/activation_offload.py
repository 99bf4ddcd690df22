"""train.offload_activations: what autograd saves waits in host memory between a microbatch's forward and its backward.

    forward saves a tensor --> HostActivations.pack (this file) --> pinned memory --> unpack, at its backward

Weights and views of them stay: fsdp gathers and frees those. Copies run on a stream of their own beside the layers; a
tensor that is copied out is free for reuse as soon as its copy is done. Values are copied, so no bit changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.gpt.errors import ConfigError

LEAST_BYTES = 1 << 16  # smaller ones cost more to copy than they hold


@dataclass(frozen=True)
class _Away:
    """A tensor in host memory, and the event behind its copy."""

    host: Tensor
    event: Any


class HostActivations:
    """Hooks for saved tensors of ``device``.

    Attributes:
        away_bytes: copied out so far.
    """

    def __init__(self, device: torch.device, *, least_bytes: int = LEAST_BYTES) -> None:
        self._device = device
        self._least = least_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.away_bytes = 0

    def hooks(self) -> AbstractContextManager[None]:
        """Within it, tensors that autograd saves are sent away."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, saved: Tensor) -> Tensor | _Away:
        """Start the copy to host memory."""
        source = saved._base if saved._is_view() else saved
        if isinstance(source, nn.Parameter) or saved.device != self._device or saved.nbytes < self._least:
            return saved
        self.away_bytes += saved.nbytes
        with torch.no_grad():
            return self._copied(saved.detach())

    def _copied(self, saved: Tensor) -> _Away:
        # Strides are kept: a kernel that reads another layout may round otherwise.
        host = torch.empty_like(saved, device="cpu", pin_memory=self._stream is not None)
        if self._stream is None:
            return _Away(host.copy_(saved), None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(saved, non_blocking=True)
            saved.record_stream(self._stream)
        return _Away(host, self._stream.record_event())

    def unpack(self, packed: Tensor | _Away) -> Tensor:
        """Bring it back; the stream that asks waits for the copy, the host does not."""
        if isinstance(packed, Tensor):
            return packed
        if self._stream is None:
            return packed.host
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(packed.event)
            back = torch.empty_like(packed.host, device=self._device).copy_(packed.host, non_blocking=True)
        current.wait_stream(self._stream)
        back.record_stream(current)
        return back


def hooks_of(activations: HostActivations | None) -> AbstractContextManager[None]:
    """Its hooks, or none."""
    return nullcontext() if activations is None else activations.hooks()


def check_offload(device: torch.device) -> None:
    """Activations can go to host memory from a device alone.

    Raises:
        ConfigError: the run computes on the CPU.
    """
    if device.type == "cpu":
        raise ConfigError(
            "train.offload_activations is true and the run computes on the CPU, whose activations are in host memory; "
            "train.offload_activations = false works, and train.recompute = 'full' needs less memory"
        )
