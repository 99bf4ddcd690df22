"""Layers that are dropped at random (LayerDrop): alike they train as in plain torch, apart the error says so.

The oracle is plain torch: as many copies of the net as there are ranks, in one process.
"""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FsdpError, FullyShardedDataParallel, fully_shard_optimizer

STEPS, RANKS = 4, 2
REMEDY = "Draw what drops a layer from a generator that all ranks seed alike"


class Dropping(nn.Module):
    """Each layer is left out with probability ``drop``, by a generator of the net's own, as transformers' loops do."""

    def __init__(self, drop: float, seed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 3)
        self.drop, self.generator, self.dropped = drop, torch.Generator().manual_seed(seed), 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([], generator=self.generator) < self.drop:
                self.dropped += 1
                continue
            x = x + layer(x).tanh()
        return self.head(x)


def loss_of(call, step: int, rank: int) -> Tensor:
    return call(torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def plainly(drop: float) -> dict[str, Tensor]:
    nets = [Dropping(drop, 3) for _ in range(RANKS)]
    first = nets[0]
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            loss_of(net, step, rank).backward()
        for mine, theirs in zip(first.parameters(), nets[1].parameters(), strict=True):
            mine.grad = None if mine.grad is None else (mine.grad + theirs.grad) / RANKS
        optimizer.step()
        for net in nets:
            net.zero_grad()
            net.load_state_dict(first.state_dict())
    assert bool(first.dropped) is bool(drop), "the seed drops none"
    return first.state_dict()


def sharded(rank, ranks, drop, seeds, options):
    net = Dropping(drop, seeds[rank])
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[nn.Linear], **options)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=0.1), model)
    began = time.monotonic()
    try:
        for step in range(STEPS):
            began = time.monotonic()
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    except FsdpError as error:
        return str(error), time.monotonic() - began
    return model.full_state_dict()


def two(*arguments):
    return run_ranks(sharded, RANKS, *arguments)


APART = BufferConfig(merge_bytes=None)  # each layer a unit


@pytest.mark.parametrize("checks", ["order", "unit", "off"])
def test_ranks_that_drop_different_layers_are_told_why_and_what_to_do(checks):
    for text, seconds in two(0.5, (3, 4), {"checks": checks, "buffers": APART}):
        assert REMEDY in text and "config.layerdrop" in text, text
        assert seconds < 5.0, f"{seconds:.1f} s"


@pytest.mark.parametrize("drop", [0.5, 0.0])
def test_ranks_that_drop_layers_alike_or_none_train_as_plain_torch(drop):
    expected = plainly(drop)
    for weights in two(drop, (3, 3), {"buffers": APART}):
        assert not isinstance(weights, tuple), weights
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
