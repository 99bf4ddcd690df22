"""Mixtral: Mistral with a mixture of experts in every layer.

    mixtral.py (this file) --> architectures/__init__.py --> config.py

``intermediate_size`` is the width of an expert. The weights of a token's experts always sum to 1.
"""

from collections.abc import Mapping
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.huggingface.architecture import DEFAULTS, Architecture, Problems
from sixfold.gpt.huggingface.experts_config import BALANCE, balance_of, written_balance


def _read(raw: Mapping[str, Any], values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    layers, chosen = values["num_hidden_layers"], values["num_experts_per_tok"]
    return {"router_aux_loss": balance_of(values, chosen, layers, problems)}


def _write(config: GPTConfig) -> dict[str, Any]:
    return {"intermediate_size": config.moe_ffn_hidden_size, BALANCE: written_balance(config)}


MIXTRAL = Architecture(
    model_type="mixtral",
    name="MixtralForCausalLM",
    defaults={
        **DEFAULTS, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2, BALANCE: 0.001,
    },
    keys={
        "sliding_window": "sliding_window", "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    free=frozenset({"router_aux_loss", "moe_ffn_hidden_size"}),
    needs=("num_experts",),
    fixed={"router_jitter_noise": 0.0},
    read=_read,
    write=_write,
    more_keys=frozenset({BALANCE, "output_router_logits"}),
    constant={"output_router_logits": False, "router_jitter_noise": 0.0},
    tensors={
        "ffn.router": "block_sparse_moe.gate", "ffn.experts.gate": "block_sparse_moe.experts.{}.w1",
        "ffn.experts.up": "block_sparse_moe.experts.{}.w3", "ffn.experts.down": "block_sparse_moe.experts.{}.w2",
    },
)  # fmt: skip
