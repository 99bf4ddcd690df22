"""An exception inside this package: out of memory in the midst of a gather, Ctrl-C in the midst of a sum.

    engine.py's events --> whole (this file) --> on several ranks the model ends; in one process it starts over

What an exception of a layer leaves is known, for all hooks run. What it leaves in the midst of a gather or a reduction
is not: a unit that counts as gathered and is not would train with other weights. On several ranks, collectives of it
may be on their way too, and others may not have met it. So there it ends the model. In one process nothing is on its
way: weights are gathered anew, and gradients are dropped by ``zero_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.engine.gather import Gathering
from sixfold.fsdp.engine.reduce import Reduction
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.deadlines import Faults

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Interruptions:
    """Of one model.

    Attributes:
        of: "gather" or "reduce", whichever an exception left in its midst; empty: none. In one process only.
    """

    def __init__(
        self, units: Sequence[Unit], gathering: Gathering, reduction: Reduction, faults: Faults, *, alone: bool
    ) -> None:
        self._units, self._gathering, self._reduction, self._faults = units, gathering, reduction, faults
        self._alone = alone
        self.of = ""

    def note(self, error: BaseException, op: str) -> None:
        """``error`` came in the midst of ``op``."""
        if self._alone:
            self.of = "reduce" if "reduce" in (op, self.of) else op
        elif self._faults.failed is None:
            self._faults.fail(
                f"{type(error).__name__} came in the midst of a {op}, and nobody can know what it left there; "
                "restart from the last checkpoint",
                None,
                op,
                (),
            )

    def before_use(self, *, in_call: bool) -> None:
        """Weights or gradients are about to be used.

        Raises:
            FsdpError: gradients are not whole, or weights are not in a call.
        """
        if self.of == "reduce":
            raise FsdpError(
                "an exception came in the midst of a reduction, so gradients are not whole; call zero_grad() and go on",
                step=self._faults.step,
                op="reduce",
            )
        if self.of and not in_call:
            self.start_over()
        if self.of:
            raise FsdpError(
                "an exception came in the midst of a gather, and weights are not here; end this call or backward, call "
                "zero_grad() and go on",
                step=self._faults.step,
                op="gather",
            )

    def start_over(self) -> None:
        """No gradient is wanted, and weights are gathered anew."""
        if self.of:
            if self.of == "reduce":
                self._reduction.pipeline.abandon()
                self._reduction.pool.holders.clear()
                for unit in self._units:
                    for flat_buffer in unit.trained:
                        flat_buffer.gradients.start_over()
            self._gathering.start_over()
            self.of = ""


class Interruptible:
    """Has events that happen as a whole."""

    interruptions: Interruptions


Self = TypeVar("Self", bound=Interruptible)


def whole(
    op: str,
) -> Callable[[Callable[Concatenate[Self, Given], Result]], Callable[Concatenate[Self, Given], Result]]:
    """A method that happens as a whole: what ends it, but for an FsdpError, is noted as in the midst of ``op``."""

    def marked(method: Callable[Concatenate[Self, Given], Result]) -> Callable[Concatenate[Self, Given], Result]:
        @wraps(method)
        def run(self: Self, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
            try:
                return method(self, *args, **kwargs)
            except FsdpError:
                raise
            except BaseException as error:
                self.interruptions.note(error, op)
                raise

        return run

    return marked
