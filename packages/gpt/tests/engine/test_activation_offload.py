"""Activations in host memory: weights stay, values come back as they were, and a CPU refuses."""

import pytest
import torch
from config_helpers import config_with
from model_helpers import boundaries, small
from torch import nn

from sixfold.gpt.engine.activation_offload import HostActivations, check_offload, hooks_of
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.model.decoder import GPTModel

CPU = torch.device("cpu")


def gradients(model, activations):
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 100, (2, 2, 16), generator=generator)
    with hooks_of(activations):
        loss = model(tokens, cu_seqlens=boundaries(2, 16, [5]), labels=labels).sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_have_the_same_bits_and_less_is_sent_away_where_more_is_recomputed(recompute):
    """Host memory stands in for a device's: what is packed is a copy."""
    model = GPTModel(small(), device="cpu")
    plain = gradients(model, None)
    model.recompute = recompute
    away = HostActivations(CPU, least_bytes=0)
    loss, found = gradients(model, away)
    assert torch.equal(loss, plain[0])
    assert all(torch.equal(found[name], gradient) for name, gradient in plain[1].items())
    most = HostActivations(CPU, least_bytes=0)
    model.recompute = "none"
    gradients(model, most)
    assert 0 < away.away_bytes <= most.away_bytes
    assert (away.away_bytes < most.away_bytes) == (recompute != "none")


def test_weights_their_views_and_small_tensors_stay():
    away = HostActivations(CPU, least_bytes=1000)
    weight = nn.Parameter(torch.randn(64, 64))
    assert away.pack(weight) is weight
    view = weight.t()
    assert away.pack(view) is view
    little = torch.randn(10)
    assert away.pack(little) is little
    assert away.away_bytes == 0
    large = torch.randn(64, 64).t()
    back = away.unpack(away.pack(large))
    assert back is not large and torch.equal(back, large) and back.stride() == large.stride()
    assert away.away_bytes == large.nbytes


def test_a_run_on_the_cpu_is_refused():
    with pytest.raises(ConfigError, match=r"train\.offload_activations is true and run\.device 'cpu'"):
        config_with("train.offload_activations=true", "run.device=cpu")
    assert config_with("train.offload_activations=true").train.offload_activations
    with pytest.raises(ConfigError, match=r"computes on the CPU.* = false works"):
        check_offload(CPU)
    check_offload(torch.device("cuda"))
