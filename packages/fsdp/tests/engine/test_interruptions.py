"""An exception at any operation of a step, caught, in one process: the next steps are those of a plain net."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from fsdp_interrupt_helpers import RaisesAtCall, sweep
from fsdp_world import SETTINGS, World
from torch import nn

from sixfold.fsdp import BufferConfig, FsdpError, MixedPrecision, fully_shard, fully_shard_optimizer
from sixfold.fsdp.buffers.gradients import Gradients
from sixfold.fsdp.engine.gather import Gathering

PARTS = 48
KINDS = {
    "zero-3": {},
    "zero-3 all": {"buffers": BufferConfig(gathered_bytes="all")},
    "zero-3 bytes": {"buffers": BufferConfig(gathered_bytes=7000)},
    "zero-2": {"strategy": "optim_grads"},
    "zero-0": {"strategy": "no_shard"},
    "tree": {"mixed_precision": MixedPrecision(grad_sum="tree")},
}


class Stop(BaseException):
    """As KeyboardInterrupt."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.usefixtures("as_sharded")
def test_one_process_goes_on_with_the_bits_of_a_plain_net_wherever_an_exception_came(kind, part):
    def wrap():
        net = make_net()
        model = fully_shard(net, fsdp_unit_modules=[Block, nn.Embedding], process_group=None, **KINDS[kind])
        return model, fully_shard_optimizer(make_adamw(net.parameters()), model)

    error = Stop if part % 2 else MemoryError
    outcomes = sweep(wrap, 0, 1, lambda all_of_them: all_of_them[part::PARTS], error, 1, by_microbatch=False)
    assert outcomes.keys() == {"skipped"}


@pytest.mark.usefixtures("as_sharded")
def test_gradients_of_an_interrupted_reduction_are_refused_until_zero_grad_drops_them():
    plain, world = World(None), World(SETTINGS["zero-3"])
    loss = world.loss(0)
    with RaisesAtCall(1, Stop, Gradients, "take"), pytest.raises(Stop):
        loss.backward()
    for use in (world.optimizer.step, lambda: world.loss(0), world.call.finish_grad_sync):
        with pytest.raises(FsdpError, match=r"gradients are not whole; call zero_grad\(\) and go on"):
            use()
    world.optimizer.zero_grad()
    for one in (plain, world):
        one.train(2)
    assert same(plain.weights(), world.weights()) == []


@pytest.mark.usefixtures("as_sharded")
def test_weights_of_an_interrupted_gather_are_refused_in_its_call_and_gathered_anew_in_the_next():
    plain, world = World(None), World(SETTINGS["zero-3"])

    def goes_on(net, x):
        with RaisesAtCall(1, Stop, Gathering, "use"), pytest.raises(Stop):
            net.blocks[0](x)
        return net.blocks[1](x)

    world.net.special = goes_on
    with pytest.raises(FsdpError, match=r"weights are not here; end this call or backward, call zero_grad\(\)"):
        world.call(batch(0, 0, 0))
    world.net.special = None
    for one in (plain, world):
        one.train(2)
    assert same(plain.weights(), world.weights()) == []


CLEARS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
}


@pytest.mark.parametrize("clear", CLEARS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("as_sharded")
def test_a_gradient_that_a_hook_of_the_users_left_behind_goes_with_zero_grad(kind, clear):
    def train(wrapped):
        """Two steps; before the second one a backward ends in a hook that was there before the wrap."""
        net, stops = make_net(), []

        def stop(_):
            if stops:
                raise stops.pop()

        for parameter in net.blocks[1].parameters():
            parameter.register_post_accumulate_grad_hook(stop)
        model, optimizer = net, make_adamw(net.parameters())
        if wrapped:
            model = fully_shard(net, fsdp_unit_modules=[Block, nn.Embedding], process_group=None, **KINDS[kind])
            fully_shard_optimizer(optimizer, model)
        for step in range(2):
            for _ in range(step):
                stops.append(Stop("injected"))
                with pytest.raises(Stop):
                    loss_of(model(batch(7, 0, 0)), batch(7, 0, 0)).backward()
                CLEARS[clear](model, optimizer)
            loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.full_state_dict() if wrapped else model.state_dict()

    assert same(train(True), train(False)) == []


def _in_a_closure(model, optimizer):
    def closure():
        raise Stop("a bad batch")

    optimizer.step(closure)


def _in_a_hook(model, optimizer):
    def stop(*_):
        raise Stop("injected")

    handle = optimizer.register_step_pre_hook(stop)
    try:
        optimizer.step()
    finally:
        handle.remove()


def _halve_through_data(optimizer):
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.data.mul_(0.5)


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("raising", [_in_a_closure, _in_a_hook])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("as_sharded")
def test_writes_through_data_are_seen_after_a_step_that_raised(kind, raising, evaluated):
    def train(wrapped):
        net = make_net()
        model, optimizer = net, make_adamw(net.parameters())
        if wrapped:
            model = fully_shard(net, fsdp_unit_modules=[Block, nn.Embedding], process_group=None, **KINDS[kind])
            fully_shard_optimizer(optimizer, model)
        outputs = []
        for step in range(2):
            loss_of(model(batch(step, 0, 0)), batch(step, 0, 0)).backward()
            with pytest.raises(Stop):
                raising(model, optimizer)
            with torch.no_grad():
                outputs += [model(batch(5, 0, 0))] if evaluated else []
                _halve_through_data(optimizer)
                outputs.append(model(batch(6, 0, 0)))
            optimizer.step()
            optimizer.zero_grad()
        return dict(enumerate(outputs)) | (model.full_state_dict() if wrapped else model.state_dict())

    assert same(train(True), train(False)) == []


@pytest.mark.parametrize("made_apart", [False, True])
@pytest.mark.usefixtures("as_sharded")
def test_a_state_is_loaded_after_a_step_that_raised_and_not_inside_a_step(made_apart):
    net = make_net()
    model = fully_shard(net, fsdp_unit_modules=[Block], process_group=None)
    if made_apart:  # by a wrapper that holds main parameters
        optimizer = make_adamw([one for _, one in model.main_parameters()])
    else:
        optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    loss_of(model(batch(0, 0, 0)), batch(0, 0, 0)).backward()
    saved = model.full_state_dict()
    texts = []

    def closure():
        with pytest.raises(FsdpError) as caught:
            model.load_full_state_dict(saved)
        texts.append(str(caught.value))
        with torch.no_grad():
            model(batch(0, 0, 0))  # a call inside the step does not end it
        with pytest.raises(FsdpError):
            model.load_full_state_dict(saved)
        raise Stop("a bad batch")

    with pytest.raises(Stop):
        optimizer.step(closure)
    assert "inside a forward or optimizer.step()" in texts[0]
    model.load_full_state_dict({name: value * 2 for name, value in saved.items()})
    assert same(model.full_state_dict(), {name: value * 2 for name, value in saved.items()}) == []
