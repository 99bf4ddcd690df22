"""The feed-forward parts of several experts, on rows that lie expert by expert.

    expert_dispatch.py: rows, where each expert's end --> feed_forward (this file) --> rows --> expert_dispatch.py

torch's grouped product takes bfloat16 on CUDA, one launch for all experts and no number read by the host; elsewhere the
experts are multiplied one after another.

[Note: made once] In backward the gradient of the hidden layer is needed twice: for the rows, and for the weights, whose
gradients ``defer_weight_grad`` asks for just before (B) or much later (I, then W). Who asks first makes it, the other
takes it. What it is made of is saved as autograd saves things and not held by a closure, so that activation
checkpointing gives it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sixfold.pipeline import defer_weight_grad

_ALIGNED = 8  # bfloat16 values in the 16 bytes to which the grouped product wants every row


@dataclass(frozen=True, slots=True)
class Segments:
    """Expert e has the rows ``ends[e - 1]`` to ``ends[e]``.

    Attributes:
        ends: int32, on the rows' device.
        known: the same where the host knows them already.
    """

    ends: Tensor
    known: tuple[int, ...] | None = None

    def bounds(self) -> Iterator[tuple[int, int]]:
        """(first row, row behind the last) of each expert; on CUDA a host read where they are not known."""
        ends = self.ends.tolist() if self.known is None else self.known
        return zip((0, *ends[:-1]), ends, strict=True)

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """(n, in) by (experts, out, in) -> (n, out), each row with the weight of its expert."""
        if grouped(rows, weight):
            return F.grouped_mm(rows, weight.transpose(1, 2), offs=self.ends)
        out = rows.new_empty(len(rows), weight.shape[1])
        for expert, (begin, end) in enumerate(self.bounds()):
            torch.mm(rows[begin:end], weight[expert].t(), out=out[begin:end])
        return out

    def transposed(self, rows: Tensor, weight: Tensor) -> Tensor:
        """(n, out) by (experts, out, in) -> (n, in): the gradient of what ``product`` read."""
        if grouped(rows, weight):
            return F.grouped_mm(rows, weight, offs=self.ends)
        out = rows.new_empty(len(rows), weight.shape[2])
        for expert, (begin, end) in enumerate(self.bounds()):
            torch.mm(rows[begin:end], weight[expert], out=out[begin:end])
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """(n, out), (n, in) -> (experts, out, in): the gradient of a weight, zero for an expert without rows."""
        experts = len(self.ends)
        if grouped(left, right):  # any number of rows
            made = F.grouped_mm(left.t(), right, offs=self.ends)
            # On some devices torch leaves what it found in memory where a group is empty.
            empty = self.ends.diff(prepend=self.ends.new_zeros(1)) == 0
            return made.masked_fill_(empty.view(experts, 1, 1), 0.0)
        made = left.new_empty(experts, left.shape[1], right.shape[1])
        for expert, (begin, end) in enumerate(self.bounds()):
            torch.mm(left[begin:end].t(), right[begin:end], out=made[expert])
        return made


def grouped(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch has a grouped product of these; the first size of both is free."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm") or not len(rows):
        return False
    aligned = all(size % _ALIGNED == 0 for size in (rows.shape[1], *weight.shape[1:]))
    return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def feed_forward(rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, segments: Segments) -> Tensor:
    """down(silu(gate(x)) * up(x)) of each row with the weights of its expert.

    Args:
        rows: (n, hidden), expert by expert.
        gate, up: (experts, ffn, hidden).
        down: (experts, hidden, ffn).
    Returns:
        (n, hidden). Gradients of the weights come when the program of a pipeline wants them.
    """
    weights = (gate, up, down)
    if not torch.is_grad_enabled():
        return _hidden_and_out(rows, weights, segments)[2]
    if not rows.requires_grad:
        rows = rows.detach().requires_grad_()
    inner = _Inner(any(weight.requires_grad for weight in weights))
    out: Tensor = _FeedForward.apply(rows, weights, segments, inner)  # type: ignore[no-untyped-call]

    def weight_grad(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, hidden, of_gate, of_up = inner.of(gradient)
        return segments.outer(of_gate, x), segments.outer(of_up, x), segments.outer(gradient, hidden)

    return defer_weight_grad(weights, weight_grad, out)


def _hidden_and_out(rows: Tensor, weights: tuple[Tensor, ...], segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = weights
    gated, upped = segments.product(rows, gate), segments.product(rows, up)
    return gated, upped, segments.product(F.silu(gated) * upped, down)


class _Parts(NamedTuple):
    """The rows, the hidden layer, and the gradients behind gate and up."""

    rows: Tensor
    hidden: Tensor
    of_gate: Tensor
    of_up: Tensor


class _Inner:
    """Gradients inside one call. [Note: made once]"""

    def __init__(self, twice: bool) -> None:
        self.node: Any = None  # of _FeedForward, which autograd holds
        self._twice = twice
        self._left: _Parts | None = None

    def of(self, gradient: Tensor) -> _Parts:
        """For the gradient of the call's output."""
        if self._left is not None:
            left, self._left = self._left, None
            return left
        node = self.node()
        assert node is not None, "the rows' gradient was made, and the weights' need what was left"
        rows, gated, upped, _, _, down = node.saved_tensors
        of_hidden = node.segments.transposed(gradient, down)
        sigmoid = torch.sigmoid(gated)
        silu = gated * sigmoid
        slope = sigmoid * (1 + gated - silu)
        made = _Parts(rows, silu * upped, of_hidden * upped * slope, of_hidden * silu)
        if self._twice:
            self._left = made
        return made


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: tuple[Tensor, ...], segments: Segments, inner: _Inner) -> Tensor:
        gated, upped, out = _hidden_and_out(rows, weights, segments)
        ctx.save_for_backward(rows, gated, upped, *weights)
        ctx.weights, ctx.segments, ctx.inner = weights, segments, inner
        inner.node = weakref.ref(ctx)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _, _, of_gate, of_up = ctx.inner.of(gradients[0])
        gate, up, _ = ctx.weights
        return ctx.segments.transposed(of_gate, gate).add_(ctx.segments.transposed(of_up, up)), None, None, None
