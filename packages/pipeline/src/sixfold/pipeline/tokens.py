"""``scale="token"``: gradients of sums, divided once by the number of tokens.

    counts of the last stage --> total of a batch on every rank (this file) --> gradients / total

The total is known once the last stage has run all forwards of a batch, which is before
any stage is done with its backwards; it is sent at that moment, on the control channel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from struct import pack, unpack
from typing import TYPE_CHECKING

from torch import Tensor, nn

from sixfold.pipeline.action import Action
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.loss import LossTail
from sixfold.pipeline.stage_run import StageRun

if TYPE_CHECKING:
    from sixfold.pipeline.transport import Control

__all__ = ["SetAside", "TokenCount"]


class SetAside:
    """Gradients that are there when a step begins: kept apart, and added to those of the step at its end."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._before: dict[nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        """A new step: there are no gradients."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._before[parameter] = parameter.grad
                parameter.grad = None

    def add(self, parameter: nn.Parameter) -> None:
        """The gradient of the step is final."""
        if (before := self._before.pop(parameter, None)) is not None:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def restore(self) -> None:
        """The step failed: gradients that were not added are what they were before it."""
        for parameter, gradient in self._before.items():
            parameter.grad = gradient
        self._before.clear()


class TokenCount:
    """The totals of a step's batches, and the division by them.

    A parameter that several stages of this process share is divided with the last of them. Gradients that are there
    when a step begins are set aside, so that they are not divided again, and added to those of the step.

    Args:
        runs: the stages of this process, by index.
        tail: the end of the last stage, where this process has it.
        batch: microbatches per STEP.
        control: between ranks; None where all are in this process.
        source: rank of the last stage.
    """

    def __init__(
        self,
        runs: Mapping[int, StageRun],
        tail: LossTail | None,
        batch: int,
        control: Control | None,
        rank: int,
        ranks: int,
        source: int,
    ) -> None:
        self._runs, self._tail, self._batch = runs, tail, batch
        self._control, self._source = control, source
        self._others = [peer for peer in range(ranks) if peer != rank] if control is not None else []
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._before = SetAside(dict.fromkeys(p for run in runs.values() for p in run.stage.parameters()))
        self._totals: dict[int, float] = {}

    def order(self, stages: Iterable[int]) -> None:
        """The order in which stages reduce, which says which of them is the last to hold a parameter."""
        taken: set[int] = set()
        for stage in reversed(list(dict.fromkeys(stages))):
            mine = list(self._runs[stage].stage.parameters())
            self._parameters[stage] = [p for p in mine if id(p) not in taken]
            taken.update(map(id, mine))

    def begin(self) -> None:
        """A new step: no total is known, and there are no gradients."""
        self._totals.clear()
        self._before.begin()

    def clear(self) -> None:
        """The step is over: where it failed, gradients are what they were before."""
        self._before.restore()

    def tell(self, batch: int, action: Action) -> None:
        """Behind the last forward of a batch on the last stage, ``action``: its total to all ranks."""
        assert self._tail is not None, "only the last stage counts"
        counts = self._tail.counts
        first = batch * self._batch
        total = float(sum(counts[k % len(counts)] for k in range(first, first + self._batch)))
        if not (math.isfinite(total) and total > 0):
            raise ScheduleError(
                f"the counts of loss_fn sum to {total}; scale='token' divides by a sum that is finite and > 0"
            )
        self._totals[batch] = total
        for peer in self._others:
            assert self._control is not None, "others are behind a control channel"
            self._control.send(pack("<d", total), peer, action)

    def divide(self, stage: int, batch: int, action: Action) -> None:
        """REDUCE_GRAD of ``stage``: divide its gradients in place."""
        if (total := self._totals.get(batch)) is None:
            total = self._totals[batch] = self._receive(action)
        for parameter in self._parameters[stage]:
            if parameter.grad is not None:
                parameter.grad.div_(total)
            self._before.add(parameter)

    def _receive(self, action: Action) -> float:
        assert self._control is not None, "in one process the total is known"
        return float(unpack("<d", self._control.receive(self._source, action))[0])
