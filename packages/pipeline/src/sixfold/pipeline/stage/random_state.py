"""The state of the random numbers, so that a forward can be run again as it was.

F --> RandomState (this file) --> RECOMPUTE, snapshots

[Note: one thread at a time] torch reads a generator's state under a lock of the generator and makes a Python tensor
there. If another thread then runs and asks for the same lock, it waits with Python's own lock in its hand, for good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["RandomState"]

_ONE_AT_A_TIME = threading.RLock()


class RandomState:
    """The generators of the CPU and of one device, as they are when this is made."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._states = self._read()

    @classmethod
    def of(cls, tensors: list[Tensor], device: torch.device | None) -> RandomState:
        """That of ``tensors()``."""
        made = cls(device)
        if tensors:
            states = [tensor.cpu() for tensor in tensors]
            made._states = states[0], states[1] if len(states) > 1 else None
        return made

    def tensors(self) -> list[Tensor]:
        """For a checkpoint."""
        return [state for state in self._states if state is not None]

    def go_on(self) -> None:
        """The generators are as they were from here on."""
        self._write(self._states)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under that state; behind it the generators go on as if nothing had run."""
        now = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._write(now)

    def _read(self) -> tuple[Tensor, Tensor | None]:
        with _ONE_AT_A_TIME:
            return torch.get_rng_state(), None if self._device is None else torch.cuda.get_rng_state(self._device)

    def _write(self, states: tuple[Tensor, Tensor | None]) -> None:
        with _ONE_AT_A_TIME:
            torch.set_rng_state(states[0])
            if states[1] is not None and self._device is not None:
                torch.cuda.set_rng_state(states[1], self._device)
