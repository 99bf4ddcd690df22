"""An exception at any operation of a step, caught, in one process: the next steps are those of a plain net."""

from __future__ import annotations

import pytest
from fsdp_helpers import Block, make_adamw, make_net
from fsdp_interrupt_helpers import sweep
from torch import nn

from sixfold.fsdp import BufferConfig, MixedPrecision, fully_shard, fully_shard_optimizer

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
