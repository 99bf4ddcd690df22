"""State of an optimizer before its first step.

    optimizer --> materialize (this file) --> state/records.py's records, torch_state.py

Takes no step on the user's parameters and changes none.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.optimizers.sharded_optimizer import Attached


def materialize(
    optimizer: torch.optim.Optimizer,
    records: Mapping[nn.Parameter, ParamRecord],
    attached: Attached,
) -> None:
    """Make the state that the first step would begin with, without a step.

    torch's optimizers make it by themselves (``_init_group``); another one steps once on throw-away copies, one
    parameter at a time, with zero gradients, and tensors and counters are set to 0. SGD with ``dampening`` begins with
    no buffer at all and would dampen its first gradient: load its state before stepping.

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
    attached.materializing.add(id(optimizer))
    try:
        for group, parameters in zip(groups, kept, strict=True):
            for main in parameters:
                if main.requires_grad and main not in optimizer.state:
                    for other in groups:
                        other["params"] = []
                    optimizer.state[main] = _state_of_copy(optimizer, group, main)
                    attached.made(optimizer, main)
    finally:
        attached.materializing.discard(id(optimizer))
        for group, parameters in zip(groups, kept, strict=True):
            group["params"] = parameters


def _state_of_copy(optimizer: torch.optim.Optimizer, group: dict[str, Any], main: nn.Parameter) -> dict[str, Any]:
    copy = nn.Parameter(main.detach().clone())
    copy.grad = torch.zeros_like(copy)
    group["params"] = [copy]
    initial = getattr(optimizer, "_init_group", None)
    if callable(initial):
        lists = len(inspect.signature(initial).parameters) - 1
        initial(group, *([] for _ in range(lists)))
        made: dict[str, Any] = optimizer.state.pop(copy, {})
        if made and all(value is not None for value in made.values()):
            return made
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
