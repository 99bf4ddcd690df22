"""Scaled losses under autocast over ranks: an overflow on one rank is one on all, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import batch, layers
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, Stage, add_loss, zb_h1

M, STEPS, OVERFLOW = 4, 5, 2


def overflow(first: nn.Module, step: int) -> None:
    """In one step, in the first stage alone."""
    if step == OVERFLOW:
        for parameter in first.parameters():
            parameter.grad.mul_(float("inf"))


def mean(output: Tensor, target: Tensor) -> Tensor:
    return ((output.float() - target) ** 2).mean()


class Balanced(nn.Module):
    """A layer with a loss of its own, which joins by ``joined``."""

    def __init__(self, layer: nn.Module, joined: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.joined = layer, joined

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self.joined(hidden, hidden.float().square().mean())


def scaled(rank: int, ranks: int, balance: float) -> tuple[list[Tensor], float]:
    module = layers(2)[rank]
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2, process_group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    if balance:  # as the guide has it
        module = Balanced(module, lambda o, loss: add_loss(o, loss, weight=balance * scaler.get_scale() / M))
    runner = PipelineRunner(
        zb_h1(2, M), Stage(module, rank), dist.group.WORLD, lambda o, t: scaler.scale(mean(o, t)), timeout_s=20
    )
    for step in range(STEPS):
        with torch.autocast("cpu", torch.float16):
            runner.step(*batch(2 * M, step))
        if rank == 0:
            overflow(module, step)
            scaler.scale(torch.zeros(1))  # a scaler that scaled nothing has no scale yet
        scaler.unscale_(optimizer)
        runner.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [p.detach() for p in module.parameters()], scaler.get_scale()


def of_one_process(balance: float) -> tuple[list[nn.Module], float]:
    losses: list[Tensor] = []

    def joined(output: Tensor, loss: Tensor) -> Tensor:
        losses.append(balance * loss)
        return output

    modules: list[nn.Module] = [Balanced(layer, joined) for layer in layers(2)]
    parameters = [p for module in modules for p in module.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for step in range(STEPS):
        for x, y in zip(*(part.chunk(M) for part in batch(2 * M, step)), strict=True):
            with torch.autocast("cpu", torch.float16):
                for module in modules:
                    x = module(x)
                loss = mean(x, y)
            scaler.scale((loss + sum(losses)) / M).backward()
            losses.clear()
        overflow(modules[0], step)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return modules, scaler.get_scale()


@pytest.mark.parametrize("balance", [0.0, 0.3], ids=["one loss", "and a loss of each stage"])
def test_a_scaler_that_knows_the_group_skips_and_scales_as_in_one_process(balance):
    modules, scale = of_one_process(balance)
    found: list[Any] = run_ranks(scaled, 2, balance)
    for (weights, mine), module in zip(found, modules, strict=True):
        assert mine == scale
        for ours, theirs in zip(weights, module.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach())
