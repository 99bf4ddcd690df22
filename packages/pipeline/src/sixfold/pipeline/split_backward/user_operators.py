"""Operators of users that leave their weight gradient to W.

    defer_weight_grad --> entries (this file) --> weight_gradients.py
    made_again --> an input that layers need not hold (this file) --> layers.py

[Note: torch's thread locals] ``defer_weight_grad`` finds the open store where torch keeps what belongs to a thread.
That goes along into the threads of torch's engine, where a checkpoint runs a forward again on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.split_backward.nested_backward import joins, task
from sixfold.pipeline.torch_private import shown

if TYPE_CHECKING:
    from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

__all__ = ["AGAIN", "defer_weight_grad", "made_again"]

AGAIN = "_sixfold_pipeline_again"  # in the __dict__ of a tensor that is made again: the promise, and of which version
_graph_is_made = torch.is_grad_enabled


def defer_weight_grad(
    params: Tensor | Sequence[Tensor], weight_grad: Callable[[Tensor], Tensor | Sequence[Tensor]], output: Tensor
) -> Tensor:
    """Give the gradients of ``params`` by a function of ``output``'s gradient, when the program wants them.

    For an operator that makes ``output`` from detached parameters, or in an autograd Function of its own that gives
    its input's gradient alone. Outside of a pipeline, and where a backward is one piece (B), ``weight_grad`` runs in
    the backward of ``output``; where it is split, in W.

    Args:
        params: those that ``weight_grad`` makes the gradients of; one that needs none is left out of the sum.
        weight_grad: ``weight_grad(g)`` -> a tensor per parameter, of its shape (None where there is none). It holds
            what it needs until then; with activation checkpointing that is not given back.
        output: of the operator.
    Returns:
        ``output``, unchanged.
    Raises:
        ScheduleError: at once, an argument is of another type; in the backward, ``weight_grad`` returned another number
            of gradients or other shapes.
    """
    params = (params,) if isinstance(params, Tensor) else tuple(params)
    for parameter in params:
        if not isinstance(parameter, Tensor):
            raise ScheduleError(f"defer_weight_grad: a {type(parameter).__name__} is among params; they are tensors")
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ScheduleError("defer_weight_grad: output is no floating-point tensor")
    if not callable(weight_grad):
        raise ScheduleError(f"defer_weight_grad: weight_grad is {weight_grad!r}; it is called with output's gradient")
    store: WeightGradientStore | None = shown()
    if store is not None and store.slot is not None:
        store.slot.again = True  # it may run once more in I, and finds the store as it is found here
    if not _graph_is_made() or not any(parameter.requires_grad for parameter in params):
        return output
    make = partial(_checked, weight_grad, params)
    targets = tuple(parameter if parameter.requires_grad else None for parameter in params)
    if store is None or store.slot is None or not store.takes(targets):
        return _Now.apply(output, make, *params)  # type: ignore[no-any-return, no-untyped-call]
    leaf = None if output.requires_grad else store.leaf
    return _Later.apply(output, leaf, (store, store.slot.entries, targets, make))  # type: ignore[no-any-return, no-untyped-call]


def made_again(input: Tensor, promise: Callable[[], Callable[[], Tensor]]) -> Tensor:
    """Let W make ``input`` once more, where layers whose weight gradients wait would hold it between I and W.

    For what is larger than what it is made of: the gathered whole of a part.

    Args:
        input: ``nn.Linear`` layers are called with this very tensor. Changed in place before that, it is held.
        promise: ``promise()``, in I, once for each of those layers, gives ``make``; ``make()``, in W, gives the values
            of ``input`` in its shape. Neither is called where a backward is one piece (B) or the weight is frozen.
    Returns:
        ``input``, unchanged.
    Raises:
        ScheduleError: an argument is of another type.
    """
    if not isinstance(input, Tensor) or not callable(promise):
        raise ScheduleError("made_again takes a tensor and a function that, called in I, gives one that W calls")
    if not input.is_inference():  # which has no version, and no layer holds
        input.__dict__[AGAIN] = promise, input._version
    return input


def _checked(weight_grad: Callable[[Tensor], Any], params: tuple[Tensor, ...], gradient: Tensor) -> tuple[Any, ...]:
    made = weight_grad(gradient)
    made = (made,) if isinstance(made, Tensor) else tuple(made)
    if len(made) != len(params):
        raise ScheduleError(f"weight_grad returned {len(made)} gradients for {len(params)} parameters")
    for one, parameter in zip(made, params, strict=True):
        if one is not None and one.shape != parameter.shape:
            shapes = f"{tuple(one.shape)} for a parameter of shape {tuple(parameter.shape)}"
            raise ScheduleError(f"weight_grad returned a gradient of shape {shapes}")
    return made


class _Now(Function):
    """The gradients of parameters are made in the backward of ``output``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, make: Any, *params: Tensor) -> Tensor:
        ctx.make = make
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        made = ctx.make(gradients[0])
        wanted = ctx.needs_input_grad[2:]
        return gradients[0], None, *(one if want else None for one, want in zip(made, wanted, strict=True))


class _Later(Function):
    """The gradients of parameters wait."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, leaf: Tensor | None, held: Any) -> Tensor:
        ctx.held = held
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        store, entries, targets, make = ctx.held
        if _graph_is_made():
            store.refuse_create_graph()
        if task() == store.task or joins(store, entries, targets):
            entries.append((_users_gradients, targets, make, gradients[0]))
        return gradients[0], None, None


def _users_gradients(make: Any, gradient: Tensor, targets: Any) -> Any:
    return make(gradient)
