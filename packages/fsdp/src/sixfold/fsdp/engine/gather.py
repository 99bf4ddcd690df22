"""When a unit's compute weights are gathered, and when they are freed.

    engine.py --> Gathering --> AllGatherPipeline (this file) --> collectives/comm.py

A unit is gathered at its use and, along the order that is expected (placement/use_order.py), ahead of it. It stays
until a unit is gathered whose range overlaps, so a unit whose backward follows its forward is not gathered twice.
placement/placement.py says where units lie. Under a byte budget, bytes that are in the way wait elsewhere
(placement/parking.py). They come back by a copy in place of a gather.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.temporary_memory import NAN_BYTE
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.buffers.weights import Weights
from sixfold.fsdp.collectives.streams import SideStream
from sixfold.fsdp.engine.grouped_gather import GroupedGather
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.deadlines import Wait
from sixfold.fsdp.fp8.scaled_matmul import Transposes
from sixfold.fsdp.parameter_access.saved_weights import Versions
from sixfold.fsdp.placement.parking import Parking
from sixfold.fsdp.placement.placement import Placement
from sixfold.fsdp.placement.residency import Action
from sixfold.fsdp.placement.use_order import ExpectedUses
from sixfold.fsdp.torch_private import in_backward


class GatherState(Enum):
    """What a unit's gathered memory holds."""

    EMPTY = "EMPTY"
    GATHERING = "GATHERING"
    READY = "READY"


class AllGatherPipeline:
    """``EMPTY -> GATHERING -> READY -> EMPTY`` for each unit. Knows no module, no memory and no order.

    Args:
        units: names.
        start: starts a unit's gather and returns what waits for it.
        freed: called with each unit that is freed.

    Attributes:
        watch: told each move and its unit, or None.
        states: where each unit is, to look at.
        ready: those that are READY.
    """

    def __init__(
        self,
        units: Collection[str],
        start: Callable[[str], Callable[[], None]],
        freed: Callable[[str], None] | None = None,
    ) -> None:
        self.watch: Callable[[str, str], None] | None = None
        self._start = start
        self._freed = freed
        self.states = dict.fromkeys(units, GatherState.EMPTY)
        self.ready: set[str] = set()
        self._pending: dict[str, Callable[[], None]] = {}
        self._histories: dict[str, deque[str]] = {unit: deque(maxlen=12) for unit in units}

    def state(self, unit: str) -> GatherState:
        """Where ``unit`` is."""
        return self.states[unit]

    def gather(self, unit: str) -> None:
        """Start: EMPTY -> GATHERING."""
        self._move(unit, "gather", GatherState.EMPTY, GatherState.GATHERING)
        self._pending[unit] = self._start(unit)

    def wait(self, unit: str) -> None:
        """Finish: GATHERING -> READY."""
        self._move(unit, "wait", GatherState.GATHERING, GatherState.READY)
        self._pending.pop(unit)()

    def free(self, unit: str) -> None:
        """Give up: READY -> EMPTY."""
        self._move(unit, "free", GatherState.READY, GatherState.EMPTY)
        if self._freed is not None:
            self._freed(unit)

    def start_over(self) -> None:
        """Every unit is EMPTY, in whatever state an exception left it."""
        self.states = dict.fromkeys(self.states, GatherState.EMPTY)
        self.ready.clear()
        self._pending.clear()

    def _move(self, unit: str, move: str, needed: GatherState, then: GatherState) -> None:
        state = self.states.get(unit)
        if state is not needed:
            if state is None:
                raise FsdpError(f"{move}({unit!r}): there is no such unit", unit=unit, op="gather")
            history = ", ".join(self._histories[unit]) or "nothing yet"
            raise FsdpError(
                f"{move}({unit!r}) in state {state.value}; it is legal in {needed.value}. History: {history}",
                unit=unit,
                op="gather",
            )
        self.states[unit] = then
        if then is GatherState.READY:
            self.ready.add(unit)
        else:
            self.ready.discard(unit)
        self._histories[unit].append(move)
        if self.watch is not None:
            self.watch(move, unit)


