"""Tied parameters over process groups: a chain of three holders, of which one is far from the next."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import Shared, batch, equal_bits, layers, square_loss
from torch import nn

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, gpipe, zb_v

TIED = (0, 2, 5)  # on ranks 0, 2 and 0 of the V


def modules() -> list[nn.Module]:
    """Six stages, three of them with the factor."""
    return [Shared(layer, 1.0 + s) if s in TIED else layer for s, layer in enumerate(layers(6))]


def add_up(rank: int, ranks: int) -> None:
    """Two steps with an evaluation between, beside copies that keep their own totals."""
    program, ours, oracle = zb_v(3, 4), modules(), modules()
    stages = [Stage(ours[s], s, tied={"f": ours[s].factor} if s in TIED else None) for s in program.stages_of(rank)]
    runner = PipelineRunner(program, stages, dist.group.WORLD, square_loss, timeout_s=20)
    copies = [oracle[s].factor for s in TIED]
    for copy in copies[1:]:
        copy.data.copy_(copies[0].data)
    wanted = None
    for seed in (1, 2):
        x, y = batch(8, seed)
        runner.step(x, y)
        runner.evaluate(x, y)
        for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            for module in oracle:
                a = module(a)
            (square_loss(a, b) / 4).backward()
        total = copies[0].grad + copies[1].grad + copies[2].grad
        wanted = total if wanted is None else wanted + total
        for copy in copies:
            copy.grad = None
    for s in set(TIED) & set(program.stages_of(rank)):
        assert torch.equal(ours[s].factor.data, copies[0].data)
        assert equal_bits([ours[s].factor.grad], [wanted])


@pytest.mark.slow
def test_every_holder_on_every_rank_gets_the_sum():
    run_ranks(add_up, 3)


def differ(rank: int, ranks: int) -> str:
    """Copies of two shapes."""
    module = nn.Linear(8, 8 + rank, bias=False)
    try:
        stage = Stage(module, rank, tied={"w": module.weight})
        PipelineRunner(gpipe(2, 1), [stage], dist.group.WORLD, square_loss)
    except ScheduleError as error:
        return str(error)
    return "made"


def test_copies_of_two_shapes_are_refused_on_every_rank():
    words = "tied['w'] is torch.float32 [8, 8] on stage 0 and torch.float32 [9, 8] on stage 1"
    told = run_ranks(differ, 2)
    assert all(each.startswith(words) for each in told), told
