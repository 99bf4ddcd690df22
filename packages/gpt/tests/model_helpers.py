"""Small models and packed batches, and a plain attention that shares no code with the package."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.gpt.config.train_config import GPTConfig


def small(**fields: Any) -> GPTConfig:
    """Three layers of 32 with grouped queries; 100 ids on 128 rows."""
    shape: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "vocab_size": 100,
    }
    return GPTConfig(**{**shape, **fields})


def boundaries(b: int, s: int, inner: list[int]) -> Tensor:
    """cu_seqlens of b rows of s with further document starts ``inner``."""
    return torch.tensor(sorted({*range(0, b * s + 1, s), *inner}), dtype=torch.int32)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, window: int = 0, cap: float = 0.0
) -> Tensor:
    """Document by document, head by head, in float64. Arguments as the back ends take them.

    cap: soft cap of scores; 0: none. window: how many keys a query sees, its own among them; 0: all before it.
    """
    b, s, heads, d = q.shape
    flat_q, flat_k, flat_v = (t.double().flatten(0, 1) for t in (q, k, v))
    repeats = heads // k.shape[2]
    out = torch.zeros_like(flat_q)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for h in range(heads):
            scores = flat_q[begin:end, h] @ flat_k[begin:end, h // repeats].T / math.sqrt(d)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            if window:
                hidden |= torch.ones_like(hidden).tril(-window)
            weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
            out[begin:end, h] = weights @ flat_v[begin:end, h // repeats]
    return out.view(b, s, heads, d)


def varlen_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """What torch's varlen_attn computes, segment by segment: (tokens, heads, d) -> the same.

    Query i of n sees key j of m where j - i <= m - n (causal from the last key backwards), and with a window (w, 0)
    where it is not more than w before that. The kernel's own demands are asserted.
    """
    assert cu_q.dtype == cu_k.dtype == torch.int32
    for cu, tokens, longest in ((cu_q, q, longest_q), (cu_k, k, longest_k)):
        lengths = cu.diff()
        assert cu[0] == 0
        assert cu[-1] == len(tokens)
        assert (lengths >= 0).all()
        assert lengths.max() <= longest
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert window_size[1] == 0
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    outs = []
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    for begin, end, first, last in zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True):
        n, m = end - begin, last - first
        # How far behind the last key that a query sees (negative) or ahead of it (positive) a key is.
        ahead = torch.arange(m, device=q.device) - torch.arange(n, device=q.device).unsqueeze(1) - (m - n)
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[first:last]) / math.sqrt(q.shape[-1])
        hidden = ahead > 0
        if window_size[0] >= 0:
            hidden |= ahead < -window_size[0]
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v[first:last]))
    return torch.cat(outs)


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """``model`` with matrices ``factor`` times as large, so that its logits lie far apart."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model
