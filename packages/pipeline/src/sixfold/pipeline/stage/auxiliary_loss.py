"""Losses that a stage makes itself, such as the balance of experts: their gradients join the microbatch's.

    output, loss --> the output, whose backward starts the loss's too (this file) --> the next layer

[Note: no channel] The gradient of a loss does not depend on its value, so nothing has to travel to the last stage: the
backward that comes through the output starts the loss's own with ``weight``. Any program, I and W, and RECOMPUTE
included, runs it as any other operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError, number

__all__ = ["add_loss"]


def add_loss(output: Tensor, loss: Tensor, *, weight: float = 1.0) -> Tensor:
    """``output`` as it is; where its backward comes through, ``loss`` gets ``weight`` as its gradient.

    Call it in a stage's forward. With ``scale="mean"`` a microbatch's loss counts 1/m: give ``weight=1/m`` times yours.
    If ``loss_fn`` scales its loss by a GradScaler, give ``weight=scaler.get_scale() / m``.

    Args:
        output: that has a gradient, and goes on in the stage.
        loss: of one number.
    Raises:
        ScheduleError: they are no such tensors.
    """
    if not isinstance(output, Tensor) or not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ScheduleError(f"add_loss has a loss of shape {given}; it takes an output and a loss of one number")
    weight = number("weight", weight)
    if not torch.is_grad_enabled() or not loss.requires_grad:
        return output
    joined: Tensor = _Joined.apply(output, loss, weight)  # type: ignore[no-untyped-call]
    return joined


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.like = loss.shape, loss.dtype, loss.device
        ctx.weight = weight
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        shape, dtype, device = ctx.like
        return gradient, torch.full(shape, ctx.weight, dtype=dtype, device=device), None
