"""Main gradients of a batch as the sums of a fixed tree: ``MixedPrecision(grad_sum="tree")``.

    microbatch_tree.py says what is added --> MicrobatchSums (this file) --> gradients.py: lands leaves, shows the total

[Note: nothing is -0] The neutral element of IEEE addition is -0: ``x + -0`` has the bits of ``x``, also if ``x`` is a
zero of either sign, and ``-0 + 0`` is 0. So who has no gradient of a parameter sends -0, and a sum does not tell on how
many ranks its terms lay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sixfold.fsdp.buffers.microbatch_tree import MicrobatchTree, Placed

NOTHING = -0.0


class MicrobatchSums:
    """Partial sums of a flat buffer, (numel,) each; at most ``slots_for(microbatches)`` of them.

    Attributes:
        batch: the number of the batch whose leaves these are.
        had, given: by record: a leaf has a gradient of it; its main gradient is that of ``show``.
        based: by record: leaves are added to what its main gradient was, which lies in ``base``.
        shown: version of main gradients when they were the sum of these leaves; -1: they are not.
    """

    def __init__(self, numel: int, records: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._tree = MicrobatchTree()
        self._slots: list[Tensor] = []
        self._placed = Placed(None, ())
        self.batch = -1
        self._base: Tensor | None = None
        self.had, self.given, self.based = [False] * records, [False] * records, [False] * records
        self.shown = -1

    def __len__(self) -> int:
        return len(self._tree)

    def __contains__(self, leaf: int) -> bool:
        return leaf in self._tree

    @property
    def nbytes(self) -> int:
        """Of all slots, and of the base."""
        return sum(one.nbytes for one in (*self._slots, *(() if self._base is None else (self._base,))))

    @property
    def base(self) -> Tensor:
        """(numel,), made once somebody needs it."""
        if self._base is None:
            self._base = torch.zeros(self._numel, dtype=self._dtype, device=self._device)
        return self._base

    def begin(self, leaf: int, closed: int) -> None:
        """``leaf`` is about to be summed over ranks, and lands by ``land``."""
        self._placed = self._tree.put(leaf, closed)
        if self._placed.stored == len(self._slots):
            self._slots.append(torch.zeros(self._numel, dtype=self._dtype, device=self._device))
        self.shown = -1

    def place(self, start: int, stop: int) -> Tensor | None:
        """Where columns ``[start, stop)`` of the leaf may be written; None: they are added to a sum."""
        return None if self._placed.stored is None else self._slots[self._placed.stored][start:stop]

    def land(self, total: Tensor, start: int, stop: int) -> None:
        """Columns ``[start, stop)`` of the leaf are ``total``."""
        place = self.place(start, stop)
        if place is not None and place.data_ptr() != total.data_ptr():
            place.copy_(total)
        for into, source in self._placed.adds:
            self._slots[into][start:stop].add_(total if source is None else self._slots[source][start:stop])

    def total(self, closed: int, out: Tensor) -> Tensor:
        """The sum of the tree, in ``out``; leaves below ``closed`` have come or never will."""
        for into, source in self._tree.close(closed):
            assert source is not None, "every leaf has a slot"
            self._slots[into].add_(self._slots[source])
        *others, last = self._tree.slots
        if not others:
            return out.copy_(self._slots[last])
        torch.add(self._slots[others.pop()], self._slots[last], out=out)
        for one in reversed(others):
            out.add_(self._slots[one])
        return out

    def wipe(self, at: int, place: tuple[int, int] | None) -> None:
        """Record ``at``, which lies in ``place``, has no gradient."""
        self.had[at] = self.given[at] = self.based[at] = False
        if place is not None:
            for slot in self._tree.slots:
                self._slots[slot][slice(*place)].fill_(NOTHING)

    def clear(self) -> None:
        """No leaf has come."""
        self._tree.clear()
        self.had, self.given, self.based = ([False] * len(self.had) for _ in range(3))
        self.shown = -1
