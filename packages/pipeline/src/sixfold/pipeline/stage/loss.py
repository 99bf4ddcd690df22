"""What the last stage does with its output: a loss, or the output itself.

output, target --> loss_fn (this file) --> losses, the root of the backward
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.stage.compute import StageRun
from sixfold.pipeline.stage.output_memory import ONE, detached_for_caller
from sixfold.pipeline.stage.side_effects import part_of

__all__ = ["LossTail"]


class LossTail:
    """The end of the last stage.

    Args:
        share: of a microbatch in the gradient: its loss is divided by this before the backward; None leaves it alone.
        tokens: ``loss_fn`` returns (sum, count).
    Attributes:
        targets: per slot; ``keep`` says whether outputs are kept beside losses.
        losses: per slot, detached.
        outputs: per slot, when they are asked for.
        counts: per slot, what the sums of ``scale="token"`` are to be divided by.
    """

    def __init__(
        self, run: StageRun, loss_fn: Callable[[Any, Any], Any] | None, *, share: int | None, tokens: bool
    ) -> None:
        self._run = run
        self._loss_fn = loss_fn
        run.effects.watch(loss_fn)
        self._share = share
        self._tokens = tokens
        self.keep = False
        self._seeds: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.clear()

    def clear(self) -> None:
        """Empty every slot."""
        self.targets: list[Any] = [None] * self._run.slots
        self.clear_results()

    def clear_results(self) -> None:
        """The caller has them."""
        slots = self._run.slots
        self.losses: list[Any] = [None] * slots
        self.outputs: list[Any] = [None] * slots
        self.counts: list[Any] = [None] * slots

    def full(self, k: int, outputs: Any) -> None:
        """Output to loss, and the backward starts at it."""
        held = getrefcount(outputs) > ONE
        value, count, made = self._loss(k, outputs, trained=True)
        self._record(k, value, count, made)
        self._root(k, value)
        if self.keep:
            self.outputs[k] = detached_for_caller(outputs, held)

    def light(self, k: int, outputs: Any) -> None:
        """Output to loss, or the output where there is no ``loss_fn``."""
        held = getrefcount(outputs) > ONE
        if self._loss_fn is not None:
            self._record(k, *self._loss(k, outputs, trained=False))
        if self.keep or self._loss_fn is None:
            self.outputs[k] = detached_for_caller(outputs, held)

    def again(self, k: int, outputs: Any) -> None:
        """The loss is known; its backward starts here."""
        value = self._loss(k, outputs, trained=True)[0]
        if self.losses[k] is not None:  # else the caller of a step before this one has it
            self._run.effects.compare("loss", part_of(self.losses[k]), part_of(value))
        self._root(k, value)

    def _loss(self, k: int, outputs: Any, *, trained: bool) -> tuple[Tensor, Any, bool]:
        """The loss, its count, and whether ``loss_fn`` keeps it: a running sum goes on behind the result's back."""
        assert self._loss_fn is not None, "the runner checks that there is a loss_fn"
        value, count = self._loss_fn(outputs, self.targets[k]), None
        kept = getrefcount(value) > ONE
        if self._tokens:
            if not (isinstance(value, tuple | list) and len(value) == 2):
                raise ScheduleError(f"with scale='token' loss_fn returns (sum, count), not a {type(value).__name__}")
            value, count = value
            kept = True
        return _one_number(value, trained), count, kept

    def _record(self, k: int, value: Tensor, count: Any, kept: bool) -> None:
        self.losses[k] = value.detach().clone() if kept else value.detach()
        self.counts[k] = count.detach().clone() if isinstance(count, Tensor) else count

    def _root(self, k: int, value: Tensor) -> None:
        key = value.dtype, value.device
        if (seed := self._seeds.get(key)) is None:
            # The gradient of loss / share, with the bits that autograd would give it.
            one = torch.ones((), dtype=value.dtype, device=value.device)
            seed = self._seeds[key] = one if self._share is None else one / self._share
        self._run.keep_root(k, value, seed.clone())  # autograd may make it the gradient of a parameter


def _one_number(loss: Any, trained: bool) -> Tensor:
    """``loss`` as a real scalar; a vector is refused, whose backward would sum it."""
    if isinstance(loss, Tensor) and loss.is_complex():
        raise ScheduleError("loss_fn returned a complex number; it returns a real one")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ScheduleError(f"loss_fn returned a {shape}; it returns one number, as a tensor")
    if trained and not loss.requires_grad:
        raise ScheduleError(
            "loss_fn returned a loss without a gradient: it was detached, or nothing that it was made from is trained; "
            "evaluate takes such a loss"
        )
    return loss.reshape(()) if loss.dim() else loss
