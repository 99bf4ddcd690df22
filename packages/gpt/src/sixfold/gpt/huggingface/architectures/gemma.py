"""Gemma 2 and Gemma 3 (text): norms before and behind, (1 + w) norms, GeGLU, soft caps, local and global layers.

    gemma.py (this file) --> architectures/__init__.py --> config.py

Soft caps of attention are those of the eager attention of transformers: its sdpa ignores them. Its Gemma 3 keeps that
cap and applies it nowhere, so one has none here.
"""

from collections.abc import Mapping
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.huggingface.architecture import DEFAULTS, Architecture, Problems
from sixfold.gpt.huggingface.layer_types import read_layer_types, written_layer_types
from sixfold.gpt.huggingface.rope_config import refuse_by_layer

_GEMMA = {
    **DEFAULTS, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "sliding_window_pattern": 6,
}  # fmt: skip
_MODEL = {
    "norm_position": "both", "zero_centered_norm": True, "hidden_act": "gelu_pytorch_tanh", "scale_embeddings": True,
}  # fmt: skip
_FINAL = {"final_logit_softcapping": "final_logit_softcapping"}
_CAPS = _FINAL | {"attn_logit_softcapping": "attn_logit_softcapping"}
_ACT = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
_NAMES = {
    "attention_post_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_FREE = frozenset({"sliding_window", "layer_types", "query_pre_attn_scalar"})


def _scalar(values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    value = values["query_pre_attn_scalar"]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        problems.append(f"query_pre_attn_scalar is {value!r}; it is a number > 0")
        value = 1
    return {"query_pre_attn_scalar": 0.0 if value == values["head_dim"] else float(value)}


def _read_2(raw: Mapping[str, Any], values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    return _scalar(values, problems) | read_layer_types(raw, values, lambda layer: layer % 2 == 0, problems)


def _read_3(raw: Mapping[str, Any], values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    every = values["sliding_window_pattern"]
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        problems.append(f"sliding_window_pattern is {every!r}; it is a whole number > 0")
        every = 1
    return _scalar(values, problems) | read_layer_types(raw, values, lambda layer: (layer + 1) % every != 0, problems)


def _write(config: GPTConfig) -> dict[str, Any]:
    scalar = config.query_pre_attn_scalar or config.head_dim
    return written_layer_types(config) | {"query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar}


def _write_3(config: GPTConfig) -> dict[str, Any]:
    return _write(config) | {"rope_local_base_freq": config.rope_local_base_freq or config.rope_theta}


GEMMA2 = Architecture(
    model_type="gemma2",
    name="Gemma2ForCausalLM",
    defaults=_GEMMA
    | {"vocab_size": 256000, "max_position_embeddings": 8192}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    keys=_CAPS,
    model=_MODEL,
    free=_FREE,
    fixed=_ACT | {"use_bidirectional_attention": False},
    read=_read_2,
    write=_write,
    more_keys=frozenset({"sliding_window", "query_pre_attn_scalar"}),
    by_layer=True,
    constant=_ACT | {"attention_bias": False},
    tensors=_NAMES,
)
GEMMA3 = Architecture(
    model_type="gemma3_text",
    name="Gemma3ForCausalLM",
    defaults=_GEMMA
    | {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    | dict.fromkeys(_FINAL.values()),
    keys=_FINAL,
    model=_MODEL | {"qk_norm": True},
    free=_FREE | {"rope_local_base_freq"},
    fixed=_ACT | {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    read=_read_3,
    write=_write_3,
    more_keys=frozenset({"sliding_window", "query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq"}),
    by_layer=True,
    local_rope=True,
    check=refuse_by_layer,
    constant=_ACT | {"attention_bias": False, "attn_logit_softcapping": None},
    tensors=_NAMES,
)
