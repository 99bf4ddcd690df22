"""A fixed tree over the microbatches of a batch: which partial sums there are, and which are added when.

    numbers of microbatches --> MicrobatchTree (this file) --> microbatch_sums.py, which has the tensors

Leaf k is a rank's k-th microbatch, already summed over ranks. Two neighbours in the tree are added as soon as nothing
that lies between them can still come: over leaves 0, 1, 2 ... that is a binary counter.

[Note: a tree with missing leaves] The tree over twelve leaves is that over sixteen, and what is missing is left out.

    leaves   0 1 2 3 4 5 6 7 8 9 a b
              +   +   +   +   +   +     level 1: neighbours
               \\ /     \\ /     \\ /      level 2
                 \\_____/        |       level 3: 8..b has no neighbour
                     \\__________/       level 4

So where two leaves meet follows from their numbers alone: at level (a ^ b).bit_length(). A rank that holds every N-th
microbatch, N a power of two, has the upper part of the same tree.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placed:
    """What a leaf does.

    Attributes:
        stored: the slot that it is written to, or None: it is added to another.
        adds: in this order: ``(into, source)`` slots; source None is the leaf. A source is free afterwards.
    """

    stored: int | None
    adds: tuple[tuple[int, int | None], ...]


class MicrobatchTree:
    """Partial sums by the leaves that are in them; each lies in a slot, numbered from 0, the lowest free one first."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, int | None]] = []  # (a leaf in it, slot), in the order of leaves
        self._leaves: set[int] = set()
        self._free: list[int] = []
        self._slots = 0

    def __len__(self) -> int:
        """Partial sums."""
        return len(self._nodes)

    def __contains__(self, leaf: int) -> bool:
        return leaf in self._leaves

    @property
    def slots(self) -> list[int]:
        """In use, in the order of leaves."""
        return [slot for _, slot in self._nodes if slot is not None]

    def put(self, leaf: int, closed: int) -> Placed:
        """``leaf`` comes. ``closed``: leaves below it have come, this one included, or never will."""
        assert leaf not in self._leaves, f"leaf {leaf} came twice"
        self._leaves.add(leaf)
        self._nodes.insert(bisect([one for one, _ in self._nodes], leaf), (leaf, None))
        unread = list(self._free)  # a slot that these adds give up is read after the leaf was written
        adds = self._merge(closed)
        at = next((at for at, (_, slot) in enumerate(self._nodes) if slot is None), None)
        if at is None:
            return Placed(None, adds)
        stored = min(unread, default=self._slots)
        if stored == self._slots:
            self._slots += 1
        else:
            self._free.remove(stored)
        self._nodes[at] = self._nodes[at][0], stored
        return Placed(stored, adds)

    def close(self, closed: int) -> tuple[tuple[int, int | None], ...]:
        """No leaf below ``closed`` will come any more: what is added by that. The last slot then has the smallest sum,
        and adding each to the one before it gives the sum of the tree."""
        return self._merge(closed)

    def clear(self) -> None:
        """No leaf has come."""
        self._nodes.clear()
        self._leaves.clear()
        self._free = list(range(self._slots))

    def _merge(self, closed: int) -> tuple[tuple[int, int | None], ...]:
        adds: list[tuple[int, int | None]] = []
        while True:
            found = []
            for at in range(len(self._nodes) - 1):
                first, second = self._nodes[at][0], self._nodes[at + 1][0]
                level = (first ^ second).bit_length()
                if ((first >> level) + 1) << level <= closed:
                    found.append((level, at))
            if not found:
                return tuple(adds)
            _, at = min(found)
            (leaf, into), (_, source) = self._nodes[at : at + 2]
            if into is None:  # it has no slot: the other one's is taken, a sum of two has no order
                into, source = source, into
            assert into is not None, f"two leaves without a slot at {leaf}"
            adds.append((into, source))
            if source is not None:
                self._free.append(source)
            self._nodes[at : at + 2] = [(leaf, into)]


def slots_for(microbatches: int) -> int:
    """The most slots that so many leaves need, one after the other."""
    return (microbatches + 1).bit_length() - 1
