"""How a model waits: with a deadline, at a step, and not at all after its first failure.

    deadlines.py --> Waiting (this file) --> engine/gather.py, engine/reduce.py, engine/order_check.py, engine/engine.py

Made before anything that waits, so nothing needs the engine for it. Starts no collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.deadlines import Faults

Wait = Callable[[Any, str | None, str], None]  # a Work, the unit's name, the operation


class Waiting:
    """The step number, the first failure, and waits that know both."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.step = 0

    @property
    def failed(self) -> FsdpError | None:
        """What ended this model."""
        return self.faults.failed

    def __call__(self, work: Any, unit: str | None, op: str, *, on_host: bool = False) -> None:
        """Wait for a Work; ``on_host``: it is a control message."""
        self.faults.wait(work, unit, self.step, op, on_host=on_host)

    def for_control(self, unit: str | None, op: str) -> Callable[[Any], None]:
        """Waits for the control messages of one exchange."""
        return lambda work: self(work, unit, op, on_host=True)

    def alive(self) -> None:
        """Raise if an earlier failure ended this model."""
        self.faults.check()

    def fail(
        self, message: str, unit: str | None, op: str, ranks: Sequence[int], *, step: int | None = None
    ) -> FsdpError:
        """End this model; returns what to raise. ``step``: None is the one that runs."""
        at = self.step if step is None else step
        return self.faults.fail(FsdpError(message, unit=unit, step=at, op=op, ranks=ranks))
