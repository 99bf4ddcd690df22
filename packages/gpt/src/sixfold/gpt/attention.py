"""Causal attention within documents: which back end, and what all layers of a micro-batch share.

    cu_seqlens, position_ids --> plan_rows (this file), once per micro-batch --> Rows --> Attention in every layer

Queries, keys and values are (b, s, heads, head_dim); key heads may be fewer (grouped queries: head h reads key head
h // (heads / key heads)). Scores are scaled by 1 / sqrt(head_dim).

[Note: back ends] One table, BACKENDS; ``choose_backend`` picks by device, dtype and length:

- ``blocks``: CPU, rows up to BLOCKS_LONGEST. Batched matrix products over blocks of queries, each against the keys up
  to its end, with the probabilities kept for backward. torch's fused CPU kernel takes 2.1 to 2.7 times as long in
  bfloat16; the price is memory quadratic in the row, hence the limit.
- ``sdpa``: torch's scaled_dot_product_attention, with a mask where a row holds several documents.
- ``varlen``: CUDA in half precision: torch's variable-length kernel on the flattened micro-batch; no mask exists.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sixfold.gpt.axes import ALONE, Axes
from sixfold.gpt.config import GPTConfig
from sixfold.gpt.rope import inverse_frequencies, tables

QUERY_BLOCK = 128
BLOCKS_LONGEST = 512

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What every layer needs to know of a micro-batch.

    Attributes:
        cos, sin: rope tables, (b or 1, s, 1, head_dim).
        attend: q, k, v -> (b, s, heads, head_dim).
        recompute: "none", or what a layer computes again in backward: "selective" (attention) or "full".
    """

    cos: Tensor
    sin: Tensor
    attend: Attend
    recompute: str = "none"


@dataclass(frozen=True, kw_only=True)
class Documents:
    """How a micro-batch of b rows of s tokens divides. ``first`` (b, s): where in its row a token's document starts."""

    b: int
    s: int
    heads: int
    key_heads: int
    dtype: torch.dtype
    device: torch.device
    cu_seqlens: Tensor | None
    first: Tensor | None

    @property
    def positions(self) -> Tensor:
        """(b or 1, s): they restart at each document."""
        index = torch.arange(self.s, device=self.device).unsqueeze(0)
        return index if self.first is None else index - self.first

    def additive_mask(self) -> Tensor:
        """(b or 1, s, s) of ``dtype``: 0 where a query (row) sees a key (column), -inf elsewhere."""
        index = torch.arange(self.s, device=self.device)
        seen = (index <= index.unsqueeze(1)).unsqueeze(0)
        if self.first is not None:
            seen = seen & (index >= self.first.unsqueeze(-1))
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, -math.inf)


def plan_rows(
    config: GPTConfig,
    x: Tensor,
    *,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    recompute: str = "none",
    backend: str | None = None,
    axes: Axes = ALONE,
) -> Rows:
    """Work out once what all layers share.

    Args:
        x: hidden states (b, s, hidden), or (b, s / tp, hidden) with sequence parallelism; their shape, dtype and
            device count.
        position_ids: (b, s) for rope; None restarts at each document.
        cu_seqlens: int32 boundaries of the flattened micro-batch, 0 ... b*s with every multiple of s, or None: each
            row is one document. On any device; nothing of it is read by the host but its length.
        backend: a name of BACKENDS instead of the choice made here.
        axes: a tensor-parallel rank attends with its own heads, to whole rows.
    """
    b, s = x.shape[0], x.shape[1] * (axes.tp.size if axes.sharded_sequence else 1)
    first = None
    # b + 1 boundaries are the row starts alone: plain causal rows.
    if cu_seqlens is not None and cu_seqlens.numel() > b + 1:
        first = _document_starts(cu_seqlens.to(x.device), b, s)
    documents = Documents(
        b=b,
        s=s,
        heads=config.num_attention_heads // axes.tp.size,
        key_heads=config.num_query_groups // axes.tp.size,
        dtype=x.dtype,
        device=x.device,
        cu_seqlens=None if first is None else cu_seqlens,
        first=first,
    )
    positions = documents.positions if position_ids is None else position_ids
    cos, sin = tables(positions, inverse_frequencies(config, x.device), x.dtype)
    attend = BACKENDS[backend or choose_backend(documents)](documents)
    return Rows(cos=cos, sin=sin, attend=attend, recompute=recompute)


def choose_backend(documents: Documents) -> str:
    """The fastest correct entry of BACKENDS; see [Note: back ends]."""
    if documents.device.type == "cpu":
        return "blocks" if documents.s <= BLOCKS_LONGEST else "sdpa"
    half = documents.dtype in (torch.bfloat16, torch.float16)
    return "varlen" if documents.first is not None and half else "sdpa"


def _document_starts(cu_seqlens: Tensor, b: int, s: int) -> Tensor:
    """(b, s) int64: the offset in its row at which each token's document starts."""
    starts = cu_seqlens[:-1].long()
    marks = torch.zeros(b * s + 1, dtype=torch.int64, device=cu_seqlens.device)
    marks[starts] = starts  # the last place takes the starts of empty documents at the end
    begin = torch.cummax(marks[:-1], 0).values.view(b, s)
    rows = torch.arange(0, b * s, s, device=cu_seqlens.device).unsqueeze(1)
    return begin - rows


