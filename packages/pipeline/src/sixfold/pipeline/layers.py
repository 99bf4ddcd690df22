"""Layers that leave their weight gradient to W.

    nn.Linear, nn.Embedding of a stage --> entries (this file) --> store.py

A deferring layer is an autograd Function in place of torch's operator, with the operator's own formulas, so that bits
are autograd's; a test holds both against each other. Whatever is not plainly that case (its inputs' layout, its
tensors' classes, a transform around it) runs the module as it is, and gets its weight gradient in I.

[Note: the store holds the Parameter] ``ctx.saved_tensors`` gives a detached alias of a parameter under activation
checkpointing. What W needs to know about is therefore kept beside what is saved.

[Note: no view] Inside of both operators rows are multiplied or looked up as a matrix, and what comes back is a view of
it, which an autograd Function must not return to who changes it in place (``nn.ReLU(inplace=True)``). Nobody else has
that matrix, so ``.data`` makes its view a tensor like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from sixfold.pipeline.defer import AGAIN
from sixfold.pipeline.errors import ScheduleError

if TYPE_CHECKING:
    from sixfold.pipeline.store import GradientStore

__all__ = ["MAKES_ITS_OWN", "Cast", "Entry", "Layer", "Operator", "Slot", "deferrable"]

# How to make the gradients, of what (parameter, Cast or None each), from what was saved, and the output's gradient.
Entry = tuple[Callable[[Any, Tensor, Any], Sequence[Tensor | None]], tuple[Any, ...], Any, Tensor]

_PLAIN = (nn.Parameter, Tensor)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_compiling = torch.compiler.is_compiling
_graph_is_made = torch.is_grad_enabled
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


class Slot:
    """What I of one microbatch left.

    Attributes:
        entries: in the order of I.
        refused: what is not deferred in this microbatch: a checkpoint's second forward must decide as its first.
        watched: layers that go through their first I, with what they deferred.
        caught: ids of parameters that got a gradient by another way.
        casts: by id of autograd's node, the casts of autocast.
    """

    __slots__ = ("casts", "caught", "entries", "refused", "watched")

    def __init__(self, refused: frozenset[tuple[int, str]]) -> None:
        self.entries: list[Entry] = []
        self.refused = refused
        self.watched: list[tuple[Operator, tuple[Any, ...]]] = []
        self.caught: set[int] = set()
        self.casts: dict[int, Cast] = {}


class Cast:
    """A parameter as autocast cast it; uses that share the cast add their gradients in its type."""

    __slots__ = ("node", "parameter")

    def __init__(self, node: Any, parameter: Tensor) -> None:
        self.node, self.parameter = node, parameter


class Operator:
    """Parameters whose gradients are deferred together, or not at all.

    Attributes:
        names: of the parameters, in the order of an entry's targets.
        never: those that another module holds too, which does not defer.
        watched: it has not been through an I. [Note: one sum per microbatch]
    """

    __slots__ = ("names", "never", "watched")

    def __init__(self, names: tuple[str, ...], never: frozenset[str] = frozenset()) -> None:
        self.names = names
        self.never = never
        self.watched = True

    def waits(self, slot: Slot, wanted: tuple[Tensor | None, ...]) -> bool:
        """The gradients of ``wanted`` are deferred: all of them, or none and autograd makes them."""
        some = False
        for name, parameter in zip(self.names, wanted, strict=True):
            if parameter is None:
                continue
            if name in self.never or (slot.refused and (id(self), name) in slot.refused):
                return False
            if self.watched and parameter._backward_hooks:  # which would see twice what is caught
                return False
            some = True
        return some


class Layer(Operator):
    """One module whose weight gradient can wait."""

    __slots__ = ("_attributes", "_forward", "_kind", "known", "module")

    def __init__(self, store: GradientStore, module: nn.Module, never: frozenset[str]) -> None:
        super().__init__(("weight", "bias") if type(module) is nn.Linear else ("weight",), never)
        self.module = module
        self.known: Any = None  # its parameters, looked at in this step
        self._kind = type(module)
        self._attributes = module.__dict__
        self._forward = (_linear if self._kind is nn.Linear else _embedding)(store, self, module)

    def replacement(self) -> tuple[dict[str, Any], Callable[..., Any]] | None:
        """The module's attributes, and the forward that belongs there while the store is open.

        Not where its class is another by now (parametrizations), or an old kind of backward hook sees what the operator
        of autograd gives.
        """
        attributes = self._attributes
        if type(self.module) is self._kind and attributes.get("_is_full_backward_hook") is not False:
            return attributes, self._forward
        return None


def deferrable(module: nn.Module, store: GradientStore) -> list[Layer]:
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


def _applied(function: type[Function]) -> Callable[..., Tensor]:
    """``function.apply`` without its search for default arguments and functorch's wrappers: 6 us of 13."""
    above: Any = super(Function, function)
    return above.apply  # type: ignore[no-any-return]


