"""Temporary memory, in which owners take turns: slots, of which any serves, and an arena with a range for each owner.

    sizes --> TemporaryBucketAllocator (this file) --> engine/reduce.py: sums on their way
    ranges --> Arena (this file) --> placement/, engine/gather.py: gathered weights

All memory is made once; steady state allocates nothing and resizes nothing, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sixfold.fsdp.errors import FsdpError

NAN_BYTE = 255  # any number of them is a NaN in each floating dtype
_SCRATCH = 1 << 22  # bytes of two places that are exchanged at a time


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


class Arena:
    """One piece of memory in which each owner has a fixed range; ranges may overlap, holders never do.

    Args:
        nbytes: size of the memory.
        ranges: owner -> (first byte, bytes).
        apart: each owner has memory of its own, and takes turns as if it had not: for ``fill_free``. Nothing is parked.

    Attributes:
        holders: who holds its range.

    [Note: one range per unit] F.linear saves the view ``weight.t()`` for its backward. So a unit that is gathered
    again comes back to the same address while a graph may point at it. Two microbatches in flight share that address.
    (Megatron-FSDP takes another one, with an INFO log.) Ranges change between steps only, when graphs are refused
    anyway, and in "double" never.
    """

    def __init__(
        self, nbytes: int, ranges: Mapping[str, tuple[int, int]], device: torch.device, *, apart: bool = False
    ) -> None:
        self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._ranges: dict[str, tuple[int, int]] = {}
        self._overlapping: dict[str, frozenset[str]] = {}
        self.holders: set[str] = set()
        self._parked: dict[str, tuple[int, int]] = {}
        self._scratch: Tensor | None = None
        self.held_bytes = 0
        self.peak_bytes = 0  # most that was held at once
        self.nbytes = nbytes
        self.move(ranges)
        sizes = {owner: size for owner, (_, size) in ranges.items()} if apart else {}
        self._own = {owner: torch.zeros(size, dtype=torch.uint8, device=device) for owner, size in sizes.items()}

    @property
    def own_bytes(self) -> int:
        """Of owners that lie ``apart``, beside ``nbytes``."""
        return sum(one.nbytes for one in self._own.values())

    @property
    def used_bytes(self) -> int:
        """Where the last range ends."""
        return max((start + size for start, size in self._ranges.values()), default=0)

    def move(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        """Give all owners their ranges anew; nobody holds any.

        Raises:
            FsdpError: a range is not inside the memory.
        """
        assert not self.holders and not self._parked, f"ranges move while {self.here} are here"
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
                if other != owner and _meet((begin, length), (start, size))
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
        return self._own[owner] if self._own else self._memory[start : start + size]

    def shares(self, owner: str) -> bool:
        """Another range overlaps ``owner``'s."""
        return bool(self._overlapping[owner])

    def in_the_way(self, owner: str) -> list[str]:
        """Holders whose ranges overlap ``owner``'s, by name: every rank frees them in one order."""
        if owner not in self._ranges:
            self.range_of(owner)
        found = self._overlapping[owner] & self.holders
        if self._parked:
            mine = self._ranges[owner]
            found |= {other for other, place in self._parked.items() if other != owner and _meet(place, mine)}
        return sorted(found) if found else []

    def allocate(self, owner: str) -> None:
        """``owner`` holds its range.

        Raises:
            FsdpError: it does already, or an overlapping one does.
        """
        if owner in self.holders:
            raise FsdpError(f"{owner!r} holds its range already; free it first", unit=owner)
        others = self.in_the_way(owner)
        if others:
            raise FsdpError(f"{owner!r} overlaps {others}, which hold theirs; free them first", unit=owner)
        self.holders.add(owner)
        self.held_bytes += self._ranges[owner][1]
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes = self.held_bytes
        assert self.held_bytes <= self.nbytes, f"{self.held_bytes} bytes are held of {self.nbytes}"

    def fill_free(self, stay: Collection[str]) -> None:
        """Whatever no owner holds becomes NaN, but for ranges of those that ``stay``."""
        for owner in self._own.keys() - self.holders - set(stay):
            self._own[owner].fill_(NAN_BYTE)
        held = map(self.range_of, self.holders.union(stay))
        at = 0
        for start, size in sorted([*held, *self._parked.values(), (self.nbytes, 0)]):
            self._memory[at : max(at, start)].fill_(NAN_BYTE)
            at = max(at, start + size)

    def free(self, owner: str) -> None:
        """``owner`` gives its range back."""
        if owner not in self.holders:
            raise FsdpError(f"{owner!r} does not hold its range; it cannot be freed", unit=owner)
        self.holders.remove(owner)
        self.held_bytes -= self._ranges[owner][1]

    def start_over(self) -> None:
        """Nobody holds a range, and nothing waits elsewhere."""
        self.holders.clear()
        self._parked.clear()
        self.held_bytes = 0

    # ---- bytes that wait elsewhere

    @property
    def here(self) -> list[str]:
        """Owners whose bytes are in the memory, in their range or parked, by name."""
        return sorted([*self.holders, *self._parked])

    @property
    def scratch_bytes(self) -> int:
        """Bytes beside the memory through which ``swap`` goes."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def parked(self, owner: str) -> bool:
        """``owner``'s bytes wait in a place that is not its range."""
        return owner in self._parked

    def gap(self, owner: str, coming: str) -> int | None:
        """Where ``owner``'s bytes can wait: its own range, or where none of it is; nothing of ``coming``'s range."""
        home, nbytes = self._ranges[owner]
        others = [self._ranges[one] for one in (*self.holders, coming) if one != owner]
        others += [place for one, place in self._parked.items() if one != owner]
        if not any(_meet((home, nbytes), one) for one in others):
            return home
        taken = [*others, (home, nbytes), self._place(owner)]  # a copy that overlaps itself is not defined
        start = 0
        for begin, size in sorted(taken):
            if begin - start >= nbytes:
                return start
            start = max(start, begin + size)
        return start if self.nbytes - start >= nbytes else None

    def park(self, owner: str, start: int) -> None:
        """Copy ``owner``'s bytes to ``start``; its range, or where they waited, is free."""
        begin, size = self._place(owner)
        self._memory[start : start + size].copy_(self._memory[begin : begin + size])
        self.holders.discard(owner)
        self._parked[owner] = start, size

    def take_back(self, owner: str) -> Tensor | None:
        """The parked bytes of ``owner``, which waits no more; None where they lie in its range already."""
        start, size = self._parked.pop(owner)
        self.held_bytes -= size
        return None if start == self._ranges[owner][0] else self._memory[start : start + size]

    def swappable(self, owner: str, other: str) -> bool:
        """``owner`` is parked, and ``other``'s bytes lie exactly in its range, in a place of the same size."""
        return owner in self._parked and self._place(other) == self._ranges[owner]

    def swap(self, owner: str, other: str) -> None:
        """``owner``'s parked bytes go to its range, which it holds, and ``other``'s to where they were."""
        (start, size), (begin, _) = self._parked[owner], self._ranges[owner]
        if self._scratch is None:
            self._scratch = torch.empty(min(size, _SCRATCH), dtype=torch.uint8, device=self._memory.device)
        for at in range(0, size, self._scratch.numel()):
            there = self._memory[start + at : min(start + at + self._scratch.numel(), start + size)]
            home = self._memory[begin + at : begin + at + there.numel()]
            kept = self._scratch[: there.numel()].copy_(there)
            there.copy_(home)
            home.copy_(kept)
        self.holders.discard(other)
        self._parked[other] = self._parked.pop(owner)
        self.holders.add(owner)

    def _place(self, owner: str) -> tuple[int, int]:
        return self._parked[owner] if owner in self._parked else self._ranges[owner]


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return max(one[0], other[0]) < min(one[0] + one[1], other[0] + other[1])
