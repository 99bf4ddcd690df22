"""Stages under torch's ``fully_shard``: shards as parameters behind a call, casts of its own for each forward.

    runner's call begins, is over --> parts that forwards left gathered are sharded (this file) --> runner
    forward under autocast --> without the casts of others (this file) --> wiring
    a batch's count of tokens --> its mean over the ranks of the shards (this file) --> token_scaling

A root of FSDP2 stays gathered behind a forward, for the backward that follows; behind an evaluation none does. Its
parameters would then be gathered copies that no optimizer knows: without gradients, and of the weights before its step.

[Note: late casts] FSDP2 reduces a part's gradients when the gradient of the part's input is there. Autograd runs nodes
that were made early late. Autocast remembers the cast of a weight that an earlier microbatch's forward made, so that
cast brings its gradient afterwards. The microbatch's part would be reduced with the next one, or never. Another object
that shards a stage (``Stage(data_parallel=)``) may count on the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage.stage import Stage

__all__ = ["check_reduced", "mean_over", "mesh_of_shards", "of_own_casts", "shard_again"]


def shard_again(stages: Iterable[Stage]) -> None:
    """Give every part of the stages that is under ``fully_shard`` its shards as parameters; nothing is sent."""
    for stage in stages:
        for part in _sharded(stage.module):
            part.reshard()


def of_own_casts(stage: Stage, call: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
    """``call``, which runs ``stage`` under autocast ([Note: late casts])."""
    if stage.data_parallel is not None or next(_sharded(stage.module), None) is not None:
        torch.clear_autocast_cache()
    return call(*inputs, **kwargs)


def mesh_of_shards(stage: Stage) -> Any:
    """The mesh over whose ranks ``stage`` is sharded by FSDP2, or None."""
    if next(_sharded(stage.module), None) is None:
        return None
    return next((p.device_mesh for p in stage.parameters() if hasattr(p, "device_mesh")), None)


def check_reduced(stage: Stage) -> None:
    """A step that is divided by tokens has its gradients in ``.grad``.

    Raises:
        ScheduleError: FSDP2 was told to keep them in a place of its own, and to reduce them in a later step.
    """
    for part in _sharded(stage.module):
        state: Any = part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        if not all(getattr(group, name, True) for group in groups for name in ("reduce_grads", "all_reduce_grads")):
            raise ScheduleError(
                f"stage {stage.index} has set_requires_gradient_sync(False), or set_requires_all_reduce(False), and "
                "scale='token' divides the gradients of each step, which FSDP2 then keeps back; set it to True: "
                "gradients of several steps add up there too"
            )


def mean_over(mesh: Any, number: float) -> float:
    """Over all ranks of ``mesh``, which call this together: the deadline is that of its groups."""
    total = torch.tensor(number, dtype=torch.float64, device=mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(dimension))
    return total.item() / int(mesh.size())


def _sharded(module: nn.Module | None) -> Iterator[Any]:
    """The parts that are under ``fully_shard`` now."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None and module is not None:  # else nobody has loaded it
        yield from (part for part in module.modules() if isinstance(part, kind))