# ---- nn.Linear


class _Operands:
    """Weight and bias as a Linear layer had them when they were looked at, and what of them is deferred."""

    __slots__ = ("bias", "dtype", "held", "targets", "weight")

    def __init__(self, store: GradientStore, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, self.dtype = weight, bias, weight.dtype
        self.targets: tuple[Any, ...] = (
            weight if weight.requires_grad else None,
            bias if bias is not None and bias.requires_grad else None,
        )
        self.held = (store, weight, bias, self.targets)


def _operands(store: GradientStore, weight: Any, bias: Any) -> _Operands | None:
    """None where torch's formulas for them are not those of ``_Linear``, or none wants a gradient."""
    for one, dimensions in ((weight, 2), (bias, 1)):
        if one is None:
            continue
        if type(one) not in _PLAIN or not one.is_leaf or one.layout is not torch.strided or one.dim() != dimensions:
            return None
    if weight is None or weight.dtype not in _FLOATS:
        return None
    n, k = weight.shape
    if n < 1 or k < 2 or weight.stride() != (k, 1):
        return None
    found = _Operands(store, weight, bias)
    return None if found.targets == (None, None) else found


def _open_slot(store: GradientStore, input: Any) -> Slot | None:
    """The slot that a layer defers into; None where it runs as it is."""
    if _compiling() or store.slot is None or not _graph_is_made() or _transformed() or type(input) is not Tensor:
        return None
    return store.slot


def _linear(store: GradientStore, layer: Layer, module: Any) -> Callable[[Tensor], Tensor]:
    plain = partial(nn.Linear.forward, module)
    apply = _applied(_Linear)

    def forward(input: Tensor) -> Tensor:
        slot = _open_slot(store, input)
        if slot is None:
            return plain(input)
        parameters = module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias", False)
        known: _Operands | None = layer.known
        if known is None or known.weight is not weight or known.bias is not bias:
            known = _operands(store, weight, bias)
            if known is None:
                return plain(input)
            layer.known = known if store.owns(weight) else None  # weights of another version are not kept
        held = known.held
        if layer.watched or slot.refused or layer.never:
            if not layer.waits(slot, known.targets):
                return plain(input)
            if layer.watched:
                store.watch(slot, layer, known.targets)
        if not _as_matrix(input):
            store.watch(slot, layer, known.targets)  # it is deferred in other calls
            return plain(input)
        if _any_autocast() and torch.is_autocast_enabled(input.device.type):
            if input.dtype is torch.float64 or known.dtype is torch.float64:
                return plain(input)
            input, *operands, targets = _cast(slot, input, weight, bias, known.targets)
            if layer.watched:
                store.watch(slot, layer, targets)
            held = (store, *operands, targets)
        elif input.dtype is not known.dtype:
            return plain(input)  # an error, in torch's words
        return apply(input, None if input.requires_grad else store.leaf, slot.entries, held)

    return forward


def _as_matrix(input: Tensor) -> bool:
    """Torch multiplies the rows of ``input`` as they lie.

    A column-major matrix, a vector, and an input of more dimensions that is not contiguous go through other kernels
    in forward or backward, with other bits.
    """
    if input.layout is not torch.strided:
        return False
    dimensions = input.dim()
    if dimensions == 2:
        row, column = input.stride()
        return column == 1 and row != 1
    return dimensions > 2 and input.is_contiguous()


class _Linear(Function):
    """``F.linear`` whose weight and bias gradients wait."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, leaf: Tensor | None, entries: list[Entry], held: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entries = entries
        ctx.held = held
        weight = held[1]
        marked = input.__dict__.get(AGAIN)  # a promise, and of which version of the input
        ctx.promise = promise = marked[0] if marked is not None and marked[1] == input._version else None
        kept = input if promise is None and held[3][0] is not None else None  # the weight's gradient reads it
        if leaf is None:
            ctx.save_for_backward(kept, weight)
        else:
            ctx.save_for_backward(kept)
        return F.linear(input, weight, held[2]).data  # [Note: no view]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None
        saved = ctx.saved_tensors
        store, _, _, targets = ctx.held
        if _graph_is_made():
            store.refuse_create_graph()
        input = saved[0]
        flat = gradient if gradient.dim() == 2 else gradient.reshape(-1, gradient.shape[-1])
        if targets[0] is None:
            ctx.entries.append((_bias_gradient, targets, (flat, gradient._version), gradient))
        elif input is None:
            ctx.entries.append((_linear_gradients_again, targets, (ctx.promise(), flat, gradient._version), gradient))
        else:
            version = input._version, gradient._version
            ctx.entries.append((_linear_gradients, targets, (input, flat, version), gradient))
        if len(saved) == 1:
            return None, None, None, None
        of_input = flat.mm(saved[1])
        if gradient is flat:
            return of_input, None, None, None
        if input is None:
            return of_input.view(*gradient.shape[:-1], saved[1].shape[1]), None, None, None
        return of_input.view_as(input), None, None, None  # .view(input.shape) takes 2.4 us, this 0.7


def _linear_gradients(saved: Any, gradient: Tensor, targets: Any) -> tuple[Tensor, Tensor | None]:
    input, flat, version = saved
    if version != (input._version, gradient._version):
        _changed()
    if input.dim() != 2:
        input = input.view(-1, input.shape[-1])
    return flat.t().mm(input), None if targets[1] is None else flat.sum(0)


def _linear_gradients_again(saved: Any, gradient: Tensor, targets: Any) -> tuple[Tensor, Tensor | None]:
    make, flat, version = saved
    input = make()
    return _linear_gradients((input, flat, (input._version, version)), gradient, targets)


def _bias_gradient(saved: Any, gradient: Tensor, targets: Any) -> tuple[None, Tensor]:
    flat, version = saved
    if version != gradient._version:
        _changed()
    return None, flat.sum(0)


def _changed() -> NoReturn:
    raise ScheduleError(
        "a layer's input or the gradient of its output was changed in place between I and W, which still needed it"
    )


def _cast(slot: Slot, input: Tensor, weight: Tensor, bias: Tensor | None, targets: Any) -> tuple[Any, ...]:
    """The operands as autocast casts them.

    The casts of parameters are autocast's own, which its cache shares with other uses and microbatches: an operator
    without rows is run, and its graph read.
    """
    device = input.device.type
    dtype = torch.get_autocast_dtype(device)
    if input.dtype is not dtype:
        input = input.to(dtype)
    with saved_tensors_hooks(_itself, _itself):  # a checkpoint need not know
        none = torch.empty(0, weight.shape[1], dtype=dtype, device=input.device, requires_grad=True)
        node: Any = F.linear(none, weight, bias).grad_fn
        cast_weight = node._saved_mat2.detach().t()
    feeding = [edge[0] for edge in node.next_functions]
    feeding = [
        feeding[-1].next_functions[0][0] if weight.requires_grad else None,
        feeding[0],
    ]  # weight (behind its t), bias
    found: list[Any] = []
    for target, feeds in zip(targets, feeding, strict=True):
        if target is not None and target.dtype is not dtype:
            cast = slot.casts.get(id(feeds))
            if cast is None:
                cast = slot.casts[id(feeds)] = Cast(feeds, target)
            target = cast
        found.append(target)
    cast_bias = None if bias is None else bias.detach().to(dtype)
    return input, cast_weight, cast_bias, tuple(found)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


# ---- nn.Embedding


def _embedding(store: GradientStore, layer: Layer, module: Any) -> Callable[[Tensor], Tensor]:
    plain = partial(nn.Embedding.forward, module)
    apply = _applied(_Embedding)

    def forward(input: Tensor) -> Tensor:
        slot = _open_slot(store, input)
        if slot is None:
            return plain(input)
        weight = module._parameters.get("weight")
        if type(weight) not in _PLAIN or not weight.is_leaf or not weight.requires_grad:
            return plain(input)
        if not layer.waits(slot, (weight,)):
            return plain(input)
        if weight.layout is not torch.strided or module.sparse or module.max_norm is not None:
            return plain(input)
        if layer.watched:
            store.watch(slot, layer, (weight,))
        padding = -1 if module.padding_idx is None else module.padding_idx
        return apply(input, store.leaf, (store, slot.entries, weight, padding, module.scale_grad_by_freq))

    return forward


class _Embedding(Function):
    """``F.embedding`` whose weight gradient waits."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, leaf: Tensor, held: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.held = held
        ctx.save_for_backward(indices)
        return torch.embedding(held[2], indices, held[3], held[4], False).data  # [Note: no view]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        gradient = gradients[0]
        if gradient is not None:
            store, entries, weight, padding, by_frequency = ctx.held
            if _graph_is_made():
                store.refuse_create_graph()
            indices = ctx.saved_tensors[0]
            version = indices._version, gradient._version
            saved = (indices, weight.shape[0], padding, by_frequency)
            entries.append((_embedding_gradient, (weight,), (saved, version), gradient))
        return None, None, None


def _embedding_gradient(saved: Any, gradient: Tensor, targets: Any) -> tuple[Tensor]:
    arguments, version = saved
    if version != (arguments[0]._version, gradient._version):
        _changed()
    return (torch.ops.aten.embedding_dense_backward(gradient, *arguments),)


# Tensors that nobody else has, and are no views.
MAKES_ITS_OWN = frozenset({_linear_gradients, _linear_gradients_again, _bias_gradient, _embedding_gradient})
