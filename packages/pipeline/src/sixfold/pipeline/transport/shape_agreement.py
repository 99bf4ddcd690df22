"""Whether an output may have another shape than in the batch before: one rule for edges of every sort.

    values of a SEND_F --> Outputs: as agreed, agreed anew, or refused (this file) --> an edge

[Note: one rule] Edges of process groups must know shapes before tensors come ([Note: shapes] in ``messages.py``);
shared memory, threads and one process need not. A program that runs on a laptop has to run on several hosts. So all of
them take what groups take and refuse what these refuse, at the same SEND. A batch is open, which means that its shapes
may change, in three cases: stage 0's inputs or a stage's first output changed; it follows a message of a batch that
was open; or ``dynamic_shapes`` is set. A stage's first output is behind the first of the stage before. So a change on
any rank (a stage that is frozen between two steps) is known to all stages behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.transport.routes import route_of
from sixfold.pipeline.transport.specs import Specs, specs_of, words_of

__all__ = ["AgreedShapes", "Outputs", "Slot"]

Slot = tuple[int, int]  # lower stage, slot: of an output and of its gradients


class AgreedShapes:
    """What one lane knows of the shapes of its outputs.

    Attributes:
        announced: they change behind ``renew`` alone. [Note: announced shapes] in ``messages.py``
        sent: the shape of each output, of the last batch.
        open: outputs of stages whose batch begins from here on may have other shapes.
    """

    def __init__(
        self, placement: Sequence[int], microbatches: int, dynamic_shapes: bool | Literal["announced"]
    ) -> None:
        self.announced = dynamic_shapes == "announced"
        self.sent: dict[Slot, Specs] = {}
        self.open = not self.announced
        self._dynamic = bool(dynamic_shapes) and not self.announced
        self._began = False
        self._signature: object = None
        self._placement, self._microbatches = placement, microbatches
        self._outputs: dict[int, Outputs] = {}

    def begin(self, signature: object) -> None:
        """See Lane."""
        changed = self._dynamic or not self._began or signature != self._signature
        self.open = changed and not self.announced
        self._signature, self._began = signature, True

    def renew(self) -> None:
        """See Lane."""
        self._began = False
        self.sent.clear()

    def resume(self, action: Action, values: tuple[Any, ...]) -> None:
        """See Lane."""
        route = route_of(action, self._microbatches)
        self.sent[route.stage, route.slot] = specs_of(values)

    def outputs_of(self, stage: int) -> Outputs:
        """Those of ``stage``."""
        if stage not in self._outputs:
            self._outputs[stage] = Outputs(self, self._microbatches)
        return self._outputs[stage]

    def forget(self) -> None:
        """A batch has failed in its midst: the next one agrees anew."""
        self._outputs.clear()
        self.renew()


class Outputs:
    """The outputs of one stage.

    Args:
        batch: how many a batch has.
    Attributes:
        open: those of this batch may have other shapes.
    """

    def __init__(self, lane: AgreedShapes, batch: int) -> None:
        self._lane, self._batch = lane, batch
        self._left = 0  # of this batch
        self.open = True

    def look(self, slot: Slot, specs: Specs, action: Action) -> tuple[bool, bool]:
        """An output is about to be sent.

        Returns:
            whether it is the first of its batch; whether the receiver has to be told its shape.
        Raises:
            ScheduleError: it has another shape than in the batch before, which nobody announced.
        """
        lane = self._lane
        before = lane.sent.get(slot)
        same = specs == before
        if first := not self._left:
            self._left = self._batch
            lane.open |= not same and not lane.announced
            self.open = lane.open
        self._left -= 1
        told = self.open or (lane.announced and before is None)
        if told:
            lane.sent[slot] = specs
        elif not same:
            assert before is not None, f"{action}: the first batch of a lane is open"
            say = "call step(..., new_shapes=True) on all ranks, or " if lane.announced else ""
            frozen = words_of(specs) == words_of(before)  # or not any more; nothing else differs
            raise ScheduleError(
                f"stage {action.stage} made {words_of(specs, gradients=frozen)} of microbatch {action.microbatch}, "
                f"in the step before {words_of(before, gradients=frozen)}; {say}make the runner with "
                "dynamic_shapes=True"
            )
        return first, told
