"""Slots of temporary memory that units hold for a while.

    sizes --> TemporaryBucketAllocator (this file) --> gather.py, reduce.py

Every slot is made once; steady state allocates nothing, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sixfold.fsdp.errors import FsdpError


class TemporaryBucketAllocator:
    """Byte slots with one holder each.

    Args:
        slot_bytes: size of each slot.
        colours: owner -> its slot, for ever [Note: one slot per unit for a whole step]; else any free slot serves.

    [Note: one slot per unit for a whole step] F.linear saves the view ``weight.t()`` for its backward, so a unit
    gathered again must come back to the same storage as long as a graph may point at it. Coloured owners have one
    slot for the life of the model: two micro-batches in flight share it, and no other is taken silently.
    (Megatron-FSDP takes another one, with an INFO log.)
    """

    def __init__(
        self, slot_bytes: Sequence[int], device: torch.device, *, colours: Mapping[str, int] | None = None
    ) -> None:
        self._slots = [torch.zeros(size, dtype=torch.uint8, device=device) for size in slot_bytes]
        self._holders: list[str | None] = [None] * len(self._slots)
        self._colours = colours

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Sizes."""
        return tuple(slot.numel() for slot in self._slots)

    def slot_of(self, owner: str) -> int | None:
        """The slot that ``owner`` holds."""
        return self._holders.index(owner) if owner in self._holders else None

    def holder(self, owner: str) -> str | None:
        """Who holds the slot that is ``owner``'s by colour."""
        return self._holders[self._colour(owner)]

    def memory(self, slot: int) -> Tensor:
        """The slot's bytes, at an address that never changes."""
        return self._slots[slot]

    def _colour(self, owner: str) -> int:
        if self._colours is None or owner not in self._colours:
            raise FsdpError(f"{owner!r} has no colour; coloured owners are {sorted(self._colours or ())}", unit=owner)
        return self._colours[owner]

    def allocate(self, owner: str, nbytes: int) -> int | None:
        """Give ``owner`` a slot; returns its number, or None if all that could serve are held.

        Raises:
            FsdpError: it holds one already, or needs more than the slot has.
        """
        if owner in self._holders:
            raise FsdpError(f"{owner!r} holds slot {self.slot_of(owner)} already; free it first", unit=owner)
        if self._colours is not None:
            choices = [self._colour(owner)]
        else:
            choices = list(range(len(self._slots)))
        free = [slot for slot in choices if self._holders[slot] is None]
        if not free:
            return None
        if nbytes > self._slots[free[0]].numel():
            raise FsdpError(
                f"{owner!r} needs {nbytes} bytes, slot {free[0]} has {self._slots[free[0]].numel()}", unit=owner
            )
        self._holders[free[0]] = owner
        return free[0]

    def free(self, owner: str) -> None:
        """Give ``owner``'s slot back."""
        slot = self.slot_of(owner)
        if slot is None:
            raise FsdpError(f"{owner!r} holds no slot; it cannot be freed", unit=owner)
        self._holders[slot] = None
