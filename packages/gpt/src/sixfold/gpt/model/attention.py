"""Causal attention within documents: which back end, and what all layers of a micro-batch share.

    cu_seqlens, position_ids --> plan_rows (this file), once per micro-batch --> Rows --> Attention in every layer
                                     `-> context_parallel.py brings the keys of other ranks

Queries, keys and values are (b, s, heads, head_dim); key heads may be fewer (grouped queries: head h reads key head
h // (heads / key heads)). Scores are scaled by 1 / sqrt(head_dim).

[Note: back ends] One table, BACKENDS; ``choose_backend`` picks by device, dtype and length:

- ``blocks``: CPU, rows up to BLOCKS_LONGEST. Batched matrix products over blocks of queries, each against the keys up
  to its end, with the probabilities kept for backward. torch's fused CPU kernel takes 2.1 to 2.7 times as long in
  bfloat16; the price is memory quadratic in the row, hence the limit.
- ``sdpa``: torch's scaled_dot_product_attention, with a mask where a row holds several documents.
- ``varlen``: CUDA in half precision: torch's variable-length kernel on the flattened micro-batch; no mask exists.
- ``math``: with soft caps of scores, which torch's kernels do not have, where ``blocks`` is not taken. It keeps nothing
  quadratic, and computes scores once more in backward.

[Note: windows] In a sliding layer a query sees the keys from its place less the window on. A mask is made of the
earliest key that a query sees: where its document starts, or where its window does. varlen's kernel has a window. A
window as long as the row is none. Layers of both types in one model share two ``Rows``.

A context-parallel rank has the queries of two chunks of each row, and each back end takes the keys of whole rows.
``blocks`` and ``sdpa`` know where in its row a query lies. ``varlen`` gets the keys of one segment after the other.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.model.dropout import TokenKeys
from sixfold.gpt.model.key_value_cache import KeyValueCache
from sixfold.gpt.model.rope import inverse_frequencies, magnitude, tables
from sixfold.gpt.parallel.axes import ALONE, Axes
from sixfold.gpt.parallel.context_parallel import RingPlan, gathered_keys, ring
from sixfold.gpt.parallel.head_groups import by_group, repeated, split_heads
from sixfold.gpt.parallel.partial_attention import Sight, whole
from sixfold.gpt.parallel.sequence_parts import (
    WHOLE_ROWS,
    DocumentsHere,
    SequencePart,
    Span,
    documents_here,
    key_blocks,
    masked,
)

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
        sliding: the same of sliding layers, where there are others too.
        dropout: keys of its tokens, where something is dropped.
        cache: keeps keys and values of what is read; ``attend`` then takes what it gives.
    """

    cos: Tensor
    sin: Tensor
    attend: Attend
    recompute: str = "none"
    sliding: "Rows | None" = None
    dropout: TokenKeys | None = None
    cache: KeyValueCache | None = None

    def of(self, *, sliding: bool) -> "Rows":
        """What a layer that slides, or does not, needs to know."""
        return self.sliding if sliding and self.sliding is not None else self