def _sdpa(documents: Documents) -> Attend:
    mask = None if documents.first is None else documents.additive_mask().unsqueeze(1)
    # Of torch's kernels only CUDA's flash attention, in half precision and without a mask, groups queries itself.
    half = documents.dtype in (torch.bfloat16, torch.float16)
    grouped = documents.device.type == "cuda" and half and mask is None
    repeats = 1 if grouped else documents.heads // documents.key_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, _repeated(k, repeats), _repeated(v, repeats)))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        ).transpose(1, 2)

    return attend


def _varlen(documents: Documents) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    b, s = documents.b, documents.s
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    repeats = 1 if grouped else documents.heads // documents.key_heads
    cu = documents.cu_seqlens
    if cu is None:
        cu = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=documents.device)
    cu = cu.to(device=documents.device, dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, _repeated(k, repeats), _repeated(v, repeats)))
        # s is the bound of any document's length: the true longest would be a host read.
        out = varlen_attn(q, k, v, cu, cu, s, s, window_size=(-1, 0), **grouped)
        assert isinstance(out, Tensor), f"varlen_attn gave {type(out).__name__}"
        return out.view(b, s, *out.shape[1:])

    return attend


def _blocks(documents: Documents) -> Attend:
    b, s, groups = documents.b, documents.s, documents.key_heads
    repeats = documents.heads // groups
    mask = documents.additive_mask()
    masks = []
    for begin in range(0, s, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, s)
        part = mask[:, begin:end, :end].unsqueeze(1)
        if mask.shape[0] == 1:  # shared by all rows and heads: (1, repeats * queries, keys)
            masks.append(part.expand(1, repeats, -1, -1).reshape(1, repeats * (end - begin), end))
        else:
            part = part.unsqueeze(2).expand(b, groups, repeats, -1, -1)
            masks.append(part.reshape(b * groups, repeats * (end - begin), end))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Blocks.apply(q, k, v, *masks)  # type: ignore[no-untyped-call]
        return out

    return attend


class _Blocks(torch.autograd.Function):
    """Attention of blocks of queries against the keys up to their end, by batched matrix products.

    Inside, keys and values are (b * key heads, s, d); a block of n queries is (b * key heads, repeats * n, d), so that
    the products sum over the query heads that share a key head.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        b, s, _, d = q.shape
        groups = k.shape[2]
        scale = 1.0 / math.sqrt(d)
        keys, values = _by_group(k), _by_group(v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        queries, outs = _split_heads(q, groups), _split_heads(out, groups)
        probabilities = []
        for mask, (begin, end) in zip(masks, _bounds(s), strict=True):
            block = queries[..., begin:end, :].reshape(b * groups, -1, d)
            scores = torch.baddbmm(mask, block, keys[:, :end].transpose(1, 2), alpha=scale)
            probability = torch.softmax(scores, -1)
            probabilities.append(probability)
            outs[..., begin:end, :] = torch.bmm(probability, values[:, :end]).view(b, groups, -1, end - begin, d)
        ctx.save_for_backward(q, keys, values, *probabilities)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, *probabilities = ctx.saved_tensors
        b, s, _, d = q.shape
        groups = keys.shape[0] // b
        scale = 1.0 / math.sqrt(d)
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = torch.empty_like(keys), torch.empty_like(values)
        queries, upstream, grads = (_split_heads(t, groups) for t in (q, gradients[0], grad_q))
        for probability, (begin, end) in reversed(list(zip(probabilities, _bounds(s), strict=True))):
            block = queries[..., begin:end, :].reshape(b * groups, -1, d)
            g = upstream[..., begin:end, :].reshape(b * groups, -1, d)
            # The last block sees every key and comes first: it sets, the others add.
            beta = 0 if end == s else 1
            grad_v[:, :end].baddbmm_(probability.transpose(1, 2), g, beta=beta)
            inner = torch.bmm(g, values[:, :end].transpose(1, 2))
            inner = torch._softmax_backward_data(inner, probability, -1, inner.dtype)
            grad_k[:, :end].baddbmm_(inner.transpose(1, 2), block, beta=beta, alpha=scale)
            part = torch.baddbmm(block, inner, keys[:, :end], beta=0, alpha=scale)
            grads[..., begin:end, :] = part.view(b, groups, -1, end - begin, d)
        back = (t.view(b, groups, s, d).transpose(1, 2) for t in (grad_k, grad_v))
        return (grad_q, *back, *(None for _ in probabilities))


def _bounds(s: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + QUERY_BLOCK, s)) for begin in range(0, s, QUERY_BLOCK)]


def _split_heads(t: Tensor, groups: int) -> Tensor:
    """(b, s, heads, d) -> view (b, groups, heads / groups, s, d)."""
    b, s, heads, d = t.shape
    return t.view(b, s, groups, heads // groups, d).permute(0, 2, 3, 1, 4)


def _repeated(t: Tensor, repeats: int) -> Tensor:
    """Key heads, each ``repeats`` times: (b, s, groups, d) -> (b, s, groups * repeats, d)."""
    return t.repeat_interleave(repeats, 2) if repeats > 1 else t


def _by_group(t: Tensor) -> Tensor:
    """(b, s, groups, d) -> (b * groups, s, d), contiguous."""
    return t.transpose(1, 2).reshape(-1, t.shape[1], t.shape[3])


BACKENDS: Mapping[str, Callable[[Documents], Attend]] = {"blocks": _blocks, "sdpa": _sdpa, "varlen": _varlen}
