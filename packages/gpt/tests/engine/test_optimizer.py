"""Groups of the optimizer."""

import pytest
import torch
from config_helpers import config_with
from model_helpers import small
from torch import nn

from sixfold.gpt.config.train_config import OptimizerConfig
from sixfold.gpt.engine.optimizer import build_optimizer
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import GPTModel


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_matrices_and_the_embedding_decay_and_nothing_else_does(device):
    model = GPTModel(small(qkv_bias=True, qk_norm=True), device=device)
    optimizer = build_optimizer(OptimizerConfig(lr=0.5, weight_decay=0.25, beta1=0.8), model.named_parameters())
    decayed, kept = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].endswith(".weight") and "norm" not in names[id(p)] for p in decayed["params"])
    assert all("norm" in names[id(p)] or names[id(p)].endswith(".bias") for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)
    assert (decayed["weight_decay"], kept["weight_decay"], kept["lr"], kept["betas"]) == (0.25, 0.0, 0.5, (0.8, 0.95))


def test_a_parameter_named_twice_is_updated_once():
    shared = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(
        OptimizerConfig(lr=0.5), [("0.embedding.weight", shared), ("3.embedding.weight", shared)]
    )
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_a_stage_without_parameters_has_an_optimizer_that_steps():
    build_optimizer(OptimizerConfig(lr=0.5), []).step()


def test_muon_has_the_matrices_inside_layers_apart_and_adamw_the_rest():
    model = GPTModel(small(qkv_bias=True, qk_norm=True, tie_embeddings=False), device="meta")
    adamw, muon = build_optimizer(OptimizerConfig(lr=0.5, name="muon"), model.named_parameters()).parts
    names = {id(p): name for name, p in model.named_parameters()}
    own = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    parts = ("attention.q", "attention.k", "attention.v", "attention.out", "ffn.gate", "ffn.up", "ffn.down")
    assert own == {f"layers.{i}.{part}.weight" for i in range(3) for part in parts}
    assert {names[id(p)] for group in adamw.param_groups for p in group["params"]} == set(names.values()) - own
    (group,) = muon.param_groups
    assert (group["adjust_lr_fn"], group["momentum"], group["nesterov"]) == ("match_rms_adamw", 0.95, True)


def test_a_stage_without_matrices_has_no_muon():
    (only,) = build_optimizer(
        OptimizerConfig(lr=0.5, name="muon"), [("norm.weight", nn.Parameter(torch.ones(2)))]
    ).parts
    assert isinstance(only, torch.optim.AdamW)


def test_muon_and_offloaded_state_are_refused_together():
    with pytest.raises(ConfigError, match=r"fsdp\.offload is true and optimizer\.name 'muon'.*'adamw' works"):
        config_with("optimizer.name=muon", "fsdp.offload=true")
