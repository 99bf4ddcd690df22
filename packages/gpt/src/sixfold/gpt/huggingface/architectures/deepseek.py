"""DeepSeek-V3: latent attention; sigmoid experts chosen by groups, with a bias that balances them and a shared expert.

    deepseek.py (this file) --> architectures/__init__.py --> config.py

``head_dim`` of its config.json is the rotated part of a head alone. Tensors of layers behind the last
(multi-token prediction), which transformers ignores, are no part of the model here and are refused.
"""

from collections.abc import Mapping
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface.architecture import DEFAULTS, NO_WINDOW, Architecture, Problems

_LATENTS = {
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim", "v_head_dim": "v_head_dim", "rope_interleave": "rope_interleave",
}  # fmt: skip
_EXPERTS = {
    "num_experts": "n_routed_experts", "experts_per_token": "num_experts_per_tok", "n_group": "n_group",
    "topk_group": "topk_group", "moe_ffn_hidden_size": "moe_intermediate_size", "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
}  # fmt: skip
_SHARED, _DENSE = "n_shared_experts", "first_k_dense_replace"


def _read(raw: Mapping[str, Any], values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    found = []
    for key, least in ((_SHARED, 1), (_DENSE, 0)):
        value = values[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            problems.append(f"{key} is {value!r}; it is a whole number >= {least}")
            value = least
        found.append(value)
    turned = values["qk_rope_head_dim"]
    if raw.get("head_dim") not in (None, turned):
        problems.append(f"head_dim is {raw['head_dim']!r} and qk_rope_head_dim {turned}; it is the same, or absent")
    return {"shared_ffn_hidden_size": found[0] * values["moe_intermediate_size"], "dense_layers": found[1]}


def _write(config: GPTConfig) -> dict[str, Any]:
    return {
        _SHARED: config.shared_ffn_hidden_size // config.moe_ffn_hidden_size,
        _DENSE: config.dense_layers,
        "qk_head_dim": config.head_dim,
        "head_dim": config.qk_rope_head_dim,
    }


def _check(config: GPTConfig) -> None:
    if config.shared_ffn_hidden_size % config.moe_ffn_hidden_size:
        raise ConfigError(
            f"model.shared_ffn_hidden_size is {config.shared_ffn_hidden_size} and model.moe_ffn_hidden_size "
            f"{config.moe_ffn_hidden_size}; transformers' DeepSeek-V3 has shared experts of the size of the others"
        )


DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    name="DeepseekV3ForCausalLM",
    defaults={
        **DEFAULTS, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048, _SHARED: 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, _DENSE: 3, "norm_topk_prob": True,
        "rope_interleave": True,
    },
    keys=_LATENTS | _EXPERTS,
    without=frozenset({"head_dim"}),
    model={"scoring_func": "sigmoid", "expert_bias": True, "router_aux_loss": 0.0},
    free=frozenset({"head_dim", "shared_ffn_hidden_size", "dense_layers", "expert_bias_update_rate"}),
    needs=("num_experts", "kv_lora_rank", "shared_ffn_hidden_size"),
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, **NO_WINDOW},
    read=_read,
    write=_write,
    more_keys=frozenset({_SHARED, _DENSE, "head_dim"}),
    neutral=frozenset(
        {
            "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers", "aux_loss_alpha", "seq_aux",
            "ep_size", "output_router_logits",
        }
    ),
    constant={"attention_bias": False, "output_router_logits": False, "num_nextn_predict_layers": 0},
    check=_check,
    tensors={
        "attention.q_a": "self_attn.q_a_proj", "attention.q_a_norm": "self_attn.q_a_layernorm",
        "attention.q_b": "self_attn.q_b_proj", "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm", "attention.kv_b": "self_attn.kv_b_proj",
        "ffn.router.bias": "mlp.gate.e_score_correction_bias",
        **{f"ffn.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    },
)  # fmt: skip
