"""The local gradients of a flat buffer: where they are summed, and how a reduction takes them and brings its result.

    autograd --> Gradients.add (this file) --> take, stage --> engine/reduce.py --> land --> main_gradients.py

Knows memory and its states; starts no collective, no stream, no hook. A local sum has the size of the whole flat
buffer, main gradients that of what this rank holds.

[Note: states of local gradients]

    IDLE ---- sum_in_own ----> OWN ---+                     flat sums in main_dtype, in memory of the flat buffer alone
      +------ sum_in --------> SLOT --+-- take --> REDUCING -- landed --> IDLE
      +------ hold ----------> HELD --+                     where autograd made them, in the compute dtype

``add`` stays, ``leave_slot`` leads from SLOT to OWN, ``drop`` back to IDLE. Whether main gradients are *alive* is no
state here. The user may set ``main.grad`` to None at any moment. So it is looked up when a reduction begins and when
it lands.

[Note: sums of a tree] With ``grad_sum="tree"`` a reduction lands a leaf, and main gradients are what ``show`` makes of
the leaves of the batch. They are a sum of a tree as long as nobody writes to them. If somebody does, or a new batch
begins while they are alive, they are what plain torch has: a number (`base`) to which the tree of later leaves is
added. Who writes is seen by the version of their memory, which a write through ``.data`` or numpy leaves as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sixfold.fsdp.buffers.column_ranges import Copy, copies
from sixfold.fsdp.buffers.flat_tensor import Cut, ParamRecord
from sixfold.fsdp.buffers.main_gradients import MainGradients
from sixfold.fsdp.buffers.microbatch_sums import NOTHING, MicrobatchSums
from sixfold.fsdp.buffers.reduction_sizes import OPEN, State
from sixfold.fsdp.collectives.gradient_sums import add_into
from sixfold.fsdp.errors import FsdpError


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    """(full_numel,) local sums, the view of each tensor, and (main_numel,) this rank's part of all."""

    flat: Tensor
    views: list[Tensor]
    part: Tensor


@dataclass(slots=True, eq=False)
class Taken:
    """Local gradients in the hands of a reduction.

    Attributes:
        home: (main_numel,) main gradients.
        sums: in main_dtype; None: they lie in ``held``, one tensor or None for each record.
        had: which records get a main gradient by this reduction.
        mine: of which this rank had a gradient; the others sent zeros.
        round: [Note: who had a gradient]
        fresh: no main gradient was alive, so results may be written to their place.
        adds: which main gradients were alive when the first result landed; empty: none.
    """

    home: Tensor
    sums: _Sum | None
    held: list[Tensor | None]
    had: tuple[bool, ...]
    mine: tuple[bool, ...]
    fresh: bool
    round: int = 0
    adds: tuple[bool, ...] | None = field(default=None)


