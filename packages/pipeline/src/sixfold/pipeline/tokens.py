"""``scale="token"``: gradients of sums, divided once by the number of tokens.

    counts of the last stage --> total on every rank (this file) --> gradients / total

The total is known once the last stage has run all its forwards, which is before
any stage is done with its backwards; it travels on the control channel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from struct import pack, unpack
from typing import Any

import torch

from sixfold.pipeline.action import Action, Kind
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program import Program
from sixfold.pipeline.stage_run import LossTail, StageRun
from sixfold.pipeline.transport import Links

__all__ = ["TokenCount"]


class TokenCount:
    """The total of a step, and the division by it.

    A parameter that several local stages share is divided with the last of them. Gradients that are there when a step
    begins are set aside, so that they are not divided again, and added to those of the step.
    """

    def __init__(
        self, program: Program, runs: Mapping[int, StageRun], tail: LossTail | None, transport: Links | None
    ) -> None:
        self._tail = tail
        self._transport = transport
        self._source = program.placement[-1]
        self._parameters: dict[int, list[torch.nn.Parameter]] = {}
        taken: set[int] = set()
        order = [a.stage for _, _, a in program.entries() if a.kind is Kind.REDUCE_GRAD and a.stage in runs]
        for stage in reversed(order):
            module = runs[stage].stage.module
            mine = list(module.parameters()) if module is not None else []
            self._parameters[stage] = [p for p in mine if id(p) not in taken]
            taken.update(map(id, mine))
        self.total: float | None = None
        self._before: dict[torch.nn.Parameter, torch.Tensor] = {}

    def begin(self) -> None:
        """A new step: the total is not known, and there are no gradients."""
        self.total = None
        for parameters in self._parameters.values():
            for parameter in parameters:
                if parameter.grad is not None:
                    self._before[parameter] = parameter.grad
                    parameter.grad = None

    def clear(self) -> None:
        """The step is over: where it failed, gradients are what they were before."""
        for parameter, gradient in self._before.items():
            parameter.grad = gradient
        self._before.clear()

    def divide(self, stage: int, action: Action) -> None:
        """REDUCE_GRAD of ``stage``: divide its gradients in place."""
        total = self._exchange(action) if self.total is None else self.total
        for parameter in self._parameters[stage]:
            if parameter.grad is not None:
                parameter.grad.div_(total)
            if (before := self._before.pop(parameter, None)) is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)

    def _exchange(self, action: Action) -> float:
        if self._tail is not None:
            self.total = float(sum(self._tail.counts))
            if not (math.isfinite(self.total) and self.total > 0):
                raise ScheduleError(
                    f"the counts of loss_fn sum to {self.total}; scale='token' divides by a sum that is finite and > 0"
                )
            for peer in self._others():
                self._control().send(pack("d", self.total), peer, action)
        else:
            self.total = float(unpack("d", self._control().receive(self._source, action))[0])
        return self.total

    def _others(self) -> list[int]:
        transport = self._transport
        return [] if transport is None else [peer for peer in range(transport.ranks) if peer != transport.rank]

    def _control(self) -> Any:
        assert self._transport is not None, "one process has no control channel"
        return self._transport.control
