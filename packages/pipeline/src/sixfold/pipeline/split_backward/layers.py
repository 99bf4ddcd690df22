"""Layers that leave their weight gradient to W.

    nn.Linear, nn.Embedding of a stage --> entries (this file) --> weight_gradients.py

A deferring layer runs torch's operator on detached parameters. Or an autograd Function with the operator's own
formulas stands in its place ([Note: two forms] in ``linear.py``). So bits are autograd's; a test holds both against
each other. Whatever is not plainly that case (its inputs' layout, its tensors' classes, a transform around it) runs
the module as it is, and gets its weight gradient in I.

[Note: no view] Inside of both Functions rows are multiplied or looked up as a matrix, and what comes back is a view of
it. An autograd Function must not return a view to code that changes it in place (``nn.ReLU(inplace=True)``). Nobody
else has that matrix, so ``.data`` makes its view a tensor like any other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules import module as _of_all_modules

from sixfold.pipeline.split_backward.deferred import (
    PLAIN,
    Operator,
    applied,
    changed,
    graph_is_made,
    looked_after,
    modes_of_users,
    of_torch,
    open_slot,
)
from sixfold.pipeline.split_backward.linear import LINEAR_GRADIENTS, linear
from sixfold.pipeline.split_backward.nested_backward import joins, task

if TYPE_CHECKING:
    from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

__all__ = ["MAKES_ITS_OWN", "Layer", "deferrable"]

_STORE = "_sixfold_pipeline_store"  # in the __dict__ of a forward that stands in a layer's place: whose it is


class Layer(Operator):
    """One module whose weight gradient can wait."""

    __slots__ = ("_attributes", "_forward", "_kind", "known", "module")

    def __init__(self, store: WeightGradientStore, module: nn.Module, never: frozenset[str]) -> None:
        super().__init__(("weight", "bias") if type(module) is nn.Linear else ("weight",), never)
        self.module = module
        self.known: Any = None  # its parameters, looked at in this step
        self._kind = type(module)
        self._attributes = module.__dict__
        self._forward = (linear if self._kind is nn.Linear else _embedding)(store, self, module)
        self._forward.__dict__[_STORE] = store

    def replacement(self) -> tuple[dict[str, Any], Callable[..., Any]] | None:
        """The module's attributes, and the forward that belongs there while the store is open.

        Not where its class is another by now (parametrizations), or an old kind of backward hook sees what the operator
        of autograd gives.
        """
        attributes = self._attributes
        left = attributes.get("forward")
        if getattr(left, "__code__", None) is self._forward.__code__:  # [Note: left in place]
            left.__dict__[_STORE].close()
            attributes.pop("forward", None)
        old = attributes.get("_is_full_backward_hook") is False
        if _of_all_modules._global_backward_hooks and _of_all_modules._global_is_full_backward_hook is False:
            old = True
        return None if old or type(self.module) is not self._kind else (attributes, self._forward)


def deferrable(module: nn.Module, store: WeightGradientStore) -> list[Layer]:
    """The layers of ``module`` whose weight gradients can wait.

    Not those inside what torch.distributed or torch.compile wrapped: the one counts on gradients in I, the other
    would trace what is put in a layer's place.
    """
    holders: dict[int, list[tuple[nn.Module, bool]]] = {}
    found: dict[nn.Module, None] = {}
    inside = {part for root in _wrapped(module) for part in root.modules()}
    for part in module.modules():
        exact = part not in inside and _can_wait(part)
        if exact:
            found[part] = None
        for parameter in part._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((part, exact))
    layers = []
    for part in found:
        shared = [
            name
            for name, parameter in part._parameters.items()
            if parameter is not None and not all(exact for _, exact in holders[id(parameter)])
        ]
        layers.append(Layer(store, part, frozenset(shared)))
    return layers


def _wrapped(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        if part._compiled_call_impl is not None or any(_wraps(one) for one in type(part).__mro__):
            yield part


def _wraps(one: type) -> bool:
    if one.__name__ == "CheckpointWrapper" or one.__name__ == "ActivationWrapper":
        return False
    return one.__module__.startswith(("torch.distributed.", "torch._dynamo."))


def _can_wait(part: nn.Module) -> bool:
    if type(part) is nn.Embedding:
        return not part.sparse and part.max_norm is None
    return type(part) is nn.Linear


# ---- nn.Embedding

_FORWARD = of_torch(nn.Embedding.forward, sys.modules["torch.nn.modules.sparse"])
_FUNCTION = of_torch(F.embedding, F)
_OPERATOR = torch._C._VariableFunctions.embedding  # what torch.embedding is


def _embedding(store: WeightGradientStore, layer: Layer, module: Any) -> Callable[[Tensor], Tensor]:
    apply = applied(_Embedding)

    def plain(*given: Any, **named: Any) -> Tensor:
        made: Tensor = nn.Embedding.forward(module, *given, **named)
        return made

    def forward(input: Tensor, *more: Any, **named: Any) -> Tensor:
        slot = open_slot(store, input)
        if slot is None:
            return plain(input, *more, **named)
        weight = module._parameters.get("weight")
        if type(weight) not in PLAIN or not weight.is_leaf or not weight.requires_grad:
            return plain(input, *more, **named)
        own = nn.Embedding.forward is _FORWARD and F.embedding is _FUNCTION and torch.embedding is _OPERATOR
        if not own or modes_of_users() or more or named:  # [Note: patched layers] in ``linear.py``
            store.watch(slot, layer, (weight,))  # it is deferred in other calls
            return plain(input, *more, **named)
        if not layer.waits(slot, (weight,)):
            return plain(input)
        if weight.layout is not torch.strided or module.sparse or module.max_norm is not None:
            return plain(input)
        if layer.watched:
            store.watch(slot, layer, (weight,))
        looked_after(slot)
        padding = -1 if module.padding_idx is None else module.padding_idx
        held = (store, slot.entries, weight, weight.shape[0], padding, module.scale_grad_by_freq)
        return apply(input, store.leaf, held)

    return forward


class _Embedding(Function):
    """``F.embedding`` whose weight gradient waits."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, leaf: Tensor, held: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.held = held
        ctx.save_for_backward(indices)
        return torch.embedding(held[2], indices, held[4], held[5], False).data  # [Note: no view]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        gradient = gradients[0]
        if gradient is not None:
            store, entries, weight, rows, padding, by_frequency = ctx.held
            if graph_is_made():
                store.refuse_create_graph()
            if task() != store.task and not joins(store, entries, (weight,)):
                return None, None, None
            indices = ctx.saved_tensors[0]
            version = indices._version, gradient._version
            saved = (indices, rows, padding, by_frequency)
            entries.append((_embedding_gradient, (weight,), (saved, version), gradient))
        return None, None, None


def _embedding_gradient(saved: Any, gradient: Tensor, targets: Any) -> tuple[Tensor]:
    arguments, version = saved
    if version != (arguments[0]._version, gradient._version):
        changed()
    return (torch.ops.aten.embedding_dense_backward(gradient, *arguments),)


# Tensors that nobody else has, and are no views.
MAKES_ITS_OWN = LINEAR_GRADIENTS | {_embedding_gradient}
