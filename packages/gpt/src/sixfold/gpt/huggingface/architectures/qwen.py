"""Qwen2 and Qwen3, and the two's mixtures of experts.

qwen.py (this file) --> architectures/__init__.py --> config.py
"""

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.huggingface import experts_config
from sixfold.gpt.huggingface.architecture import DEFAULTS, Architecture

_QWEN = {
    **DEFAULTS, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}  # fmt: skip
_WINDOWS = {"use_sliding_window": False, "sliding_window": None}
_EXPERTS = frozenset(
    {"num_experts", "experts_per_token", "router_aux_loss", "moe_ffn_hidden_size", "norm_topk_prob", "dense_layers"}
)


def _layers(config: GPTConfig) -> dict[str, object]:
    return {"max_window_layers": config.num_layers}


def _experts(config: GPTConfig) -> dict[str, object]:
    return _layers(config) | experts_config.write(config)


QWEN2 = Architecture(
    model_type="qwen2",
    name="Qwen2ForCausalLM",
    defaults=_QWEN,
    model={"qkv_bias": True},
    write=_layers,
    constant=_WINDOWS,
)
QWEN3 = Architecture(
    model_type="qwen3",
    name="Qwen3ForCausalLM",
    defaults=_QWEN | {"head_dim": 128},
    model={"qk_norm": True},
    write=_layers,
    constant=_WINDOWS | {"attention_bias": False},
)
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    name="Qwen2MoeForCausalLM",
    defaults={
        **_QWEN, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, **experts_config.DEFAULTS, "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 5632, "num_experts": 60,
    },
    model={"qkv_bias": True, "shared_expert_gate": True},
    free=_EXPERTS | {"shared_ffn_hidden_size"},
    needs=("num_experts", "shared_ffn_hidden_size"),
    fixed={"qkv_bias": True},
    read=experts_config.read,
    write=_experts,
    more_keys=experts_config.KEYS | {"shared_expert_intermediate_size"},
    constant=_WINDOWS | {"qkv_bias": True},
)  # fmt: skip
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    name="Qwen3MoeForCausalLM",
    defaults={
        **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        **experts_config.DEFAULTS,
    },
    model={"qk_norm": True},
    free=_EXPERTS,
    needs=("num_experts",),
    read=experts_config.read,
    write=_experts,
    more_keys=experts_config.KEYS,
    constant=_WINDOWS | {"attention_bias": False},
)  # fmt: skip
