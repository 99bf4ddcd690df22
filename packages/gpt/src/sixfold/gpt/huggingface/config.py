"""config.json of Hugging Face's Llama, Qwen2, Qwen3 and the two's mixtures of experts <--> [model].

    config.json --> read (this file) --> GPTConfig --> convert.py        GPTConfig --> write (this file) --> config.json

[Note: every key is judged] transformers ignores a key that its class does not know, and takes the class's default for
one that is not there. Here a key is read, or must have the one value that changes nothing (FIXED), or is known to have
no part in the logits (NEUTRAL). Any other is refused. experts_config.py judges the keys of experts. Pure: no files, no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface import experts_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What differs between them; ``defaults`` are those of transformers' class for keys that may be left out."""

    model_type: str
    name: str
    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    shared: bool = False  # an expert that every token passes, behind a gate


_SHARED = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096, "rms_norm_eps": 1e-6}
_SHARED |= {"tie_word_embeddings": False, "initializer_range": 0.02}
_QWEN = _SHARED | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32}
_QWEN |= {"max_position_embeddings": 32768}
LLAMA = Architecture(
    model_type="llama",
    name="LlamaForCausalLM",
    defaults=_SHARED
    | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "max_position_embeddings": 2048}
    | {"head_dim": None},
)
QWEN2 = Architecture(model_type="qwen2", name="Qwen2ForCausalLM", defaults=_QWEN | {"head_dim": None}, qkv_bias=True)
QWEN3 = Architecture(model_type="qwen3", name="Qwen3ForCausalLM", defaults=_QWEN | {"head_dim": 128}, qk_norm=True)
QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    name="Qwen2MoeForCausalLM",
    defaults=_QWEN
    | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"num_key_value_heads": 16, "head_dim": None}
    | dict(experts_config.DEFAULTS)
    | {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632}
    | {"num_experts": 60},
    qkv_bias=True,
    experts=True,
    shared=True,
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    name="Qwen3MoeForCausalLM",
    defaults=_QWEN
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4}
    | {"head_dim": None}
    | dict(experts_config.DEFAULTS),
    qk_norm=True,
    experts=True,
)
ARCHITECTURES = (LLAMA, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE)

