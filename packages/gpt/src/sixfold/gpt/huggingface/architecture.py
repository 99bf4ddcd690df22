"""What an architecture of Hugging Face is: its keys of config.json, its fields of [model], its names of tensors.

    architectures/*.py: one Architecture each --> config.py: config.json <--> [model]    tensor_names.py <-- its names

Every architecture here has the keys of SIZES and FIXED. What is its own stands in its own file. Pure: no files, no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig

Problems = list[str]

# Field of [model] -> key of config.json.
SIZES: Mapping[str, str] = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads", "head_dim": "head_dim", "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}  # fmt: skip
# Fields that every architecture can have at any value.
_FREE = frozenset((*SIZES, "rope_theta", "rope_scaling", "vocab_multiple"))
DEFAULTS: Mapping[str, Any] = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "initializer_range": 0.02, "rope_theta": 10000.0, "head_dim": None,
}  # fmt: skip
# Of one whose layers never slide: transformers drops keys and values behind a window from its cache all the same.
NO_WINDOW: Mapping[str, Any] = {"sliding_window": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What differs between them.

    Attributes:
        defaults: those of transformers' class for keys that may be left out.
        keys: further fields of [model] and the key of config.json that each is.
        without: fields of SIZES whose key says something else.
        neutral: further keys that have no part in the logits.
        model: fields of [model] that all its models have, beside the defaults of [model].
        free: further fields of [model] that its models may have at any value.
        needs: fields of [model] that are not 0.
        fixed: further keys of config.json that have one value.
        read: fields of [model] of what is more than a key for a field. Takes config.json, the same with the defaults
            of what is not there, and the list of what is wrong.
        write: the same back.
        more_keys: keys that ``read`` reads.
        constant: keys that are written and have no part in the logits.
        by_layer: layers slide or do not, each as ``layer_types`` says.
        local_rope: and rotary positions of the two are told apart.
        check: refuses a model that its class does not take; a ConfigError.
        tensors: its names of tensors, where they are not Llama's.
    """

    model_type: str
    name: str
    defaults: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    neutral: frozenset[str] = frozenset()
    model: Mapping[str, Any] = field(default_factory=dict)
    free: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any], Mapping[str, Any], Problems], dict[str, Any]] | None = None
    write: Callable[[GPTConfig], Mapping[str, Any]] | None = None
    more_keys: frozenset[str] = frozenset()
    by_layer: bool = False
    local_rope: bool = False
    constant: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[GPTConfig], None] | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[str, str]:
        """Field of [model] -> key of config.json."""
        return {**{ours: theirs for ours, theirs in SIZES.items() if ours not in self.without}, **self.keys}

    @property
    def experts(self) -> bool:
        """Its models are mixtures of experts."""
        return "num_experts" in self.needs

    def values(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a config.json, with the defaults of those that are not there."""
        return {**self.defaults, **{key: value for key, value in raw.items() if value is not None}}

    def lacks(self, config: GPTConfig) -> dict[str, Any]:
        """Fields of a model that it cannot have at that value, and which value it could have."""
        found: dict[str, Any] = {}
        free = _FREE | self.free | self.keys.keys()
        for one in fields_of(GPTConfig):
            wanted = self.model.get(one.name, one.default)
            if one.name not in free and getattr(config, one.name) != wanted:
                found[one.name] = wanted
        return found | {name: "> 0" for name in self.needs if not getattr(config, name)}
