"""config.json: every key is read, must have its one value, or has no part in the logits; transformers is the judge."""

import copy
import json
import math

import pytest
import torch
from hf_helpers import CASES, LLAMA3, edit_json, peer, write_folder

from sixfold.gpt import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface.config import ARCHITECTURES, FIXED, fixed_keys, known_keys, neutral_keys, read, write

transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

KINDS = {kind.model_type: kind for kind in ARCHITECTURES}
SMALL = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
# Another value than the default of each key, to see who minds.
OTHER = {
    "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1,
    "use_sliding_window": True, "is_encoder_decoder": True, "chunk_size_feed_forward": 4, "use_mrope": True,
    "add_cross_attention": True, "cross_attention_hidden_size": 8, "pruned_heads": {"0": [1]}, "torchscript": True,
    "rope_interleaved": True,
}  # fmt: skip


def base(kind, **fields):
    sizes = SMALL | ({"num_key_value_heads": 4, "first_k_dense_replace": 1} if kind == "deepseek_v3" else {})
    return {"architectures": [KINDS[kind].name], "model_type": kind, **sizes, **copy.deepcopy(fields)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_transformers_has_is_judged(kind):
    theirs = transformers.AutoConfig.for_model(kind).to_dict()
    known, fixed, neutral = (judged(KINDS[kind]) for judged in (known_keys, fixed_keys, neutral_keys))
    assert not theirs.keys() - known - neutral - fixed.keys()
    assert all(theirs[key] in (value, None) for key, value in fixed.items() if key in theirs)
    assert not (neutral - {"initializer_range"}) & known and not neutral & fixed.keys() and not known & fixed.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_left_out_has_the_default_of_transformers(kind):
    theirs = transformers.AutoConfig.for_model(kind)
    ours = read({"model_type": kind})
    assert (ours.num_layers, ours.hidden_size, ours.ffn_hidden_size, ours.vocab_size) == (
        theirs.num_hidden_layers, theirs.hidden_size, theirs.intermediate_size, theirs.vocab_size
    )  # fmt: skip
    assert (ours.num_attention_heads, ours.num_query_groups) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    head_dim = getattr(theirs, "qk_head_dim", None) or getattr(theirs, "head_dim", None)
    assert ours.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.norm_eps, ours.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    rope = theirs.rope_parameters
    assert ours.init_std == theirs.initializer_range
    assert ours.rope_theta == (rope["full_attention"] if KINDS[kind].local_rope else rope)["rope_theta"]
    if KINDS[kind].local_rope:
        assert (ours.rope_local_base_freq or ours.rope_theta) == rope["sliding_attention"]["rope_theta"]
    if KINDS[kind].by_layer:
        assert list(ours.layer_types) == theirs.layer_types
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert getattr(ours, key) == (getattr(theirs, key, None) or 0)
    assert (ours.query_pre_attn_scalar or ours.head_dim) == getattr(theirs, "query_pre_attn_scalar", ours.head_dim)
    if kind == "deepseek_v3":
        named = ("q_lora_rank", "kv_lora_rank", "v_head_dim", "rope_interleave", "n_group", "topk_group")
        assert all(getattr(ours, key) == getattr(theirs, key) for key in (*named, "routed_scaling_factor"))
        assert (ours.qk_nope_head_dim, ours.qk_rope_head_dim) == (theirs.qk_nope_head_dim, theirs.qk_rope_head_dim)
        assert ours.shared_ffn_hidden_size == theirs.n_shared_experts * theirs.moe_intermediate_size
        assert (ours.num_experts, ours.dense_layers) == (theirs.n_routed_experts, theirs.first_k_dense_replace)
        assert (ours.experts_per_token, ours.norm_topk_prob) == (theirs.num_experts_per_tok, theirs.norm_topk_prob)
    elif KINDS[kind].experts:
        assert (ours.num_experts, ours.experts_per_token, ours.moe_ffn_hidden_size, ours.norm_topk_prob) == (
            theirs.num_experts, theirs.num_experts_per_tok,
            getattr(theirs, "moe_intermediate_size", theirs.intermediate_size), getattr(theirs, "norm_topk_prob", True),
        )  # fmt: skip
        assert ours.shared_ffn_hidden_size == getattr(theirs, "shared_expert_intermediate_size", 0)
        assert (getattr(theirs, "decoder_sparse_step", 1), getattr(theirs, "mlp_only_layers", [])) == (1, [])
        assert ours.dense_layers == 0
        of_theirs = theirs.num_experts_per_tok / theirs.num_hidden_layers
        assert ours.router_aux_loss == pytest.approx(theirs.router_aux_loss_coef * of_theirs, rel=1e-12)
    assert ours.sliding_window == ((getattr(theirs, "sliding_window", 0) or 0) if "qwen" not in kind else 0)
    longest = read({"model_type": kind, "rope_scaling": {k: v for k, v in LLAMA3.items() if "original" not in k}})
    assert longest.rope_scaling["original_max_position_embeddings"] == theirs.max_position_embeddings


@pytest.mark.parametrize("kind", KINDS)
def test_keys_called_neutral_leave_the_logits_of_transformers_alone(kind, tmp_path):
    model = write_folder(tmp_path, kind)
    config = tmp_path / "config.json"
    plain = json.loads(config.read_text())
    for key in neutral_keys(KINDS[kind]) & plain.keys() - {"model_type", "dtype", "transformers_version"}:
        old = plain[key]
        edit_json(config, lambda raw, key=key, old=old: raw.update({key: 3 if old is None else (not old) if
                                                                    isinstance(old, bool) else old * 2}))  # fmt: skip
    assert json.loads(config.read_text()) != plain
    changed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(changed(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_may_not_change_is_refused_at_once(kind):
    with pytest.raises(ConfigError) as error:
        read(base(kind, **OTHER, embedding_multiplier=12.0, quantization_config={"bits": 4}, auto_map={"a": "b"}))
    for key in (*FIXED, "embedding_multiplier", "quantization_config", "auto_map"):
        assert f"{key} is " in str(error.value)
    assert OTHER.keys() == FIXED.keys() and "\n" not in str(error.value)
    assert read(base(kind, logit_scale=None)) == read(base(kind)), "null switches nothing on"


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_both_spellings_of_rope_are_read(spelling):
    table = LLAMA3 | ({"rope_theta": 7.0} if spelling == "rope_parameters" else {})
    found = read(base("llama", **{spelling: table}, **({} if "rope_theta" in table else {"rope_theta": 7.0})))
    assert found.rope_theta == 7.0 and found.rope_scaling == LLAMA3
    old = {"type" if key == "rope_type" else key: value for key, value in table.items()}
    assert read(base("llama", **{spelling: old}, rope_theta=7.0)) == found
    assert (
        read(base("llama", rope_theta=7.0, rope_parameters={"rope_theta": 7.0, **LLAMA3}, rope_scaling=LLAMA3)) == found
    )
    assert read(base("llama", rope_theta=7.0, rope_scaling={"type": "default"})).rope_scaling == {}


ROPES = {
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling has rope_type 'dynamic'"),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, "one of 'default', 'llama3', 'linear', 'yarn'"),
    "linear": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None; it is a number > 0"),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 1}}, "truncate is 1; it is true or false"),
    "yarn's": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "long_factor": []}}, "rope_scaling.long_factor is []"),
    "both": ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'"),
    "two": ({"rope_scaling": {"type": "llama3", "rope_type": "default"}}, "'default' and 'llama3'"),
    "theta": ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "which differ"),
    "tables": ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "differ"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "partial inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    "unknown": ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor"),
    "by layer": ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters.full_attention"),
    "lacking": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling.low_freq_factor is None"),
    "no number": ({"rope_theta": "many"}, "rope_theta is 'many'"),
    "no table": ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'"),
    "wrong type": ({"rope_scaling": {"rope_type": 3}}, "rope_scaling has rope_type 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_rope_that_is_not_understood_is_refused(case):
    fields, says = ROPES[case]
    with pytest.raises(ConfigError, match=r"^config\.json: ") as error:
        read(base("llama", **fields))
    assert says in str(error.value)


LOCAL = {"sliding_attention": {"rope_theta": 9.0}, "full_attention": {"rope_theta": 5.0}}


def test_positions_of_sliding_layers_are_read_apart_and_what_they_cannot_be_is_refused():
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    found = read(base("olmo3", **kinds, rope_parameters=LOCAL))
    assert (found.rope_theta, found.rope_local_base_freq, found.layer_types) == (5.0, 9.0, tuple(kinds["layer_types"]))
    alike = {layer: {"rope_theta": 5.0, "rope_type": "linear", "factor": 2.0} for layer in LOCAL}
    found = read(base("olmo3", **kinds, rope_parameters=alike))
    assert (found.rope_local_base_freq, found.rope_scaling["factor"]) == (0.0, 2.0)
    assert (
        read(base("olmo3", rope_parameters=LOCAL, **kinds | {"layer_types": ["full_attention"] * 2})).layer_types == ()
    )
    for fields, says in (
        ({"rope_theta": 7.0}, "rope_theta is 7.0 without rope_parameters, which transformers 4 and 5 read otherwise"),
        ({"rope_parameters": {"rope_theta": 7.0}}, "it is a table with a table for each of"),
        (
            {"rope_parameters": alike | {"full_attention": {"rope_theta": 5.0}}},
            "it is of type default, or as of full_attention",
        ),
        ({"rope_parameters": LOCAL | {"sliding_attention": {"rope_type": "su"}}}, "rope_parameters has rope_type 'su'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}},
            "truncate of rope_parameters is False; transformers takes it for True",
        ),
        ({"layer_types": ["sliding_attention"]}, "it is sliding_attention or full_attention for each of 2 layers"),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
    ):
        with pytest.raises(ConfigError, match=r"^config\.json: ") as error:
            read(base("olmo3", **kinds | fields))
        assert says in str(error.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon"}, "'FalconForCausalLM'"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "layer_types": ["full_attention"] * 2},
            "layer_types has ['full_attention']; it is sliding_attention for each of 2 layers",
        ),
        ({"architectures": ["LlamaForCausalLM", "Other"]}, "'Other'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has ['sliding_attention']"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1"),
        ({"hidden_size": "32", "rms_norm_eps": None, "tie_word_embeddings": 1}, "hidden_size is '32'"),
    ],
)
def test_what_no_architecture_is_is_refused(fields, says):
    with pytest.raises(ConfigError, match=r"^config\.json: ") as error:
        read(base("llama") | fields)
    assert says in str(error.value)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_reads_back_in_both_generations(case):
    raw = peer(case).config.to_dict()
    config = read(raw)
    written = write(config, max_positions=256, dtype="float32", tokens={})
    assert read(written) == config
    four = {key: value for key, value in written.items() if key != "rope_parameters"}
    five = {key: value for key, value in written.items() if key not in ("rope_theta", "rope_scaling")}
    assert read(four) == read(five) == config
    theirs = transformers.AutoConfig.for_model(**written).to_dict()
    assert theirs["rope_parameters"] == raw["rope_parameters"]


