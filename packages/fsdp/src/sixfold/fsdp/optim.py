"""Optimizers over main parameters.

    torch.optim --> fully_shard_optimizer (this file) --> engine.py's step events
    optimizer --> materialize (this file) --> state.py's records

Only optimizer hooks and ``param_groups``: the optimizer stays the user's object, of any class.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sixfold.fsdp.buffer import ParamRecord
from sixfold.fsdp.engine import Engine
from sixfold.fsdp.errors import FsdpError


def shard_optimizer(
    optimizer: torch.optim.Optimizer, engine: Engine, records: Mapping[nn.Parameter, ParamRecord], marked: set[int]
) -> torch.optim.Optimizer:
    """Put main parameters in ``optimizer``'s groups and tell the engine of its steps; ``marked`` holds ids of such.

    Raises:
        FsdpError: the optimizer has state, or a parameter that is not of this model.
    """
    if optimizer.state:
        raise FsdpError(
            f"{type(optimizer).__name__} has state for {len(optimizer.state)} parameters; fully_shard_optimizer takes "
            "a fresh one. Load state through state_records after it"
        )
    of_main = {record.main: record for record in records.values() if record.main is not None}
    groups = []
    covered: list[nn.Parameter] = []
    given_mains = False
    for group in optimizer.param_groups:
        held = []
        for parameter in group["params"]:
            record = of_main.get(parameter) or records.get(parameter)
            if record is None:
                raise FsdpError(f"the optimizer's parameter of shape {tuple(parameter.shape)} is not of this model")
            covered.append(record.parameter)
            given_mains = given_mains or parameter is record.main
            if record.main is not None:
                held.append(record.main)
        groups.append(held)
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = held
    # Main parameters differ from rank to rank and tell nothing of the rest; what is forgotten must be the same on all.
    _discard_with_zero_grad(optimizer, engine, list(records) if given_mains else covered)
    optimizer.register_step_pre_hook(lambda *_: _unless_materializing(marked, optimizer, engine.before_step))
    optimizer.register_step_post_hook(lambda *_: _unless_materializing(marked, optimizer, engine.after_step))
    return optimizer


def _discard_with_zero_grad(
    optimizer: torch.optim.Optimizer, engine: Engine, parameters: Sequence[nn.Parameter]
) -> None:
    """``optimizer.zero_grad()`` forgets what still waits for its reduction, as plain torch forgets ``p.grad``.

    Else a step that was given up (``zero_grad()`` without ``step()``) would leak into the next one's gradients. torch
    has no hook for it, so the method is replaced on the object, as learning rate schedulers replace ``step``.
    """
    plain = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        engine.discard_local(parameters)
        plain(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def _unless_materializing(marked: set[int], optimizer: torch.optim.Optimizer, event: Any) -> None:
    if id(optimizer) not in marked:
        event()


def refuse_unsharded_steps(engine: Engine) -> Any:
    """A hook on every optimizer's step: one that holds the module's own parameters would train nothing.

    Returns the hook's handle. (Megatron-FSDP steps such an optimizer in silence.)
    """
    watched = weakref.ref(engine)

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        model = watched()
        if model is None or model.failed is not None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                record = model.records.get(parameter)
                if record is not None:
                    raise FsdpError(
                        f"{type(optimizer).__name__} holds {record.name} itself, which has no gradient; "
                        "use fully_shard_optimizer(optimizer, model) before the first step"
                    )

    return register_optimizer_step_pre_hook(check)


def materialize(
    optimizer: torch.optim.Optimizer, records: Mapping[nn.Parameter, ParamRecord], marked: set[int]
) -> None:
    """Make the state that the first step would make, without a step: tensors zero, counters 0.

    The optimizer steps once on throw-away copies, one parameter at a time, with zero gradients.

    Raises:
        FsdpError: the optimizer still holds the module's own parameters, or steps only with a closure.
    """
    own = next((p for group in optimizer.param_groups for p in group["params"] if p in records), None)
    if own is not None:
        raise FsdpError(
            f"{type(optimizer).__name__} holds {records[own].name} itself; use fully_shard_optimizer(optimizer, model) "
            "before its state is made"
        )
    groups = optimizer.param_groups
    kept = [group["params"] for group in groups]
    marked.add(id(optimizer))
    try:
        for group, parameters in zip(groups, kept, strict=True):
            for main in parameters:
                if main.requires_grad and main not in optimizer.state:
                    for other in groups:
                        other["params"] = []
                    optimizer.state[main] = _state_of_copy(optimizer, group, main)
    finally:
        marked.discard(id(optimizer))
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters


def _state_of_copy(optimizer: torch.optim.Optimizer, group: dict[str, Any], main: nn.Parameter) -> dict[str, Any]:
    copy = nn.Parameter(main.detach().clone())
    copy.grad = torch.zeros_like(copy)
    group["params"] = [copy]
    try:
        optimizer.step()
    except TypeError as error:
        raise FsdpError(
            f"{type(optimizer).__name__} needs a closure to step; its state cannot be made ahead"
        ) from error
    state: dict[str, Any] = optimizer.state.pop(copy, {})
    for name, value in state.items():
        if isinstance(value, Tensor):
            value.zero_()
        elif isinstance(value, int) and not isinstance(value, bool):
            state[name] = 0
    return state
