"""Attention of some queries to some keys, with the log-sum-exp by which parts are joined, and its gradients.

    a block of keys on its way --> partial (this file) --> joined in context_parallel.py
                               --> gradients (this file), from the joined result and log-sum-exp

Queries are (b, m, heads, d), keys and values (b, n, key heads, d). A query that sees nothing of a block has a
log-sum-exp near ``NOT_SEEN`` there, which is finite: its part then weighs exactly 0, and no infinity is subtracted from
another.

[Note: kernels] ``math`` runs everywhere and keeps nothing quadratic. On CUDA flash attention takes whole and causal
blocks in half precision, efficient attention with a bias the others. Both give the log-sum-exp. Their backward takes
one that is joined of several blocks, because it only computes exp(score - log-sum-exp).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sixfold.gpt.parallel.head_groups import by_group, repeated, split_heads
from sixfold.gpt.parallel.sequence_parts import MaskKind

NOT_SEEN = -1e30
_NOT_SEEN_FLOAT16 = -32768.0  # what float16 can hold
ROWS = 512  # queries whose scores exist at a time in ``math``
_EFFICIENT_ALIGN = 32  # of the length of its log-sum-exp
_BIAS_ALIGN = 16  # elements: a row of the bias starts at a multiple
_FLASH_WIDEST = 256  # head_dim

Three = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys queries see.

    Attributes:
        first: (b, m), where in its row the document of each query starts, ``places`` (m,) where it lies itself and
            ``first_key`` where the first key does: of account in "masked" alone.
        cap: soft cap of scores, which ``math`` has alone; 0: none.
    """

    seen: MaskKind
    first: Tensor
    places: Tensor
    first_key: int
    cap: float = 0.0

    def mask(self, begin: int, end: int, n: int) -> Tensor | None:
        """(b or 1, end - begin, n): True where a query sees a key; None: everywhere."""
        if self.seen == "full":
            return None
        index = torch.arange(n, device=self.places.device)
        if self.seen == "causal":
            return (index <= torch.arange(begin, end, device=index.device).unsqueeze(1)).unsqueeze(0)
        index = index + self.first_key
        before = index <= self.places[begin:end].unsqueeze(1)
        return before & (index >= self.first[:, begin:end].unsqueeze(-1))


def kernel_of(device: torch.device, dtype: torch.dtype, head_dim: int, seen: MaskKind, cap: float = 0.0) -> str:
    """ "math", "flash" or "efficient"; see [Note: kernels]."""
    if device.type != "cuda" or head_dim % 8 or cap:
        return "math"
    half = dtype in (torch.bfloat16, torch.float16)
    return "flash" if half and seen != "masked" and head_dim <= _FLASH_WIDEST else "efficient"


