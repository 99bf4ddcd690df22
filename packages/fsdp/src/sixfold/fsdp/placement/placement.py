"""Where units' gathered weights lie: memory of their own, the two slots of "double", or ranges under a byte budget.

    gathered_bytes + units --> placement_of (this file) --> Arena, engine/gather.py

Decides addresses and binds views; starts no gather. The root unit has memory of its own in every mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sixfold.fsdp.buffers.stored_bytes import turn_ranges
from sixfold.fsdp.buffers.temporary_memory import Arena
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.config import ShardingStrategy
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.placement.address_assignment import AddressAssignment, assign_addresses
from sixfold.fsdp.placement.parking import Simulated, simulate
from sixfold.fsdp.placement.residency import Solution, solve

_ORDERS_KEPT = 8  # orders whose ranges are remembered: a batch ramp goes from one to the next and back


class Placement:
    """The arena, who has a range in it, and ranges for an order of uses.

    ``budget_bytes``: what all gathered weights may take, the root's included; None: the ranges stay for life.
    """

    def __init__(
        self, units: Sequence[Unit], ranges: Mapping[str, tuple[int, int]], arena: Arena, budget_bytes: int | None
    ) -> None:
        self._units = {unit.name: unit for unit in units}
        self.arena = arena
        self.budget_bytes = budget_bytes
        self.sizes = {name: size for name, (_, size) in ranges.items()}  # of units in the arena
        self.kept_bytes = sum(unit.gathered_bytes for unit in units if unit.name not in ranges)
        self.assignment: AddressAssignment | None = None  # of the order that is followed
        self.parked: Simulated | None = None  # the same with units that wait elsewhere, where that gathers less
        self.parks = False  # units in the way of another wait elsewhere
        self._known: dict[object, tuple[AddressAssignment, Simulated | None]] = {}
        self._least: tuple[Sequence[str], Solution] | None = None
        self._bind()

    @property
    def apart(self) -> list[tuple[str, str]]:
        """Units that run inside each other."""
        return [
            (name, outer.name) for name in self.sizes for outer in self._units[name].around if outer.name in self.sizes
        ]

    def assign(
        self, uses: Sequence[str], *, ahead: bool, stays: Sequence[bool] | None = None
    ) -> tuple[AddressAssignment, Simulated | None]:
        """Ranges for ``uses`` (the root's left out) in this arena; the last few orders are remembered."""
        key = tuple(uses), None if stays is None else tuple(stays), ahead
        found = self._known.pop(key, None)
        if found is None:
            nbytes = self.arena.nbytes
            assignment = assign_addresses(
                uses, self.sizes, arena_bytes=nbytes, apart=self.apart, ahead=ahead, stays=stays
            )
            parked = None
            if stays is None and not self.apart:
                parked = simulate(uses, self.sizes, assignment.offsets, nbytes)
                parked = parked if parked.pays_against(assignment.gathered_bytes) else None
            found = assignment, parked
        self._known[key] = found
        while len(self._known) > _ORDERS_KEPT:
            self._known.pop(next(iter(self._known)))
        return found

    def least(self, uses: Sequence[str]) -> Solution:
        """What bytes alone allow for ``uses`` in this arena; the last answer is remembered."""
        if self._least is None or self._least[0] != uses:
            self._least = uses, solve(uses, self.sizes, budget_bytes=self.arena.nbytes)
        return self._least[1]

    def follow(self, assignment: AddressAssignment, parked: Simulated | None, *, parks: bool) -> bool:
        """Units move to ``assignment``'s ranges; returns whether any address changed. Nothing is gathered."""
        self.assignment, self.parked, self.parks = assignment, parked, parks
        before = {name: self.arena.range_of(name) for name in self.sizes}
        ranges = {name: (assignment.offsets[name], size) for name, size in self.sizes.items()}
        if ranges == before:
            return False
        self.arena.move(ranges)
        self._bind()
        for name in self.sizes:
            _show(self._units[name])
        return True

    def start_over(self) -> None:
        """Nothing is gathered, and each unit lies in its own range, wherever an exception left it."""
        self.arena.start_over()
        self._bind()
        for name in self.sizes:
            _show(self._units[name])

    def _bind(self) -> None:
        for unit in self._units.values():
            if unit.name not in self.sizes:
                for flat_buffer in unit.flat_buffers:
                    flat_buffer.weights.bind(None)
                unit.gathered_ranges = () if not unit.index else _addresses(unit)
                continue
            memory, at = self.arena.memory(unit.name), 0
            for flat_buffer in unit.flat_buffers:
                flat_buffer.weights.bind(memory[at : at + flat_buffer.weights.gathered_bytes])
                flat_buffer.weights.gathered_once = False
                at += flat_buffer.weights.padded_bytes
            unit.shares = self.arena.shares(unit.name)
            unit.gathered_ranges = _addresses(unit)


def _addresses(unit: Unit) -> tuple[tuple[int, int], ...]:
    """(first, end) of each flat buffer whose memory does not hold main weights."""
    kept = [one.weights for one in unit.flat_buffers if not one.weights.main_in_gathered]
    return tuple((one.gathered.data_ptr(), one.gathered.data_ptr() + one.padded_bytes) for one in kept)


def _show(unit: Unit) -> None:
    """Parameters see their unit's new range."""
    with torch._C.DisableTorchFunctionSubclass():
        for record in unit.records:
            record.parameter.data = record.compute


def placement_of(
    units: Sequence[Unit],
    strategy: ShardingStrategy,
    gathered_bytes: int | str | None,
    *,
    align_bytes: int,
    device: torch.device,
    own_memory: bool = False,
) -> Placement:
    """Memory for all gathered weights; ranges begin on multiples of ``align_bytes``. ``own_memory``: Arena's ``apart``.

    Raises:
        FsdpError: a budget below what must be here at once; says what is needed.
    """
    budget = gathered_bytes if isinstance(gathered_bytes, int) else None
    own = [unit for unit in units[1:] if unit.flat_buffers]
    if budget is not None:
        _check_budget(budget, units, own, strategy)
    if not strategy.shards_params or gathered_bytes == "all":
        return Placement(units, {}, Arena(0, {}, device), budget)
    if budget is None:
        ranges = double_ranges(own)
        nbytes = max((start + size for start, size in ranges.values()), default=0)
        return Placement(units, ranges, Arena(nbytes, ranges, device, apart=own_memory), None)
    sizes = {unit.name: unit.turn_bytes for unit in own}
    nbytes = min(sum(sizes.values()), (budget - units[0].turn_bytes) // align_bytes * align_bytes)
    apart = [(unit.name, outer.name) for unit in own for outer in unit.around if outer.name in sizes]
    likely = [unit.name for unit in own]  # until an order is recorded: a forward and its backward
    first = assign_addresses([*likely, *likely[::-1]], sizes, arena_bytes=nbytes, apart=apart)
    ranges = {name: (start, sizes[name]) for name, start in first.offsets.items()}
    return Placement(units, ranges, Arena(nbytes, ranges, device), budget)


def _check_budget(budget: int, units: Sequence[Unit], own: Sequence[Unit], strategy: ShardingStrategy) -> None:
    root = units[0].turn_bytes
    if not strategy.shards_params:
        needed = sum(unit.turn_bytes for unit in units)
        if budget < needed:
            raise FsdpError(
                f"gathered_bytes is {budget}: strategy {strategy.value!r} keeps all weights, which are {needed} bytes; "
                "use 'optim_grads_params', or gathered_bytes 'double'",
                op="gather",
            )
        return

    def beside(unit: Unit) -> int:
        return unit.turn_bytes + sum(outer.turn_bytes for outer in unit.around)

    largest = max(own, key=beside, default=None)
    needed = root + (0 if largest is None else beside(largest))
    if budget < needed:
        raise FsdpError(
            f"gathered_bytes is {budget}; the root unit ({root} bytes) and the largest unit"
            f"{'' if largest is None else f' {largest.name!r}, those around it included'}, need {needed} bytes. "
            "Give at least that many",
            unit=None if largest is None else largest.name,
            op="gather",
        )


def double_ranges(units: Sequence[Unit]) -> dict[str, tuple[int, int]]:
    """Ranges of ``gathered_bytes="double"``, by unit."""
    turns = [(len(unit.around), None if unit.large else type(unit.module), unit.turn_bytes) for unit in units]
    return dict(zip((unit.name for unit in units), turn_ranges(turns), strict=True))
