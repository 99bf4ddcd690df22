"""Optimizer state in host memory: a step brings one stream's state at a time to the device, and takes it back.

    optimizer.step --> HostState (this file): copy in, torch's step on one chunk, copy out --> optimizer.state

A chunk is what the optimizer holds of one stream of a unit. Two slots of device memory, each as large as the largest
chunk's state, take turns, so that the copy of the next chunk runs beside the step of this one. Host tensors are made
once and keep their addresses: ``state_records`` are aliases of them. Nothing else moves, neither main weights nor
gradients.

[Note: chunks step alone] torch's optimizers treat each parameter by itself (LBFGS does not), so that a step over some
parameters and then over the others gives the bits of one step. Of other optimizers nobody knows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.streams import SideStream

_ALIGN = 128  # every tensor starts on such a border of its slot


def refuse_unfit(optimizer: torch.optim.Optimizer, *, in_pieces: bool) -> None:
    """Raise for optimizers that need more than a chunk at a time. [Note: chunks step alone]"""
    what = type(optimizer).__name__
    if in_pieces:
        raise FsdpError(
            f"{what} over matrices in pieces needs the momentum of all of them at once, and offload brings it stream "
            "by stream; wrap its matrices with granularity 'tensor', or use offload=False"
        )
    if type(optimizer) is not getattr(torch.optim, what, None) or what == "LBFGS":
        raise FsdpError(
            f"{what} is not known to step each parameter by itself, and offload steps stream by stream; use one of "
            "torch.optim's other than LBFGS, or offload=False"
        )


class HostState:
    """The state of one optimizer, in host memory between steps.

    Args:
        chunks: its main parameters, stream by stream.
        pinned: host memory that the device copies from by itself.
        plain: says whether this is no step of the user's (state is being made ahead).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chunks: Sequence[Sequence[nn.Parameter]],
        *,
        device: torch.device,
        stream: SideStream,
        pinned: bool,
        plain: Callable[[], bool],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._chunks = [list(chunk) for chunk in chunks if chunk]
        self._device = device
        self._stream = stream
        self._pinned = pinned
        self._plain = plain
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

    def keep(self, mains: Sequence[nn.Parameter]) -> None:
        """State of ``mains`` goes to host memory, wherever it is."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer of a step is gone"
        for main in mains:
            for key, value in optimizer.state.get(main, {}).items():
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
                optimizer.state[main][key] = home

    def keep_all(self) -> None:
        """All state goes to host memory, and is there when this returns."""
        with self._stream.enter():
            self.keep([main for chunk in self._chunks for main in chunk])
        self._settle()

    def step(self, closure: Callable[[], Any] | None, raw: Callable[..., Any]) -> Any:
        """A step of ``raw``, the optimizer's own, chunk by chunk."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer of a step is gone"
        if self._plain():
            return raw(optimizer) if closure is None else raw(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        all_params = [group["params"] for group in groups]
        self._fit_slots(optimizer)
        try:
            ready = self._bring(optimizer, 0) if self._chunks else None
            for at, chunk in enumerate(self._chunks):
                arrived, ready = ready, self._bring(optimizer, at + 1) if at + 1 < len(self._chunks) else None
                self._stream.join(arrived)
                inside = set(map(id, chunk))
                for group, params in zip(groups, all_params, strict=True):
                    group["params"] = [one for one in params if id(one) in inside]
                raw(optimizer)
                with self._stream.enter():
                    self.keep(chunk)
        finally:
            for group, params in zip(groups, all_params, strict=True):
                group["params"] = params
            self.keep_all()  # also what an interrupted step left on the device
        return loss

    def _fit_slots(self, optimizer: torch.optim.Optimizer) -> None:
        largest = max((sum(map(_room, self._large(optimizer, chunk).values())) for chunk in self._chunks), default=0)
        if largest > self._slots[0].numel():  # once: after the first step, which makes the state
            self._slots = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]

    def _large(
        self, optimizer: torch.optim.Optimizer, chunk: Sequence[nn.Parameter]
    ) -> dict[tuple[nn.Parameter, str], Tensor]:
        return {
            (main, key): value
            for main in chunk
            for key, value in optimizer.state.get(main, {}).items()
            if _is_large(value, main)
        }

    def _bring(self, optimizer: torch.optim.Optimizer, number: int) -> Any:
        """Start the copy of a chunk's state into its slot; an event for when it is there.

        The slot's last chunk went out on the same stream, so it is gone by then.
        """
        slot, at = self._slots[number % 2], 0
        with self._stream.enter():
            for (main, key), home in self._large(optimizer, self._chunks[number]).items():
                place = slot[at : at + home.nbytes].view(home.dtype).view(home.shape)
                place.copy_(home, non_blocking=True)
                optimizer.state[main][key] = self._visiting[main, key] = place
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


def install(
    optimizer: torch.optim.Optimizer,
    chunks: Sequence[Sequence[nn.Parameter]],
    *,
    device: torch.device,
    stream: SideStream,
    plain: Callable[[], bool],
) -> HostState:
    """From now on ``optimizer.step()`` goes chunk by chunk and leaves all state in host memory.

    torch has no hook around a step, so the method is replaced on the object, as learning rate schedulers do; hooks of
    the optimizer run as before, once for each step.
    """
    host = HostState(optimizer, chunks, device=device, stream=stream, pinned=device.type == "cuda", plain=plain)
    raw = type(optimizer).step
    while getattr(raw, "hooked", False):  # torch.compile may have wrapped it once more
        raw = raw.__wrapped__  # type: ignore[attr-defined]  # hooks are called around all chunks, not around each
    counted = getattr(optimizer.step, "_wrapped_by_lr_sched", False)

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]  # what a scheduler made before looks at
        return host.step(closure, raw)

    around = torch.optim.Optimizer.profile_hook_step(step)
    if counted:
        around._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(around, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(lambda _: host.keep_all())
    return host
