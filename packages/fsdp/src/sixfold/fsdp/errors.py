"""The one error of this package.

    every file --> FsdpError (this file) --> the user, on all ranks

Pure: no torch, no processes.
"""

from __future__ import annotations

from collections.abc import Iterable


class FsdpError(RuntimeError):
    """Bad input, or a fault of a run: the thing, its value, the rule and the remedy.

    Attributes:
        unit: the unit in which it happened. ``""`` is the root unit, None means none.
        step: the model's step, counted from 0. None before training.
        op: ``"gather"``, ``"reduce"``, ``"check"`` and so on. None means none.
        ranks: ranks at fault, as positions in the data-parallel mesh. Empty if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        unit: str | None = None,
        step: int | None = None,
        op: str | None = None,
        ranks: Iterable[int] = (),
    ) -> None:
        self.unit = unit
        self.step = step
        self.op = op
        self.ranks = tuple(ranks)
        where = []
        if unit is not None:
            where.append(f"unit {unit or '(root)'}")
        if step is not None:
            where.append(f"step {step}")
        if op is not None:
            where.append(f"op {op}")
        if self.ranks:
            where.append("rank " + ", ".join(map(str, self.ranks)))
        super().__init__(message + (f" [{'; '.join(where)}]" if where else ""))


class MissingError(FsdpError, AttributeError):
    """A member that torch's wrappers or megatron-fsdp have and this package has not. ``hasattr`` says False of it."""