@dataclass(frozen=True, kw_only=True)
class Documents:
    """How a micro-batch of b rows divides, of which ``part`` is here: s tokens of each row.

    Attributes:
        first: (b, s), where in its row a token's document starts; None: a row is one document.
        here: segments of documents, where there are several ranks and several documents.
        window: keys that a query sees, its own among them; 0: all of its document. [Note: windows]
        cap: soft cap of scores; 0: none.
    """

    b: int
    s: int
    heads: int
    key_heads: int
    dtype: torch.dtype
    device: torch.device
    cu_seqlens: Tensor | None
    first: Tensor | None
    part: SequencePart = WHOLE_ROWS
    here: DocumentsHere[Tensor] | None = None
    window: int = 0
    cap: float = 0.0

    @property
    def row(self) -> int:
        """Tokens of a row, on all ranks."""
        return self.s * self.part.size

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where in its row the s tokens of a row lie."""
        return self.part.spans(self.row)

    @property
    def places(self) -> Tensor:
        """(s,): where in its row each token lies."""
        parts = [torch.arange(begin, end, device=self.device) for begin, end in self.spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @property
    def positions(self) -> Tensor:
        """(b or 1, s): they restart at each document."""
        index = self.places.unsqueeze(0)
        return index if self.first is None else index - self.first

    @property
    def earliest(self) -> Tensor | None:
        """(b or 1, s): where in its row the first key lies that a token sees; None: at the row's start."""
        if not self.window:
            return self.first
        begins = (self.places - (self.window - 1)).clamp_(min=0).unsqueeze(0)
        return begins if self.first is None else torch.maximum(self.first, begins)

    def additive_mask(self) -> Tensor:
        """(b or 1, s, row) of ``dtype``: 0 where a query (row) sees a key (column), -inf elsewhere."""
        index, earliest = torch.arange(self.row, device=self.device), self.earliest
        seen = (index <= self.places.unsqueeze(1)).unsqueeze(0)
        if earliest is not None:
            seen = seen & (index >= earliest.unsqueeze(-1))
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, -math.inf)


def plan_rows(
    config: GPTConfig,
    x: Tensor,
    *,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | DocumentsHere[Tensor] | None,
    recompute: str = "none",
    backend: str | None = None,
    axes: Axes = ALONE,
    layers: Iterable[int] | None = None,
    cache: KeyValueCache | None = None,
) -> Rows:
    """Work out once what all layers share.

    Args:
        x: hidden states (b, s, hidden), or (b, s / tp, hidden) with sequence parallelism; their shape, dtype and
            device count. Of rows of S tokens a context-parallel rank has s = S / cp.
        position_ids: (b, s) for rope; None restarts at each document.
        cu_seqlens: int32 boundaries of the flattened micro-batch of all cp ranks, 0 ... b*S with every multiple of S,
            or None: each row is one document. On any device; nothing of it is read by the host but its length. With
            context parallelism the host reads it, and saves that where it is given what ``documents_here`` made of it.
        backend: a name of BACKENDS instead of the choice made here. With ``axes.cp_comm_type`` "p2p" it is of no
            account: the ring has its own kernels.
        axes: a tensor-parallel rank attends with its own heads, to whole rows; a context-parallel rank with its own
            queries, to the keys of all.
        layers: that it is for; None: all of ``config``.
        cache: what was read before ``x``, which it counts the positions of.
    """
    later = cache is not None and cache.length > 0
    if cache is not None:
        cache.check_piece(x.shape[0], x.shape[1], axes, others=position_ids is not None or cu_seqlens is not None)
        position_ids = cache.positions(x.shape[1], x.device) if later else None
        cu_seqlens = None if later else cache.boundaries(x.shape[0], x.shape[1])
    documents = _documents(config, x, cu_seqlens, axes)
    positions = documents.positions if position_ids is None else position_ids
    made: list[Rows] = []
    for slides in sorted({config.slides(layer) for layer in (range(config.num_layers) if layers is None else layers)}):
        here = documents
        if slides and config.sliding_window < documents.row:
            here = replace(documents, window=config.sliding_window)
        if not made or config.rope_local_base_freq:
            frequencies = inverse_frequencies(config, x.device, sliding=slides)
            cos, sin = tables(positions, frequencies, x.dtype, magnitude(config, sliding=slides))
        if cache is not None and later:
            attend = cache.attend(sliding=slides)
        else:
            chosen = backend or choose_backend(here)
            attend = BACKENDS[chosen](here) if axes.cp.size == 1 else _over_ranks(here, axes, chosen)
        made.append(Rows(cos=cos, sin=sin, attend=attend, recompute=recompute, cache=cache))
    return made[0] if len(made) == 1 else replace(made[0], sliding=made[1])


