"""Units that wait elsewhere: under a byte budget, bytes in the way of another unit are copied to a gap of the arena.

    engine/gather.py --> Parking (this file) --> buffers/temporary_memory.py

Decides who is freed, who is moved and where; starts no gather. [Note: parked] A unit is used in its own range only, so
saved views stay right. Between its uses its bytes may wait in any gap. They come back by a copy, which is far cheaper
than a gather. For units of one size the gathers are then the fewest that bytes allow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from sixfold.fsdp.buffers.temporary_memory import Arena
from sixfold.fsdp.placement.residency import NEVER

_COPIES = 64  # that cost as much as a gather: memory of 3.3 TB/s, read and written, beside a link of 25 GB/s

NextUse = Callable[[str], int]


class Parking:
    """Room for a unit in an arena.

    Args:
        sizes: bytes of each unit in the arena.
    """

    def __init__(self, arena: Arena, sizes: Mapping[str, int]) -> None:
        self._arena = arena
        self._sizes = sizes

    def victims(self, unit: str, kept: Collection[str], next_use: NextUse) -> list[str]:
        """Who gives up its bytes for ``unit``: the farthest next use first, as far as bytes are short."""
        short = self._arena.held_bytes - self._arena.nbytes
        short += 0 if self._arena.parked(unit) else self._sizes[unit]
        if short <= 0:
            return []
        chosen: list[str] = []
        others = [name for name in self._arena.here if name != unit and name not in kept]
        for name in sorted(others, key=lambda name: (-next_use(name), name)):
            if short <= 0:
                break
            chosen.append(name)
            short -= self._sizes[name]
        return chosen

    def clear(self, unit: str, kept: Collection[str], leave: Callable[[str], bool]) -> tuple[int, bool]:
        """Move who is in the way of ``unit``; who finds no gap is dropped.

        Args:
            leave: a holder leaves its range; False: its bytes are worth nothing.
        Returns:
            (copies made, whether ``unit``'s own parked bytes are in its range now, which it holds).
        """
        arena, copies = self._arena, 0
        for name in arena.in_the_way(unit):
            if name in kept:
                continue
            if not arena.parked(name) and not leave(name):
                arena.free(name)
                continue
            start = arena.gap(name, unit)
            if start is not None:
                arena.park(name, start)
                copies += 1
            elif arena.swappable(unit, name):
                arena.swap(unit, name)
                return copies + 3, True
            else:
                self.drop(name)
        return copies, False

    def drop(self, name: str) -> None:
        """Its bytes are no more here."""
        if self._arena.parked(name):
            self._arena.take_back(name)
        elif name in self._arena.holders:
            self._arena.free(name)


@dataclass(frozen=True, slots=True)
class Simulated:
    """An order once, from nothing gathered."""

    gathers: int
    gathered_bytes: int
    copies: int

    def pays_against(self, gathered_bytes: int) -> bool:
        """It saves more than its copies cost against ``gathered_bytes`` without them."""
        copied = self.copies * self.gathered_bytes // max(self.gathers, 1)
        return (gathered_bytes - self.gathered_bytes) * _COPIES > copied


def simulate(uses: Sequence[str], sizes: Mapping[str, int], offsets: Mapping[str, int], arena_bytes: int) -> Simulated:
    """What ``uses`` cost with units that wait elsewhere; nothing of ``sizes`` is made."""
    ranges = {name: (offsets[name], size) for name, size in sizes.items()}
    arena = Arena(arena_bytes, ranges, torch.device("meta"))
    parking = Parking(arena, sizes)
    following: dict[str, int] = {}
    later = [NEVER] * len(uses)
    for at in range(len(uses) - 1, -1, -1):
        later[at] = following.get(uses[at], NEVER)
        following[uses[at]] = at
    upcoming = dict(following)
    gathers = nbytes = copies = 0
    for at, name in enumerate(uses):
        upcoming[name] = later[at]
        if name in arena.holders:
            continue
        for victim in parking.victims(name, (), lambda one: upcoming[one]):
            parking.drop(victim)
        made, came = parking.clear(name, (), lambda one: True)
        copies += made
        if came:
            continue
        if arena.parked(name):
            copies += arena.take_back(name) is not None
        else:
            gathers, nbytes = gathers + 1, nbytes + sizes[name]
        arena.allocate(name)
    return Simulated(gathers, nbytes, copies)
