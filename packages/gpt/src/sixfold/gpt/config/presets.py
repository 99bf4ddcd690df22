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


def _experts(moe_ffn: int) -> dict[str, Any]:
    return {"num_experts": 128, "experts_per_token": 8, "moe_ffn_hidden_size": moe_ffn, "router_aux_loss": 0.001}


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
    "qwen3-30b-a3b": _qwen_3(48, 2048, 32, 4, 6144, **_experts(768)),
    "qwen3-235b-a22b": _qwen_3(94, 4096, 64, 4, 12288, **_experts(1536)),
    "smollm2-135m": _model(30, 576, 9, 3, 1536, vocab_size=49152, rope_theta=1e5, tie_embeddings=True),
    "smollm2-360m": _model(32, 960, 15, 5, 2560, vocab_size=49152, rope_theta=1e5, tie_embeddings=True),
    "smollm2-1.7b": _model(24, 2048, 32, 32, 8192, vocab_size=49152, rope_theta=130000.0, tie_embeddings=True),
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