def _documents(
    config: GPTConfig, x: Tensor, cu_seqlens: Tensor | DocumentsHere[Tensor] | None, axes: Axes
) -> Documents:
    b, s = x.shape[0], x.shape[1] * (axes.tp.size if axes.sharded_sequence else 1)
    part = SequencePart(axes.cp.rank, axes.cp.size)
    here: DocumentsHere[Tensor] | None = None
    first: Tensor | None = None
    # b + 1 boundaries are the row starts alone: plain causal rows.
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.numel() <= b + 1:
        cu_seqlens = None
    if part.size > 1 and isinstance(cu_seqlens, Tensor):
        cu_seqlens = documents_here(cu_seqlens.cpu().numpy(), b, part).to(torch.from_numpy)
    if isinstance(cu_seqlens, DocumentsHere):
        here, cu_seqlens = cu_seqlens.to(lambda tensor: tensor.to(x.device)), None
        first = here.first
    elif cu_seqlens is not None:
        first = _document_starts(cu_seqlens.to(x.device), b, s)
    return Documents(
        b=b,
        s=s,
        heads=config.num_attention_heads // axes.tp.size,
        key_heads=config.num_query_groups // axes.tp.size,
        dtype=x.dtype,
        device=x.device,
        cu_seqlens=cu_seqlens,
        first=first,
        part=part,
        here=here,
        cap=config.attn_logit_softcapping,
    )


def _over_ranks(documents: Documents, axes: Axes, backend: str) -> Attend:
    """Attention of this rank's queries to the keys of all ranks."""
    if axes.cp_comm_type == "p2p":
        earliest, blocks = documents.earliest, key_blocks(documents.part, documents.row, window=documents.window)
        if earliest is None:
            earliest = torch.zeros(1, documents.s, dtype=torch.int64, device=documents.device)
        if documents.here is not None:  # on the host only the blocks are known, of documents or of windows
            blocks = documents.here.blocks if not documents.window else masked(blocks)
        plan = RingPlan(axes.cp, blocks, earliest, documents.places, documents.cap)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring(q, k, v, plan)
    else:
        alone = BACKENDS[backend](documents)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return alone(q, *gathered_keys(k, v, axes.cp))

    uncompiled: Attend = torch._disable_dynamo(attend)  # type: ignore[attr-defined]  # what travels stays outside of compiled parts

    def either(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return uncompiled(q, k, v) if torch.compiler.is_compiling() else attend(q, k, v)

    return either


def choose_backend(documents: Documents) -> str:
    """The fastest correct entry of BACKENDS; see [Note: back ends]."""
    if documents.device.type == "cpu" and documents.row <= BLOCKS_LONGEST:
        return "blocks"
    if documents.cap:
        return "math"
    if documents.device.type == "cpu":
        return "sdpa"
    half = documents.dtype in (torch.bfloat16, torch.float16)
    return "varlen" if half and (documents.first is not None or documents.window) else "sdpa"


def _document_starts(cu_seqlens: Tensor, b: int, s: int) -> Tensor:
    """(b, s) int64: the offset in its row at which each token's document starts."""
    starts = cu_seqlens[:-1].long()
    marks = torch.zeros(b * s + 1, dtype=torch.int64, device=cu_seqlens.device)
    marks[starts] = starts  # the last place takes the starts of empty documents at the end
    begin = torch.cummax(marks[:-1], 0).values.view(b, s)
    rows = torch.arange(0, b * s, s, device=cu_seqlens.device).unsqueeze(1)
    return begin - rows


def _sdpa(documents: Documents) -> Attend:
    assert not documents.cap, f"sdpa has no soft cap of {documents.cap}"
    plain = documents.first is None and not documents.window
    if documents.device.type == "cuda" and plain and documents.part.size > 1:
        return _sdpa_by_chunk(documents)
    causal = plain and documents.part.size == 1
    mask = None if causal else documents.additive_mask().unsqueeze(1)
    # Of torch's kernels only CUDA's flash attention, in half precision and without a mask, groups queries itself.
    grouped = _groups_itself(documents) and causal
    repeats = 1 if grouped else documents.heads // documents.key_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, repeated(k, repeats), repeated(v, repeats)))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped).transpose(
            1, 2
        )

    return attend


