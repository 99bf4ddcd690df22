"""``nn.Linear`` as a layer that leaves its weight gradient to W.

    input --> linear (this file) --> output; in I an entry for weight_gradients.py

[Note: two forms] Torch's own operator runs on detached parameters, and a hook of its node takes the output's gradient.
That takes 4 us more than the operator, and its formulas are autograd's. Where somebody looks after saved tensors (a
checkpoint, an offload) the input must be among them. Where neither input nor bias wants a gradient there is no node.
In both cases an autograd Function with the operator's formulas stands in its place. It takes 6 us more in F and 4 in
I.

[Note: the store holds the Parameter] ``ctx.saved_tensors`` gives a detached alias of a parameter under activation
checkpointing. What W needs to know about is therefore kept beside what is saved.

[Note: patched layers] Quantizers, fp8 emulation and weight noise put their own function in the place of
``nn.Linear.forward`` or ``F.linear``, or switch on a TorchFunctionMode. What they make of the weight has a gradient
that only autograd knows. Each call looks whether torch's own functions are in place: four identities, 0.1 us.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from sixfold.pipeline.split_backward.deferred import (
    PLAIN,
    Cast,
    Entry,
    MicrobatchEntries,
    applied,
    changed,
    graph_is_made,
    looked_after,
    modes_of_users,
    of_torch,
    open_slot,
)
from sixfold.pipeline.split_backward.nested_backward import ends_here, joins, task
from sixfold.pipeline.split_backward.user_operators import AGAIN

if TYPE_CHECKING:
    from sixfold.pipeline.split_backward.layers import Layer
    from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore

__all__ = ["LINEAR_GRADIENTS", "linear"]

_TWICE = "_sixfold_pipeline_twice"  # in the __dict__ of a bias' leaf that holds the gradients of several passes
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_saved_by: Callable[[bool], object] = torch._C._autograd._top_saved_tensors_default_hooks
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_any_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
_compiling = torch.compiler.is_compiling
_FORWARD = of_torch(nn.Linear.forward, sys.modules["torch.nn.modules.linear"])
_OPERATOR = torch._C._nn.linear  # what F.linear is
_current_node: Callable[[], object] = torch._C._current_autograd_node
_LEAF = type(get_gradient_edge(torch.empty(0, requires_grad=True)).node)


class _Operands:
    """Weight and bias as a Linear layer had them when they were looked at, and what of them is deferred."""

    __slots__ = (
        "_at",
        "_bias_at",
        "_bias_size",
        "_size",
        "_stride",
        "_wants",
        "alias",
        "bias",
        "both",
        "dtype",
        "held",
        "targets",
        "weight",
    )

    def __init__(self, store: WeightGradientStore, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, self.dtype = weight, bias, weight.dtype
        self.targets: tuple[Any, ...] = (
            weight if weight.requires_grad else None,
            bias if bias is not None and bias.requires_grad else None,
        )
        self.both = None not in self.targets
        self._wants = weight.requires_grad, bias is not None and bias.requires_grad
        self.held = (store, weight, bias, self.targets)
        self._at, self._size, self._stride = weight.data_ptr(), weight.numel(), weight.stride()
        self._bias_at, self._bias_size = (0, 0) if bias is None else (bias.data_ptr(), bias.numel())
        # The same memory without a gradient; a sharded stage's is given back, and is another in each microbatch.
        self.alias = detached_of(weight, bias) if store.alone else None

    def is_of(self, parameters: dict[str, Any]) -> bool:
        """These are a module's parameters, lie where and as they did, and are frozen or not as they were."""
        weight, bias = self.weight, self.bias
        wants, bias_wants = self._wants
        return (
            parameters.get("weight") is weight
            and parameters.get("bias", False) is bias
            and weight.data_ptr() == self._at
            and weight.requires_grad is wants
            and weight.numel() == self._size
            and weight.stride() == self._stride  # with numel the shape of a matrix whose rows lie one after another
            and (
                bias is None
                or (
                    bias.data_ptr() == self._bias_at
                    and bias.requires_grad is bias_wants
                    and bias.numel() == self._bias_size
                )
            )
        )


