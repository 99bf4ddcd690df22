"""A model inside torch's transforms and fake modes: refused at the call with nothing changed, or right.

The oracle is a plain net that trains the same steps and never met the transform.
"""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import batch, loss_of, same
from fsdp_world import SETTINGS, WIDTH, World
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from sixfold.fsdp import BufferConfig, FsdpError

pytestmark = pytest.mark.usefixtures("as_sharded")
X = torch.ones(3, WIDTH)


def by_jacrev(world):
    torch.func.jacrev(lambda x: world.call(x).sum(0))(X)


def by_grad_without_grad(world):
    with torch.no_grad():
        torch.func.grad(lambda x: world.call(x).sum())(X)


def by_jvp(world):
    torch.func.jvp(world.call, (X,), (X,))


def by_grad_of_a_vmap(world):
    torch.func.grad(lambda x: torch.vmap(world.call)(x).sum())(X)


def by_grad_inside_the_forward(world):
    world.net.special = lambda net, x: torch.func.grad(lambda y: net.blocks[0](y).sum())(x)
    try:
        world.call(batch(0, 0, 0))
    finally:
        world.net.special = None


def by_a_fake_mode(world):
    with FakeTensorMode(allow_non_fake_inputs=True):
        world.call(X)


def by_a_plain_fake_mode(world):
    with FakeTensorMode() as mode:
        world.call(mode.from_tensor(X))


def by_a_fake_backward(world):
    loss = world.loss(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        loss.backward()


def by_a_fake_read_of_the_state(world):
    with FakeTensorMode(allow_non_fake_inputs=True):
        world.call.full_state_dict()


def by_a_fake_zero_grad(world):
    with FakeTensorMode(allow_non_fake_inputs=True):
        world.optimizer.zero_grad()


def by_a_fake_step(world):
    world.loss(0).backward()
    with FakeTensorMode(allow_non_fake_inputs=True):
        world.optimizer.step()


def by_a_functional_mode(world):
    with FunctionalTensorMode():
        world.call(X)


def by_a_functional_step(world):
    world.loss(0).backward()
    with FunctionalTensorMode():
        world.optimizer.step()


def by_a_trace(world):
    torch.jit.trace(world.net, X)


def by_an_export(world):
    torch.export.export(world.net, (X,))


USES = [by_jacrev, by_grad_without_grad, by_jvp, by_grad_of_a_vmap, by_grad_inside_the_forward, by_a_fake_mode]
USES += [by_a_plain_fake_mode, by_a_fake_backward, by_a_fake_read_of_the_state, by_a_fake_zero_grad, by_a_fake_step]
USES += [by_a_functional_mode, by_a_functional_step, by_a_trace, by_an_export]
KEPT = {**SETTINGS["zero-3"], "buffers": BufferConfig(gathered_bytes="all")}


@pytest.mark.parametrize("first", [0, 1], ids=["before a step", "after a step"])
@pytest.mark.parametrize("options", [SETTINGS["zero-3"], KEPT], ids=["turns", "all kept"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.slow
def test_a_transform_is_refused_by_name_and_the_model_trains_on(use, options, first):
    plain, world = World(None), World(options)
    plain.train(3)
    world.train(first)
    for _ in range(2):
        with pytest.raises(FsdpError, match=r"is used while .*; do it with an unwrapped model"):
            use(world)
    world.optimizer.zero_grad()
    world.train(3 - first, first=first)
    assert same(plain.weights(), world.weights()) == []


def test_a_fake_backward_without_shards_is_refused_too():
    world = World(SETTINGS["zero-0"])
    with pytest.raises(FsdpError, match="FakeTensorMode"):
        by_a_fake_backward(world)


@pytest.mark.parametrize("use", [by_jacrev, by_jvp, by_grad_of_a_vmap, by_a_fake_mode, by_a_trace])
def test_a_transform_is_right_where_nothing_is_gathered(use):
    plain, world = World(None), World(SETTINGS["zero-0"])
    plain.train(2)
    world.train(1)
    use(world)
    world.train(1, first=1)
    assert same(plain.weights(), world.weights()) == []


def test_vmap_alone_and_the_remedies_are_right():
    plain, world = World(None), World(KEPT)
    for one in (plain, world):
        one.train(1)
    rows = [torch.vmap(one.call)(X) for one in (plain, world)]
    assert torch.equal(*rows)
    whole = [torch.autograd.functional.jacobian(lambda x, one=one: one.call(x).sum(0), X) for one in (plain, world)]
    assert torch.equal(*whole)
    copy = World(None)
    copy.net.load_state_dict(world.call.full_state_dict())
    transformed = [torch.func.jacrev(lambda x, one=one: one.call(x).sum(0))(X) for one in (plain, copy)]
    assert torch.equal(*transformed)
    for one in (plain, world):
        one.optimizer.zero_grad()
        loss_of(one.call(batch(1, 0, 0)), batch(1, 0, 0)).backward()
        one.optimizer.step()
    assert same(plain.weights(), world.weights()) == []


LAYERS = {"fsdp_unit_modules": [nn.Linear, nn.LayerNorm], "buffers": BufferConfig(merge_bytes=None)}
TURNS = {**SETTINGS["zero-3"], "buffers": BufferConfig(gathered_bytes="double")}


@pytest.mark.parametrize("randomness", ["error", "different"])
@pytest.mark.parametrize(
    "options", [SETTINGS["zero-3"], TURNS, LAYERS, KEPT], ids=["zero-3", "turns", "layers", "kept"]
)
def test_training_through_vmap_has_the_bits_of_a_plain_net(options, randomness):
    plain, world = World(None), World(options)
    for one in (plain, world):
        if randomness == "different":
            one.net.blocks[1].norm = nn.Sequential(one.net.blocks[1].norm, nn.Dropout(0.5))
        torch.manual_seed(1)
        for step in range(3):
            rows = torch.vmap(torch.vmap(one.call, randomness=randomness), randomness=randomness)
            rows(torch.full((2, 3, 5, WIDTH), 1.0 + step)).square().mean().backward()
            one.optimizer.step()
            one.optimizer.zero_grad()
    assert same(plain.weights(), world.weights()) == []
