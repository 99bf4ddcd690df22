"""Optimizers over main parameters.

    torch.optim --> fully_shard_optimizer (this file) --> engine.py's step events
    optimizer --> materialize (this file) --> state.py's records

Only optimizer hooks and ``param_groups``: the optimizer stays the user's object, of any class.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
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
    mains = {record.main for record in records.values() if record.main is not None}
    groups = []
    for group in optimizer.param_groups:
        held = []
        for parameter in group["params"]:
            if parameter in mains:
                held.append(parameter)
                continue
            record = records.get(parameter)
            if record is None:
                raise FsdpError(f"the optimizer's parameter of shape {tuple(parameter.shape)} is not of this model")
            if record.main is not None:
                held.append(record.main)
        groups.append(held)
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = held
    optimizer.register_step_pre_hook(lambda *_: _unless_materializing(marked, optimizer, engine.before_step))
    optimizer.register_step_post_hook(lambda *_: _unless_materializing(marked, optimizer, engine.after_step))
    return optimizer


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


def materialize(optimizer: torch.optim.Optimizer, marked: set[int]) -> None:
    """Make the state that the first step would make, without a step: tensors zero, counters 0.

    The optimizer steps once on throw-away copies, one parameter at a time, with zero gradients.
    """
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
