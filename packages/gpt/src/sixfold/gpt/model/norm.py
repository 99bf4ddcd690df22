"""RMSNorm as Llama computes it: mean square and rsqrt in float32, cast, then times weight.

    hidden --> RMSNorm (this file) --> attention, ffn, head

torch's own rms_norm is a chain of separate operators on a CPU: 1.6 times the time of the two functions below.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sixfold.gpt.config.train_config import GPTConfig


class RMSNorm(nn.Module):
    """Normalise the last axis, of ``size`` elements; one weight per element, initially 1."""

    def __init__(self, size: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class ZeroCenteredNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, initially 0, in float32: a small weight would be lost beside the 1."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _ZeroCentered.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


def norm_of(config: GPTConfig, size: int) -> RMSNorm:
    """A norm over ``size`` elements as ``config`` has them; without values."""
    kind = ZeroCenteredNorm if config.zero_centered_norm else RMSNorm
    return kind(size, config.norm_eps, device="meta")


class _ZeroCentered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        unit = x.float() * scale
        ctx.save_for_backward(unit.to(x.dtype), scale, weight)
        out: Tensor = (unit * (1 + weight.float())).to(x.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        size, g, by = unit.shape[-1], gradients[0].float(), 1 + weight.float()
        by_weight = (g * unit).reshape(-1, size)
        along = torch.mv(by_weight, by).div_(size).view(scale.shape)
        inner = (g * by).addcmul_(unit.float(), along, value=-1)
        return inner.mul_(scale).to(unit.dtype), by_weight.sum(0).to(weight.dtype), None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_().div_(x.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        unit = scaled(x, scale)
        ctx.save_for_backward(unit, scale, weight)
        out: Tensor = unit * weight
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        size = unit.shape[-1]
        (g,) = gradients
        by_weight = (g * unit).reshape(-1, size)
        # d unit -> d x removes the part along unit: (g w - unit <g w, unit> / size) * scale.
        along = torch.mv(by_weight, weight).div_(size).view(scale.shape)
        inner = (g * weight).addcmul_(unit, along, value=-1)
        return scaled(inner, scale), by_weight.sum(0), None


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """``x * scale`` in float32, as ``x``'s dtype. Two operators of one dtype each cost a third of a mixed one."""
    return x * scale if x.dtype == torch.float32 else x.float().mul_(scale).to(x.dtype)