def _sdpa_by_chunk(documents: Documents) -> Attend:
    """The queries of each chunk against the keys up to its end: causal from the last key backwards, without a mask."""
    from torch.nn.attention.bias import causal_lower_right

    grouped = _groups_itself(documents)
    repeats = 1 if grouped else documents.heads // documents.key_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, repeated(k, repeats), repeated(v, repeats)))
        outs, at = [], 0
        for begin, end in documents.spans:
            mask = causal_lower_right(end - begin, end)
            queries = q[:, :, at : at + end - begin]
            outs.append(F.scaled_dot_product_attention(queries, k[:, :, :end], v[:, :, :end], mask, enable_gqa=grouped))
            at += end - begin
        return torch.cat(outs, 2).transpose(1, 2)

    return attend


def _groups_itself(documents: Documents) -> bool:
    return documents.device.type == "cuda" and documents.dtype in (torch.bfloat16, torch.float16)


def _varlen(documents: Documents) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    assert not documents.cap, f"varlen has no soft cap of {documents.cap}"
    b, s = documents.b, documents.s
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    repeats = 1 if grouped else documents.heads // documents.key_heads
    index, queries, keys, longest = _segments(documents)
    window = (documents.window - 1, 0)  # (-1, 0): no window

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        if index is not None:
            k, v = k.index_select(0, index), v.index_select(0, index)  # its gradient adds without a sort
        k, v = repeated(k.unsqueeze(0), repeats)[0], repeated(v.unsqueeze(0), repeats)[0]
        # Causal is counted from the last key of a segment backwards, so its queries may be fewer than its keys.
        out = varlen_attn(q, k, v, queries, keys, *longest, window_size=window, **grouped)
        assert isinstance(out, Tensor), f"varlen_attn gave {type(out).__name__}"
        return out.view(b, s, *out.shape[1:])

    return attend


def _segments(documents: Documents) -> tuple[Tensor | None, Tensor, Tensor, tuple[int, int]]:
    """Which keys, in their order, boundaries of queries and of keys, and the longest of both."""
    b, s = documents.b, documents.s
    here = documents.here
    if here is None and documents.part.size > 1:
        rows = np.arange(0, b * documents.row + 1, documents.row)
        here = documents_here(rows, b, documents.part).to(torch.from_numpy)
        here = here.to(lambda tensor: tensor.to(documents.device))
    if here is not None:
        return here.index, here.queries, here.keys, here.longest
    cu = documents.cu_seqlens
    if cu is None:
        cu = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=documents.device)
    cu = cu.to(device=documents.device, dtype=torch.int32)
    return None, cu, cu, (s, s)  # s bounds any document's length: the true longest would be a host read


def _blocks(documents: Documents) -> Attend:
    b, groups = documents.b, documents.key_heads
    repeats = documents.heads // groups
    mask, bounds = documents.additive_mask(), _bounds(documents.spans)
    masks = []
    for begin, end, keys in bounds:
        part = mask[:, begin:end, :keys].unsqueeze(1)
        if mask.shape[0] == 1:  # shared by all rows and heads: (1, repeats * queries, keys)
            masks.append(part.expand(1, repeats, -1, -1).reshape(1, repeats * (end - begin), keys))
        else:
            part = part.unsqueeze(2).expand(b, groups, repeats, -1, -1)
            masks.append(part.reshape(b * groups, repeats * (end - begin), keys))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Blocks.apply(q, k, v, bounds, documents.cap, *masks)  # type: ignore[no-untyped-call]
        return out

    return attend


Bounds = tuple[tuple[int, int, int], ...]  # queries [begin, end) against keys [0, up to), in the order of the row


