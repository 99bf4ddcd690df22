"""What a step that failed leaves in gradients: nothing, or a mark that the next step refuses.

    step begins: which parameters have a gradient --> it fails --> dropped, or marked (this file) --> the next step

[Note: partial sums] A gradient that was not there before the step is dropped. One that was there is added to in place:
a copy of all gradients for each step would be their memory once more. After a failure it holds neither the old sum nor
the new one. It is marked, and a step of any runner that finds the mark is refused until the gradient was zeroed or
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from sixfold.pipeline.compiler.token_scaling import leaves_in
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.microbatches.cut_batch import tensors_in
from sixfold.pipeline.stage.distributed_data_parallel import Replicas
from sixfold.pipeline.stage.side_effects import module_of
from sixfold.pipeline.stage.stage import Stage

__all__ = ["StepGradients"]

_PARTIAL = "_sixfold_pipeline_partial"  # in the __dict__ of a gradient: its version when the step failed


class StepGradients:
    """Gradients of the stages of one process, of ``loss_fn`` and of what a step is given, as the step found them.

    Args:
        others: whether other processes have stages too: a step that is refused then ends the runners of all.
    """

    def __init__(self, *, others: bool) -> None:
        self._others = others
        self._none: list[Tensor] = []
        self._there: list[tuple[Tensor, Tensor, int]] = []

    def begin(
        self, stages: Iterable[Stage], loss_fn: Callable[..., Any] | None, inputs: object, beside: object
    ) -> None:
        """Look at the parameters that the stages and ``loss_fn``, if it is a module, have now, and at what is given.

        Args:
            inputs: the graph of a tensor among them runs when all else went through; those of a list run in the step.
            beside: targets and keyword arguments.
        Raises:
            ScheduleError: a gradient holds a part of a step that failed.
        """
        self.end()
        for stage in stages:
            if stage.data_parallel is None or isinstance(stage.data_parallel, Replicas):
                self._look(stage.parameters(), stage.index)
        if (loss := module_of(loss_fn)) is not None:
            self._look(loss.parameters(), "loss_fn")
        if not isinstance(inputs, list):
            inputs = [tensor for _, tensor in tensors_in(inputs, "") if tensor.is_leaf]
        self._look(leaves_in((inputs, beside)), "inputs, targets or kwargs")

    def _look(self, leaves: Iterable[Tensor], whose: int | str) -> None:
        for leaf in leaves:
            gradient = leaf.grad
            if gradient is None:
                self._none.append(leaf)
                continue
            if gradient.__dict__.get(_PARTIAL) == gradient._version:
                self.end()
                remedy = "on its optimizer, then repeat all steps of this sum"
                if self._others:
                    remedy = "and make a new runner on all ranks, then repeat all steps of this sum there"
                whose = f"stage {whose}" if isinstance(whose, int) else whose
                raise ScheduleError(
                    f"a gradient of {whose} holds a part of a step that failed; call zero_grad() {remedy}"
                )
            self._there.append((leaf, gradient, gradient._version))

    def end(self) -> None:
        """The step went through."""
        self._none, self._there = [], []

    def failed(self) -> None:
        """Drop what the step made; mark what it cannot be taken out of."""
        for parameter in self._none:
            parameter.grad = None
        for parameter, gradient, version in self._there:
            if parameter.grad is gradient and gradient._version != version:
                gradient.__dict__[_PARTIAL] = gradient._version
        self.end()
