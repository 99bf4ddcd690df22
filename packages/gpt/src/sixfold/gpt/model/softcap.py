"""Soft caps: values that a tanh keeps below a bound, cap * tanh(x / cap), as Gemma 2 has them.

head's logits --> softcapped (this file) --> losses.    Scores of attention have the same in their back ends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def softcapped(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)``; backward needs the result alone, which the loss keeps anyway."""
    capped: Tensor = _Softcapped.apply(x, cap)  # type: ignore[no-untyped-call]
    return capped


class _Softcapped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        out = x.div(cap).tanh_().mul_(cap)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        slope = out.div(ctx.cap).square_().neg_().add_(1)
        return slope.mul_(gradients[0]), None