# config.json of published models, as they lie on the hub; what it means beside.
PUBLISHED = {
    "llama 3.1 8B": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
         "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
         "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
         "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256},
        8_030_261_248,
    ),
    "qwen 2.5 0.5B": (
        {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
         "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
         "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
         "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
         "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
         "vocab_size": 151936},
        494_032_768,
    ),
    "qwen 3 0.6B": (
        {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
         "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
         "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
         "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936},
        596_049_920,
    ),
    "mistral 7B v0.1": (
        {"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
         "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
         "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
         "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000},
        7_241_732_096,
    ),
    "mixtral 8x7B v0.1": (
        {"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
         "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
         "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
         "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
         "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000},
        46_702_792_704,
    ),
    "smollm2 135M": (
        {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
         "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
         "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
         "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
         "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
         "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
         "vocab_size": 49152},
        134_515_008,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_with_their_number_of_parameters(name):
    raw, parameters = PUBLISHED[name]
    assert read(raw).num_parameters == parameters


def test_a_head_size_of_its_own_is_kept():
    assert read(base("qwen3")).head_dim == 128 and read(base("llama", head_dim=None)).head_dim == 8
    assert isinstance(read(base("qwen2", head_dim=16)), GPTConfig)


EXPERTS = {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mlp_only_layers": [1]}, "so layers [1] have no experts; the first ones of the 4 alone may have none"),
        ({"decoder_sparse_step": 2}, "so layers [0, 2] have no experts"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "so layers [0, 1, 2, 3] have no experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0 and mlp_only_layers []; a number > 0 and a list"),
        ({"num_experts": 0}, "num_experts is 0; it is a whole number > 0"),
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts is 4 and num_local_experts 8, which is the same"),
        ({"num_experts_per_tok": 5}, "model.experts_per_token is 5 and model.num_experts 4"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'; it is true or false"),
        ({"router_aux_loss_coef": -1}, "router_aux_loss_coef is -1; it is a finite number >= 0"),
        ({"router_aux_loss_coef": math.nan}, "router_aux_loss_coef is nan; it is a finite number >= 0"),
        ({"router_aux_loss_coef": math.inf}, "router_aux_loss_coef is inf; it is a finite number >= 0"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8, which is not known"),
    ],
)
def test_keys_of_experts_that_are_not_understood_are_refused(fields, says):
    with pytest.raises(ConfigError, match=r"^config\.json") as error:
        read(base("qwen3_moe", **{**EXPERTS, **fields}))
    assert says in str(error.value)


def test_the_first_layers_may_have_no_experts_however_it_is_said():
    assert read(base("qwen3_moe", **EXPERTS, mlp_only_layers=[1, 0])).dense_layers == 2
    assert read(base("qwen3_moe", **EXPERTS | {"num_hidden_layers": 2}, decoder_sparse_step=2)).dense_layers == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"dense_layers": 1},
        {"qk_norm": True, "shared_ffn_hidden_size": 8},
        {"qkv_bias": True, "shared_ffn_hidden_size": 8},
    ],
)
def test_experts_that_no_architecture_has_are_not_written(fields):
    config = GPTConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=100, num_experts=4, **fields
    )
    with pytest.raises(ConfigError, match="sixfold-ckpt convert writes the tensors of other models"):
        write(config, max_positions=8, dtype="float32", tokens={})