class Gathering:
    """Brings units' weights to where the layers read them."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        placement: Placement,
        stream: SideStream,
        wait: Wait,
        prefetch_bytes: int | None,
        transposes: Transposes | None = None,
        fill_freed: bool = False,
        grouped: Mapping[ParamAndGradBuffer, GroupedGather] | None = None,
    ) -> None:
        self._units = units
        self._grouped = grouped or {}
        self._by_name = {unit.name: unit for unit in units}
        self.placement = placement
        self._arena = placement.arena
        self._sizes = placement.sizes  # of units in the arena
        self._parking = Parking(placement.arena, placement.sizes)
        self._stream = stream
        self._wait = wait
        self._prefetch_bytes = prefetch_bytes
        self._transposes = transposes
        self._fills = fill_freed
        self.expected = ExpectedUses()
        self.order = self.expected.order
        self.pipeline = AllGatherPipeline(self._by_name, self._start, self._freed)
        self.versions: Versions | None = None  # once start values are there
        self._returning: dict[str, Tensor | None] = {}  # whose bytes come from where they waited (None: they came)
        self.copies = 0  # of units between places of the arena, in this step
        self.last_copies = 0
        self.gathers = 0
        self.step_gathers = 0  # of units in the arena, in this step
        self.last_gathers: int | None = None  # the same of the step before

    def _freed(self, name: str) -> None:
        if self.versions is not None:
            self.versions.gone(name)
        if self._transposes is not None:
            self._transposes.drop(name)

    def ready(self, unit: Unit) -> bool:
        """Its weights are there."""
        return unit.name in self.pipeline.ready

    def use(self, unit: Unit, busy: Collection[Unit], *, in_step: bool = True) -> None:
        """Weights of ``unit`` are needed now; ``busy`` units (their forward runs) keep their ranges.

        ``in_step``: a use of a step; else of an evaluation, which leaves the recorded order and a given plan alone.
        """
        beside: Sequence[Action] = ()
        coming: Iterable[int] | None
        if in_step:
            place = unit.name if unit.name in self._sizes else None
            before, beside, coming = self.expected.use(unit.index, place)
            self._move(before, busy)
        else:
            coming = self.expected.use_in_evaluation(unit.index)
        state = self.pipeline.states[unit.name]
        if state is GatherState.EMPTY:
            self._claim(unit, busy)
            self.pipeline.gather(unit.name)
            state = GatherState.GATHERING
        if coming is None:
            self._move(beside, [unit, *busy])
        else:
            self._prefetch(unit, busy, coming)
        if state is GatherState.GATHERING:
            self.pipeline.wait(unit.name)
        if self._transposes is not None:
            self._transposes.use(unit.name, in_backward=in_backward() != -1)

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Start gathers of units whose memory no other takes."""
        for unit in units:
            if not unit.shares and self.pipeline.states[unit.name] is GatherState.EMPTY:
                self._claim(unit, ())
                self.pipeline.gather(unit.name)

    def _claim(self, unit: Unit, busy: Collection[Unit], kept: Collection[str] | None = None) -> None:
        """Make ``unit`` hold its range; those in the way are elsewhere now, but for ``kept`` (``busy`` if None)."""
        name, arena = unit.name, self._arena
        if name not in self._sizes or name in arena.holders:
            return
        parks = self.placement.parks  # else nothing waits elsewhere
        if parks and self._parks and self._make_room(unit, {one.name for one in busy} if kept is None else kept):
            return
        for holder in arena.in_the_way(name):
            if self._by_name[holder] in busy:
                raise FsdpError(
                    f"unit {name!r} runs inside unit {holder!r}, which is not around it in the module tree, and "
                    f'their memory overlaps; use BufferConfig(gathered_bytes="all")',
                    unit=name,
                    op="gather",
                )
            if parks:
                self._drop(holder)
            else:
                self._release(holder)
        if parks and arena.parked(name):
            self._returning[name] = arena.take_back(name)
        elif self._fills:
            self._fill_free()
        arena.allocate(name)

    def _fill_free(self) -> None:
        frozen = [  # nobody writes there, so frozen weights are gathered once
            unit.name
            for unit in self._units
            if unit.name in self._sizes
            and not self._written_over(unit)
            and any(not one.trainable and one.weights.gathered_once for one in unit.flat_buffers)
        ]
        with self._stream.inside:
            self._arena.fill_free(frozen)

    def _drop(self, name: str) -> None:
        """Its bytes are no more here."""
        if self._arena.parked(name):
            self._arena.take_back(name)
        elif name in self._arena.holders:
            self._release(name)

    # ---- bytes that wait elsewhere [Note: parked]

    @property
    def _parks(self) -> bool:
        """Units in the way of another are kept in a gap: there is a budget, and what comes is known."""
        return self.placement.parks and self.expected.known

    def _next_use(self, name: str) -> int:
        return self.order.next_use(self._by_name[name].index)

    def _make_room(self, unit: Unit, kept: Collection[str]) -> bool:
        """Free who is needed last, as few as bytes ask for; who else is in the way waits in a gap.

        Returns whether ``unit``'s own bytes came to its range.
        """
        for name in self._parking.victims(unit.name, kept, self._next_use):
            self._drop(name)
        with self._stream.inside:
            copies, came = self._parking.clear(unit.name, kept, self._leave)
        self.copies += copies
        if came:
            self._returning[unit.name] = None
        return came

    def _leave(self, name: str) -> bool:
        if self.pipeline.states[name] is GatherState.GATHERING:
            self.pipeline.wait(name)
        if self.pipeline.states[name] is GatherState.EMPTY:
            return False
        self.pipeline.free(name)
        return True

    def _release(self, holder: str) -> None:
        if self.pipeline.states[holder] is GatherState.GATHERING:  # a prefetch that was not used
            self.pipeline.wait(holder)
        if self.pipeline.states[holder] is GatherState.READY:
            self.pipeline.free(holder)
        self._arena.free(holder)

    def _prefetch(self, current: Unit, busy: Collection[Unit], coming: Iterable[int]) -> None:
        """Start the next gathers of ``coming``, as far as ranges and ``prefetch_bytes`` allow.

        None is gathered in the place of a unit that runs, or that is used before it.
        """
        spent = 0
        needed = {current.name}
        for one in busy:
            needed.add(one.name)
        arena, states, ready = self._arena, self.pipeline.states, GatherState.READY
        for index in coming:
            unit = self._units[index]
            name = unit.name
            if name in needed or (not index and states[name] is ready):
                continue
            if states[name] is GatherState.EMPTY:
                spent += unit.turn_bytes
                if self._prefetch_bytes is not None and spent > self._prefetch_bytes:
                    return
                inside = name in self._sizes
                if inside and not needed.isdisjoint(arena.in_the_way(name)):
                    return
                if inside and self.placement.parks and self._parks:
                    # None: as few gathers as there can be. A number: gathers ahead, and units used before stay.
                    spare: Collection[str] = needed if self._prefetch_bytes else ()
                    if not needed.isdisjoint(self._parking.victims(name, spare, self._next_use)):
                        return
                self._claim(unit, busy, needed)
                self.pipeline.gather(name)
            if self._prefetch_bytes is None:
                return
            needed.add(name)

    # ---- a plan that was given

    def use_plan(self, actions: Sequence[Action]) -> None:
        """Follow ``actions`` from the next step on (from this one, if nothing of it ran yet).

        Raises:
            FsdpError: there is no byte budget; the actions are illegal or exceed it.
        """
        budget = self.placement.budget_bytes
        if budget is None:
            raise FsdpError(
                f"use_plan with {len(actions)} actions: a plan is for a byte budget; give BufferConfig(gathered_bytes="
                "bytes). 'double' and 'all' gather by their own fixed rule",
                op="gather",
            )
        sizes = {unit.name: unit.turn_bytes for unit in self._units}
        always = [unit.name for unit in self._units if unit.name not in self._sizes]
        self.expected.give(actions, sizes, budget_bytes=budget, always=always)

    def _move(self, actions: Sequence[Action], busy: Collection[Unit]) -> None:
        """Make a given plan's frees and gathers. Where ranges clash, a unit is gathered at its use instead."""
        for action in actions:
            unit = self._by_name[action.unit]
            if action.kind == "free":
                if unit not in busy:
                    self._drop(unit.name)
            elif self.pipeline.states[unit.name] is GatherState.EMPTY:
                kept = {one.name for one in busy}
                if kept.isdisjoint(self._arena.in_the_way(unit.name)):
                    self._claim(unit, busy)
                    self.pipeline.gather(unit.name)

    # ---- between steps

    def begin_step(self, *, stepped: bool) -> bool:
        """A step begins; ``stepped``: after an optimizer's step. Returns whether units moved to other ranges.

        [Note: one range per unit] Only here: graphs from before an optimizer's step are refused, and before the first
        use there are none.
        """
        if stepped:
            self.last_gathers, self.step_gathers = self.step_gathers, 0
            self.last_copies, self.copies = self.copies, 0
        if not self.expected.begin_step(stepped=stepped):
            return False
        if self.placement.budget_bytes is None or not self.placement.sizes:
            return False
        return self._follow()

    def _follow(self) -> bool:
        given = self.expected.given
        stays = None if given is None else given.stays
        assignment, parked = self.placement.assign(self.followed_uses(), ahead=bool(self._prefetch_bytes), stays=stays)
        if assignment is self.placement.assignment:
            return False
        parks = parked is not None if given is None else len(set(self.placement.sizes.values())) == 1
        self.settle()
        for name in self.placement.sizes:
            self._drop(name)
            if self.versions is not None:
                self.versions.changed(name, frozen=True)  # what was saved lies elsewhere
        return self.placement.follow(assignment, parked, parks=parks)

    def followed_uses(self) -> list[str]:
        """Uses of the given plan or of the last step, of units in the arena."""
        if self.expected.given is not None:
            return self.expected.given.uses
        names = [self._units[index].name for index in self.order.recorded]
        return [name for name in names if name in self._sizes]

    def _start(self, name: str) -> Callable[[], None]:
        unit = self._by_name[name]
        if name in self._returning:
            place = self._returning.pop(name)
            if place is not None:
                self.copies += 1
                with self._stream.inside:
                    self._arena.memory(name).copy_(place)
            return partial(self._finish, name, [])
        works: list[tuple[Weights, Any]] = []
        sends = not unit.flat_buffers  # [Note: one gather for several]
        with self._stream.inside:
            for flat_buffer in unit.flat_buffers:
                weights = flat_buffer.weights
                if not flat_buffer.trainable and weights.gathered_once and not self._written_over(unit):
                    continue  # frozen weights that stay do not change
                group = self._grouped.get(flat_buffer)
                if group is not None:
                    sends |= group.start(lambda work: self._wait(work, name, "gather"))
                    works.append((weights, group))
                    continue
                sends = True
                if weights.source_stale:
                    weights.refresh_source(lambda work: self._wait(work, name, "gather"))
                weights.gathered_once = True
                if flat_buffer.cut.parts > 1 or weights.shards_params:
                    works.append((weights, flat_buffer.ranks.shard.all_gather(weights.gathered, weights.source)))
                else:
                    works.append((weights, None))
        self.gathers += sends
        self.step_gathers += sends and name in self._sizes
        return partial(self._finish, name, works)

    def _written_over(self, unit: Unit) -> bool:
        """Others use its memory: their ranges overlap it, or under a byte budget they wait there. [Note: parked]"""
        return unit.shares or (self.placement.budget_bytes is not None and unit.name in self._sizes)

    def _finish(self, name: str, works: list[tuple[Weights, Any]]) -> None:
        with self._stream.joined:
            for weights, work in works:
                if isinstance(work, GroupedGather):
                    work.bring(weights, lambda work: self._wait(work, name, "gather"))
                elif work is not None:
                    self._wait(work, name, "gather")
                if weights.spreads:
                    weights.spread_copies()
        if self.versions is not None:
            self.versions.here(name)

    @property
    def waiting_bytes(self) -> int:
        """Bytes in which weights of small units wait for their use. [Note: one gather for several]"""
        return sum(one.nbytes for one in set(self._grouped.values()))

    def settle(self) -> None:
        """Wait for gathers that nobody used: main weights are about to change."""
        for unit in self._units:
            if self.pipeline.states[unit.name] is GatherState.GATHERING:
                self.pipeline.wait(unit.name)

    def start_over(self) -> None:
        """Forget what is gathered or was about to be. For one process alone: no collective may be on its way."""
        self.pipeline.start_over()
        self.placement.start_over()
        self._returning.clear()
        for unit in self._units:
            self._freed(unit.name)
        self.invalidate(frozen=True)

    def invalidate(self, *, frozen: bool) -> None:
        """Main weights changed: gathered copies are stale (``frozen``: those of frozen parameters too)."""
        self.settle()
        for unit in self._units:
            for flat_buffer in unit.flat_buffers:
                if flat_buffer.trainable or frozen:
                    flat_buffer.weights.main_changed()
            if self.versions is not None:
                self.versions.changed(unit.name, frozen=frozen)
            if unit.name in self._sizes:
                self._drop(unit.name)
            elif self.ready(unit):
                self.pipeline.free(unit.name)
                for flat_buffer in unit.flat_buffers if self._fills else ():
                    if flat_buffer.weights.shards_params and (flat_buffer.trainable or frozen):
                        flat_buffer.weights.gathered.view(torch.uint8).fill_(NAN_BYTE)
        if self._fills:
            self._fill_free()
