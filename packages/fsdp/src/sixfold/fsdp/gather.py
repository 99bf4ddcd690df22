"""Gathering compute weights: the state machine, the order of uses, and the fixed rule of two slots.

    hooks.py --> engine.py --> Gathering --> AllGatherPipeline (this file) --> comm.py

AllGatherPipeline is driven by events and knows no module. Gathering decides when: a unit is gathered at
its use and, along the recorded order, one unit before it. It stays until its slot is needed (lazily freed), so
a unit whose backward follows its forward is not gathered twice. [Note: one slot per unit for a whole step]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any

from sixfold.fsdp.alloc import TemporaryBucketAllocator
from sixfold.fsdp.calls import in_backward
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.scaled import Transposes
from sixfold.fsdp.streams import SideStream
from sixfold.fsdp.units import Unit
from sixfold.fsdp.waiting import Wait
from sixfold.fsdp.weights import Weights

_MAX_RECORDED = 100_000  # uses in a step; a loop that never steps must not grow without bound


class GatherState(Enum):
    """What a unit's gathered memory holds."""

    EMPTY = "EMPTY"
    GATHERING = "GATHERING"
    READY = "READY"


class AllGatherPipeline:
    """``EMPTY -> GATHERING -> READY -> EMPTY`` for each unit.

    Args:
        units: names.
        start: starts a unit's gather and returns what waits for it.
        freed: is told of each unit that is freed.
    """

    def __init__(
        self,
        units: Collection[str],
        start: Callable[[str], Callable[[], None]],
        freed: Callable[[str], None] | None = None,
    ) -> None:
        self._start = start
        self._freed = freed
        self._states = dict.fromkeys(units, GatherState.EMPTY)
        self._pending: dict[str, Callable[[], None]] = {}
        self._histories: dict[str, deque[str]] = {unit: deque(maxlen=12) for unit in units}

    def state(self, unit: str) -> GatherState:
        """Where ``unit`` is."""
        return self._states[unit]

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

    def _move(self, unit: str, move: str, needed: GatherState, then: GatherState) -> None:
        state = self._states.get(unit)
        if state is not needed:
            if state is None:
                raise FsdpError(f"{move}({unit!r}): there is no such unit", unit=unit, op="gather")
            history = ", ".join(self._histories[unit]) or "nothing yet"
            raise FsdpError(
                f"{move}({unit!r}) in state {state.value}; it is legal in {needed.value}. History: {history}",
                unit=unit,
                op="gather",
            )
        self._states[unit] = then
        self._histories[unit].append(move)


class UseOrder:
    """The order of uses in the last step, and where this step is in it.

    A step that leaves the recorded order gets no more predictions; its own order is recorded for the next.
    """

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []
        self._at = 0

    def use(self, unit: int) -> None:
        """Unit number ``unit`` is used."""
        if len(self._now) < _MAX_RECORDED:
            self._now.append(unit)
        if self._at < len(self._last):
            self._at = self._at + 1 if self._last[self._at] == unit else len(self._last)

    def coming(self) -> Sequence[int]:
        """Uses that are expected, the next one first; empty when unknown."""
        return self._last[self._at : self._at + 64]

    def next_step(self) -> None:
        """What was recorded is followed from now on."""
        if self._now:
            self._last, self._now, self._at = self._now, [], 0


