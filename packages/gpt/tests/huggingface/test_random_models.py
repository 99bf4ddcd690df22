"""Random models: of each architecture as transformers makes them, in and out; and of runs, out.

    nox -s "tests(gpt)" -- --random-models 50       1 without it

A seed names sizes, options and weights; one that fails is run again by ``-k "in_and_out and qwen3 and [17"``.
"""

from __future__ import annotations

import random

import pytest
import torch
from hf_helpers import OURS, from_folder, run_of, stepwise_logits
from model_helpers import small

from sixfold.gpt import GPTConfig, GPTModel, load_model
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface.architectures import ARCHITECTURES
from sixfold.gpt.huggingface.config import architecture_of
from sixfold.gpt.huggingface.convert import export_model, import_model

pytest.importorskip("safetensors", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

KINDS = [kind.model_type for kind in ARCHITECTURES]
BY_LAYER = ("olmo3", "gemma3_text")  # positions of layers that slide are told apart
WITH_HEAD_DIM = ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "gemma2", "gemma3_text")
EXPERTS = [kind.model_type for kind in ARCHITECTURES if kind.experts]
LOGITS = 5e-5  # of the largest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--random-models")))


def some(rng: random.Random, **options: object) -> dict[str, object]:
    """Each of them at even odds."""
    return {key: value for key, value in options.items() if rng.random() < 0.5}


def drawn_rope(rng: random.Random, kind: str) -> dict[str, object]:
    kinds: dict[str, dict[str, object]] = {
        "default": {},
        "linear": {"factor": rng.choice([1.0, 2.0, 8.5])},
        "llama3": {"factor": rng.choice([2.0, 8.0]), "low_freq_factor": 1.5, "high_freq_factor": 3.0,
                   "original_max_position_embeddings": rng.choice([16, 64])},
        "yarn": {"factor": rng.choice([2.0, 32.0]), "original_max_position_embeddings": rng.choice([16, 32])}
                | some(rng, attention_factor=0.8, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.5)
                | ({} if kind in BY_LAYER else some(rng, truncate=rng.random() < 0.5)),
    }  # fmt: skip
    name = rng.choice([*kinds])
    return {"rope_type": name, "rope_theta": rng.choice([500.0, 1e4, 1e6]), **kinds[name]}


