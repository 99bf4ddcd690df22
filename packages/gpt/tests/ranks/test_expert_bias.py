"""Experts balanced by a bias: its moves counted by a loop, alike at every layout."""

from __future__ import annotations

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import final_tensors, run, run_all

import sixfold.blending  # noqa: F401 - a run imports it late; here the server of ranks has it loaded
from sixfold.gpt import GPTModel, global_batches

ROUTED = (
    "model.num_experts=4", "model.moe_ffn_hidden_size=32", "model.router_aux_loss=0", "model.scoring_func=sigmoid",
    "model.expert_bias=true", "model.expert_bias_update_rate=0.25", "model.dense_layers=1", "model.num_layers=2",
    "train.micro_batch_size=1", "train.global_batch_size=2", "model.init_std=0.2",
)  # fmt: skip
BIAS = "model.layers.1.ffn.router.bias"
LAYOUTS = {
    "dp, whole weights": ("parallel.sharding=no_shard",), "dp": ("parallel.sharding=optim_grads_params",),
    "ep": ("parallel.ep=2",), "tp": ("parallel.tp=2",), "pp": ("parallel.pp=2",), "cp": ("parallel.cp=2",),
    "bf16": ("train.precision=bf16", "parallel.tp=2"),
}  # fmt: skip


def tokens_of_experts(config) -> torch.Tensor:
    """How many tokens of the first batch each expert of the last layer gets: by the best scores, two a token."""
    model, seen = GPTModel(config.model), []
    model.initialize(config.train.seed)
    model.layers["1"].ffn.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    batch = next(global_batches(config))
    with torch.no_grad():
        model(batch.tokens, cu_seqlens=batch.cu_seqlens)
        scores = torch.sigmoid(seen[0].flatten(0, 1) @ model.layers["1"].ffn.router.weight.T)
    return torch.bincount(scores.topk(2, -1).indices.flatten(), minlength=4)


def test_after_a_step_the_bias_is_lower_for_experts_that_got_more_than_an_equal_share(tmp_path):
    config = tiny_config(tmp_path, *ROUTED, "train.steps=1")
    run(config, 1)
    tokens = tokens_of_experts(config)
    equal = float(tokens.sum()) / 4
    expected = [0.25 if got < equal else -0.25 if got > equal else 0.0 for got in tokens.tolist()]
    assert len(set(expected)) > 1
    assert final_tensors(config)[BIAS].tolist() == expected


@pytest.mark.slow
def test_the_bias_and_what_it_chooses_do_not_depend_on_the_layout(tmp_path):
    alone = tiny_config(tmp_path, *ROUTED, "train.steps=3", run="alone")
    runs = {name: tiny_config(tmp_path, *ROUTED, "train.steps=3", *one, run=name) for name, one in LAYOUTS.items()}
    run_all([(1, alone), *((2, config) for config in runs.values())])
    expected = final_tensors(alone)
    assert expected[BIAS].abs().max() >= 0.25
    for name, config in runs.items():
        found = final_tensors(config)
        if name == "bf16":  # other choices may be near; the moves are whole ones all the same
            assert (found[BIAS] / 0.25).frac().abs().max() == 0 and found[BIAS].dtype == torch.float32
            continue
        assert torch.equal(found[BIAS], expected[BIAS]), name
        for key, tensor in expected.items():
            torch.testing.assert_close(
                found[key], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name, k=key: f"{n} {k}: {m}"
            )
