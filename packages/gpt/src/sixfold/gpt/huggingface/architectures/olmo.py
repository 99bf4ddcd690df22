"""OLMo-2: norms behind attention and feed-forward part, q and k normed over all heads. OLMo-3: also sliding layers.

    olmo.py (this file) --> architectures/__init__.py --> config.py

In OLMo-3 RoPE's scaling is of the layers that do not slide.
"""

from collections.abc import Mapping
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.huggingface.architecture import DEFAULTS, NO_WINDOW, Architecture, Problems
from sixfold.gpt.huggingface.layer_types import read_layer_types, written_layer_types
from sixfold.gpt.huggingface.rope_config import refuse_by_layer

_OLMO = {
    **DEFAULTS, "vocab_size": 50304, "intermediate_size": 11008, "num_key_value_heads": None, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
}  # fmt: skip
_NORMS = {"qk_norm": True, "qk_norm_over": "projection", "norm_position": "post"}
_NAMES = {"attention_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"}


def _read(raw: Mapping[str, Any], values: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    return read_layer_types(raw, values, lambda layer: (layer + 1) % 4 != 0, problems)


def _write(config: GPTConfig) -> Mapping[str, Any]:
    return written_layer_types(config)


OLMO2 = Architecture(
    model_type="olmo2",
    name="Olmo2ForCausalLM",
    defaults=_OLMO,
    model=_NORMS,
    fixed=NO_WINDOW,
    constant={"attention_bias": False},
    tensors=_NAMES,
)
OLMO3 = Architecture(
    model_type="olmo3",
    name="Olmo3ForCausalLM",
    defaults=_OLMO | {"rope_theta": 500000.0, "sliding_window": 4096},
    model=_NORMS,
    free=frozenset({"sliding_window", "layer_types", "rope_local_base_freq"}),
    read=_read,
    write=_write,
    more_keys=frozenset({"sliding_window"}),
    by_layer=True,
    local_rope=True,
    check=refuse_by_layer,
    constant={"attention_bias": False},
    tensors=_NAMES,
)
