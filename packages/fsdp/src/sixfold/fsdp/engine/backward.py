"""Root calls, and the backward that runs through them: made at its first event, dropped at its end.

    engine.py --> CallContext, Backward (this file) --> engine.py closes the units that it names

What is true of one backward lies here and nowhere else, so the next one finds nothing of it, also when it raised.
Events of a backward inside it (a reentrant checkpoint's) are its own: autograd ends the outermost one last.

[Note: when a unit's backward is done] Autograd runs ready nodes with the latest forward first. So when the gradient of
another unit's output arrives, every node of the units after it has run. That moment is the same on all ranks, also
where one rank leaves a parameter unused, so it orders the collectives; counting delivered gradients would not. Units
around the new one or inside it (which may have returned the same tensor), and units called again earlier in the same
forward, stay open. What is left closes when backward ends, and ``finish_grad_sync`` relies on neither.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.torch_private import backward_inputs, runs_still


class CallContext:
    """One root call: how many forward calls of each unit wait for their backward.

    ``training`` is that of the root call: a reentrant checkpoint inside it runs its forward without grad.
    ``weights`` counts the changes of main weights before it: its graph holds views of those weights.
    ``frame`` is torch's frame of the call while it runs, where nothing else tells of its end.
    """

    __slots__ = ("frame", "outstanding", "training", "weights")

    def __init__(self, units: int, training: bool, weights: int) -> None:
        self.outstanding = [0] * units
        self.training = training
        self.weights = weights
        self.frame: FrameType | None = None

    def left_by_interrupt(self) -> bool:
        """Its frame is not on this thread's stack: the call ended without its hook."""
        return self.frame is not None and not runs_still(self.frame)


@dataclass(slots=True, eq=False)
class Backward:
    """See above.

    Attributes:
        reduces: numbers of the units whose gradients are reduced as this backward makes them.
        opened: units whose backward has begun and is not done, each with the call that it counts down.
        makes_gradients: False while ``autograd.grad`` of inputs runs, which accumulates nothing.
        inputs: ``id`` of each of the inputs that it was given; None: it was given none.
        joint: it runs through several root calls (loss1 + loss2).
        task: of autograd, the last one that was asked.
    """

    reduces: Collection[int]
    opened: list[tuple[Unit, CallContext | None]] = field(default_factory=list)
    makes_gradients: bool = True
    inputs: frozenset[int] | None = None
    joint: bool = False
    task: int = -1
    _call: CallContext | None = None  # the first that it came to

    def ask(self, task: int, records: Sequence[ParamRecord], *, driven: bool) -> None:
        """What autograd was asked for, once per task. A driven one's split backward may leave all gradients to W."""
        self.task = task
        self.makes_gradients = driven or accumulates(records)
        self.inputs = None if driven else backward_inputs()

    def open(
        self, unit: Unit, context: CallContext | None, others: Sequence[int] | None, *, touched: bool
    ) -> tuple[list[Unit], bool]:
        """``unit``'s backward begins, in the graph of ``context``'s call.

        Args:
            others: by unit, calls that wait for their backward, of all root calls; None: the context's own count.
            touched: ``unit`` has a sum from before.
        Returns:
            (units to reduce, whose backward is done by that; False where ``unit``'s had begun before).
        """
        if context is not None:
            self.joint = self.joint or self._call not in (None, context)
            self._call = self._call or context
        done = self._done_before(unit, others) if unit.index else []
        begins = all(opened is not unit for opened, _ in self.opened)
        if begins:
            self.opened.append((unit, context))
            self._leave_out(unit, touched=touched)
        return done, begins

    def opened_inside(self, unit: Unit) -> list[Unit]:
        """Units inside ``unit`` whose backward is not done.

        A module that returns what the last unit inside it returned: that tensor carries the hooks of both, the inner
        one's first. Its backward is about to run, and a prefetch must not take its place.
        """
        found = []
        for opened, _ in self.opened:
            if not unit.index or unit in opened.around:
                found.append(opened)
        return found

    def _leave_out(self, unit: Unit, *, touched: bool) -> None:
        """``backward(inputs=some parameters)`` makes no gradients of the others, and zeros are gradients.

        ``touched``: ``unit`` has a sum from before.
        """
        if self.inputs is None and not touched:
            return  # as nearly always; nothing is left out of a unit that no sum is held for
        for record in unit.records:
            asked = self.inputs is None or id(record.parameter) in self.inputs
            record.left_out = not asked and (record.left_out or not touched)

    def _done_before(self, unit: Unit, others: Sequence[int] | None) -> list[Unit]:
        """Units to reduce, whose backward is done now that ``unit``'s begins.

        [Note: when a unit's backward is done] Not where one was called again, earlier in the same forward or by another
        call of a joint backward.
        """
        still: list[tuple[Unit, CallContext | None]] = []
        done: list[Unit] = []
        for opened, context in self.opened:
            beside = opened is unit or not opened.index or opened in unit.around or unit in opened.around
            at = opened.index
            again = context is not None and (context.outstanding[at] > 0 or (others is not None and others[at] > 0))
            if beside or again:
                still.append((opened, context))
            elif at in self.reduces:
                done.append(opened)
        self.opened = still
        return done


def accumulates(records: Sequence[ParamRecord]) -> bool:
    """The backward that runs now adds to ``.grad`` of any of these parameters (``autograd.grad`` adds to none)."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        for record in records:
            view = record.parameter.expand_as(record.parameter)
            if view.grad_fn is None:  # frozen after wrapping
                continue
            node: Any = view.grad_fn.next_functions[0][0]
            try:
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:  # it is what autograd.grad was asked for
                return False
    return False


def old_graph(unit: Unit, step: int) -> FsdpError:
    """The weights that a graph saved are of an earlier step."""
    return FsdpError(
        "backward of a graph from before an optimizer step or refresh(): its saved weights have changed (plain "
        "torch: 'modified by an inplace operation'). Run the forward again",
        unit=unit.name,
        step=step,
        op="gather",
    )


def refuse_graph(unit: Unit, units: Sequence[Unit], *, changed: bool, step: int) -> None:
    """Graphs whose saved weights are (``changed``), or would be, others than their forward used.

    Asked where weights changed since the forward, or where a backward makes a graph of its own.
    """
    if changed:
        raise old_graph(unit, step)
    if any(one.shares for one in units):
        raise FsdpError(
            "create_graph=True: a second backward reads weights of several units at once, and memory that units "
            'share holds only some of them; use BufferConfig(gathered_bytes="all")',
            unit=unit.name,
            step=step,
            op="gather",
        )
