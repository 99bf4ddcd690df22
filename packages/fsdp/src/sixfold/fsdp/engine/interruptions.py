"""An exception inside this package: out of memory in the midst of a gather, Ctrl-C in the midst of a sum.

    engine.py's events --> interruptible (this file) --> on several ranks the model ends; in one process it starts over

An exception of a layer leaves a known state, since all hooks run. One in the midst of a gather or a reduction does not:
a unit that counts as gathered and is not would train with other weights. On several ranks collectives may be on their
way too, and other ranks may not have met the exception. So there it ends the model. In one process nothing is on its
way: weights are gathered anew, and gradients are dropped by ``zero_grad()``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar

from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.engine.gather import Gathering
from sixfold.fsdp.engine.reduce import Reduction
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.deadlines import Faults

Operation = Literal["gather", "reduce"]
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Interruptions:
    """What exceptions left unfinished in one model.

    Attributes:
        unfinished: in one process, what an exception left in its midst. On several ranks the model ends instead.
    """

    def __init__(
        self, units: Sequence[Unit], gathering: Gathering, reduction: Reduction, faults: Faults, *, alone: bool
    ) -> None:
        self._units, self._gathering, self._reduction, self._faults = units, gathering, reduction, faults
        self._alone = alone
        self.unfinished: Operation | None = None

    def note(self, error: BaseException, op: Operation) -> None:
        """``error`` came in the midst of ``op``."""
        if self._alone:
            if self.unfinished != "reduce":  # whose remedy includes that of a gather
                self.unfinished = op
        elif self._faults.failed is None:
            self._faults.fail(
                f"{type(error).__name__} came in the midst of a {op}, and nobody can know what it left there; "
                "restart from the last checkpoint",
                None,
                op,
                (),
            )

    def before_use(self) -> None:
        """Outside of a call, weights or gradients are about to be used.

        Raises:
            FsdpError: gradients are not whole.
        """
        self.gather_anew()
        self.refuse()

    def gather_anew(self) -> None:
        """Outside of a call: weights that an exception left half gathered are gathered when they are used."""
        if self.unfinished == "gather":
            self.start_over()

    def refuse(self) -> None:
        """Raise FsdpError if gradients are not whole, or weights are not here."""
        if self.unfinished == "reduce":
            raise FsdpError(
                "an exception came in the midst of a reduction, so gradients are not whole; call zero_grad() and go on",
                step=self._faults.step,
                op="reduce",
            )
        if self.unfinished == "gather":
            raise FsdpError(
                "an exception came in the midst of a gather, and weights are not here; end this call or backward, call "
                "zero_grad() and go on",
                step=self._faults.step,
                op="gather",
            )

    def start_over(self) -> None:
        """If anything is unfinished: gradients of an unfinished reduction are dropped, weights are gathered anew."""
        if self.unfinished is None:
            return
        if self.unfinished == "reduce":
            self._reduction.pipeline.abandon()
            self._reduction.pool.holders.clear()
            for unit in self._units:
                for flat_buffer in unit.trained:
                    flat_buffer.gradients.start_over()
        self._gathering.start_over()
        self.unfinished = None


class HasInterruptions(Protocol):
    """Whose methods ``interruptible`` marks."""

    interruptions: Interruptions


Owner = TypeVar("Owner", bound=HasInterruptions)


def interruptible(
    op: Operation,
) -> Callable[[Callable[Concatenate[Owner, Given], Result]], Callable[Concatenate[Owner, Given], Result]]:
    """Mark a method: an exception that ends it, but for an FsdpError, is noted as in the midst of ``op``."""

    def marked(method: Callable[Concatenate[Owner, Given], Result]) -> Callable[Concatenate[Owner, Given], Result]:
        @wraps(method)
        def run(self: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
            try:
                return method(self, *args, **kwargs)
            except FsdpError:
                raise
            except BaseException as error:
                self.interruptions.note(error, op)
                raise

        return run

    return marked
