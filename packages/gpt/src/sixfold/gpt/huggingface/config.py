"""config.json of Hugging Face's architectures <--> [model].

    config.json --> read (this file) --> GPTConfig --> convert.py        GPTConfig --> write (this file) --> config.json

[Note: every key is judged] transformers ignores a key that its class does not know, and takes the class's default for
one that is not there. Here a key is read, or must have the one value that changes nothing (FIXED), or is known to have
no part in the logits (NEUTRAL). Any other is refused. architectures/ has what differs from one to the other,
rope_config.py judges rotary positions, experts_config.py experts. Pure: no files, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface import rope_config
from sixfold.gpt.huggingface.architecture import Architecture
from sixfold.gpt.huggingface.architectures import ARCHITECTURES
from sixfold.gpt.huggingface.rope_config import shortened

# null where a model has none of it; in [model] that is 0.
_NUMBERS_OR_NULL = ("attn_logit_softcapping", "final_logit_softcapping")
_MAY_BE_NULL = ("head_dim", "num_key_value_heads", "sliding_window", "q_lora_rank", *_NUMBERS_OR_NULL)

# With another value these change what the model computes, in evaluation or in training.
FIXED: Mapping[str, Any] = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    "use_sliding_window": False, "is_encoder_decoder": False, "chunk_size_feed_forward": 0, "use_mrope": False,
    "add_cross_attention": False, "cross_attention_hidden_size": None, "pruned_heads": {}, "torchscript": False,
    "rope_interleaved": False,
}  # fmt: skip
# No value of these has a part in the logits of a causal language model of these architectures.
_NEUTRAL = """
    _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled _name_or_path attn_implementation
    bos_token_id dtype eos_token_id finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range
    is_decoder is_llama_config label2id max_position_embeddings max_window_layers model_type name_or_path num_labels
    output_attentions output_hidden_states pad_token_id prefix pretraining_tp problem_type return_dict sep_token_id
    sliding_window task_specific_params tokenizer_class torch_dtype transformers.js_config transformers_version
    unsloth_version use_bfloat16 use_cache decoder_start_token_id bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature tf_legacy_loss tie_encoder_decoder top_k top_p typical_p
    cache_implementation _sliding_window_pattern
