"""How a pipeline program drives the sharding of one stage.

    pipeline's runner --> StageHandle (this file) --> engine/engine.py

The runner's ``data_parallel`` object: eight methods, no import of either package by the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sixfold.fsdp.engine.engine import Engine
from sixfold.fsdp.engine.reduce import StageState


class StageHandle:
    """One stage (a child of the wrapped module) under a driven program."""

    def __init__(self, engine: Engine, stage: StageState, run: Callable[..., Any]) -> None:
        self._engine = engine
        self._stage = stage
        self._run = run

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The stage's forward, as ``entry`` runs it."""
        return self._run(args, kwargs, self._stage)

    def unshard(self) -> None:
        """Start the gathers of all units of the stage that share memory with no other.

        This is a hint. Units that share memory are gathered at their use; this does nothing for them.
        """
        self._engine.faults.check()
        self._engine.gathering.prefetch(self._stage.units)

    def reshard(self) -> None:
        """Say that the program does not need the stage for now. A unit is freed when its memory is needed."""
        self._engine.faults.check()

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that autograd did not deliver (a deferred weight gradient) to the local fp32 sum.

        Raises:
            FsdpError: the parameter is frozen or of another model. Or it was reduced already: the handle was made with
                ``fused=True``, and gradients are reduced in each micro-batch.
        """
        self._engine.deliver_deferred(parameter, gradient)

    def before_backward(self, microbatch: int) -> None:
        """A backward (B or I) of ``microbatch`` runs next."""
        self._stage.microbatch, self._stage.told = microbatch, True

    def after_backward(self, microbatch: int) -> None:
        """The last action (B or W) of ``microbatch`` on this stage ran. A fused backward was reduced as it ended."""
        self._engine.end_microbatch(self._stage, microbatch)

    def before_last_backward(self) -> None:
        """The next B or W is the stage's last in this step: reductions overlap with a fused one."""
        self._stage.last = True

    def reduce_grad(self) -> None:
        """Start what is left of the stage's reductions; ``model.finish_grad_sync()`` waits."""
        self._engine.reduce_stage(self._stage)
