"""Optimizer state in host memory: a step brings one flat buffer's state at a time to the device, and takes it back.

    chunked_step.py --> HostState (this file): copy in, copy out --> optimizer.state

Two slots of device memory take turns. Each is as large as the largest chunk's state. So the copy of the next chunk
runs beside the step of this one. Host tensors are made once and keep their addresses: ``state_records`` are aliases of
them. Nothing else moves, neither main weights nor gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.collectives.streams import SideStream
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.optimizers.chunked_step import replaced_step, steps_alone

_ALIGN = 128  # every tensor starts on such a border of its slot


def refuse_unfit(optimizer: torch.optim.Optimizer, *, in_pieces: bool) -> None:
    """Raise for optimizers that need more than a chunk at a time. [Note: chunks step alone]"""
    what = type(optimizer).__name__
    if in_pieces:
        raise FsdpError(
            f"{what} over matrices in pieces needs the momentum of all of them at once, and offload brings a part "
            "of it at a time; wrap its matrices with granularity 'tensor', or use offload=False"
        )
    if not steps_alone(optimizer):
        raise FsdpError(
            f"{what} is not known to step each parameter by itself, and offload steps some parameters at a time; use "
            "one of torch.optim's other than LBFGS, or offload=False"
        )
    replaced = replaced_step(optimizer)
    if replaced is not None:
        raise FsdpError(
            f"{what}.step is replaced on the object by {replaced}, and offload would not call it as a whole; replace "
            "it after fully_shard_optimizer, or use offload=False"
        )


class HostState:
    """The state of one optimizer, in host memory between steps.

    Args:
        chunks: main parameters that it may ever hold, by flat buffer.
        pinned: host memory that the device copies from by itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks: Sequence[Sequence[nn.Parameter]],
        *,
        device: torch.device,
        stream: SideStream,
        pinned: bool,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._chunks = [list(chunk) for chunk in chunks]
        self._device = device
        self._stream = stream
        self._pinned = pinned
        self._next: dict[int, int] = {}  # the chunk after a chunk, in this step
        self._turn = 0  # the slot of the next chunk
        self._ready: Any = None  # an event for when the next chunk's state is there
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._host: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._visiting: dict[tuple[nn.Parameter, str], Tensor] = {}  # copies on the device
        self.keep([main for chunk in self._chunks for main in chunk])  # of constructors (Adagrad)

    @property
    def host_bytes(self) -> int:
        """Bytes of state in host memory."""
        return sum(tensor.nbytes for tensor in self._host.values())

    @property
    def device_bytes(self) -> int:
        """Bytes of the two slots."""
        return sum(slot.nbytes for slot in self._slots)

    def owned_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """It is this optimizer's."""
        return self._optimizer() is optimizer

    def _state(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer of a step is gone"
        return optimizer.state

    def keep(self, mains: Sequence[nn.Parameter]) -> None:
        """State of ``mains`` goes to host memory, wherever it is."""
        state = self._state()
        for main in mains:
            for key, value in state.get(main, {}).items():
                if not _is_large(value, main):
                    continue
                home = self._host.get((main, key))
                if home is value:
                    continue
                if home is None or home.shape != value.shape or home.dtype != value.dtype:
                    home = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=self._pinned)
                    self._host[main, key] = home
                # A tensor that is no slot's is freed here: its copy must be over.
                home.copy_(value, non_blocking=self._visiting.pop((main, key), None) is value)
                state[main][key] = home

    def keep_all(self) -> None:
        """All state goes to host memory, and is there when this returns."""
        with self._stream.inside:
            self.keep([main for chunk in self._chunks for main in chunk])
        self._settle()

    def begin(self, chunks: Sequence[int]) -> None:
        """The first chunk is on its way."""
        self._fit_slots()
        self._next = dict(pairwise(chunks))
        self._ready = self._bring(chunks[0]) if chunks else None

    def before(self, chunk: int) -> None:
        """Its state is there, and the next one's on its way."""
        arrived, self._ready = self._ready, self._bring(self._next[chunk]) if chunk in self._next else None
        self._stream.join(arrived)

    def after(self, chunk: int) -> None:
        """Its state goes back."""
        with self._stream.inside:
            self.keep(self._chunks[chunk])

    def end(self) -> None:
        """All is back, also what an interrupted step left on the device."""
        self.keep_all()

    def _fit_slots(self) -> None:
        largest = max((sum(map(_room, self._large(chunk).values())) for chunk in self._chunks), default=0)
        if largest > self._slots[0].numel():  # once: after the first step, which makes the state
            self._slots = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _large(self, chunk: Sequence[nn.Parameter]) -> dict[tuple[nn.Parameter, str], Tensor]:
        state = self._state()
        return {
            (main, key): value for main in chunk for key, value in state.get(main, {}).items() if _is_large(value, main)
        }

    def _bring(self, number: int) -> Any:
        """Start the copy of a chunk's state into its slot; an event for when it is there.

        The slot's last chunk went out on the same stream, so it is gone by then.
        """
        slot, at, state = self._slots[self._turn], 0, self._state()
        self._turn = 1 - self._turn
        with self._stream.inside:
            for (main, key), home in self._large(self._chunks[number]).items():
                place = slot[at : at + home.nbytes].view(home.dtype).view(home.shape)
                place.copy_(home, non_blocking=True)
                state[main][key] = self._visiting[main, key] = place
                at += _room(home)
        return self._stream.mark()

    def _settle(self) -> None:
        """The host waits: state is read there, by records and by state dicts."""
        event = self._stream.mark()
        if event is not None:
            event.synchronize()


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN


def _is_large(value: Any, main: nn.Parameter) -> bool:
    """Moments and the like; step counters stay where the optimizer wants them."""
    return isinstance(value, Tensor) and (value.numel() > 1 or (value.shape == main.shape and value.dim() > 0))
