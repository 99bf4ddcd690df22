"""A mixture of experts written out token by token, in float64, which shares no code with the package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sixfold.gpt.config.train_config import GPTConfig


def tiny_experts(**fields: Any) -> GPTConfig:
    """Two layers of 16 with five experts, of which a token passes two."""
    shape: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 24,
        "vocab_size": 50,
        "num_experts": 6,
        "experts_per_token": 2,
        "moe_ffn_hidden_size": 12,
    }
    return GPTConfig(**{**shape, **fields})


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x) of one token."""
    gated = gate @ x
    return down @ (gated / (1 + torch.exp(-gated)) * (up @ x))


def plain_mixture(config: GPTConfig, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(what comes out, load-balancing loss times tokens) of ``x`` (tokens, hidden), all of them one microbatch."""
    tokens, probabilities, counts = [], [], [0] * config.num_experts
    for token in x:
        p = torch.softmax(weights["router.weight"] @ token, 0)
        probabilities.append(p)
        values = p.tolist()
        chosen = sorted(range(config.num_experts), key=lambda e: (-values[e], e))[: config.experts_per_token]
        total = sum(p[e] for e in chosen) if config.norm_topk_prob else 1.0
        out = torch.zeros_like(token)
        for e in chosen:
            counts[e] += 1
            one = [weights[f"experts.{part}.weight"][e] for part in ("gate", "up", "down")]
            out = out + p[e] / total * swiglu(token, *one)
        if config.shared_ffn_hidden_size:
            shared = swiglu(token, *(weights[f"shared.{part}.weight"] for part in ("gate", "up", "down")))
            if config.shared_expert_gate:
                shared = torch.sigmoid(weights["shared_gate.weight"][0] @ token) * shared
            out = out + shared
        tokens.append(out)
    mean = torch.stack(probabilities).mean(0)
    pairs = len(x) * config.experts_per_token
    balance = sum(counts[e] / pairs * mean[e] for e in range(config.num_experts))
    return torch.stack(tokens), config.router_aux_loss * config.num_experts * balance * len(x)
