"""The states of each unit's gathered memory, and the moves between them.

    gather.py's events --> AllGatherPipeline (this file) --> a unit's gather starts, is waited for, is given up

Driven by events; knows no module, no memory and no order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from enum import Enum

from sixfold.fsdp.errors import FsdpError


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
