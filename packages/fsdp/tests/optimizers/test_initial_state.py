"""materialize_state with every switch of torch's optimizers: keys, shapes, dtypes and bits of the first step's state.

The oracles are the same optimizer after a step (form), and on a plain module (bits).
"""

from __future__ import annotations

import inspect

import pytest
import torch
from fsdp_helpers import Block, same
from fsdp_world import World

SWITCHES = {
    "amsgrad": {"amsgrad": True},
    "fused": {"fused": True},
    "fused amsgrad": {"fused": True, "amsgrad": True},
    "foreach": {"foreach": True},
    "maximize": {"maximize": True},
    "centered": {"centered": True, "momentum": 0.9},
    "nesterov": {"nesterov": True, "momentum": 0.9},
    "decoupled": {"decoupled_weight_decay": True},
    "accumulator": {"initial_accumulator_value": 0.5},
    "lr tensor": {"lr": torch.tensor(1e-2)},
}
NAMES = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
WHOLE = ["Adafactor", "Muon"]


def takes(name, options):
    return set(options) <= set(inspect.signature(getattr(torch.optim, name).__init__).parameters)


CASES = [(name, switch) for name in [*NAMES, *WHOLE] for switch in SWITCHES if takes(name, SWITCHES[switch])]


def world(name, options, wrapped=True):
    made = getattr(torch.optim, name)
    grain = {"granularity": lambda n, p: "tensor"} if name in WHOLE else {}
    return World(
        {"fsdp_unit_modules": [Block], **grain} if wrapped else None,
        lambda parameters: made([p for p in parameters if p.ndim == 2] if name == "Muon" else parameters, **options),
    )


def form(one):
    return {
        name: {
            key: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)
            for key, value in one.optimizer.state.get(main, {}).items()
        }
        for name, main in one.call.main_parameters()
    }


@pytest.mark.parametrize("name", [*NAMES, *WHOLE])
@pytest.mark.slow
def test_state_is_made_as_the_first_step_makes_it_with_every_switch(name):
    switches = [switch for of, switch in CASES if of == name]
    assert "lr tensor" in switches
    for switch in switches:
        early, late, plain = (world(name, SWITCHES[switch], wrapped) for wrapped in (True, True, False))
        early.call.materialize_state(early.optimizer)
        late.train(1)
        assert form(early) == form(late), switch
        early.train(2)
        plain.train(2)
        assert same(plain.weights(), early.weights()) == [], switch


@pytest.mark.parametrize("name", [name for name in [*NAMES, *WHOLE] if takes(name, {"capturable": True})])
@pytest.mark.slow
def test_capturable_state_counts_steps_on_the_device_and_is_made_without_a_step(name):
    """A step of it needs a device; its state has the form of the plain one's, and every step count is a tensor."""
    captured, other = world(name, {"capturable": True}), world(name, {})
    captured.call.materialize_state(captured.optimizer)
    other.call.materialize_state(other.optimizer)
    assert {n: set(keys) for n, keys in form(captured).items()} == {n: set(keys) for n, keys in form(other).items()}
    for main, state in captured.optimizer.state.items():
        assert isinstance(state["step"], torch.Tensor) and state["step"].device == main.device
        assert float(state["step"]) == 0.0
