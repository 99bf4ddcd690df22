"""A step of a sum fails on several ranks: what the error says to do is what works."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import batch, layers, square_loss
from torch import Tensor, nn

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b

M = 4


class Fails(nn.Module):
    """Fails while it is told to."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.fails, self.calls = module, False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.fails and self.calls % M == 0:
            raise RuntimeError("out of memory")
        return self.module(x)


def repeat(rank: int, ranks: int) -> None:
    """Follows the message."""
    module = Fails(layers(ranks)[rank])

    def made() -> PipelineRunner:
        return PipelineRunner(one_f_one_b(ranks, M), Stage(module, rank), dist.group.WORLD, square_loss, timeout_s=20)

    runner = made()
    runner.step(*batch(8, 5))
    once = [p.grad.clone() for p in module.parameters()]
    module.fails = rank == ranks - 1
    with pytest.raises(ScheduleError, match="out of memory"):
        runner.step(*batch(8, 6))
    module.fails = False
    runner = made()
    words = r"holds a part of a step that failed; call zero_grad\(\) and make a new runner on all ranks, then repeat"
    with pytest.raises(ScheduleError, match=words):
        runner.step(*batch(8, 5))
    module.zero_grad()
    made().step(*batch(8, 5))
    assert all(torch.equal(p.grad, was) for p, was in zip(module.parameters(), once, strict=True))


@pytest.mark.slow
def test_the_remedy_of_a_sum_that_failed_works_on_several_ranks():
    run_ranks(repeat, 2)
