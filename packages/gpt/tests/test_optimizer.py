"""Groups of the optimizer."""

import pytest
import torch
from model_helpers import small
from torch import nn

from sixfold.gpt.config import OptimizerConfig
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model import GPTModel
from sixfold.gpt.optimizer import build_optimizer


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


def test_muon_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match="Muon is not supported: use adamw"):
        build_optimizer(OptimizerConfig(lr=0.5, name="muon"), [])
