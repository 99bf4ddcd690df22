"""Frozen parts at every layout: losses of a plain torch loop, frozen bits as they were, no state of what is frozen."""

from __future__ import annotations

import pytest
import torch
from gpt_helpers import plain_losses, tiny_config
from kept_alive_helpers import Fault, run_kept_alive
from run_helpers import assert_same_tensors, final_tensors, lines, losses, run, run_all

from sixfold.gpt import ConfigError, GPTModel, TrainConfig
from sixfold.gpt.config.frozen import is_frozen

# A whole stage, and below it nothing that is trained; ends and single parts, so that gradients pass through.
BEGIN = 'train.frozen=["embedding", "layers.0", "layers.1"]'
AMONG = 'train.frozen=["layers.0.attention.q", "layers.1.ffn", "layers.1.attention_norm", "layers.3", "norm", "head"]'
END = 'train.frozen=["layers.2", "layers.3", "norm", "head"]'
UNTIED, TIED = "model.tie_embeddings=false", "model.tie_embeddings=true"
TABLE = 'train.frozen=["embedding", "layers.2.ffn_norm"]'
ZB = ("parallel.schedule=zb_v", "parallel.stages_per_rank=2")
EXPERTS = (
    "model.num_experts=4", "model.scoring_func=sigmoid", "model.router_aux_loss=0", "model.expert_bias=true",
    "model.num_layers=2", "train.clip_grad=0", "train.steps=3",  # an odd number of moves
)  # fmt: skip

CASES = {
    "alone": (1, BEGIN, UNTIED),
    "alone, tied": (1, TABLE, TIED),
    "alone, budget": (1, AMONG, UNTIED, "fsdp.gathered_bytes=150000"),
    "dp, ZeRO-3": (2, AMONG, UNTIED, "parallel.dp=2"),
    "dp, ZeRO-2": (2, BEGIN, UNTIED, "parallel.dp=2", "parallel.sharding=optim_grads"),
    "dp, ZeRO-1": (2, END, UNTIED, "parallel.dp=2", "parallel.sharding=optim"),
    "dp, whole": (2, AMONG, UNTIED, "parallel.dp=2", "parallel.sharding=no_shard"),
    "dp, tree": (2, AMONG, UNTIED, "parallel.dp=2", "parallel.grad_sum=tree"),
    "dp, tree, tied": (2, TABLE, TIED, "parallel.dp=2", "parallel.grad_sum=tree"),
    "dp, offload": (2, AMONG, UNTIED, "parallel.dp=2", "fsdp.offload=true"),
    "pp, first stage": (2, BEGIN, UNTIED, "parallel.pp=2"),
    "pp, last stage": (2, END, UNTIED, "parallel.pp=2"),
    "pp, tied": (2, TABLE, TIED, "parallel.pp=2"),
    "pp, split backwards": (2, BEGIN, UNTIED, "parallel.pp=2", *ZB),
    "pp, split backwards, among": (2, AMONG, UNTIED, "parallel.pp=2", *ZB),
    "tp": (2, AMONG, UNTIED, "parallel.tp=2"),
    "tp, whole rows": (2, BEGIN, UNTIED, "parallel.tp=2", "parallel.sequence=false"),
    "cp": (2, AMONG, UNTIED, "parallel.cp=2"),
    "recompute": (2, BEGIN, UNTIED, "parallel.tp=2", "train.recompute=full"),
    "pp, dp, tied": (4, TABLE, TIED, "parallel.pp=2", "parallel.dp=2"),
    "pp, tp": (4, BEGIN, UNTIED, "parallel.pp=2", "parallel.tp=2"),
}


def first_tensors(config):
    model = GPTModel(config.model)
    model.initialize(config.train.seed)
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


