"""Temporary memory in slots, which whoever comes takes in turn.

    sizes --> TemporaryBucketAllocator (this file) --> engine/reduce.py

All memory is made once; steady state allocates nothing and resizes nothing, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sixfold.fsdp.errors import FsdpError


class TemporaryBucketAllocator:
    """Byte slots with one holder each; any free one serves.

    Args:
        slot_bytes: size of each slot.
        fill: a slot that is given back is filled with NaN.

    Attributes:
        holders: who holds a slot, and its number.
    """

    def __init__(self, slot_bytes: Sequence[int], device: torch.device, *, fill: bool = False) -> None:
        self._fill = fill
        self._slots = [torch.zeros(size, dtype=torch.uint8, device=device) for size in slot_bytes]
        self.holders: dict[str, int] = {}
        self._slot_bytes = tuple(slot_bytes)

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Sizes."""
        return self._slot_bytes

    def slot_of(self, owner: str) -> int | None:
        """The slot that ``owner`` holds."""
        return self.holders.get(owner)

    def memory(self, slot: int) -> Tensor:
        """The slot's bytes, at an address that never changes."""
        return self._slots[slot]

    def allocate(self, owner: str, nbytes: int) -> int | None:
        """Give ``owner`` a slot; returns its number, or None if all are held.

        Raises:
            FsdpError: it holds one already, or needs more than the slot has.
        """
        if owner in self.holders:
            raise FsdpError(f"{owner!r} holds slot {self.holders[owner]} already; free it first", unit=owner)
        if len(self.holders) == len(self._slots):
            return None
        slot = min(set(range(len(self._slots))).difference(self.holders.values()))
        if nbytes > self._slot_bytes[slot]:
            raise FsdpError(f"{owner!r} needs {nbytes} bytes, slot {slot} has {self._slot_bytes[slot]}", unit=owner)
        self.holders[owner] = slot
        return slot

    def free(self, owner: str) -> None:
        """Give ``owner``'s slot back."""
        if owner not in self.holders:
            raise FsdpError(f"{owner!r} holds no slot; it cannot be freed", unit=owner)
        slot = self.holders.pop(owner)
        if self._fill:
            self._slots[slot].fill_(NAN_BYTE)


NAN_BYTE = 255  # any number of them is a NaN in each floating dtype
