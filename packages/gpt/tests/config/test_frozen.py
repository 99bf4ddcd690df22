"""Patterns of train.frozen, beside the names of GPTModel's own parameters."""

import pytest
from config_helpers import config_with
from model_helpers import small

from sixfold.gpt.config.frozen import is_frozen
from sixfold.gpt.config.layer_tensors import layer_tensors, parameter_names
from sixfold.gpt.config.train_config import GPTConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import GPTModel

LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"num_experts": 4, "shared_ffn_hidden_size": 16, "shared_expert_gate": True, "dense_layers": 1}
MODELS = {
    "plain": {},
    "tied, biases, norms": {"tie_embeddings": True, "qkv_bias": True, "qk_norm": True},
    "four norms": {"norm_position": "both"},
    "norms behind": {"norm_position": "post", "qk_norm": True, "qk_norm_over": "projection"},
    "latent": LATENT,
    "latent, plain queries": LATENT | {"q_lora_rank": 0},
    "experts": EXPERTS,
    "balanced experts": EXPERTS | {"scoring_func": "sigmoid", "router_aux_loss": 0.0, "expert_bias": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_names_and_sizes_are_those_of_the_modules(name):
    sizes = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "vocab_size": 128}
    config = GPTConfig(**sizes, **MODELS[name])
    parameters = dict(GPTModel(config, device="meta").named_parameters())
    assert parameter_names(config) == list(parameters)
    for layer in range(3):
        inside = [p.numel() for full, p in parameters.items() if full.startswith(f"layers.{layer}.")]
        assert list(layer_tensors(config, layer).values()) == inside


def frozen(*patterns):
    config = config_with("model.num_layers=12", f"train.frozen={list(patterns)!r}")
    return [name for name in parameter_names(config.model) if is_frozen(config, name)]


def test_a_pattern_is_the_beginning_of_a_name_part_by_part():
    assert frozen("embedding") == ["embedding.weight"]
    assert frozen("layers.1") == [n for n in parameter_names(small(num_layers=12)) if n.startswith("layers.1.")]
    ends = ("q", "k", "v", "out")
    assert frozen("layers.9-11.attention") == [f"layers.{i}.attention.{e}.weight" for i in (9, 10, 11) for e in ends]
    assert frozen("layers.*.attention.q", "norm") == [
        *(f"layers.{i}.attention.q.weight" for i in range(12)), "norm.weight"
    ]  # fmt: skip


@pytest.mark.parametrize("pattern", ["embeding", "layers.12", "layers.12-20", "attention.q", "layers.0-1.mlp", "", "q"])
def test_a_pattern_that_matches_nothing_is_refused_with_names_that_there_are(pattern):
    with pytest.raises(ConfigError, match=rf"train\.frozen has '{pattern}', which no .*layers\.11\.ffn\.down\.weight"):
        frozen("norm", pattern)


def test_a_tied_head_is_the_embedding_and_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match=r"'head', which no .*the head is the embedding"):
        config_with("model.tie_embeddings=true", 'train.frozen=["head"]')
    with pytest.raises(ConfigError, match="which is every parameter"):
        config_with("model.tie_embeddings=false", 'train.frozen=["embedding", "layers", "norm", "head"]')
    with pytest.raises(ConfigError, match=r"train\.frozen is \['norm'\] and parallel\.schedule 'pipedream_2bw'"):
        config_with(
            'train.frozen=["norm"]', "parallel.schedule=pipedream_2bw", "parallel.sharding=no_shard",
            "train.clip_grad=0", "model.tie_embeddings=false",
        )  # fmt: skip
