"""A key of config.json that is taken does in transformers what it does here, in a whole row and token by token.

transformers keeps keys that its model applies nowhere, or applies to one of the two alone. Those are refused.
"""

import json

import pytest
import torch
from hf_helpers import CASES, LINEAR, LLAMA3, OURS, YARN, from_folder, stepwise_logits, write_folder
from model_helpers import small

pytest.importorskip("safetensors", reason="needs the extra hf")
pytest.importorskip("transformers", reason="needs transformers, a peer that only tests use")

from sixfold.gpt import load_model
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.huggingface.config import architecture_of, read
from sixfold.gpt.huggingface.convert import import_model

TOKENS = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(5))
WINDOW = "sliding_attention"
WINDOWS = [None, 2, 4, 64]  # of 1, the cache of transformers keeps every key
# Values that leave the shapes of all tensors. Null takes the class's default, where a key may be null.
VALUES = {
    "attention_bias": [True], "attention_dropout": [0.3], "attn_logit_softcapping": [None, 0.0, 0, 2.0],
    "attention_multiplier": [2.0], "chunk_size_feed_forward": [3], "clip_qkv": [0.5], "embedding_multiplier": [2.0],
    "expert_bias": [True], "final_logit_softcapping": [None, 0.0, 1.5], "first_k_dense_replace": [0, 1],
    "hidden_act": ["gelu", "silu", "gelu_pytorch_tanh"], "hidden_activation": ["gelu", "gelu_pytorch_tanh"],
    "head_dim": [None], "layer_norm_eps": [0.01], "layer_types": [None, [WINDOW] * 3, [WINDOW] * 2],
    "logit_scale": [2.0], "max_position_embeddings": [8], "max_window_layers": [0, 1], "mlp_bias": [True],
    "mlp_only_layers": [[0], []], "moe_layer_freq": [2], "n_group": [1, 2], "norm_topk_prob": [True, False],
    "num_experts_per_tok": [1, 3], "num_key_value_heads": [None], "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5], "pretraining_tp": [2], "qk_layernorm": [True],
    "query_pre_attn_scalar": [3, 20], "residual_multiplier": [0.5], "rms_norm_eps": [0.1],
    "rope_interleave": [True, False], "rope_local_base_freq": [50.0], "rope_parameters": [None],
    "rope_scaling": [LINEAR, LLAMA3, YARN], "rope_theta": [77.0], "router_jitter_noise": [0.5],
    "routed_scaling_factor": [3.0], "scoring_func": ["softmax"], "sliding_window": WINDOWS,
    "sliding_window_pattern": [2], "tie_word_embeddings": [True, False], "topk_group": [1, 4],
    "topk_method": ["greedy"], "use_bidirectional_attention": [True], "use_cache": [False], "use_qk_norm": [False],
    "use_sliding_window": [True],
}  # fmt: skip
PLAIN = {kind: case for case, (kind, _) in reversed(CASES.items())}  # the first case of each


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.slow
def test_a_key_that_is_taken_does_what_it_does_in_transformers(tmp_path, kind):
    write_folder(tmp_path / "hf", PLAIN[kind])
    plain = json.loads((tmp_path / "hf/config.json").read_text())
    taken, differ = 0, []
    changes = [{key: value} for key, values in VALUES.items() for value in values]
    if "full_attention" not in (plain["rope_parameters"] or {}):
        changes += [{"rope_parameters": None, "rope_theta": 77.0, "rope_scaling": one} for one in (None, LINEAR, YARN)]
    for number, change in enumerate(changes):
        if all(plain.get(key, "none") == value for key, value in change.items()):
            continue
        (tmp_path / "hf/config.json").write_text(json.dumps(plain | change))
        run = tmp_path / f"run{number}"
        try:
            import_model(tmp_path / "hf", run)
        except ConfigError:
            continue
        try:
            theirs = from_folder(tmp_path / "hf")
        except Exception:  # its class refuses the value, so there are no logits to compare
            continue
        taken += 1
        with torch.no_grad():
            ours, row = load_model(run)(TOKENS), theirs(TOKENS, use_cache=False).logits
            steps = stepwise_logits(theirs, TOKENS)
        worst = max(float((ours - one).abs().max() / row.abs().max()) for one in (row, steps))
        differ += [f"{change}: {worst:.1e}"] if not worst < 5e-5 else []
    assert not differ
    assert taken >= 8, "most keys are refused, so that little was compared"


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0, and only null is supported"),
        ("gemma3_text", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0; it is a number > 0, or"),
        ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0; it is a number > 0, or"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0; it is a number > 0, or"),
        ("gemma2", {"attn_logit_softcapping": True}, "attn_logit_softcapping is True; it is a number > 0, or"),
        ("llama", {"sliding_window": 4096}, "sliding_window is 4096, and only null is supported"),
        ("olmo2", {"sliding_window": 4096}, "sliding_window is 4096, and only null is supported"),
        ("deepseek_v3", {"sliding_window": 4096}, "sliding_window is 4096, and only null is supported"),
    ],
)  # fmt: skip
def test_what_transformers_applies_nowhere_or_in_its_cache_alone_is_refused(kind, fields, says):
    with pytest.raises(ConfigError, match=r"^config\.json: ") as error:
        read({"model_type": kind, **fields})
    assert says in str(error.value)
    assert read({"model_type": kind} | dict.fromkeys(fields)), "null is none"


def test_a_run_with_a_cap_that_gemma_3_does_not_apply_has_no_architecture():
    assert architecture_of(small(**OURS["gemma3"], final_logit_softcapping=3.0)).model_type == "gemma3_text"
    with pytest.raises(ConfigError, match=r"the nearest, Gemma3ForCausalLM, has model\.attn_logit_softcapping = 0\.0"):
        architecture_of(small(**OURS["gemma3"], attn_logit_softcapping=3.0))
