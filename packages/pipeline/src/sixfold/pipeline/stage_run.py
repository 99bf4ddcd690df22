"""One stage while a program runs: what waits for it and what it holds.

    inbox --> forward, backward of microbatch k (this file) --> outbox

No rank, no group, no schedule: ``compile`` says where the results go. Slots are
lists indexed by microbatch; an entry is dropped as soon as it was used, so that
what is alive is what ``simulate`` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.split import as_tuple
from sixfold.pipeline.stage import Stage

__all__ = ["Arriving", "LossTail", "StageRun", "leaves"]

Tensors = tuple[Tensor, ...]


class Arriving(Protocol):
    """A message that was asked for and may not be there yet."""

    def wait(self) -> Tensors:
        """The tensors, as leaves of this rank's graph."""


class StageRun:
    """Runs one stage, microbatch by microbatch.

    Attributes:
        inbox: per microbatch the inputs, there or arriving.
        gradients: per microbatch the gradients of those outputs that want one.
        outbox, gradient_outbox: what the next and the previous rank are to get.
    """

    def __init__(self, stage: Stage, microbatches: int, keep_graph: bool) -> None:
        self.stage = stage
        self.index = stage.index
        self.deliver: Callable[[int, Any], None] = self.to_outbox
        self.deliver_gradients: Callable[[int, Tensors], None] = self.to_gradient_outbox
        self._call = stage.call
        self._keep_graph = keep_graph
        self._m = microbatches
        self.begin([{}] * microbatches)

    def begin(self, kwargs: list[Mapping[str, Any]]) -> None:
        """Empty every slot for a new step, or for good."""
        m = self._m
        self.kwargs = kwargs
        self.inbox: list[Tensors | Arriving | None] = [None] * m
        self.gradients: list[Tensors | Arriving | None] = [None] * m
        self.outbox: list[Tensors | None] = [None] * m
        self.gradient_outbox: list[Tensors | None] = [None] * m
        self._inputs: list[Tensors | None] = [None] * m
        self._roots: list[list[GradientEdge] | None] = [None] * m

    def forward(self, k: int) -> None:
        """F: take the inputs of microbatch ``k``, run the stage, hand its outputs on."""
        inputs = self.inbox[k]
        self.inbox[k] = None
        if type(inputs) is not tuple:
            inputs = inputs.wait()  # type: ignore[union-attr]
        if self._keep_graph:
            self._inputs[k] = inputs
        self.deliver(k, self._call(*inputs, **self.kwargs[k]))

    def backward(self, k: int) -> None:
        """B: gradients of the stage's parameters are accumulated, those of its inputs handed on."""
        gradients = self.gradients[k]
        self.gradients[k] = None
        if type(gradients) is not tuple:
            gradients = gradients.wait()  # type: ignore[union-attr]
        roots = self._roots[k]
        self._roots[k] = None
        if roots:
            torch.autograd.backward(roots, gradients)
        inputs = self._inputs[k]
        self._inputs[k] = None
        assert inputs is not None, f"stage {self.index}: backward of microbatch {k} runs twice"
        mine = inputs if self.index else ()  # those of stage 0 are the caller's, whose graph has its gradients
        self.deliver_gradients(k, tuple(_gradient(leaf) for leaf in mine if leaf.requires_grad))

    def to_outbox(self, k: int, outputs: Any) -> None:
        """Keep the outputs for a SEND_F."""
        self.outbox[k] = self._rooted(k, outputs)

    def to_gradient_outbox(self, k: int, gradients: Tensors) -> None:
        """Keep the gradients of the inputs for a SEND_B."""
        self.gradient_outbox[k] = gradients

    def to_stage(self, following: StageRun) -> Callable[[int, Any], None]:
        """Hand outputs to a stage of this process, as leaves of a graph of its own."""

        def deliver(k: int, outputs: Any) -> None:
            following.inbox[k] = leaves(self._rooted(k, outputs))

        return deliver

    def take_gradients(self, k: int, gradients: Tensors) -> None:
        """Gradients of the outputs of microbatch ``k``, from a stage of this process."""
        self.gradients[k] = gradients

    def keep_root(self, k: int, loss: Tensor) -> None:
        """Backward of ``k`` starts at this scalar."""
        self._roots[k] = [get_gradient_edge(loss)]
        self.gradients[k] = (torch.ones_like(loss),)

    def _rooted(self, k: int, outputs: Any) -> Tensors:
        # Only the graph is kept for the backward; the output itself is free once it was sent.
        tensors = as_tuple(outputs, f"the output of stage {self.index}")
        if self._keep_graph:
            self._roots[k] = [get_gradient_edge(t) for t in tensors if t.requires_grad]
        return tensors


class LossTail:
    """What the last stage does with its output: a loss, or the output itself.

    Attributes:
        losses: per microbatch, detached.
        outputs: per microbatch, when no loss is asked for.
        counts: per microbatch, what the sums of ``scale="token"`` are to be divided by.
    """

    def __init__(self, run: StageRun, loss_fn: Callable[[Any, Any], Any] | None, scale: str, keep_graph: bool) -> None:
        self._run = run
        self._loss_fn = loss_fn
        self._scale = scale
        self._keep_graph = keep_graph
        self.begin([])

    def begin(self, targets: list[Any]) -> None:
        """Forget the step before; m targets."""
        self._targets = targets
        self.losses: list[Tensor] = []
        self.outputs: list[Any] = []
        self.counts: list[Any] = []

    def loss(self, k: int, outputs: Any) -> None:
        """Output to loss; its graph is kept only while a backward will use it."""
        assert self._loss_fn is not None, "the runner checks that there is a loss_fn"
        value = self._loss_fn(_unwrapped(outputs), self._targets[k])
        if self._scale == "token":
            if not (isinstance(value, tuple | list) and len(value) == 2):
                raise ScheduleError(f"with scale='token' loss_fn returns (sum, count), not a {type(value).__name__}")
            value, count = value
            self.counts.append(count)
        value = _one_number(value, self._keep_graph)
        self.losses.append(value.detach())
        if self._keep_graph:
            self._run.keep_root(k, value / len(self._targets) if self._scale == "mean" else value)

    def keep(self, k: int, outputs: Any) -> None:
        """Keep the output for the caller."""
        self.outputs.append(_unwrapped(outputs))


def _one_number(loss: Any, trained: bool) -> Tensor:
    """``loss`` as a real scalar; a vector is refused, whose backward would sum it."""
    if isinstance(loss, Tensor) and loss.is_complex():
        raise ScheduleError("loss_fn returned a complex number; it returns a real one")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ScheduleError(f"loss_fn returned a {shape}; it returns one number, as a tensor")
    if trained and not loss.requires_grad:
        raise ScheduleError(
            "loss_fn returned a loss without a gradient: it was detached, or nothing that it was made from is trained; "
            "evaluate takes such a loss"
        )
    return loss.reshape(()) if loss.dim() else loss


def _unwrapped(outputs: Any) -> Any:
    """A tuple of one tensor, which is what an empty stage passes on, as that tensor."""
    return outputs[0] if type(outputs) is tuple and len(outputs) == 1 else outputs


def leaves(tensors: Tensors) -> Tensors:
    """``tensors`` without their history, still asking for gradients where they did."""
    return tuple(t.detach().requires_grad_() if t.requires_grad else t for t in tensors)


def _gradient(leaf: Tensor) -> Tensor:
    # An input that the stage did not use has none, but the stage that made it waits for one.
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
