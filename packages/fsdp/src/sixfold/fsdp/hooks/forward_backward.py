"""Forward and autograd hooks: the only file that knows them. ``module(x)`` does what ``model(x)`` does.

    nn.Module calls, autograd --> hooks (this file) --> engine/engine.py

Each hook turns into one event of the engine; after a fault they are inert.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.engine.backward import CallContext
from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.engine.reduce import StageState
from sixfold.fsdp.engine.transforms import below_vmap
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.parameter_access.guard import MARK, GuardedParameter
from sixfold.fsdp.parameter_access.saved_weights import own_outputs, tensors_in
from sixfold.fsdp.torch_private import in_backward

COPY = (
    "a wrapped module is not copied or pickled: it holds groups and this rank's shards. Save full_state_dict() and "
    "load it into a new module before wrapping; average weights (EMA) over main_parameters(), element by element"
)


class Hook:
    """What a module calls for an engine; neither copied nor pickled."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FsdpError(COPY)


class _OutputHook:
    """On all outputs of one forward call: the first gradient of each backward opens the unit, once."""

    __slots__ = ("_context", "_engine", "_task", "_unit", "_weights")

    def __init__(self, engine: Engine, unit: Unit, context: CallContext | None) -> None:
        self._engine = engine
        self._unit = unit
        self._context = context
        self._task = -1
        self._weights = engine.weights
        if context is not None:
            engine.count_call(unit, context)

    def __call__(self, gradient: Tensor) -> None:
        task = in_backward()
        if task != self._task:
            self._task = task
            if self._engine.before_backward(self._unit, self._context, self._weights):
                self._context = None  # a retained graph counts down once


def watch_outputs(engine: Engine, unit: Unit, output: Any, context: CallContext | None) -> None:
    """The first gradient of ``output`` opens ``unit`` for its backward.

    Leaves are left out: one of the caller's, or a parameter of the root unit, would keep the hook for later steps.
    """
    hook: _OutputHook | None = None
    for tensor in (output,) if type(output) is Tensor else tensors_in(output):
        tensor = below_vmap(tensor)
        if tensor.requires_grad and not tensor.is_leaf:
            if hook is None:
                hook = _OutputHook(engine, unit, context)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def install(engine: Engine, root: nn.Module, cast_to: torch.dtype | None) -> list[Any]:
    """Hooks on the root, on the modules of all units, and on all trainable parameters; returns their handles."""
    whole = RootCall(engine, cast_to)
    handles: list[Any] = [
        root.register_forward_pre_hook(whole.before, with_kwargs=True, prepend=True),
        root.register_forward_hook(whole.after, with_kwargs=True, always_call=True),
    ]
    for unit in engine.units:
        if unit.index and unit.flat_buffers:
            call = _UnitCall(engine, unit)
            # Before the module's own hooks: those of weight_norm, spectral_norm and prune read its weights.
            for module in unit.modules:
                handles.append(module.register_forward_pre_hook(call.before, prepend=True))
                handles.append(module.register_forward_hook(call.after, always_call=True))
    for number, record in enumerate(engine.numbered):
        if record.flat_buffer.trainable:
            register: Any = record.parameter.register_post_accumulate_grad_hook
            handles.append(register(_grad_hook(engine, number)))
    return handles


class _UnitCall(Hook):
    """A forward call of a unit's module."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        super().__init__(engine)
        self._unit = unit

    def before(self, module: nn.Module, args: Any) -> None:
        """Its weights are gathered."""
        self.engine.before_forward(self._unit)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Its outputs are watched for their backward; what shows its memory is copied."""
        try:  # None: also of a forward that raised
            own = None if output is None else own_outputs(self._unit, output)
        finally:
            context = self.engine.after_forward(self._unit)
        if output is not None:
            self.engine.guards[self._unit.index].refuse_written()
        if torch.is_grad_enabled() and self.engine.faults.failed is None:
            watch_outputs(self.engine, self._unit, own, context)
        return None if own is output else own


class RootCall(Hook):
    """``module(x)`` does what ``model(x)`` does."""

    def __init__(self, engine: Engine, cast_to: torch.dtype | None) -> None:
        super().__init__(engine)
        self._cast_to = cast_to
        self._contexts: list[CallContext | None] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A root call, unless one runs already."""
        self._contexts.append(None)  # taken back by ``after``, which comes also when begin_call raises
        if self.engine.in_call or self.engine.faults.failed is not None:
            self.engine.faults.check()
            return None
        self._contexts[:] = [self.engine.begin_call(None, by_hook=True)]  # interrupted calls took nothing back
        if self._cast_to is None:
            return None
        return cast_floating(args, self._cast_to), cast_floating(kwargs, self._cast_to)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The call ended, also by an exception."""
        context = self._contexts.pop()
        if context is None:
            return None
        try:
            own = None if output is None else own_parameters(self.engine, output)
        finally:
            self.engine.end_call()
        if own is not None:
            self.engine.guards[0].refuse_written()
        if torch.is_grad_enabled():
            watch_outputs(self.engine, self.engine.units[0], own, context)
        return None if own is output else own


def _grad_hook(engine: Engine, number: int) -> Callable[[Tensor], None]:
    # Weakly: autograd keeps the hook where the garbage collector does not look, and a model must go with its module.
    watched = weakref.ref(engine)

    def delivered(parameter: Tensor) -> None:
        gradient = _take_gradient(parameter)
        alive = watched()
        if gradient is not None and alive is not None:
            alive.deliver(alive.numbered[number], gradient)

    return delivered


def _take_gradient(parameter: Any) -> Tensor | None:
    """``parameter.grad``, which is None afterwards; without asking its guard."""
    shown = parameter.__class__
    parameter.__class__ = nn.Parameter if shown is GuardedParameter else parameter.__dict__[MARK].own_class
    try:
        gradient: Tensor | None = parameter.grad
        parameter.grad = None
    finally:
        parameter.__class__ = shown
    return gradient


def run_root(
    engine: Engine,
    child: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cast_to: torch.dtype | None,
    stage: StageState | None = None,
) -> Any:
    """Call ``child`` as the root: root unit gathered, floating inputs cast, step counted, outputs watched."""
    context = engine.begin_call(stage)
    try:
        if cast_to is not None:
            args, kwargs = cast_floating(args, cast_to), cast_floating(kwargs, cast_to)
        output = own_parameters(engine, child(*args, **kwargs))
    finally:
        engine.end_call()
    engine.guards[0].refuse_written()
    if torch.is_grad_enabled():
        watch_outputs(engine, engine.units[0], output, context)
    return output


def own_parameters(engine: Engine, output: Any) -> Any:
    """``output`` with copies of parameters: outside the call theirs are not read. The same object where it has none."""
    if type(output) is Tensor or not any(isinstance(one, nn.Parameter) for one in tensors_in(output)):
        return output

    def copied(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, nn.Parameter) and leaf in engine.records else leaf

    return pytree.tree_map(copied, output)


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in ``values`` as ``dtype``."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        return value

    return pytree.tree_map(one, values)