def check_untouched(config):
    """Frozen tensors of the last checkpoint are the initial ones, without state; all others have moved and have state.

    Biases of routers are moved by their loads, not by gradients: they have no state, and loads may leave them.
    """
    first, last = first_tensors(config), final_tensors(config)
    for key, value in first.items():
        has_state = any(name.startswith("optimizer.") and name.endswith(f".{key}") for name in last)
        if is_frozen(config, key.removeprefix("model.")):
            assert torch.equal(last[key], value) and not has_state, key
        elif not key.endswith("router.bias"):
            assert not torch.equal(last[key], value) and has_state, key


@pytest.mark.slow
def test_frozen_parts_stay_bit_for_bit_and_the_rest_trains_as_in_a_plain_loop(tmp_path):
    configs = {
        name: (ranks, tiny_config(tmp_path, *keys, run=f"run-{number}"))
        for number, (name, (ranks, *keys)) in enumerate(CASES.items())
    }
    run_all(configs.values())
    for name, (_, config) in configs.items():
        assert losses(config) == pytest.approx(plain_losses(config, 4), rel=1e-6), name
        check_untouched(config)


@pytest.mark.slow
def test_a_frozen_run_goes_on_at_another_layout_with_the_same_bits_and_its_frozen_parts_are_its_past(tmp_path):
    # pp and sharding change no bit of a run whose sums are a tree.
    keys = (AMONG, UNTIED, "parallel.grad_sum=tree", "schedule.shape=constant")
    whole = tiny_config(tmp_path, *keys, run="whole")
    first = tiny_config(tmp_path, *keys, "train.steps=2", "parallel.dp=2", run="cut")
    second = TrainConfig.from_text(first.to_toml(), ["train.steps=4", "parallel.dp=1", "parallel.pp=2"])
    run(whole, 1)
    run(first, 2)
    run(second, 2)
    assert losses(second) == losses(whole)
    assert_same_tensors(final_tensors(second), final_tensors(whole))
    other = TrainConfig.from_text(first.to_toml(), ["train.steps=5", "train.frozen=[]", "parallel.dp=1"])
    with pytest.raises(ConfigError, match=r"cannot change train\.frozen \(was \('layers\.0\.attention\.q'"):
        run(other, 1)


@pytest.mark.slow
def test_a_frozen_run_that_loses_a_rank_goes_on_from_memory_with_its_bits(tmp_path):
    keys = (AMONG, UNTIED, "parallel.dp=2", "checkpoint.every_minutes=0")
    whole, config = (tiny_config(tmp_path, *keys, run=name) for name in ("whole", "lost"))
    run(whole, 2)
    run_kept_alive(config, 2, Fault("after the optimizer", 1, "SIGKILL", step=3))
    assert [line["source"] for line in lines(config, "recovery")] == ["memory"]
    assert losses(config) == losses(whole)
    assert_same_tensors(final_tensors(config), final_tensors(whole))


@pytest.mark.slow
def test_muon_and_experts_leave_what_is_frozen(tmp_path):
    muon = tiny_config(tmp_path, AMONG, UNTIED, "optimizer.name=muon", "parallel.dp=2", run="muon")
    experts = tiny_config(
        tmp_path, *EXPERTS, 'train.frozen=["layers.0.ffn.router", "layers.1.ffn.experts.up"]', run="experts"
    )
    ep = TrainConfig.from_text(experts.to_toml(), ["parallel.ep=2", "parallel.dp=2", f"run.dir={tmp_path / 'ep'}"])
    fp8 = tiny_config(tmp_path, BEGIN, UNTIED, "train.precision=fp8", "parallel.dp=2", run="fp8")
    run_all([(2, muon), (1, experts), (2, ep), (2, fp8)])
    check_untouched(muon)
    check_untouched(fp8)
    for config in (experts, ep):
        check_untouched(config)
        moved = final_tensors(config)["model.layers.1.ffn.router.bias"]
        assert moved.abs().max() > 0, "the router that is not frozen is balanced"
    assert losses(ep) == pytest.approx(losses(experts), rel=1e-6)