class Gradients:
    """Local sums and main gradients of a flat buffer; those of a frozen one stay idle.

    Args:
        main_dtype: of local sums, whatever the compute dtype is.
        grad_dtype: of main gradients at rest; a step finds them in ``main_dtype``. [Note: narrow main gradients]
        shards_grads: main gradients have memory of their own from the start; else they may take the local sum's.
        tree: [Note: sums of a tree]

    Attributes:
        state: of local gradients; whoever reduces them reads it.
        sum_bytes: of a local sum of the whole flat buffer.
    """

    def __init__(
        self,
        unit: str,
        records: Sequence[ParamRecord],
        cut: Cut,
        *,
        main_dtype: torch.dtype,
        shards_grads: bool,
        device: torch.device,
        grad_dtype: torch.dtype | None = None,
        tree: bool = False,
    ) -> None:
        self._unit = unit
        self._records = tuple(records)
        self._index = {record: at for at, record in enumerate(self._records)}
        self._cut = cut
        self.dtype = main_dtype
        self.grad_dtype = grad_dtype or main_dtype
        self._device = device
        self.sum_bytes = cut.full_numel * main_dtype.itemsize
        # As long as nothing else needs it.
        self._home_in_own = not shards_grads and self.grad_dtype == main_dtype and not tree
        count = len(self._records)
        self._tree = MicrobatchSums(cut.main_numel, count, dtype=main_dtype, device=device) if tree else None
        self._nothing = NOTHING if tree else 0.0
        self._no_home = torch.empty(0, dtype=main_dtype, device=device)
        self.main = MainGradients(self._records, cut, dtype=main_dtype, grad_dtype=self.grad_dtype, device=device)
        self.state = State.IDLE
        self._history: deque[str] = deque(maxlen=12)
        self._sum: _Sum | None = None
        self._held: list[Tensor | None] = [None] * len(self._records)
        self._filled = [False] * len(self._records)
        self._unsure: dict[int, int] = {}  # main gradients that may be nobody's, and their round
        self._own: _Sum | None = None
        self._slots: dict[int, _Sum] = {}  # by address
        starts = [offset // cut.itemsize for offset in cut.layout.offsets_bytes]
        self._ranges = [(at, at + record.spec.numel) for at, record in zip(starts, self._records, strict=True)]
        here = {
            part.name: (part.offset_bytes // cut.itemsize, part.offset_bytes // cut.itemsize + part.stop - part.start)
            for part in cut.layout.slices(cut.part)
        }
        self._here = [here.get(record.name) for record in self._records]  # in this rank's part
        self._copies: dict[tuple[int, int], tuple[Copy, ...]] = {}

    # ---- what is where

    @property
    def own_local_bytes(self) -> int:
        """Bytes of full-size local sums that only this flat buffer uses."""
        return 0 if self._own is None else self._own.flat.nbytes

    @property
    def home_bytes(self) -> int:
        """Bytes of main gradients that lie in no local sum, and of the sums that they are made of."""
        if self._tree is not None:
            return self.main.nbytes + self._tree.nbytes
        return 0 if self._own is not None and self.main.lie_in(self._own.flat) else self.main.nbytes

    @property
    def summing_bytes(self) -> int:
        """Bytes of local sums that no reduction has taken; what is held is autograd's."""
        return 0 if self._sum is None else self.sum_bytes

    def filled(self, record: ParamRecord) -> bool:
        """``record`` has a local gradient that no reduction has taken."""
        return self._filled[self._index[record]]

    def delivered(self) -> list[Tensor | None]:
        """Local gradients that no reduction has taken, by record."""
        places = self._held if self._sum is None else self._sum.views
        return [one if filled else None for one, filled in zip(places, self._filled, strict=True)]

    def _move(self, event: str, *allowed: State) -> None:
        if self.state not in allowed:
            raise FsdpError(
                f"{event} while local gradients are {self.state.value}; it needs them "
                f"{' or '.join(one.value for one in allowed)}. History: {', '.join(self._history) or 'none'}",
                unit=self._unit,
                op="reduce",
            )
        self._history.append(event)

    # ---- local gradients

    def hold(self) -> None:
        """Keep gradients where autograd made them, until the reduction copies them piece by piece."""
        self._move("hold", State.IDLE)
        self.state = State.HELD

    def sum_in_own(self) -> None:
        """Sum in memory of this flat buffer alone."""
        self._move("sum_in_own", State.IDLE)
        if self._own is None:
            self._own = self._make_sum(torch.zeros(self._cut.full_numel, dtype=self.dtype, device=self._device))
            if not self.main.nbytes and self._home_in_own:
                # The reduced gradient takes the place of its local sum: no memory of its own.
                self.main.lie_at(self._own.part)
        elif self.main.lie_in(self._own.flat):
            alive = self.main.alive
            if self.main.held_by_others(self._own.flat, self._own.part, *self._own.views):
                self._own = None  # theirs: sums get other memory
                if not alive:
                    self.main.part_from()
                self.sum_in_own()
                return
            if alive:
                self.main.leave()
        self._sum, self.state = self._own, State.OWN

    def sum_in(self, memory: Tensor) -> None:
        """Sum in ``memory`` (bytes, ``sum_bytes`` or more, at one address for ever), until it is reduced."""
        self._move("sum_in", State.IDLE)
        address = memory.data_ptr()
        if address not in self._slots:
            self._slots[address] = self._make_sum(memory[: self.sum_bytes].view(self.dtype))
        self._sum, self.state = self._slots[address], State.SLOT

    def leave_slot(self) -> None:
        """Go on summing in own memory: the slot is needed."""
        self._move("leave_slot", State.SLOT)
        old, filled = self._sum, list(self._filled)
        self._sum, self.state = None, State.IDLE
        self.sum_in_own()
        assert old is not None and self._sum is not None, f"unit {self._unit!r} has no memory for its sums"
        self._sum.flat.copy_(old.flat)
        self._filled = filled

    def _make_sum(self, flat: Tensor) -> _Sum:
        whole = self._cut.view_of(flat)
        return _Sum(flat, [whole.full(record.name) for record in self._records], self._cut.part_of(flat))

    def add(self, record: ParamRecord, gradient: Tensor, scratch: Tensor | None = None) -> None:
        """Add what autograd made for ``record``; the first one is copied, or kept.

        Sums are in main_dtype. ``scratch`` is for ``add_into``.
        """
        if self.state not in OPEN:  # asked here: this is the hot path
            self._move("add", *OPEN)
        at = self._index[record]
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self._sum is not None:
            if self._filled[at]:
                add_into(self._sum.views[at], gradient, scratch)
            else:
                self._sum.views[at].copy_(gradient)
        else:
            before = self._held[at]
            if before is None:
                self._held[at] = gradient
            else:  # twice in one backward (a reentrant checkpoint): from here on a sum in main_dtype
                self._held[at] = wide = before.to(self.dtype)
                add_into(wide, gradient, scratch)
        self._filled[at] = True

    def forget(self, record: ParamRecord) -> None:
        """``record``'s local gradient is not wanted."""
        at = self._index[record]
        self._held[at], self._filled[at] = None, False
        self._unsure.pop(at, None)
        if self._tree is not None:
            self._tree.wipe(at, self._here[at])
            if not any(self._tree.had):
                self._tree.clear()

    def drop(self) -> None:
        """No local gradient is wanted."""
        self._move("drop", *OPEN)
        self._leave()
        self.state = State.IDLE

    def start_over(self) -> None:
        """Drop what is local, in whatever state an exception left it. Main gradients stay: ``.grad`` refers to them."""
        self._leave()
        self._unsure.clear()
        self.state = State.IDLE
        if self._tree is not None:
            self._tree.clear()

    def _leave(self) -> None:
        self._sum = None
        self._held = [None] * len(self._records)
        self._filled = [False] * len(self._records)

    def release_own(self) -> None:
        """Free the memory of ``sum_in_own``; no sum is in it."""
        self._move("release_own", State.IDLE)
        if self._own is not None and self.main.lie_in(self._own.flat):
            raise FsdpError("own sums are released while main gradients lie in them", unit=self._unit, op="reduce")
        self._own = None

    # ---- reduction

    def take(self, *, fill_zeros: bool, leaf: tuple[int, int, int] = (0, 0, 1)) -> Taken:
        """Hand local gradients to a reduction; ``leaf``: batch, microbatch, how many microbatches are over by it.

        ``fill_zeros``: parameters without a gradient contribute zeros, as on every other rank; only those frozen
        after wrapping or left out of ``backward(inputs=)`` (on all ranks alike) have none, as in plain training.
        """
        self._move("take", *OPEN)
        summed, held, mine = self._sum, self._held, tuple(self._filled)
        self._leave()
        full = all(mine)
        had = mine if full else tuple(
            filled or (fill_zeros and record.wanted and not record.left_out)
            for filled, record in zip(mine, self._records, strict=True)
        )  # fmt: skip
        if summed is not None and not full and (fill_zeros or self._tree is not None):
            for view, filled in zip(summed.views, mine, strict=True):
                if not filled:
                    view.fill_(self._nothing)
        for record in self._records:
            record.left_out = False
        self.state = State.REDUCING
        if self._tree is not None:
            self._begin_leaf(self._tree, *leaf)
            return Taken(self._no_home, summed, held, had, mine, fresh=False)
        fresh = not self.main.alive
        if fresh and not (self._own is not None and self.main.lie_in(self._own.flat)) and self.main.held_by_others():
            self.main.part_from()
        return Taken(self.main.memory(), summed, held, had, mine, fresh=fresh)

    def _begin_leaf(self, tree: MicrobatchSums, batch: int, leaf: int, closed: int) -> None:
        """[Note: sums of a tree]"""
        if len(tree) and tree.batch != batch:
            tree.clear()
        elif len(tree) and tree.shown != -1:
            mine = [at for at, had in enumerate(tree.had) if had and self._records[at].main is not None]
            gone = [at for at in mine if self.main.none_at(at)]
            if len(gone) == len(mine) or not self.main.as_at(tree.shown):
                tree.clear()
            else:
                for at in gone:
                    tree.wipe(at, self._here[at])
        if leaf in tree:
            raise FsdpError(
                f"microbatch {leaf} is reduced twice in a batch, and grad_sum='tree' adds each in its own place; a "
                "program calls before_backward(microbatch) and after_backward(microbatch) of its stage handles",
                unit=self._unit,
                op="reduce",
            )
        tree.batch = batch
        tree.begin(leaf, closed)

    def stage(self, taken: Taken, start: int, stop: int, sent: Tensor) -> None:
        """Copy columns ``[start, stop)`` of all shards to ``sent`` (parts * (stop - start),), in its dtype."""
        parts, row = self._cut.parts, self._cut.main_numel
        piece = sent.view(parts, stop - start)
        if taken.sums is not None:
            piece.copy_(taken.sums.flat.view(parts, row)[:, start:stop])
            return
        if (start, stop) not in self._copies:
            self._copies[start, stop] = copies(self._ranges, parts, row, start, stop)
        for one in self._copies[start, stop]:
            place = piece[one.row : one.row + one.rows, one.column : one.column + one.columns]
            gradient = None if one.tensor is None else taken.held[one.tensor]
            if gradient is None:
                place.fill_(self._nothing)
            else:
                flat = gradient.reshape(-1)
                offset = flat.storage_offset() + one.start
                place.copy_(flat.as_strided((one.rows, one.columns), (row, 1), offset))

    def result_place(self, taken: Taken, start: int, stop: int) -> Tensor | None:
        """Where a reduction may write the sum of columns ``[start, stop)`` in main_dtype; None: nowhere here.

        The main gradients' own place while none is alive, else this rank's part of the local sums.
        """
        if self._tree is not None and (place := self._tree.place(start, stop)) is not None:
            return place
        if taken.fresh and taken.home.dtype == self.dtype:
            return taken.home[start:stop]
        return None if taken.sums is None else taken.sums.part[start:stop]

    def land(self, taken: Taken, total: Tensor, start: int, stop: int, scratch: Tensor | None = None) -> None:
        """Columns ``[start, stop)`` of main gradients become ``total``, or have it added."""
        self._move("land", State.REDUCING)
        if self._tree is not None:
            self._tree.land(total, start, stop)
            return
        home = taken.home[start:stop]
        if taken.adds is None:
            taken.adds = self.main.each_alive()
        in_place = total.data_ptr() == home.data_ptr() and total.dtype == home.dtype
        adds = [taken.adds[at] for at, place in enumerate(self._here) if place is not None] if taken.adds else []
        if all(taken.had) and not any(adds):
            if not in_place:
                home.copy_(total)
        elif adds and all(taken.had) and all(adds):
            assert not in_place, f"unit {self._unit!r}: a sum was written over live gradients"
            add_into(home, total, scratch)
        else:
            self._land_each(taken, total, home, start, in_place, scratch)

    def _land_each(
        self, taken: Taken, total: Tensor, home: Tensor, start: int, in_place: bool, scratch: Tensor | None
    ) -> None:
        assert taken.adds is not None, f"unit {self._unit!r}: a piece landed before the first one"
        for at, place in enumerate(self._here):
            if place is None or not taken.had[at]:
                continue
            low, high = max(place[0] - start, 0), min(place[1] - start, total.numel())
            if low >= high:
                continue
            if taken.adds and taken.adds[at]:
                assert not in_place, f"{self._records[at].name}: a sum was written over its live gradient"
                add_into(home[low:high], total[low:high], scratch)
            elif not in_place:
                home[low:high].copy_(total[low:high])

    def landed(self, taken: Taken) -> None:
        """All columns have landed: main parameters have their gradients."""
        self._move("landed", State.REDUCING)
        self.state = State.IDLE
        taken.held = []
        if self._tree is None:
            self.main.give(taken.had)
        if self._unsure or taken.mine is not taken.had:
            for at, mine in enumerate(taken.mine):
                if mine:
                    self._unsure.pop(at, None)
                elif taken.had[at] and (at in self._unsure or not self._had_before(at, taken)):
                    self._unsure[at] = taken.round
        if self._tree is not None:
            self._tree.had = [before or now for before, now in zip(self._tree.had, taken.had, strict=True)]

    def _had_before(self, at: int, taken: Taken) -> bool:
        return self._tree.had[at] if self._tree is not None else bool(taken.adds and taken.adds[at])

    def show(self, closed: int, divisor: Tensor | None, gather: Callable[[Tensor], None] | None = None) -> None:
        """Main gradients become the sum of what landed, divided once; ``closed``: so many microbatches are over.

        ``gather`` brings the parts that landed on other ranks. [Note: sums of a tree]
        """
        tree = self._tree
        if tree is None or not len(tree) or tree.shown != -1:
            return
        if not self.main.alive and self.main.held_by_others():
            self.main.part_from()
        home = self.main.memory()
        alive = self.main.each_alive() or (False,) * len(tree.had)
        direct = home.dtype == self.dtype and all(had or not there for had, there in zip(tree.had, alive, strict=True))
        for at, place in enumerate(self._here):
            if tree.had[at] and alive[at] and not tree.given[at]:
                tree.based[at] = True
                if place is not None:
                    tree.base[slice(*place)].copy_(home[slice(*place)])
        total = tree.total(closed, home if direct else torch.empty_like(home, dtype=self.dtype))
        if gather is not None:
            gather(total)
        if divisor is not None:
            total.div_(divisor)
        for at, place in enumerate(() if direct and not any(tree.based) else self._here):
            if place is not None and tree.had[at]:
                mine, new = home[slice(*place)], total[slice(*place)]
                if tree.based[at]:
                    new.add_(tree.base[slice(*place)])
                if not direct:
                    mine.copy_(new)
        self.main.give(tree.had)
        tree.given, tree.shown = list(tree.had), self.main.version

    @property
    def unsure(self) -> bool:
        """Main gradients that landed here may be zeros of every rank."""
        return bool(self._unsure)

    def settle(self, union: int, of_round: int) -> None:
        """Bits of ``union`` say of which records some rank had a gradient; of the others nobody had one."""
        for at, since in list(self._unsure.items()):
            if since <= of_round:
                del self._unsure[at]
                if not union >> at & 1:
                    self.main.take_back(at)
                    if self._tree is not None:
                        self._tree.wipe(at, None)