"""
NEUTRAL = frozenset(_NEUTRAL.split())
READ = frozenset((*rope_config.KEYS, "architectures", "layer_types"))


def read(raw: Mapping[str, Any]) -> GPTConfig:
    """The model that a config.json describes.

    Raises:
        ConfigError: one that lists everything that is not understood, or would change the logits.
    """
    problems: list[str] = []
    kind = _architecture(raw, problems)
    if kind is None:
        raise ConfigError(f"config.json: {'; '.join(problems)}")
    sizes = {theirs: _size(raw, kind, theirs, problems) for theirs in kind.sizes.values()}
    values = {ours: sizes[theirs] for ours, theirs in kind.sizes.items()} | dict(kind.model)
    if kind.read is not None:
        values |= kind.read(raw, kind.values(raw) | sizes, problems)
    values |= rope_config.read_rope(raw, kind, problems, slides=bool(values.get("sliding_window")))
    if not kind.by_layer:
        _check_layer_types(raw, values, problems)
    known, fixed, neutral = known_keys(kind), fixed_keys(kind), neutral_keys(kind)
    for key, value in raw.items():
        if key in fixed:
            if value != fixed[key] and value is not None:
                only = "null" if fixed[key] is None else repr(fixed[key])
                problems.append(f"{key} is {value!r}, and only {only} is supported")
        elif key not in neutral and key not in known and value is not None:
            said = f"{key} is {shortened(value)}, which is not known"
            problems.append(f"{said}; take it out if it has no part in the logits")
    if problems:
        raise ConfigError(f"config.json: {'; '.join(problems)}")
    try:
        return GPTConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"config.json as [model]: {error}") from error


def known_keys(kind: Architecture) -> frozenset[str]:
    """Keys that are read."""
    return READ | kind.more_keys | frozenset(kind.sizes.values())


def fixed_keys(kind: Architecture) -> Mapping[str, Any]:
    """Keys that must have one value, and which."""
    return {**FIXED, **kind.fixed}


def neutral_keys(kind: Architecture) -> frozenset[str]:
    """Keys that may have any value."""
    return (NEUTRAL | kind.neutral) - (known_keys(kind) - {"initializer_range"}) - fixed_keys(kind).keys()


def longest(raw: Mapping[str, Any]) -> int:
    """The longest row that the model of a config.json, which ``read`` took, is made for."""
    return int(raw.get("max_position_embeddings", kind_of(raw).defaults["max_position_embeddings"]))


def kind_of(raw: Mapping[str, Any]) -> Architecture:
    """The architecture of a config.json, which ``read`` took."""
    kind = _architecture(raw, [])
    assert kind is not None, f"read refuses {raw.get('architectures')}"
    return kind


def write(
    config: GPTConfig,
    *,
    max_positions: int,
    dtype: str,
    tokens: Mapping[str, Any],
    model_type: str = "",
    transformers: str = "4.51.0",
) -> dict[str, Any]:
    """config.json of a model, for transformers 4 and 5: both spellings of RoPE.

    Args:
        max_positions: the longest row that the model has been trained on.
        dtype: name of the weights' dtype, as float32.
        tokens: bos_token_id, eos_token_id, pad_token_id, those that are known.
        model_type: of the architecture that it was imported from, which is written again if it computes the model.
        transformers: the oldest release that reads it.
    Raises:
        ConfigError: no architecture of these computes this model.
    """
    kind = architecture_of(config, model_type)
    written: dict[str, Any] = {
        theirs: None if theirs in _MAY_BE_NULL and not getattr(config, ours) else getattr(config, ours)
        for ours, theirs in kind.sizes.items()
    }
    written |= {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        **rope_config.written_rope(config, max_positions, by_layer=kind.local_rope),
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformers_version": transformers,
        "use_cache": True,
        **{key: tokens.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **kind.constant,
    }
    if kind.write is not None:
        written |= kind.write(config)
    return dict(sorted(written.items()))


def architecture_of(config: GPTConfig, model_type: str = "") -> Architecture:
    """The architecture that computes this model: that of ``model_type``, if it does, or the first one.

    Raises:
        ConfigError: there is none.
    """
    lacks = {kind.name: kind.lacks(config) for kind in ARCHITECTURES}
    found = [kind for kind in ARCHITECTURES if not lacks[kind.name]]
    if not found:
        near = min(lacks, key=lambda name: len(lacks[name]))
        wanted = " and ".join(f"model.{key} = {_toml(value)}" for key, value in lacks[near].items())
        raise ConfigError(
            f"no architecture of transformers computes this model; the nearest, {near}, has {wanted}. "
            "sixfold-ckpt convert writes the tensors of other models as they are"
        )
    kind = next((kind for kind in found if kind.model_type == model_type), found[0])
    if kind.check is not None:
        kind.check(config)
    return kind


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _architecture(raw: Mapping[str, Any], problems: list[str]) -> Architecture | None:
    known = ", ".join(kind.name for kind in ARCHITECTURES)
    names, model_type = raw.get("architectures"), raw.get("model_type")
    if names is None:
        found = [kind for kind in ARCHITECTURES if kind.model_type == model_type]
        if not found:
            problems.append(f"model_type is {model_type!r} without architectures; known are {known}")
        return found[0] if found else None
    if not isinstance(names, list) or len(names) != 1 or names[0] not in [kind.name for kind in ARCHITECTURES]:
        problems.append(f"architectures is {names!r}; it is one of {known}")
        return None
    kind = next(kind for kind in ARCHITECTURES if kind.name == names[0])
    if model_type not in (None, kind.model_type):
        problems.append(
            f"model_type is {model_type!r} and architectures {names}, whose model_type is {kind.model_type!r}"
        )
    return kind


def _size(raw: Mapping[str, Any], kind: Architecture, key: str, problems: list[str]) -> Any:
    value, default = raw.get(key, kind.defaults[key]), kind.defaults[key]
    if value is None and key in _MAY_BE_NULL:
        return 0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        right, rule = isinstance(value, bool), "true or false"
    elif key in _NUMBERS_OR_NULL:
        right, rule = number and value > 0, "a number > 0, or null for none"  # transformers divides by it
    elif isinstance(default, float):
        right, rule = number and value >= 0, "a number >= 0"
    else:
        right, rule = number and isinstance(value, int) and value > 0, "a whole number > 0"
    if not right:
        problems.append(f"{key} is {value!r}; it is {rule}")
        return default or 1
    return value


def _check_layer_types(raw: Mapping[str, Any], values: Mapping[str, Any], problems: list[str]) -> None:
    """Of an architecture whose layers are all of one type."""
    kinds, layers = raw.get("layer_types"), values["num_layers"]
    alike = "sliding_attention" if values.get("sliding_window") else "full_attention"
    if kinds is not None and kinds != [alike] * layers:
        other = sorted({str(one) for one in kinds} - {alike}) if isinstance(kinds, list) else [repr(kinds)]
        problems.append(f"layer_types has {other or len(kinds)}; it is {alike} for each of {layers} layers")
