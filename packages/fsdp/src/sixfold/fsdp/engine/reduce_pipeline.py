"""Reductions in flight, first in first out.

    reduce.py's events --> GradReducePipeline (this file) --> a unit's reduction starts, is finished

Driven by events; knows no module, no memory and no slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from sixfold.fsdp.errors import FsdpError


class GradReducePipeline:
    """Reductions in flight, first in first out.

    Args:
        units: names.
        start: starts a unit's reduction and returns what finishes it.

    Attributes:
        watch: told each move and its unit, or None: "put" before, "reduce" after it was sent, "drain" when it is done.
    """

    def __init__(self, units: Collection[str], start: Callable[[str], Callable[[], None]]) -> None:
        self.watch: Callable[[str, str], None] | None = None
        self._start = start
        self._units = frozenset(units)
        self._flying: dict[str, Callable[[], None]] = {}  # the oldest first
        self._histories: dict[str, deque[str]] = {unit: deque(maxlen=12) for unit in units}

    def __len__(self) -> int:
        return len(self._flying)

    def flying(self, unit: str) -> bool:
        """``unit`` has a reduction that is not finished."""
        return unit in self._flying

    def put(self, unit: str) -> None:
        """Start the reduction of ``unit``; illegal while one of it is in flight."""
        if unit not in self._units:
            raise FsdpError(f"put({unit!r}): there is no such unit", unit=unit, op="reduce")
        if unit in self._flying:
            history = ", ".join(self._histories[unit])
            raise FsdpError(
                f"put({unit!r}) while its reduction is in flight; drain it first. History: {history}",
                unit=unit,
                op="reduce",
            )
        self._histories[unit].append("put")
        watch = self.watch
        if watch is not None:
            watch("put", unit)
        self._flying[unit] = self._start(unit)
        if watch is not None:
            watch("reduce", unit)

    def drain(self, limit: int) -> None:
        """Finish the oldest until at most ``limit`` (>= 0) are in flight."""
        if limit < 0:
            raise FsdpError(f"drain({limit}): the limit is >= 0", op="reduce")
        while len(self._flying) > limit:
            unit = next(iter(self._flying))
            finish = self._flying.pop(unit)
            self._histories[unit].append("drain")
            finish()
            if self.watch is not None:
                self.watch("drain", unit)

    def finish(self) -> None:
        """Finish all."""
        self.drain(0)
