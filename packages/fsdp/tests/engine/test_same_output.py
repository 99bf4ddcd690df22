"""Units inside units that return the very tensor the inner one returned: it carries the hooks of both."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import same
from torch import Tensor, nn

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, fully_shard_optimizer

WIDTH = 8


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.first(x)))


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Outer() for _ in range(4)))


def train(call: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        call(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("gathered", "prefetch"), [("double", 10**6), ("all", None), (2700, None), (2700, 400)])
def test_neither_prefetch_nor_reduction_takes_the_outer_units_word_for_the_inner_ones(gathered, prefetch):
    net, plain = make(), make()
    buffers = BufferConfig(gathered_bytes=gathered, prefetch_bytes=prefetch)
    model = FullyShardedDataParallel(net, fsdp_unit_modules=[Outer, Inner], buffers=buffers)
    train(model, fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), model))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert same(plain.state_dict(), model.full_state_dict()) == []
    assert model.report()["reductions"] == 3 * 8  # each unit once in a step
