"""Activation checkpointing gathers no unit more often than training without it, where memory holds the recomputed ones.

The least number is counted by hand: a unit that is recomputed and then goes backward is gathered once for both.
"""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from torch import nn
from torch.utils.checkpoint import checkpoint

from sixfold.fsdp import BufferConfig, fully_shard, fully_shard_optimizer

LAYERS = 4


class Segments(nn.Module):
    """Blocks of one size, ``length`` of them in each checkpoint; ``reentrant``: its form, None: no checkpoint."""

    def __init__(self, length: int, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(13) for _ in range(LAYERS))
        self.head = nn.Linear(13, 13)
        self.length, self.reentrant = length, reentrant

    def forward(self, x):
        x = self.head(x)
        for first in range(0, LAYERS, self.length):
            part = nn.Sequential(*self.blocks[first : first + self.length])
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return x


def gathers_of_a_step(net, loss, **buffers):
    """Of the third step, and the weights after it."""
    model = fully_shard(net, fsdp_unit_modules=[Block], buffers=BufferConfig(**buffers))
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    for step in range(3):
        before = model.report()["gathers"]
        loss(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.report()["gathers"] - before, model.full_state_dict()


def loss_of_segments(net, step):
    return net(torch.full((2, 13), 0.1 * (step + 1))).square().sum()


# Root 1, forward 4; backward 2: the last two units are still in their slots. A segment of one or two fits two slots and
# stays from its recompute to its backward.
EXPECTED = {(1, "double"): 1 + 4 + 2, (2, "double"): 1 + 4 + 2, (1, "all"): 1 + 4, (2, "all"): 1 + 4, (4, "all"): 1 + 4}


@pytest.mark.sampled
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize(("length", "memory"), EXPECTED)
def test_a_checkpoint_around_units_gathers_each_once_for_recompute_and_backward(length, memory, reentrant):
    plain = gathers_of_a_step(Segments(1, None), loss_of_segments, gathered_bytes="all")[1]
    count, weights = gathers_of_a_step(Segments(length, reentrant), loss_of_segments, gathered_bytes=memory)
    assert count == EXPECTED[length, memory]
    assert same(plain, weights) == []


def loss_of_net(net, step):
    return loss_of(net(batch(step, 0, 0)), batch(step, 0, 0))


@pytest.mark.parametrize("recompute", ["inside", "reentrant", "around"])
@pytest.mark.parametrize("memory", ["double", "all"])
def test_a_checkpoint_inside_units_of_any_size_gathers_as_often_as_none(memory, recompute):
    count, plain = gathers_of_a_step(make_net(), loss_of_net, gathered_bytes=memory)
    found, weights = gathers_of_a_step(make_net(recompute=recompute), loss_of_net, gathered_bytes=memory)
    assert found == count
    assert same(plain, weights) == []


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.slow
def test_under_a_byte_budget_a_recomputed_unit_is_gathered_once_too(reentrant):
    """Memory for the root and three of four units: two of them are still there when the backward begins."""
    net = Segments(1, None)
    sizes = fully_shard(Segments(1, None), fsdp_unit_modules=[Block]).report()["units"]
    budget = sizes[""]["gathered_bytes"] + 3 * sizes["blocks.0"]["gathered_bytes"]
    plain, weights = gathers_of_a_step(net, loss_of_segments, gathered_bytes=budget)
    found, again = gathers_of_a_step(Segments(1, reentrant), loss_of_segments, gathered_bytes=budget)
    assert found == plain == 1 + 4 + 1
    assert same(weights, again) == []
