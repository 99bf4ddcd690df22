"""RMSNorm over all heads of a projection, of which a tensor-parallel rank has its own.

    q or k (b, s, its heads) --> ProjectionNorm (this file) --> rotary positions

Every rank has the whole weight and uses its part, so its gradient is a part of a sum over tp, as that of other norms of
queries and keys. Over tp one number of a token travels: its sum of squares, and in backward the sum that its gradient
needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # which imports torch._dynamo when it is called, not here
from torch.autograd.function import once_differentiable

from sixfold.gpt.model.norm import RMSNorm, scaled
from sixfold.gpt.parallel.axes import Axis
from sixfold.gpt.parallel.lost_ranks import axis_collective


class ProjectionNorm(RMSNorm):
    """Normalise ``size`` elements, of which ``size / axis.size`` are here."""

    def __init__(self, size: int, eps: float, axis: Axis, device: torch.device | str | None = None) -> None:
        super().__init__(size, eps, device)
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """(b, s, size / axis.size) -> the same."""
        if self.axis.size == 1:
            return super().forward(x)
        here = self.weight.narrow(0, self.axis.rank * x.shape[-1], x.shape[-1])
        return _over_ranks_uncompiled(x, here, self) if torch.compiler.is_compiling() else _over_ranks(x, here, self)


def _over_ranks(x: Tensor, weight: Tensor, norm: ProjectionNorm) -> Tensor:
    normed: Tensor = _Normed.apply(x, weight, norm.eps, norm.axis)  # type: ignore[no-untyped-call]
    return normed


_over_ranks_uncompiled = _disable_dynamo(_over_ranks)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, axis: Axis) -> Tensor:
        ctx.axis, ctx.size = axis, x.shape[-1] * axis.size
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        with axis_collective(axis, "sum of squares of queries or keys over tp"):
            dist.all_reduce(squares, group=axis.group)
        scale = squares.div_(ctx.size).add_(eps).rsqrt_()
        unit = scaled(x, scale)
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        unit, scale, weight = ctx.saved_tensors
        (g,) = gradients
        by_weight = (g * unit).reshape(-1, unit.shape[-1])
        # As of a whole row, norm.py; the sum along the row is over all ranks.
        along = torch.mv(by_weight.float(), weight.float()).view(scale.shape)
        with axis_collective(ctx.axis, "sum for the gradient of queries or keys over tp"):
            dist.all_reduce(along, group=ctx.axis.group)
        inner = (g * weight).addcmul_(unit, along.div_(ctx.size).to(unit.dtype), value=-1)
        return scaled(inner, scale), by_weight.sum(0), None, None