_SIZES = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads", "head_dim": "head_dim", "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size", "norm_eps": "rms_norm_eps", "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}  # fmt: skip
_MAY_BE_NULL = ("head_dim", "num_key_value_heads")
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

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
"""
NEUTRAL = frozenset(_NEUTRAL.split())
READ = frozenset((*_SIZES.values(), *_ROPE, "architectures", "layer_types"))


def read(raw: Mapping[str, Any]) -> GPTConfig:
    """The model that a config.json describes.

    Raises:
        ConfigError: one that lists everything that is not understood, or would change the logits.
    """
    problems: list[str] = []
    kind = _architecture(raw, problems)
    if kind is None:
        raise ConfigError(f"config.json: {'; '.join(problems)}")
    values = {ours: _size(raw, kind, theirs, problems) for ours, theirs in _SIZES.items()}
    values["head_dim"] = values["head_dim"] or 0
    values["num_query_groups"] = values["num_query_groups"] or 0
    values["rope_theta"], values["rope_scaling"] = _rope(raw, kind, problems)
    _check_layer_types(raw, values["num_layers"], problems)
    if kind.experts:
        values |= experts_config.read(raw, kind.defaults, values["num_layers"], problems)
    known, fixed = known_keys(kind), fixed_keys(kind)
    for key, value in raw.items():
        if key in fixed:
            if value != fixed[key] and value is not None:
                problems.append(f"{key} is {value!r}, and only {fixed[key]!r} is supported")
        elif key not in NEUTRAL and key not in known and value is not None:
            said = f"{key} is {_short(value)}, which is not known"
            problems.append(f"{said}; take it out if it has no part in the logits")
    if problems:
        raise ConfigError(f"config.json: {'; '.join(problems)}")
    try:
        return GPTConfig(**values, qkv_bias=kind.qkv_bias, qk_norm=kind.qk_norm)
    except ConfigError as error:
        raise ConfigError(f"config.json as [model]: {error}") from error


def known_keys(kind: Architecture) -> frozenset[str]:
    """Keys that are read."""
    return READ | experts_config.keys(shared=kind.shared) if kind.experts else READ


def fixed_keys(kind: Architecture) -> Mapping[str, Any]:
    """Keys that must have one value, and which."""
    return FIXED if kind is not QWEN2_MOE else {**FIXED, "qkv_bias": True}


def longest(raw: Mapping[str, Any]) -> int:
    """The longest row that the model of a config.json, which ``read`` took, is made for."""
    kind = _architecture(raw, [])
    assert kind is not None, f"read refuses {raw.get('architectures')}"
    return int(raw.get("max_position_embeddings", kind.defaults["max_position_embeddings"]))


def write(
    config: GPTConfig, *, max_positions: int, dtype: str, tokens: Mapping[str, Any], transformers: str = "4.51.0"
) -> dict[str, Any]:
    """config.json of a model, for transformers 4 and 5: both spellings of RoPE.

    Args:
        max_positions: the longest row that the model has been trained on.
        dtype: name of the weights' dtype, as float32.
        tokens: bos_token_id, eos_token_id, pad_token_id, those that are known.
        transformers: the oldest release that reads it.
    Raises:
        ConfigError: no architecture of these computes this model.
    """
    kind = architecture_of(config)
    scaling: dict[str, Any] = dict(config.rope_scaling)
    if scaling:
        context = int(scaling["original_max_position_embeddings"])
        scaling["original_max_position_embeddings"] = context
        max_positions = max(max_positions, int(context * scaling["factor"]))
    written: dict[str, Any] = {theirs: getattr(config, ours) for ours, theirs in _SIZES.items()}
    written |= {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "max_position_embeddings": max_positions,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default", **scaling},
        "rope_scaling": scaling or None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformers_version": transformers,
        "use_cache": True,
        **{key: tokens.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if not kind.qkv_bias:
        written["attention_bias"] = False
    if kind.experts:
        written |= experts_config.write(config, transformers)
    if kind is QWEN2_MOE:
        written["qkv_bias"] = True
    if kind is LLAMA:
        written["mlp_bias"] = False
    else:
        written |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.num_layers}
    return dict(sorted(written.items()))


def architecture_of(config: GPTConfig) -> Architecture:
    """The architecture that computes this model.

    Raises:
        ConfigError: there is none.
    """
    if config.qk_norm and config.qkv_bias:
        raise ConfigError(
            "model.qk_norm and model.qkv_bias are both true; Qwen3 has the one and Qwen2 the other, and no "
            "architecture of transformers both: sixfold-ckpt convert writes the tensors as they are"
        )
    if config.num_experts:
        experts_config.check(config)
    wanted = config.qk_norm, config.qkv_bias, config.num_experts > 0
    kind = next(k for k in ARCHITECTURES if (k.qk_norm, k.qkv_bias, k.experts) == wanted)
    if kind is LLAMA and config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size is {config.hidden_size} and model.num_attention_heads {config.num_attention_heads}; "
            "transformers' Llama wants the second to divide the first, whatever head_dim is"
        )
    return kind


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
    value = raw.get(key, kind.defaults[key])
    if value is None and key in _MAY_BE_NULL:
        return None
    default = kind.defaults[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        right, rule = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        right, rule = number and value >= 0, "a number >= 0"
    else:
        right, rule = number and isinstance(value, int) and value > 0, "a whole number > 0"
    if not right:
        problems.append(f"{key} is {value!r}; it is {rule}")
        return default or 1
    return value


def _check_layer_types(raw: Mapping[str, Any], layers: int, problems: list[str]) -> None:
    kinds = raw.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * layers:
        other = sorted({str(one) for one in kinds} - {"full_attention"}) if isinstance(kinds, list) else [repr(kinds)]
        problems.append(f"layer_types has {other or len(kinds)}; it is full_attention for each of {layers} layers")


def _rope(raw: Mapping[str, Any], kind: Architecture, problems: list[str]) -> tuple[float, dict[str, float | str]]:
    """(theta, llama3's table or {}) of whatever spelling: rope_scaling (4.x) and rope_parameters (5.x) must agree."""
    tables: dict[str, dict[str, Any]] = {}
    for spelling in ("rope_scaling", "rope_parameters"):
        table = raw.get(spelling) or {}
        if not isinstance(table, dict):
            problems.append(f"{spelling} is {table!r}; it is a table or null")
            table = {}
        if table:
            tables[spelling] = {key: value for key, value in table.items() if value is not None}
    outside = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if raw.get(key) is not None}
    thetas = {f"{where}.rope_theta": table["rope_theta"] for where, table in tables.items() if "rope_theta" in table}
    thetas |= {"rope_theta": outside["rope_theta"]} if "rope_theta" in outside else {}
    if len(set(map(repr, map(_number, thetas.values())))) > 1:
        problems.append(" and ".join(f"{where} is {value!r}" for where, value in thetas.items()) + ", which differ")
    theta = _number(next(iter(thetas.values()), 10000.0))
    if theta is None or theta <= 0:
        problems.append(f"rope_theta is {next(iter(thetas.values()))!r}; it is a number > 0")
    found = [_scaling(raw, kind, where, table, problems) for where, table in tables.items()]
    if len(found) == 2 and found[0] != found[1]:
        problems.append(
            f"rope_scaling is {raw['rope_scaling']} and rope_parameters {raw['rope_parameters']}: they differ"
        )
    if _number(outside.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(f"partial_rotary_factor is {outside['partial_rotary_factor']!r}, and only 1.0 is supported")
    return theta or 1.0, found[0] if found else {}


def _scaling(
    raw: Mapping[str, Any], kind: Architecture, where: str, table: Mapping[str, Any], problems: list[str]
) -> dict[str, float | str]:
    names = {table[key] for key in ("rope_type", "type") if isinstance(table.get(key), str)} or {"default"}
    wrong = [repr(table[key]) for key in ("rope_type", "type") if not isinstance(table.get(key, ""), str)]
    wrong += sorted(repr(name) for name in names - {"default", "llama3"})
    if wrong or len(names) > 1:
        said = " and ".join(wrong or sorted(map(repr, names)))
        problems.append(f"{where} has rope_type {said}; it is one of 'default', 'llama3'")
        return {}
    (name,) = names
    plain = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    odd = sorted(set(table) - {*plain, *(_LLAMA3 if name == "llama3" else ())})
    problems += [f"{where}.{key} is {_short(table[key])}, which rope_type {name!r} does not have" for key in odd]
    if _number(table.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append(
            f"{where}.partial_rotary_factor is {table['partial_rotary_factor']!r}, and only 1.0 is supported"
        )
    if name == "default":
        return {}
    context = "original_max_position_embeddings"
    # As transformers: a key beside the table comes first, and the longest row where nothing says it.
    longest = raw.get("max_position_embeddings", kind.defaults["max_position_embeddings"])
    given = {context: longest, **table} | ({context: raw[context]} if raw.get(context) is not None else {})
    scaling: dict[str, float | str] = {"rope_type": "llama3"}
    for key in _LLAMA3:
        value = _number(given.get(key))
        if value is None or value <= 0:
            problems.append(f"{where}.{key} is {given.get(key)!r}; it is a number > 0")
        else:
            scaling[key] = value
    return scaling


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
