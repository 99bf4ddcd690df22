"""[model] of published models, by name.

    --preset NAME --> preset_named (this file) --> toml.py: files and arguments change it --> train_config.py

The numbers are those of each model's config.json; a test adds them up to the published number of parameters. Weights
are not in here: `sixfold import` takes those of a Hugging Face folder.
"""

from collections.abc import Mapping
from typing import Any

from sixfold.gpt.config.table import nearest
from sixfold.gpt.errors import ConfigError

_LLAMA_31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_OLMO_3: dict[str, Any] = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192.0, "beta_fast": 32.0,
    "beta_slow": 1.0, "attention_factor": 1.2079441541679836,
}  # fmt: skip
_DEEPSEEK_V3: dict[str, Any] = {
    "vocab_size": 129280, "norm_eps": 1e-6, "rope_interleave": True,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_experts": 256, "experts_per_token": 8, "router_aux_loss": 0.0, "moe_ffn_hidden_size": 2048,
    "shared_ffn_hidden_size": 2048, "dense_layers": 3, "scoring_func": "sigmoid", "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "expert_bias": True,
}  # fmt: skip
_LLAMA_32 = _LLAMA_31 | {"factor": 32.0}


def _model(layers: int, hidden: int, heads: int, groups: int, ffn: int, **other: Any) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "tie_embeddings": False,
        **other,
    }


def _llama_2(*sizes: int) -> dict[str, Any]:
    return _model(*sizes, vocab_size=32000)


def _llama_3(*sizes: int, **other: Any) -> dict[str, Any]:
    return _model(*sizes, vocab_size=128256, rope_theta=500000.0, **other)


def _qwen_25(*sizes: int, vocab_size: int = 152064, norm_eps: float = 1e-6, **other: Any) -> dict[str, Any]:
    return _model(*sizes, vocab_size=vocab_size, rope_theta=1e6, norm_eps=norm_eps, qkv_bias=True, **other)


def _qwen_3(*sizes: int, **other: Any) -> dict[str, Any]:
    return _model(*sizes, vocab_size=151936, head_dim=128, rope_theta=1e6, norm_eps=1e-6, qk_norm=True, **other)


def _balance(coefficient: float, experts_per_token: int, layers: int) -> float:
    """model.router_aux_loss of a router_aux_loss_coef. [Note: the balance of transformers] (experts_config.py)"""
    return float(f"{coefficient * experts_per_token / layers:.15g}")  # as an import of config.json reads it


def _mixtral(*sizes: int, coefficient: float) -> dict[str, Any]:
    balance = _balance(coefficient, 2, sizes[0])
    return _model(*sizes, vocab_size=32000, rope_theta=1e6, num_experts=8, router_aux_loss=balance)


def _layer_types(count: int, every: int) -> list[str]:
    """Every ``every``-th layer sees the whole row; the others slide."""
    return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(count)]


def _olmo_2(*sizes: int, vocab_size: int = 100352, **other: Any) -> dict[str, Any]:
    norms: dict[str, Any] = {"norm_eps": 1e-6, "qk_norm": True, "qk_norm_over": "projection", "norm_position": "post"}
    return _model(*sizes, vocab_size=vocab_size, rope_theta=500000.0, **norms) | other


def _olmo_3(*sizes: int) -> dict[str, Any]:
    """RoPE is scaled for rows of 65,536 tokens in the layers that see the whole row; training began with 8,192."""
    window: dict[str, Any] = {
        "sliding_window": 4096,
        "layer_types": _layer_types(sizes[0], 4),
        "rope_local_base_freq": 500000.0,
    }
    return _olmo_2(*sizes, vocab_size=100278, rope_scaling=_OLMO_3, **window)


def _gemma(*sizes: int, **other: Any) -> dict[str, Any]:
    kind: dict[str, Any] = {"norm_position": "both", "zero_centered_norm": True, "hidden_act": "gelu_pytorch_tanh"}
    return _model(*sizes, norm_eps=1e-6, scale_embeddings=True, **kind) | other | {"tie_embeddings": True}


def _gemma_2(*sizes: int, head_dim: int = 256, **other: Any) -> dict[str, Any]:
    caps: dict[str, Any] = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    window: dict[str, Any] = {"sliding_window": 4096, "layer_types": _layer_types(sizes[0], 2)}
    return _gemma(*sizes, vocab_size=256000, head_dim=head_dim, **caps, **window, **other)


