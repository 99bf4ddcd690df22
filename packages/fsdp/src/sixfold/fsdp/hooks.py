"""Module and autograd hooks: the only file that knows them.

    nn.Module calls, autograd --> hooks (this file) --> engine.py

Each hook turns into one event of the engine; after a fault they are inert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sixfold.fsdp.buffer import ParamRecord
from sixfold.fsdp.engine import CallContext, Engine, StageState, in_backward
from sixfold.fsdp.units import Unit


class _OutputHook:
    """On all outputs of one forward call: the first gradient of each backward opens the unit, once."""

    __slots__ = ("_context", "_engine", "_task", "_unit")

    def __init__(self, engine: Engine, unit: Unit, context: CallContext | None) -> None:
        self._engine = engine
        self._unit = unit
        self._context = context
        self._task = -1
        if context is not None:
            context.outstanding[unit.index] += 1

    def __call__(self, gradient: Tensor) -> None:
        task = in_backward()
        if task != self._task:
            self._task = task
            context, self._context = self._context, None  # a retained graph counts down once
            self._engine.before_backward(self._unit, context)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _watch_outputs(engine: Engine, unit: Unit, output: Any, context: CallContext | None) -> None:
    hook: _OutputHook | None = None
    for tensor in _tensors(output):
        if tensor.requires_grad:
            if hook is None:
                hook = _OutputHook(engine, unit, context)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def install(engine: Engine) -> list[Any]:
    """Hooks on the modules of all units but the root, and on all trainable parameters; returns their handles."""
    handles: list[Any] = []
    for unit in engine.units:
        if unit.index and unit.buffers:
            before, after = _forward_hooks(engine, unit)
            handles.append(unit.module.register_forward_pre_hook(before))
            handles.append(unit.module.register_forward_hook(after, always_call=True))
        if unit.trainable is not None:
            for record in unit.trainable.records:
                register: Any = record.parameter.register_post_accumulate_grad_hook
                handles.append(register(_grad_hook(engine, record)))
    return handles


def _forward_hooks(engine: Engine, unit: Unit) -> tuple[Callable[..., None], Callable[..., None]]:
    def before(module: nn.Module, args: Any) -> None:
        engine.before_forward(unit)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        context = engine.after_forward(unit)
        if torch.is_grad_enabled() and engine.failed is None:
            _watch_outputs(engine, unit, output, context)

    return before, after


def _grad_hook(engine: Engine, record: ParamRecord) -> Callable[[Tensor], None]:
    def delivered(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            engine.deliver(record, gradient)

    return delivered


def run_root(
    engine: Engine,
    child: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cast_to: torch.dtype | None,
    stage: StageState | None = None,
) -> Any:
    """Call ``child`` as the root: root unit gathered, floating inputs cast, step counted, outputs watched."""
    context = engine.begin_call(stage)
    try:
        if cast_to is not None:
            args, kwargs = _cast(args, cast_to), _cast(kwargs, cast_to)
        output = child(*args, **kwargs)
    finally:
        engine.end_call()
    if torch.is_grad_enabled():
        _watch_outputs(engine, engine.units[0], output, context)
    return output


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
            return value.to(dtype)
        return value

    return pytree.tree_map(one, values)
