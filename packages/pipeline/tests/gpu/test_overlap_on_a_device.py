"""Batches that overlap on one CUDA device: the recurrence, and a restart under the device's random numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from overlapping_batches_helpers import runner_of
from pipeline_helpers import layers
from torch import nn
from version_helpers import OPTIMIZERS, delayed, made_batches, same_weights

from sixfold.pipeline import pipedream_2bw

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device(batches):
    return [tuple([tensor.to("cuda") for tensor in part] for part in batch) for batch in batches]


@pytest.mark.parametrize("make", ["momentum", "adamw", "foreach", "fused"])
def test_2bw_is_the_delayed_recurrence(make):
    modules, oracle = ([module.to("cuda") for module in layers(3)] for _ in range(2))
    batches = on_device(made_batches(5, 3))
    runner = runner_of(pipedream_2bw(3, 3), modules, make=make)
    losses = [runner.step(*batch).losses for batch in batches]
    runner.drain()
    assert losses == delayed(oracle, batches, OPTIMIZERS[make])
    assert same_weights(modules, oracle)


def test_restored_under_the_devices_random_numbers():
    first = [nn.Sequential(module, nn.Dropout(0.5)).to("cuda") for module in layers(3)]
    second, batches = copy.deepcopy(first), on_device(made_batches(5, 3))
    torch.manual_seed(7)
    one = runner_of(pipedream_2bw(3, 3), first)
    for batch in batches[:2]:
        one.step(*batch)
    state = copy.deepcopy(one.state_dict())
    expected = [one.step(*batch).losses for batch in batches[2:]]
    other = runner_of(pipedream_2bw(3, 3), second)
    torch.manual_seed(99)
    other.load_state_dict(state)
    assert [other.step(*batch).losses for batch in batches[2:]] == expected
