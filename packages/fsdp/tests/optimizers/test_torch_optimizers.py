"""Every optimizer of torch.optim: bit for bit its plain self, or refused; each state tensor in a record, or told.

The oracle is the same optimizer on a plain module in the same process.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from fsdp_helpers import Block, same
from fsdp_world import MAKERS, WHOLE, World, a_closure
from torch import nn

from sixfold.fsdp import FsdpError, MixedPrecision, fully_shard, fully_shard_optimizer

OTHERS = {"LBFGS", "SparseAdam"}  # hooks/test_uses.py, and refused below
UNITS = {"fsdp_unit_modules": [Block]}
TENSOR = {**UNITS, "granularity": lambda name, parameter: "tensor"}


def test_no_optimizer_of_torch_is_left_out():
    theirs = {
        name
        for name, found in vars(torch.optim).items()
        if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
    }
    assert theirs == MAKERS.keys() | WHOLE.keys() | OTHERS


@pytest.mark.sampled
@pytest.mark.parametrize("options", [UNITS, TENSOR, {**UNITS, "strategy": "optim"}], ids=["element", "tensor", "optim"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.slow
def test_an_elementwise_optimizer_gives_its_plain_bits(name, options):
    plain, world = World(None, MAKERS[name]), World(options, MAKERS[name])
    for one in (plain, world):
        one.train(3)
        a_closure(one)
    assert same(plain.weights(), world.weights()) == []


@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_of_whole_tensors_gives_its_plain_bits_with_whole_tensors(name):
    plain, world = World(None, WHOLE[name]), World(TENSOR, WHOLE[name])
    plain.train(3)
    world.train(3)
    assert same(plain.weights(), world.weights()) == []


def test_adafactor_over_pieces_is_refused():
    with pytest.raises(FsdpError, match=r"Adafactor updates embedding.weight .*flat; wrap with granularity"):
        World(UNITS, WHOLE["Adafactor"])


def test_an_optimizer_of_sparse_gradients_is_refused():
    net = nn.Embedding(5, 3, sparse=True)
    model = fully_shard(net)
    with pytest.raises(FsdpError, match=r"SparseAdam steps on sparse gradients.*Adam or AdamW"):
        fully_shard_optimizer(torch.optim.SparseAdam(list(net.parameters())), model)


def elements(state):
    return sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor) and value.numel() != 1)


@pytest.mark.parametrize("name", [*MAKERS, *WHOLE])
def test_every_element_of_an_optimizers_state_lies_in_a_record(name):
    world = World(TENSOR if name in WHOLE else UNITS, {**MAKERS, **WHOLE}[name])
    world.train(1)
    records = [r for r in world.call.state_records(world.optimizer) if r.key != "param"]
    assert sum(r.tensor.numel() for r in records) == sum(elements(s) for s in world.optimizer.state.values())
    for r in records:
        assert r.stop - r.start == r.tensor.numel() and r.stop <= torch.Size(r.global_shape).numel()
    places = {(r.name, r.key, r.tensor.data_ptr()) for r in records}
    mains = dict(world.call.main_parameters())
    for n, main in mains.items():
        for key, value in world.optimizer.state.get(main, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                assert (n, key, value.data_ptr()) in places


def test_factored_state_has_a_shape_of_its_own():
    world = World(TENSOR, WHOLE["Adafactor"])
    world.train(1)
    shapes = {(r.name, r.key): (r.global_shape, r.start, r.stop) for r in world.call.state_records(world.optimizer)}
    assert shapes["embedding.weight", "row_var"] == ((17, 1), 0, 17)
    assert shapes["embedding.weight", "col_var"] == ((1, 13), 0, 13)
    assert shapes["norm.weight", "variance"] == ((13,), 0, 13)


class Odd(torch.optim.SGD):
    """A user's optimizer with state that is of no parameter's shape."""

    def __init__(self, params, extra):
        super().__init__(params, lr=0.1)
        self.extra = extra

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["extra"] = self.extra()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (lambda: torch.zeros(3, 3), r"'extra' of embedding.weight is of shape \(3, 3\)"),
        (lambda: [torch.zeros(2)], "'extra' of embedding.weight is a list of 1 tensors"),
    ],
)
def test_state_that_no_record_can_hold_is_told_and_not_left_out(extra, says):
    world = World(UNITS, lambda p: Odd(p, extra))
    world.train(1)
    with pytest.raises(FsdpError, match=says + ".*optimizer.state_dict"):
        world.call.state_records(world.optimizer)


@pytest.mark.parametrize("name", [*MAKERS, *WHOLE])
@pytest.mark.slow
def test_materialised_state_is_what_the_first_step_begins_with(name):
    options = TENSOR if name in WHOLE else UNITS
    plain, world = (World(one, {**MAKERS, **WHOLE}[name]) for one in (None, options))
    world.call.materialize_state(world.optimizer)
    plain.train(2)
    world.train(2)
    assert same(plain.weights(), world.weights()) == []


def test_an_optimizer_that_has_stepped_is_refused_also_if_it_makes_state_early():
    net = World(None, MAKERS["Adagrad"])
    net.train(1)
    model = fully_shard(net.net, fsdp_unit_modules=[Block])
    with pytest.raises(FsdpError, match="state"):
        fully_shard_optimizer(net.optimizer, model)


def test_state_of_a_constructor_that_saw_bf16_weights_is_in_main_dtype():
    """Adagrad built on a wrapped model: sums of squares in bfloat16 would stop growing."""
    bf16 = {**UNITS, "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    built_before = World(None, MAKERS["Adagrad"])
    model = fully_shard(built_before.net, **bf16)
    built_before.call, built_before.wrapped = model, True
    fully_shard_optimizer(built_before.optimizer, model)
    built_after = World(bf16, MAKERS["Adagrad"])
    for one in (built_before, built_after):
        one.train(3)
    assert {state["sum"].dtype for state in built_after.optimizer.state.values()} == {torch.float32}
    assert same(built_before.weights(), built_after.weights()) == []


def test_an_optimizer_is_sharded_once():
    """Twice, it refused its own state dict as that of an optimizer that was not sharded."""
    world = World(UNITS)
    with pytest.raises(FsdpError, match=r"AdamW is sharded already; call fully_shard_optimizer once"):
        fully_shard_optimizer(world.optimizer, world.call)
    world.train(1)
    world.optimizer.load_state_dict(world.optimizer.state_dict())