class Gathering:
    """Brings units' weights to where the layers read them."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        slots: TemporaryBucketAllocator,
        stream: SideStream,
        wait: Wait,
        prefetch_bytes: int | None,
        transposes: Transposes | None = None,
    ) -> None:
        self._units = units
        self._by_name = {unit.name: unit for unit in units}
        self._slots = slots
        self._stream = stream
        self._wait = wait
        self._prefetch_bytes = prefetch_bytes
        self._transposes = transposes
        self.order = UseOrder()
        self.pipeline = AllGatherPipeline(self._by_name, self._start, None if transposes is None else transposes.drop)
        self.gathers = 0

    def ready(self, unit: Unit) -> bool:
        """Its weights are there."""
        return self.pipeline.state(unit.name) is GatherState.READY

    def use(self, unit: Unit, busy: Collection[Unit], *, record: bool = True) -> None:
        """Weights of ``unit`` are needed now; ``busy`` units (their forward runs) keep their slots."""
        if record:
            self.order.use(unit.index)
        state = self.pipeline.state(unit.name)
        if state is GatherState.EMPTY:
            self._claim(unit, busy)
            self.pipeline.gather(unit.name)
            state = GatherState.GATHERING
        if record:
            self._prefetch(unit, busy)
        if state is GatherState.GATHERING:
            self.pipeline.wait(unit.name)
        if self._transposes is not None:
            self._transposes.use(unit.name, in_backward=in_backward() != -1)

    def prefetch(self, units: Sequence[Unit]) -> None:
        """Start gathers of units that have memory of their own."""
        for unit in units:
            if unit.slot is None and self.pipeline.state(unit.name) is GatherState.EMPTY:
                self.pipeline.gather(unit.name)

    def _claim(self, unit: Unit, busy: Collection[Unit]) -> None:
        """Make ``unit`` the holder of its slot; who held it is empty now."""
        if unit.slot is None:
            return
        holder = self._slots.holder(unit.name)
        if holder == unit.name:
            return
        if holder is not None:
            if self._by_name[holder] in busy:
                raise FsdpError(
                    f"unit {unit.name!r} runs inside unit {holder!r}, which is not around it in the module tree, and "
                    f'both have slot {unit.slot}; use BufferConfig(gathered_bytes="all")',
                    unit=unit.name,
                    op="gather",
                )
            self._release(holder)
        self._slots.allocate(unit.name, unit.gathered_bytes)

    def _release(self, holder: str) -> None:
        if self.pipeline.state(holder) is GatherState.GATHERING:  # a prefetch that was not used
            self.pipeline.wait(holder)
        if self.pipeline.state(holder) is GatherState.READY:
            self.pipeline.free(holder)
        self._slots.free(holder)

    def _prefetch(self, current: Unit, busy: Collection[Unit]) -> None:
        """Start the next gathers of the recorded order, as far as slots and ``prefetch_bytes`` allow."""
        spent = 0
        kept = {current.slot, *(unit.slot for unit in busy)}
        seen = {current.index}
        for index in self.order.coming():
            if index in seen:
                continue
            seen.add(index)
            unit = self._units[index]
            spent += unit.gathered_bytes
            if self._prefetch_bytes is not None and spent > self._prefetch_bytes:
                return
            if unit.slot is not None:
                if unit.slot in kept:
                    return
                kept.add(unit.slot)
            if self.pipeline.state(unit.name) is GatherState.EMPTY:
                self._claim(unit, busy)
                self.pipeline.gather(unit.name)
            if self._prefetch_bytes is None:
                return

    def _start(self, name: str) -> Callable[[], None]:
        unit = self._by_name[name]
        self.gathers += 1
        works = []
        with self._stream.enter():
            for stream in unit.streams:
                weights = stream.weights
                if not stream.trainable and weights.gathered_once and unit.slot is None:
                    continue  # frozen weights that stay do not change
                weights.refresh_source(lambda work: self._wait(work, name, "gather"))
                weights.gathered_once = True
                if stream.cut.parts > 1 or weights.shards_params:
                    works.append((weights, stream.ranks.shard.all_gather(weights.gathered, weights.source)))
                else:
                    works.append((weights, None))

        def finish() -> None:
            self._finish(name, works)

        return finish

    def _finish(self, name: str, works: list[tuple[Weights, Any]]) -> None:
        with self._stream.enter():
            for weights, work in works:
                if work is not None:
                    self._wait(work, name, "gather")
                weights.spread_copies()
            event = self._stream.mark()
        self._stream.join(event)

    def settle(self) -> None:
        """Wait for gathers that nobody used: main weights are about to change."""
        for unit in self._units:
            if self.pipeline.state(unit.name) is GatherState.GATHERING:
                self.pipeline.wait(unit.name)

    def invalidate(self, *, frozen: bool) -> None:
        """Main weights changed: gathered copies are stale (``frozen``: those of frozen parameters too)."""
        self.settle()
        for unit in self._units:
            for stream in unit.streams:
                if stream.trainable or frozen:
                    stream.weights.main_changed()
            if self.pipeline.state(unit.name) is GatherState.READY:
                self.pipeline.free(unit.name)
