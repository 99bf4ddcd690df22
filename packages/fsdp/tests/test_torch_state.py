"""State in the form of torch's functions in one process, through every way to keep weights and state.

ranks/test_torch_state_ranks.py has DTensors and FSDP2.
"""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from sixfold.fsdp import BufferConfig, FsdpError, MixedPrecision, fully_shard, fully_shard_optimizer, torch_state

WAYS = {
    "double": {},
    "optim": {"strategy": "optim"},
    "budget": {"buffers": BufferConfig(gathered_bytes=20_000)},
    "offload": {"buffers": BufferConfig(offload=True)},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    "fp8": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, fp8=lambda name: "up" in name)},
    "rows": {"granularity": lambda name, parameter: "row"},
}


def make(options):
    net = make_net(tied=True, frozen=True)
    model = fully_shard(net, fsdp_unit_modules=[Block], **options)
    return net, model, fully_shard_optimizer(make_adamw(net.parameters()), model)


def step(model, optimizer, at):
    loss_of(model(batch(at, 0, 0)), batch(at, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_in_another_model_from_what_was_got(way):
    _, model, optimizer = make(WAYS[way])
    step(model, optimizer, 0)
    weights = torch_state.get_model_state_dict(model)
    state = torch_state.get_optimizer_state_dict(model, optimizer)
    assert {type(value) for value in weights.values()} <= {torch.Tensor, nn.Parameter}
    net, other, others = make(WAYS[way])
    step(other, others, 5)
    torch_state.set_model_state_dict(other, weights)
    torch_state.set_optimizer_state_dict(other, others, state)
    assert torch.equal(model(batch(3, 0, 0)), net(batch(3, 0, 0)))
    step(model, optimizer, 1)
    step(other, others, 1)
    assert same(model.full_state_dict(), other.full_state_dict()) == []


def test_torchs_recipe_loads_into_an_optimizer_that_took_no_step():
    _, model, optimizer = make({})
    step(model, optimizer, 0)
    saved = torch_state.get_state_dict(model, optimizer)
    _, other, others = make({})
    _, state = torch_state.get_state_dict(other, others)  # what dcp.load fills
    assert {name: set(one) for name, one in state["state"].items()} == {n: set(o) for n, o in saved[1]["state"].items()}
    torch_state.set_state_dict(other, others, model_state_dict=saved[0], optim_state_dict=saved[1])
    for one in ((model, optimizer), (other, others)):
        step(*one, 1)
    assert same(model.full_state_dict(), other.full_state_dict()) == []


def test_an_empty_state_is_refused_with_the_call_that_fills_it():
    _, model, optimizer = make({})
    empty = {"state": {}, "param_groups": torch_state.get_optimizer_state_dict(model, optimizer)["param_groups"]}
    with pytest.raises(FsdpError, match=r"missing: .*call model.materialize_state\(optimizer\) before it is saved"):
        torch_state.set_optimizer_state_dict(model, optimizer, empty)


def test_options_of_torch_are_followed_or_refused():
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    _, model, optimizer = make({})
    step(model, optimizer, 0)
    weights, state = torch_state.get_state_dict(model, optimizer, options=options)
    assert same(weights, model.full_state_dict()) == [] and state["state"]
    torch_state.set_model_state_dict(model, weights, options=StateDictOptions(broadcast_from_rank0=True))
    with pytest.raises(FsdpError, match=r"StateDictOptions.dsd_fqn_modifiers is .*; here it is"):
        torch_state.set_model_state_dict(model, weights, options=StateDictOptions(dsd_fqn_modifiers="other"))