def drawn_parts(rng: random.Random, kind: str, layers: int, heads: int) -> dict[str, object]:
    """What an architecture has beside Llama's keys."""
    window, experts = rng.choice([2, 5, 64]), rng.choice([4, 6])
    types = {"layer_types": [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]}
    slides = {"sliding_window": window, **types}
    local = {"rope_type": "default", "rope_theta": rng.choice([100.0, 1e4])}
    by_layer = {"rope_parameters": {"full_attention": drawn_rope(rng, kind), "sliding_attention": local}}
    chosen = {"num_experts_per_tok": rng.randint(1, experts)}
    routed = {"num_experts": experts, "moe_intermediate_size": rng.choice([16, 24]), **chosen}
    routed["norm_topk_prob"] = rng.random() < 0.5
    scalar = {"query_pre_attn_scalar": rng.choice([5, 12, 256])}
    final = {"final_logit_softcapping": rng.choice([None, 2.0, 30.0])}
    match kind:
        case "mistral":
            return {"sliding_window": rng.choice([None, window])}
        case "mixtral":
            return {"sliding_window": rng.choice([None, window]), "num_local_experts": experts, **chosen}
        case "qwen2_moe":
            return {**routed, "shared_expert_intermediate_size": rng.choice([16, 40])}
        case "qwen3_moe":
            return routed | {"mlp_only_layers": [0] if layers > 1 and rng.random() < 0.5 else []}
        case "olmo3":
            return slides | by_layer
        case "gemma2":
            return slides | scalar | final | {"attn_logit_softcapping": rng.choice([None, 3.0, 50.0])}
        case "gemma3_text":
            return slides | scalar | final | by_layer
        case "deepseek_v3":
            groups = rng.choice([1, 2])
            taken = rng.randint(1, groups)
            return {
                "num_key_value_heads": heads, "n_routed_experts": 4, "n_group": groups, "topk_group": taken,
                "num_experts_per_tok": rng.randint(1, taken * 4 // groups), "n_shared_experts": rng.choice([1, 2]),
                "moe_intermediate_size": 16, "first_k_dense_replace": rng.choice([0, 1]) if layers > 1 else 0,
                "q_lora_rank": rng.choice([None, 12]), "kv_lora_rank": rng.choice([8, 20]),
                **rng.choice([{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
                              {"qk_nope_head_dim": 6, "qk_rope_head_dim": 6, "v_head_dim": 4}]),
                "routed_scaling_factor": rng.choice([1.0, 2.5]), "norm_topk_prob": rng.random() < 0.5,
                "rope_interleave": rng.random() < 0.5,
            }  # fmt: skip
    return {}


def drawn(rng: random.Random, kind: str) -> dict[str, object]:
    """Keys of a config.json that import takes."""
    # Experts of transformers on a CPU want rows of whole 16 bytes.
    widths = ([8, 16], [32, 48]) if kind in EXPERTS else ([6, 8, 10], [33, 48])
    heads, layers, head_dim = rng.choice([2, 4, 6]), rng.choice([1, 2, 3]), rng.choice(widths[0])
    own = kind in WITH_HEAD_DIM and rng.random() < 0.5
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": rng.choice([100, 257]),
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "hidden_size": heads * (rng.choice(widths[0]) if own else head_dim),
        "intermediate_size": rng.choice(widths[1]), "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.4, "max_position_embeddings": rng.choice([64, 4096]),
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": drawn_rope(rng, kind),
        **({"head_dim": head_dim} if kind in WITH_HEAD_DIM else {}),
        **drawn_parts(rng, kind, layers, heads),
    }  # fmt: skip


def fill(model: torch.nn.Module, seed: int) -> None:
    """Weights, and biases of routers, that are all large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    biases = [buffer for name, buffer in model.named_buffers() if "e_score" in name or name.endswith("router.bias")]
    with torch.no_grad():
        for tensor in (*model.parameters(), *biases):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise * 1.3 / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else tensor + 0.3 * noise)


def tokens_of(vocabulary: int, seed: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (2, 40), generator=torch.Generator().manual_seed(seed))


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_random_model_has_its_logits_in_and_out(tmp_path, kind, seed):
    rng = random.Random(f"{kind} {seed}")
    keys = drawn(rng, kind)
    config = transformers.AutoConfig.for_model(kind, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    fill(model, seed)
    model.to(rng.choice([torch.float32, torch.bfloat16])).save_pretrained(
        tmp_path / "hf", max_shard_size=rng.choice(["5GB", "20KB"])
    )
    theirs, tokens = from_folder(tmp_path / "hf", dtype=torch.float32), tokens_of(config.vocab_size, seed)
    import_model(tmp_path / "hf", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "again")
    again = from_folder(tmp_path / "again", dtype=torch.float32)
    with torch.no_grad():
        expected, ours = theirs(tokens).logits, load_model(tmp_path / "run")(tokens)
        assert apart(ours, expected) < LOGITS, keys
        assert apart(ours, stepwise_logits(theirs, tokens)) < LOGITS, keys
        assert torch.equal(again(tokens).logits, expected), keys
    assert type(again) is type(model)


# Changes of a model, most of which no architecture has together with the rest of it.
CHANGES: dict[str, list[object]] = {
    "tie_embeddings": [True, False], "norm_eps": [1e-3], "head_dim": [8, 12], "vocab_multiple": [64],
    "qk_norm": [True, False], "qk_norm_over": ["head", "projection"], "qkv_bias": [True, False],
    "norm_position": ["pre", "post", "both"], "zero_centered_norm": [True, False],
    "hidden_act": ["silu", "gelu_pytorch_tanh"], "scale_embeddings": [True, False],
    "query_pre_attn_scalar": [0.0, 20.0, 12.5], "attn_logit_softcapping": [0.0, 3.0],
    "final_logit_softcapping": [0.0, 2.0], "sliding_window": [0, 2, 5], "layer_types": [()],
    "rope_local_base_freq": [0.0, 100.0], "num_query_groups": [4],
    "rope_scaling": [{}, {"rope_type": "linear", "factor": 2.0},
                     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False}],
    "num_experts": [0, 4, 6], "experts_per_token": [1, 3], "norm_topk_prob": [True, False], "dense_layers": [0, 1],
    "shared_ffn_hidden_size": [0, 24, 30], "shared_expert_gate": [True, False], "moe_ffn_hidden_size": [12],
    "scoring_func": ["sigmoid", "softmax"], "expert_bias": [True, False], "routed_scaling_factor": [1.0, 2.5],
    "router_aux_loss": [0.0, 0.01], "n_group": [1, 2], "topk_group": [1], "q_lora_rank": [0, 20],
    "rope_interleave": [True, False],
}  # fmt: skip


def drawn_run(rng: random.Random) -> GPTConfig:
    """[model] of a run: as some architecture's, with two changes or fewer that the configuration takes."""
    model = OURS[rng.choice([*OURS])]
    changes = {key: rng.choice(CHANGES[key]) for key in rng.sample([*CHANGES], rng.choice([0, 1, 2, 2]))}
    try:
        return small(**model | changes)
    except ConfigError:
        return drawn_run(rng)


@pytest.mark.slow
def test_a_run_of_random_keys_is_exported_with_its_logits_or_refused(tmp_path, seed):
    rng, exported = random.Random(seed), 0
    while exported < 3:
        config = drawn_run(rng)
        try:
            architecture_of(config)
        except ConfigError:
            continue
        exported += 1
        model, tokens = GPTModel(config), tokens_of(config.vocab_size, seed)
        fill(model, seed)
        export_model(run_of(tmp_path / f"run{exported}", model), tmp_path / f"hf{exported}")
        theirs = from_folder(tmp_path / f"hf{exported}")
        with torch.no_grad():
            assert apart(model(tokens), theirs(tokens).logits) < LOGITS, config
            assert apart(model(tokens), stepwise_logits(theirs, tokens)) < LOGITS, config


def test_what_is_drawn_has_every_architecture_and_models_of_none():
    names = []
    for seed in range(400):
        try:
            names.append(architecture_of(drawn_run(random.Random(seed))).model_type)
        except ConfigError:
            names.append("none")
    assert set(names) == {*KINDS, "none"}
    assert 40 < names.count("none") < 360
    ropes = {drawn_rope(random.Random(seed), "llama")["rope_type"] for seed in range(20)}
    assert ropes == {"default", "linear", "llama3", "yarn"}
