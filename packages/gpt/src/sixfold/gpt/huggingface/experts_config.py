"""Keys of experts in config.json as Qwen2-MoE and Qwen3-MoE have them <--> [model], and the balance of all.

    config.json --> read (this file) --> architectures/     architectures/ --> write (this file) --> config.json

[Note: the balance of transformers] In the loss of router_aux_loss_coef the shares of tokens sum to num_experts_per_tok,
not to 1. It is a mean over the layers with experts, not their sum. So a coefficient of 1 there is
num_experts_per_tok / layers of model.router_aux_loss here. Gradients agree with transformers' if all layers share out
their tokens alike. Pure: no files, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig

# Of transformers' Qwen3MoeConfig; the other class has some of its own.
DEFAULTS: Mapping[str, Any] = {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1,
}  # fmt: skip
BALANCE = "router_aux_loss_coef"
_SHARED = "shared_expert_intermediate_size"
KEYS = frozenset((*DEFAULTS, "num_local_experts", "mlp_only_layers", "output_router_logits"))


def read(raw: Mapping[str, Any], values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Fields of [model] that say what the experts are; what is wrong goes to ``problems``.

    Args:
        values: ``raw``, with the defaults of keys that are not there.
    """
    found: dict[str, Any] = {}
    counts = [raw[key] for key in ("num_experts", "num_local_experts") if raw.get(key) is not None]
    if len(counts) == 2 and counts[0] != counts[1]:
        problems.append(f"num_experts is {counts[0]!r} and num_local_experts {counts[1]!r}, which is the same")
    values = {**values, "num_experts": counts[0] if counts else values["num_experts"]}
    sizes = {
        "num_experts": "num_experts", "experts_per_token": "num_experts_per_tok",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    }  # fmt: skip
    if _SHARED in values:
        sizes["shared_ffn_hidden_size"] = _SHARED
    for ours, theirs in sizes.items():
        value = values[theirs]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{theirs} is {value!r}; it is a whole number > 0")
            value = 1
        found[ours] = value
    found["norm_topk_prob"] = values["norm_topk_prob"]
    if not isinstance(found["norm_topk_prob"], bool):
        problems.append(f"norm_topk_prob is {found['norm_topk_prob']!r}; it is true or false")
    layers = values["num_hidden_layers"]
    found["dense_layers"] = _dense_layers(values, layers, problems)
    sparse = max(layers - found["dense_layers"], 1)
    return found | {"router_aux_loss": balance_of(values, found["experts_per_token"], sparse, problems)}


def balance_of(values: Mapping[str, Any], experts_per_token: int, sparse: int, problems: list[str]) -> float:
    """model.router_aux_loss of a model with ``sparse`` layers of experts. [Note: the balance of transformers]"""
    weight = values[BALANCE]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        problems.append(f"router_aux_loss_coef is {weight!r}; it is a finite number >= 0")
        weight = 0
    return _short(weight * experts_per_token / sparse)


def written_balance(config: GPTConfig) -> float:
    """router_aux_loss_coef of a model."""
    return _short(config.router_aux_loss * len(config.expert_layers) / config.experts_per_token)


def _dense_layers(values: Mapping[str, Any], layers: int, problems: list[str]) -> int:
    """How many layers without experts come first; none come later."""
    step, alone = values["decoder_sparse_step"], values.get("mlp_only_layers", [])
    if isinstance(step, bool) or not isinstance(step, int) or step < 1 or not isinstance(alone, list):
        problems.append(f"decoder_sparse_step is {step!r} and mlp_only_layers {alone!r}; a number > 0 and a list")
        return 0
    dense = [number for number in range(layers) if number in alone or (number + 1) % step]
    if dense != list(range(len(dense))) or len(dense) == layers:
        problems.append(
            f"decoder_sparse_step is {step} and mlp_only_layers {alone}, so layers {dense} have no experts; the first "
            f"ones of the {layers} alone may have none"
        )
        return 0
    return len(dense)


def write(config: GPTConfig) -> dict[str, Any]:
    """Keys of config.json that say what the experts are."""
    written = {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.dense_layers)),
        "output_router_logits": False,
        BALANCE: written_balance(config),
    }
    return written | ({_SHARED: config.shared_ffn_hidden_size} if config.shared_ffn_hidden_size else {})


def _short(value: float) -> float:
    """Without the last bits of a product and its inverse, so that what was read is written."""
    return float(f"{value:.15g}")