class _Blocks(torch.autograd.Function):
    """Attention of blocks of queries against the keys up to their end, by batched matrix products.

    Inside, keys and values are (b * key heads, s, d); a block of n queries is (b * key heads, repeats * n, d), so that
    the products sum over the query heads that share a key head.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, cap: float, *masks: Tensor) -> Tensor:
        b, _, _, d = q.shape
        groups = k.shape[2]
        scale = 1.0 / math.sqrt(d)
        keys, values = by_group(k), by_group(v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        queries, outs = split_heads(q, groups), split_heads(out, groups)
        probabilities = []
        for mask, (begin, end, seen) in zip(masks, bounds, strict=True):
            block = queries[..., begin:end, :].reshape(b * groups, -1, d)
            if cap:
                scores = _tanh(block, keys[:, :seen], scale / cap).mul_(cap).add_(mask)
            else:
                scores = torch.baddbmm(mask, block, keys[:, :seen].transpose(1, 2), alpha=scale)
            probability = torch.softmax(scores, -1)
            probabilities.append(probability)
            outs[..., begin:end, :] = torch.bmm(probability, values[:, :seen]).view(b, groups, -1, end - begin, d)
        ctx.bounds, ctx.cap = bounds, cap
        ctx.save_for_backward(q, keys, values, *probabilities)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, *probabilities = ctx.saved_tensors
        b, _, _, d = q.shape
        groups = keys.shape[0] // b
        scale = 1.0 / math.sqrt(d)
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = torch.empty_like(keys), torch.empty_like(values)
        queries, upstream, grads = (split_heads(t, groups) for t in (q, gradients[0], grad_q))
        _, _, most = ctx.bounds[-1]
        grad_k[:, most:], grad_v[:, most:] = 0, 0
        # The last block sees all keys that any block sees and comes first: it sets, the others add.
        beta = 0
        for probability, (begin, end, seen) in reversed(list(zip(probabilities, ctx.bounds, strict=True))):
            block = queries[..., begin:end, :].reshape(b * groups, -1, d)
            g = upstream[..., begin:end, :].reshape(b * groups, -1, d)
            grad_v[:, :seen].baddbmm_(probability.transpose(1, 2), g, beta=beta)
            inner = torch.bmm(g, values[:, :seen].transpose(1, 2))
            inner = torch._softmax_backward_data(inner, probability, -1, inner.dtype)
            if ctx.cap:  # the slope of the cap
                inner = inner * _tanh(block, keys[:, :seen], scale / ctx.cap).square_().neg_().add_(1)
            grad_k[:, :seen].baddbmm_(inner.transpose(1, 2), block, beta=beta, alpha=scale)
            part = torch.baddbmm(block, inner, keys[:, :seen], beta=0, alpha=scale)
            grads[..., begin:end, :] = part.view(b, groups, -1, end - begin, d)
            beta = 1
        back = (t.view(b, groups, -1, d).transpose(1, 2) for t in (grad_k, grad_v))
        return (grad_q, *back, None, None, *(None for _ in probabilities))


def _tanh(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Of scaled products of batches of queries and keys."""
    return torch.bmm(queries, keys.transpose(1, 2)).mul_(scale).tanh_()


def _math(documents: Documents) -> Attend:
    earliest = documents.earliest
    if earliest is None:
        earliest = torch.zeros(1, documents.s, dtype=torch.int64, device=documents.device)
    sight = Sight("masked", earliest, documents.places, 0, documents.cap)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return whole(q, k, v, sight)

    return attend


def _bounds(spans: tuple[Span, ...]) -> Bounds:
    found, at = [], 0
    for first, last in spans:
        for begin in range(first, last, QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, last)
            found.append((at + begin - first, at + end - first, end))
        at += last - first
    return tuple(found)


BACKENDS: Mapping[str, Callable[[Documents], Attend]] = {
    "blocks": _blocks,
    "sdpa": _sdpa,
    "varlen": _varlen,
    "math": _math,
}