def detached_of(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Without gradients."""
    return weight.detach(), None if bias is None else bias.detach()


def _operands(store: WeightGradientStore, weight: Any, bias: Any) -> _Operands | None:
    """None where torch's formulas for them are not those of ``_Linear``, or none wants a gradient."""
    for one, dimensions in ((weight, 2), (bias, 1)):
        if one is None:
            continue
        if type(one) not in PLAIN or not one.is_leaf or one.layout is not torch.strided or one.dim() != dimensions:
            return None
    if weight is None or weight.dtype not in _FLOATS:
        return None
    n, k = weight.shape
    if n < 1 or k < 2 or weight.stride() != (k, 1):
        return None
    found = _Operands(store, weight, bias)
    return None if found.targets == (None, None) else found


def linear(store: WeightGradientStore, layer: Layer, module: Any) -> Callable[[Tensor], Tensor]:
    apply = applied(_Linear)

    def forward(input: Tensor, *more: Any, **named: Any) -> Tensor:
        slot = store.slot
        known: _Operands | None = layer.known
        if (  # what nearly every call is, in one look: ``carefully`` would do the same
            slot is not None
            and known is not None
            and known.alias is not None
            and type(input) is Tensor
            and (input.requires_grad or known.both)
            and input.dtype is known.dtype
            and (1 == (strides := input.stride())[1] != strides[0] if input.dim() == 2 else _as_matrix(input))
            and _saved_by(False) is None
            and graph_is_made()
            and not (layer.watched or slot.refused or layer.never or _any_autocast() or _transformed() or _compiling())
            and known.is_of(module._parameters)
            and AGAIN not in input.__dict__
            and F.linear is _OPERATOR
            and nn.Linear.forward is _FORWARD
            and not (more or named or (_any_mode() and modes_of_users()))
        ):
            return _natively(input, known.alias, slot.entries, known.held)
        return carefully(input, *more, **named)

    def plain(*given: Any, **named: Any) -> Tensor:
        made: Tensor = nn.Linear.forward(module, *given, **named)
        return made

    def carefully(input: Tensor, *more: Any, **named: Any) -> Tensor:
        slot = open_slot(store, input)
        if slot is None:
            return plain(input, *more, **named)
        parameters = module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias", False)
        known: _Operands | None = layer.known
        if known is None or not known.is_of(parameters):
            if known is not None:
                store.moved(known.weight, known.bias)
                layer.known = None
            known = _operands(store, weight, bias)
            if known is None:
                return plain(input, *more, **named)
            layer.known = known if store.owns(weight) else None  # weights of another version are not kept
        held, detached = known.held, known.alias
        patched = nn.Linear.forward is not _FORWARD or F.linear is not _OPERATOR or modes_of_users()
        if patched or more or named:  # [Note: patched layers]
            store.watch(slot, layer, known.targets)  # it is deferred in other calls
            return plain(input, *more, **named)
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
            if input.is_leaf and input.requires_grad:  # autocast's uses of it share one cast
                *_, targets = _cast(slot, input.detach()[:0], weight, bias, known.targets)
                store.watch(slot, layer, targets)  # it is deferred in other calls
                return plain(input)
            input, *operands, targets = _cast(slot, input, weight, bias, known.targets)
            if layer.watched:
                store.watch(slot, layer, targets)
            held = (store, *operands, targets)
            detached = tuple(operands)
        elif input.dtype is not known.dtype:
            return plain(input)  # an error, in torch's words
        if looked_after(slot) or AGAIN in input.__dict__ or not (input.requires_grad or known.both):
            return apply(input, None if input.requires_grad else store.leaf, slot.entries, held)
        return _natively(input, detached or detached_of(weight, bias), slot.entries, held)

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


class _Last(dict[int | None, Callable[..., Any]]):
    """Hooks of an output, in the order in which autograd calls them: ours, under None, stays the last."""

    def __setitem__(self, key: int | None, hook: Callable[..., Any]) -> None:
        ours = self.pop(None)
        super().__setitem__(key, hook)
        super().__setitem__(None, ours)


def _natively(input: Tensor, operands: Any, entries: list[Entry], held: Any) -> Tensor:
    """Torch's operator on detached parameters, and a hook for the gradient of its output. [Note: two forms]

    The hook is the output's, behind every other one of it, and stays with the operator's node where the output is
    changed in place. ``register_hook`` would make a handle besides, 2 us of a call.
    Where the input wants no gradient there is a node if the bias is a leaf; the bias' gradient is then made in I.
    """
    dimensions = input.dim()
    rows = input if dimensions == 2 else input.view(-1, input.shape[-1])
    leaf = None
    if not input.requires_grad:
        weight, bias = operands
        leaf = bias.detach().requires_grad_()
        operands = weight, leaf
    output = F.linear(rows, *operands)
    kept = None if held[3][0] is None else rows  # the weight's gradient reads it
    output._backward_hooks = _Last({None: partial(_arrived, entries, held, kept, rows._version, leaf)})  # type: ignore[assignment]
    output.grad_fn._register_hook_dict(output)  # type: ignore[union-attr]
    return output if dimensions == 2 else output.view(*input.shape[:-1], output.shape[1])


def _arrived(
    entries: list[Entry],
    held: Any,
    rows: Tensor | None,
    version: int,
    leaf: Tensor | None,
    gradient: Tensor | None,
) -> None:
    if gradient is None or type(_current_node()) is _LEAF:  # of an output that was detached in place
        return
    store, _, _, targets = held
    if graph_is_made():
        if ends_here():
            return
        store.refuse_create_graph()
    if task() != store.task and not joins(store, entries, targets):
        return
    if leaf is not None:
        if leaf.grad is not None:
            leaf.__dict__[_TWICE] = True
        entries.append((_leaf_gradients, targets, (rows, gradient, (version, gradient._version), leaf), gradient))
    elif rows is None:
        entries.append((_bias_gradient, targets, (gradient, gradient._version), gradient))
    else:
        entries.append((_linear_gradients, targets, (rows, gradient, (version, gradient._version)), gradient))


class _Linear(Function):
    """``F.linear`` whose weight and bias gradients wait."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, leaf: Tensor | None, entries: list[Entry], held: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entries = entries
        ctx.held = held
        weight = held[1].detach()  # a parameter that is given other data would be read as it then is
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
        if graph_is_made():
            store.refuse_create_graph()
        input = saved[0]
        wanted = task() == store.task or joins(store, ctx.entries, targets)
        flat = gradient if gradient.dim() == 2 else gradient.reshape(-1, gradient.shape[-1])
        if not wanted:
            pass
        elif targets[0] is None:
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
        changed()
    if input.dim() != 2:
        input = input.view(-1, input.shape[-1])
    return flat.t().mm(input), None if targets[1] is None else flat.sum(0)


def _leaf_gradients(saved: Any, gradient: Tensor, targets: Any) -> tuple[Tensor, Tensor | None]:
    rows, flat, version, leaf = saved
    if version != (rows._version, gradient._version):
        changed()
    if _TWICE in leaf.__dict__:
        return flat.t().mm(rows), flat.sum(0)
    of_bias, leaf.grad = leaf.grad, None  # which a graph that is kept may add to
    return flat.t().mm(rows), of_bias


def _linear_gradients_again(saved: Any, gradient: Tensor, targets: Any) -> tuple[Tensor, Tensor | None]:
    make, flat, version = saved
    input = make()
    return _linear_gradients((input, flat, (input._version, version)), gradient, targets)


def _bias_gradient(saved: Any, gradient: Tensor, targets: Any) -> tuple[None, Tensor]:
    flat, version = saved
    if version != gradient._version:
        changed()
    return None, flat.sum(0)


def _cast(slot: MicrobatchEntries, input: Tensor, weight: Tensor, bias: Tensor | None, targets: Any) -> tuple[Any, ...]:
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
            if slot.casts is None:
                slot.casts = {}
            cast = slot.casts.get(id(feeds))
            if cast is None:
                cast = slot.casts[id(feeds)] = Cast(feeds, target)
            target = cast
        found.append(target)
    cast_bias = None if bias is None else bias.detach().to(dtype)
    return input, cast_weight, cast_bias, tuple(found)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


# Tensors that nobody else has, and are no views.
LINEAR_GRADIENTS = frozenset({_linear_gradients, _leaf_gradients, _linear_gradients_again, _bias_gradient})
