"""Temporary memory that units take turns in: slots for whoever comes, and an arena with a range for each unit.

    sizes --> TemporaryBucketAllocator (this file) --> reduce.py
    ranges --> Arena (this file) --> gather.py

All memory is made once; steady state allocates nothing and resizes nothing, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sixfold.fsdp.errors import FsdpError


class TemporaryBucketAllocator:
    """Byte slots with one holder each; any free one serves.

    Args:
        slot_bytes: size of each slot.
    """

    def __init__(self, slot_bytes: Sequence[int], device: torch.device) -> None:
        self._slots = [torch.zeros(size, dtype=torch.uint8, device=device) for size in slot_bytes]
        self._holders: list[str | None] = [None] * len(self._slots)

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Sizes."""
        return tuple(slot.numel() for slot in self._slots)

    def slot_of(self, owner: str) -> int | None:
        """The slot that ``owner`` holds."""
        return self._holders.index(owner) if owner in self._holders else None

    def memory(self, slot: int) -> Tensor:
        """The slot's bytes, at an address that never changes."""
        return self._slots[slot]

    def allocate(self, owner: str, nbytes: int) -> int | None:
        """Give ``owner`` a slot; returns its number, or None if all are held.

        Raises:
            FsdpError: it holds one already, or needs more than the slot has.
        """
        if owner in self._holders:
            raise FsdpError(f"{owner!r} holds slot {self.slot_of(owner)} already; free it first", unit=owner)
        free = [slot for slot, holder in enumerate(self._holders) if holder is None]
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


class Arena:
    """One piece of memory in which each owner has a fixed range; ranges may overlap, holders never do.

    Args:
        nbytes: size of the memory.
        ranges: owner -> (first byte, bytes).

    [Note: one range per unit] F.linear saves the view ``weight.t()`` for its backward, so a unit gathered again must
    come back to the same address as long as a graph may point at it: two micro-batches in flight share it, and no
    other place is taken silently. (Megatron-FSDP takes another one, with an INFO log.) Ranges change between steps
    only, when graphs are refused anyway, and in "double" never.
    """

    def __init__(self, nbytes: int, ranges: Mapping[str, tuple[int, int]], device: torch.device) -> None:
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._ranges: dict[str, tuple[int, int]] = {}
        self._overlapping: dict[str, frozenset[str]] = {}
        self._holders: set[str] = set()
        self.held_bytes = 0
        self.peak_bytes = 0  # most that was held at once
        self.move(ranges)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._memory.numel()

    @property
    def used_bytes(self) -> int:
        """Where the last range ends."""
        return max((start + size for start, size in self._ranges.values()), default=0)

    def move(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Give all owners their ranges anew; nobody holds any.

        Raises:
            FsdpError: a range is not inside the memory.
        """
        assert not self._holders, f"ranges move while {sorted(self._holders)} hold theirs"
        for owner, (start, size) in ranges.items():
            if start < 0 or size < 0 or start + size > self.nbytes:
                raise FsdpError(
                    f"{owner!r} has bytes [{start}, {start + size}) of an arena of {self.nbytes}", unit=owner
                )
        self._ranges = dict(ranges)
        self._overlapping = {
            owner: frozenset(
                other
                for other, (begin, length) in self._ranges.items()
                if other != owner and max(begin, start) < min(begin + length, start + size)
            )
            for owner, (start, size) in self._ranges.items()
        }

    def __contains__(self, owner: str) -> bool:
        return owner in self._ranges

    def range_of(self, owner: str) -> tuple[int, int]:
        """(first byte, bytes) of ``owner``."""
        if owner not in self._ranges:
            raise FsdpError(f"{owner!r} has no range; owners are {sorted(self._ranges)}", unit=owner)
        return self._ranges[owner]

    def memory(self, owner: str) -> Tensor:
        """The bytes of ``owner``'s range."""
        start, size = self.range_of(owner)
        return self._memory[start : start + size]

    def shares(self, owner: str) -> bool:
        """Another range overlaps ``owner``'s."""
        return bool(self._overlapping[owner])

    def holds(self, owner: str) -> bool:
        """``owner`` holds its range."""
        return owner in self._holders

    def in_the_way(self, owner: str) -> list[str]:
        """Holders whose ranges overlap ``owner``'s, by name: every rank frees them in one order."""
        self.range_of(owner)
        found = self._overlapping[owner] & self._holders
        return sorted(found) if found else []

    def allocate(self, owner: str) -> None:
        """``owner`` holds its range.

        Raises:
            FsdpError: it does already, or an overlapping one does.
        """
        if owner in self._holders:
            raise FsdpError(f"{owner!r} holds its range already; free it first", unit=owner)
        others = self.in_the_way(owner)
        if others:
            raise FsdpError(f"{owner!r} overlaps {others}, which hold theirs; free them first", unit=owner)
        self._holders.add(owner)
        self.held_bytes += self._ranges[owner][1]
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        assert self.held_bytes <= self.nbytes, f"{self.held_bytes} bytes are held of {self.nbytes}"

    def free(self, owner: str) -> None:
        """``owner`` gives its range back."""
        if owner not in self._holders:
            raise FsdpError(f"{owner!r} does not hold its range; it cannot be freed", unit=owner)
        self._holders.remove(owner)
        self.held_bytes -= self._ranges[owner][1]
