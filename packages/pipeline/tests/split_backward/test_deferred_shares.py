"""What W really makes: the share of each stage, a warning where it is small, and a simulation that counts it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sixfold.pipeline import Costs, PipelineRunner, ScheduleError, Stage, gpipe, simulate, zb_h1


class Own(nn.Linear):
    """A subclass, as LoRA's and quantised layers are."""


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[:, 0]


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Own(8, 8))


def runner_of(program: Any, *modules: nn.Module) -> PipelineRunner:
    stages = [Stage(module, i) for i, module in enumerate(modules)]
    return PipelineRunner(program, stages, None, lambda output, _: output.square().mean())


@pytest.mark.parametrize(
    ("module", "share"),
    [(lambda: nn.Linear(8, 8), 1.0), (half, 0.5), (lambda: Own(8, 8), 0.0), (Images, 0.0)],
    ids=["Linear", "half", "subclass", "Conv1d"],
)
@pytest.mark.filterwarnings("ignore:W makes")
def test_each_stage_tells_which_part_w_made(module, share):
    runner = runner_of(zb_h1(2, 4), nn.Linear(8, 8), module())
    assert runner.deferred == {}
    runner.step(torch.randn(8, 8))
    assert runner.deferred == {0: 1.0, 1: share}


@pytest.mark.filterwarnings("ignore:W makes")
def test_a_compiled_stage_leaves_nothing_to_w():
    module = nn.Sequential(nn.Linear(8, 8))
    module.compile(backend="eager")
    runner = runner_of(zb_h1(2, 4), nn.Linear(8, 8), module)
    runner.step(torch.randn(8, 8))
    assert runner.deferred == {0: 1.0, 1: 0.0}


def test_a_w_with_little_to_do_is_told_of_once_and_never_of_whole_backwards():
    runner = runner_of(zb_h1(2, 4), Own(8, 8), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="W makes the gradients of 0% of stage 0; the others are made in I"):
        runner.step(torch.randn(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.step(torch.randn(8, 8))
        runner_of(gpipe(2, 4), Own(8, 8), Own(8, 8)).step(torch.randn(8, 8))
        runner_of(zb_h1(2, 4), nn.Linear(8, 8), nn.Linear(8, 8)).step(torch.randn(8, 8))


def test_simulate_counts_what_w_does_not_make():
    program = zb_h1(4, 8)
    costs = Costs.per_rank(program, forward=1.0, backward_input=1.0, backward_weight=1.0)
    none = costs.deferring(dict.fromkeys(range(4), 0.0))
    assert (none.backward_input, none.backward_weight) == ((2.0,) * 4, (0.0,) * 4)
    assert costs.deferring(dict.fromkeys(range(4), 1.0)) == costs
    bubble = simulate(program, costs).bubble_over_ideal
    quarter, nothing = (simulate(program, costs.deferring(dict.fromkeys(range(4), s))) for s in (0.25, 0.0))
    assert bubble < quarter.bubble_over_ideal < nothing.bubble_over_ideal
    assert nothing.bubble_over_ideal == pytest.approx(3 / 8)  # 1F1B's, (p - 1) / m
    with pytest.raises(ScheduleError, match=r"shares\[4\] is 0.5; stages are 0..3, shares 0..1"):
        costs.deferring({4: 0.5})