def _gemma_3(*sizes: int, head_dim: int = 256, small: bool = False, **other: Any) -> dict[str, Any]:
    window: dict[str, Any] = {"sliding_window": 512 if small else 1024, "layer_types": _layer_types(sizes[0], 6)}
    rope: dict[str, Any] = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
    longer: dict[str, Any] = {} if small else {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    vocab = 262144 if small else 262208  # those that see pictures have 64 rows more
    return _gemma(*sizes, vocab_size=vocab, head_dim=head_dim, qk_norm=True, **window, **rope, **longer, **other)


def _qwen_3_moe(*sizes: int, moe_ffn: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "experts_per_token": 8, "moe_ffn_hidden_size": moe_ffn}
    return _qwen_3(*sizes, **experts, router_aux_loss=_balance(0.001, 8, sizes[0]))


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _llama_2(32, 4096, 32, 32, 11008),
    "llama-2-13b": _llama_2(40, 5120, 40, 40, 13824),
    "llama-2-70b": _llama_2(80, 8192, 64, 8, 28672),
    "llama-3-8b": _llama_3(32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama_3(80, 8192, 64, 8, 28672),
    "llama-3.1-8b": _llama_3(32, 4096, 32, 8, 14336, rope_scaling=_LLAMA_31),
    "llama-3.1-70b": _llama_3(80, 8192, 64, 8, 28672, rope_scaling=_LLAMA_31),
    "llama-3.1-405b": _llama_3(126, 16384, 128, 8, 53248, rope_scaling=_LLAMA_31),
    "llama-3.2-1b": _llama_3(16, 2048, 32, 8, 8192, rope_scaling=_LLAMA_32, tie_embeddings=True),
    "llama-3.2-3b": _llama_3(28, 3072, 24, 8, 8192, rope_scaling=_LLAMA_32, tie_embeddings=True),
    "qwen2.5-0.5b": _qwen_25(24, 896, 14, 2, 4864, vocab_size=151936, tie_embeddings=True),
    "qwen2.5-1.5b": _qwen_25(28, 1536, 12, 2, 8960, vocab_size=151936, tie_embeddings=True),
    "qwen2.5-3b": _qwen_25(36, 2048, 16, 2, 11008, vocab_size=151936, tie_embeddings=True),
    "qwen2.5-7b": _qwen_25(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen_25(48, 5120, 40, 8, 13824, norm_eps=1e-5),
    "qwen2.5-32b": _qwen_25(64, 5120, 40, 8, 27648, norm_eps=1e-5),
    "qwen2.5-72b": _qwen_25(80, 8192, 64, 8, 29568, norm_eps=1e-5),
    "qwen3-0.6b": _qwen_3(28, 1024, 16, 8, 3072, tie_embeddings=True),
    "qwen3-1.7b": _qwen_3(28, 2048, 16, 8, 6144, tie_embeddings=True),
    "qwen3-4b": _qwen_3(36, 2560, 32, 8, 9728, tie_embeddings=True),
    "qwen3-8b": _qwen_3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen_3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen_3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen_3_moe(48, 2048, 32, 4, 6144, moe_ffn=768),
    "qwen3-235b-a22b": _qwen_3_moe(94, 4096, 64, 4, 12288, moe_ffn=1536),
    "smollm2-135m": _model(30, 576, 9, 3, 1536, vocab_size=49152, rope_theta=1e5, tie_embeddings=True),
    "smollm2-360m": _model(32, 960, 15, 5, 2560, vocab_size=49152, rope_theta=1e5, tie_embeddings=True),
    "smollm2-1.7b": _model(24, 2048, 32, 32, 8192, vocab_size=49152, rope_theta=130000.0, tie_embeddings=True),
    "mistral-7b-v0.1": _model(32, 4096, 32, 8, 14336, vocab_size=32000, sliding_window=4096),
    "mistral-7b-v0.3": _model(32, 4096, 32, 8, 14336, vocab_size=32768, rope_theta=1e6),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 8, 14336, coefficient=0.02),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 8, 16384, coefficient=0.001),
    "olmo-2-1b": _olmo_2(16, 2048, 16, 16, 8192),
    "olmo-2-7b": _olmo_2(32, 4096, 32, 32, 11008),
    "olmo-2-13b": _olmo_2(40, 5120, 40, 40, 13824),
    "olmo-2-32b": _olmo_2(64, 5120, 40, 8, 27648),
    "olmo-3-7b": _olmo_3(32, 4096, 32, 32, 11008),
    "olmo-3-32b": _olmo_3(64, 5120, 40, 8, 27648),
    "gemma-2-2b": _gemma_2(26, 2304, 8, 4, 9216),
    "gemma-2-9b": _gemma_2(42, 3584, 16, 8, 14336),
    "gemma-2-27b": _gemma_2(46, 4608, 32, 16, 36864, head_dim=128, query_pre_attn_scalar=144.0),
    "gemma-3-270m": _gemma_3(18, 640, 4, 1, 2048, small=True),
    "gemma-3-1b": _gemma_3(26, 1152, 4, 1, 6912, small=True),
    "gemma-3-4b": _gemma_3(34, 2560, 8, 4, 10240),
    "gemma-3-12b": _gemma_3(48, 3840, 16, 8, 15360),
    "gemma-3-27b": _gemma_3(62, 5376, 32, 16, 21504, head_dim=128, query_pre_attn_scalar=168.0),
    "deepseek-v3": _model(61, 7168, 128, 128, 18432, **_DEEPSEEK_V3),
    "tinyllama-1.1b": _model(22, 2048, 32, 4, 5632, vocab_size=32000),
}


def preset_named(name: str) -> dict[str, Any]:
    """Keys of [model].

    Raises:
        ConfigError: there is no such model, with the nearest that there is.
    """
    if name in PRESETS:
        return dict(PRESETS[name])
    near = nearest(name.lower().replace("_", "-"), PRESETS) or "one of them"
    raise ConfigError(f"--preset is {name!r}; {near} works. There are {', '.join(PRESETS)}")
