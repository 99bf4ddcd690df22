"""The step that users of torch.distributed.pipelining write, beside ours; frozen stages, strides and integers."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import WIDTH, batch, equal_bits, gradients, layers, square_loss
from torch import Tensor, nn

from ranktest import run_ranks, store
from sixfold.pipeline import (
    PipelineRunner,
    PipelineTimeout,
    ScheduleError,
    Stage,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
)

M = 4  # a power of two: dividing each loss by it, or the sum of gradients, are the same bits


def both(rank: int, ranks: int) -> None:
    """One step of Schedule1F1B as its users call it, and one of ours, on equal modules."""
    import torch.distributed.pipelining as peer

    theirs, ours = layers(ranks)[rank], layers(ranks)[rank]
    x, y = batch(2 * M)
    stage = peer.PipelineStage(theirs, rank, ranks, torch.device("cpu"))
    schedule = peer.Schedule1F1B(stage, M, square_loss)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=losses)
    runner = PipelineRunner(one_f_one_b(ranks, M), [Stage(ours, rank)], dist.group.WORLD, square_loss, timeout_s=10)
    made = runner.step(x, y).losses
    assert len(made) == len(losses) == (M if rank == ranks - 1 else 0)
    assert all(torch.equal(a, b) for a, b in zip(made, losses, strict=True))
    assert equal_bits(gradients(ours), gradients(theirs))


@pytest.mark.slow
def test_a_step_has_the_losses_and_gradients_of_pytorchs():
    pytest.importorskip("numpy", reason="PyTorch's stages send each other their shapes as objects, which needs it")
    run_ranks(both, 2)


class Strided(nn.Module):
    """Its output's columns lie next to each other, not its rows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).T.contiguous().T


def modules() -> list[nn.Module]:
    """Integers in, strided outputs, a frozen stage in the middle."""
    torch.manual_seed(0)
    made: list[nn.Module] = [nn.Embedding(10, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    made[1].requires_grad_(False)
    return [Strided(module) for module in made]


def odd_stages(rank: int, ranks: int, frozen_first: bool) -> None:
    """A step, compared with the plain loop."""
    ours, oracle = modules(), modules()
    if frozen_first:  # then nothing is to be sent back at all
        ours[0].requires_grad_(False)
        oracle[0].requires_grad_(False)
    x, y = torch.arange(6) % 4, batch(6)[1]
    runner = PipelineRunner(
        one_f_one_b(ranks, 3), [Stage(ours[rank], rank)], dist.group.WORLD, square_loss, timeout_s=10
    )
    for _ in range(2):
        runner.step(x, y)
        for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            (square_loss(oracle[2](oracle[1](oracle[0](a))), b) / 3).backward()
    # A message arrives contiguous, and products of other strides may differ in their last bits.
    for mine, other in zip(gradients(ours[rank]), gradients(oracle[rank]), strict=True):
        assert (mine is None) == (other is None)
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7) if mine is not None else None


@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.slow
def test_frozen_stages_strided_outputs_and_integers_travel(frozen_first):
    run_ranks(odd_stages, 3, frozen_first)


def with_another_scale(rank: int, ranks: int) -> str:
    """Rank 1 counts tokens, rank 0 would wait for no count."""
    loss: Any = square_loss if rank == 0 else lambda o, t: (square_loss(o, t), o.numel())
    runner = PipelineRunner(
        gpipe(ranks, 2),
        [Stage(layers(2)[rank], rank)],
        dist.group.WORLD,
        loss,
        scale=("mean", "token")[rank],
        timeout_s=5,
    )
    with pytest.raises(ScheduleError) as caught:
        runner.step(*batch(4))
    return str(caught.value)


def test_ranks_with_different_scales_are_told_so():
    for rank, text in enumerate(run_ranks(with_another_scale, 2)):
        assert f"scale='{('mean', 'token')[rank]}'" in text


def with_other_calls(rank: int, ranks: int, mixed: str) -> str:
    """After both know both programs and calls, each rank makes another one: messages would pair that do not belong."""
    own, programs = (0, 2) if rank == 0 else (1, 3), (interleaved(ranks, M, 2), looped_bfs(ranks, M, 2))
    modules = layers(4)
    stages = [Stage(modules[index], index) for index in own]
    runner = PipelineRunner(programs[0], stages, dist.group.WORLD, square_loss, timeout_s=10, store=store())
    x, y = batch(2 * M)
    runner.evaluate(x, y)
    for program in programs:
        runner.step(x, y, program=program)
    with pytest.raises(ScheduleError) as caught:
        if mixed == "programs":
            runner.step(x, y, program=programs[rank])
        else:
            (runner.evaluate, runner.step)[rank](x, y)
    return str(caught.value)


@pytest.mark.parametrize("mixed", ["programs", "calls"])
def test_ranks_that_make_different_calls_are_told_so_also_when_nothing_is_new(mixed):
    for text in run_ranks(with_other_calls, 2, mixed):
        assert "rank 1 failed at" in text and "rank 0 runs another program in this step, or another call" in text


def on_no_interface(rank: int, ranks: int) -> tuple[str, float]:
    """gloo is told to use an interface that this machine does not have."""
    os.environ["GLOO_SOCKET_IFNAME"] = "absent0"
    begin = time.monotonic()
    with pytest.raises(PipelineTimeout) as caught:
        PipelineRunner(gpipe(ranks, 2), [Stage(layers(2)[rank], rank)], dist.group.WORLD, square_loss, timeout_s=20)
    return str(caught.value), time.monotonic() - begin


def test_what_fails_at_once_is_not_said_to_have_waited():
    for rank, (text, took) in enumerate(run_ranks(on_no_interface, 2)):
        assert took < 10 and f"rank {rank} has no connection to all 2 ranks: " in text and "absent0" in text


def unequal(rank: int, ranks: int) -> str:
    """Only the last rank's targets do not divide."""
    x, y = batch(7)
    runner = PipelineRunner(gpipe(ranks, 3), [Stage(layers(2)[rank], rank)], dist.group.WORLD, square_loss, timeout_s=3)
    with pytest.raises(ScheduleError) as caught:
        runner.step(list(x.tensor_split(3)), y)
    return str(caught.value)


def test_targets_that_do_not_divide_end_the_step_on_every_rank():
    first, last = run_ranks(unequal, 2)
    assert "targets has 7 rows for 3 microbatches" in last
    assert "rank 0 waits" in first or "for rank 1" in first or "rank 1" in first
