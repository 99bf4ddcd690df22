"""A stage: a piece of the model with its place in the pipeline.

nn.Module, index --> Stage (this file) --> PipelineRunner
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sixfold.pipeline.errors import ScheduleError, whole

__all__ = ["DataParallel", "Stage"]


class DataParallel(Protocol):
    """What shards or replicates a stage; the program drives it.

    Optional besides: ``call(*args, **kwargs)``, used in F instead of the module, and
    ``after_backward(microbatch)``, called when a microbatch is done on the stage.
    """

    def unshard(self) -> object:
        """Gather the stage's parameters; called at UNSHARD."""

    def reshard(self) -> object:
        """Free them again; called at RESHARD."""

    def before_last_backward(self) -> object:
        """Called once per step, before the stage's last B or W."""

    def reduce_grad(self) -> object:
        """Start the reduction of the stage's gradients; called once, at REDUCE_GRAD."""


class Stage:
    """One stage of the model.

    Args:
        module: takes and returns a tensor or a tuple of tensors; None passes its input on.
        index: its place, 0 first.
        data_parallel: see ``DataParallel``.
        optimizer, tied, checkpoint: not supported, and refused when given: step the optimizer behind the runner's
            step, sum the gradients of tied weights yourself, and checkpoint inside the module
            (torch.utils.checkpoint).
    Raises:
        ScheduleError: the module is none or holds a DistributedDataParallel, ``index`` is no place, or an argument that
            is not supported was given.
    """

    def __init__(
        self,
        module: nn.Module | None,
        index: int,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        tied: Mapping[str, Tensor] | None = None,
        checkpoint: bool = False,
        data_parallel: DataParallel | None = None,
    ) -> None:
        index = whole("index", index, least=0)
        for name, given in (("optimizer", optimizer), ("tied", tied), ("checkpoint", checkpoint)):
            if given is not None and given is not False:
                raise ScheduleError(f"stage {index}: {name} is not supported; {_INSTEAD[name]}")
        if module is not None and not isinstance(module, nn.Module):
            raise ScheduleError(f"stage {index} is a {type(module).__name__}; it is an nn.Module, or None to pass on")
        for part in module.modules() if module is not None else ():
            if isinstance(part, DistributedDataParallel):
                raise ScheduleError(
                    f"stage {index} holds a {type(part).__name__}, which reduces in every backward or not at all; "
                    "give the module itself and what reduces its gradients as data_parallel"
                )
        self.module = module
        self.index = index
        self.data_parallel = data_parallel

    @property
    def call(self) -> Callable[..., Any]:
        """What F runs: ``data_parallel.call``, else the module, else the identity."""
        if (call := getattr(self.data_parallel, "call", None)) is not None:
            return call  # type: ignore[no-any-return]
        return self.module if self.module is not None else _pass_on

    @property
    def device(self) -> torch.device | None:
        """Device of the stage's first parameter or buffer, None if it has none."""
        if self.module is None:
            return None
        first = next(chain(self.module.parameters(), self.module.buffers()), None)
        return None if first is None else first.device


_INSTEAD = {
    "optimizer": "call the optimizer behind the runner's step",
    "tied": "sum the gradients of tied weights behind the runner's step",
    "checkpoint": "use torch.utils.checkpoint inside the module",
}


def _pass_on(*arguments: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """The empty stage."""
    return arguments
