"""An exception at any operation of a step, caught, in one process: the next steps are those of a plain net."""

from __future__ import annotations

import pytest
from fsdp_helpers import Block, batch, make_adamw, make_net, same
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