def partial(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """(b, m, heads, d) of the dtype of q, and its log-sum-exp (b, heads, m) in float32."""
    kernel = kernel_of(q.device, q.dtype, q.shape[-1], sight.seen, sight.cap)
    return {"math": math_forward, "flash": flash_forward, "efficient": efficient_forward}[kernel](q, k, v, sight)


def gradients(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight) -> Three:
    """This block's part of the gradients of q, k and v.

    Args:
        g: gradient of ``out``, the result joined over all blocks. lse: (b, heads, m) float32, joined likewise.
    """
    kernel = kernel_of(q.device, q.dtype, q.shape[-1], sight.seen, sight.cap)
    return {"math": math_backward, "flash": flash_backward, "efficient": efficient_backward}[kernel](
        g, q, k, v, out, lse, sight
    )


def whole(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
    """Attention to all keys at once by ``math``, (b, m, heads, d)."""
    out: Tensor = _Whole.apply(q, k, v, sight)  # type: ignore[no-untyped-call]
    return out


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> Tensor:
        out, lse = math_forward(q, k, v, sight)
        ctx.sight = sight
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = math_backward(gradients[0], q, k, v, out, lse, ctx.sight)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None


def math_forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """By batched matrix products, ``ROWS`` queries at a time."""
    b, m, heads, d = q.shape
    groups, n = k.shape[2], k.shape[1]
    keys, values, queries = by_group(k), by_group(v), split_heads(q, groups)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(b, groups, heads // groups, m, dtype=torch.float32, device=q.device)
    outs = split_heads(out, groups)
    for begin in range(0, m, ROWS):
        end = min(begin + ROWS, m)
        scores = _scores(queries[..., begin:end, :], keys, sight.mask(begin, end, n), sight.cap)
        lse[..., begin:end] = scores.logsumexp(-1)
        probabilities = scores.sub_(lse[..., begin:end, None]).exp_().to(q.dtype)
        outs[..., begin:end, :] = torch.bmm(probabilities.view(b * groups, -1, n), values).view(
            b, groups, -1, end - begin, d
        )
    return out, lse.flatten(1, 2)


def math_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight) -> Three:
    """As ``math_forward``; probabilities are computed again from scores and log-sum-exp."""
    b, m, heads, d = q.shape
    groups, n = k.shape[2], k.shape[1]
    keys, values = by_group(k), by_group(v)
    queries, upstream, outs = (split_heads(t, groups) for t in (q, g, out))
    lse = lse.view(b, groups, heads // groups, m)
    grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    grads = split_heads(grad_q, groups)
    grad_k, grad_v = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (keys, values))
    for begin in range(0, m, ROWS):
        end = min(begin + ROWS, m)
        block, up = queries[..., begin:end, :], upstream[..., begin:end, :]
        scores = _scores(block, keys, sight.mask(begin, end, n), sight.cap)
        # The slope of the cap; 0 where nothing is seen, whose score is beyond the cap.
        slope = scores.div(sight.cap).clamp_(min=-1).square_().neg_().add_(1) if sight.cap else None
        probabilities = scores.sub_(lse[..., begin:end, None]).exp_()
        shared = (up.float() * outs[..., begin:end, :].float()).sum(-1, keepdim=True)
        flat, flat_up = (t.reshape(b * groups, -1, d) for t in (block, up))
        grad_v += torch.bmm(probabilities.to(q.dtype).view(b * groups, -1, n).transpose(1, 2), flat_up)
        inner = torch.bmm(flat_up, values.transpose(1, 2)).view(probabilities.shape)
        inner = (inner - shared) * probabilities * _scale(d)
        inner = (inner if slope is None else inner.mul_(slope)).to(q.dtype).view(b * groups, -1, n)
        grad_k += torch.bmm(inner.transpose(1, 2), flat)
        grads[..., begin:end, :] = torch.bmm(inner, keys).view(b, groups, -1, end - begin, d)
    back_k, back_v = (t.view(b, groups, n, d).transpose(1, 2) for t in (grad_k, grad_v))
    return grad_q, back_k, back_v


def flash_forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """CUDA, half precision; the kernel groups queries itself."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), 0.0, sight.seen == "causal", False, scale=_scale(q.shape[-1])
    )
    return out.transpose(1, 2), lse


def flash_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight) -> Three:
    """As ``flash_forward``. The kernel's random state is that of dropout, of which there is none."""
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(t.transpose(1, 2) for t in (g, q, k, v, out)),
        lse.contiguous(),
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        sight.seen == "causal",
        unused,
        unused,
        scale=_scale(q.shape[-1]),
    )
    grad_q, grad_k, grad_v = (t.transpose(1, 2) for t in found)
    return grad_q, grad_k, grad_v


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """CUDA; every query head needs its own copy of a key head."""
    repeats = q.shape[2] // k.shape[2]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *(t.transpose(1, 2) for t in (q, repeated(k, repeats), repeated(v, repeats))),
        bias_of(q, k, sight),
        True,
        0.0,
        False,
        scale=_scale(q.shape[-1]),
    )
    return out.transpose(1, 2), lse[..., : q.shape[1]]


def efficient_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight) -> Three:
    """As ``efficient_forward``; gradients of the copies of a key head are summed."""
    b, m, heads, d = q.shape
    groups, n = k.shape[2], k.shape[1]
    bias, repeats = bias_of(q, k, sight), heads // groups
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = F.pad(lse, (0, -m % _EFFICIENT_ALIGN), value=math.inf)  # as its forward gives it
    grad_q, grad_k, grad_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *(t.transpose(1, 2) for t in (g, q, repeated(k, repeats), repeated(v, repeats))),
        bias,
        out.transpose(1, 2),
        lse,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        False,
        scale=_scale(d),
    )
    back_k, back_v = (
        t.transpose(1, 2).reshape(b, n, groups, repeats, d).sum(3, dtype=torch.float32) for t in (grad_k, grad_v)
    )
    return grad_q.transpose(1, 2), back_k, back_v


def bias_of(q: Tensor, k: Tensor, sight: Sight) -> Tensor | None:
    """(b, heads, m, n) of the dtype of q, expanded: 0 where a query sees a key; None: it sees all."""
    b, m, heads, _ = q.shape
    n = k.shape[1]
    mask = sight.mask(0, m, n)
    if mask is None:
        return None
    unseen = _NOT_SEEN_FLOAT16 if q.dtype == torch.float16 else NOT_SEEN
    bias = torch.zeros(mask.shape[0], 1, m, n + -n % _BIAS_ALIGN, dtype=q.dtype, device=q.device)[..., :n]
    bias.masked_fill_(~mask.unsqueeze(1), unseen)
    return bias.expand(b, heads, m, n)


def _scores(block: Tensor, keys: Tensor, mask: Tensor | None, cap: float) -> Tensor:
    """(b, groups, repeats, rows, d) by (b * groups, n, d) -> (b, groups, repeats, rows, n) in float32."""
    b, groups, repeats, rows, d = block.shape
    flat = torch.bmm(block.reshape(b * groups, -1, d), keys.transpose(1, 2)).float().mul_(_scale(d))
    if cap:
        flat = flat.div_(cap).tanh_().mul_(cap)
    scores = flat.view(b, groups, repeats, rows, -1)
    return scores if mask is None else scores.masked_fill_(~mask[:, None, None], NOT_SEEN)


def _scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)
