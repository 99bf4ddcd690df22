"""What a step holds, for all schedules: microbatches as simulated, outputs and gradients until they were taken."""

from __future__ import annotations

import pytest
import torch
from matrix_helpers import WIDTH
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sixfold.pipeline import Costs, PipelineRunner, Stage, simulate
from sixfold.pipeline.schedules import registered

PROGRAMS = [entry.with_chunks(3, 4, entry.chunks or 2) for entry in registered() if entry.flushed]
all_programs = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def summed(output: Tensor, _: None) -> Tensor:
    """A loss that keeps nothing."""
    return output.sum()


class Held(nn.Module):
    """Notes how many of its rank's microbatches are held, by what its linear layer keeps for its weight gradient."""

    def __init__(self, alive: list[StorageWeakRef], peaks: list[int]) -> None:
        super().__init__()
        self.layer, self.alive, self.peaks = nn.Linear(WIDTH, WIDTH), alive, peaks

    def forward(self, x: Tensor) -> Tensor:
        kept = x + 1
        if torch.is_grad_enabled():
            self.alive.append(StorageWeakRef(kept.untyped_storage()))
            self.peaks.append(sum(not each.expired() for each in self.alive))
        return self.layer(kept)


@all_programs
@pytest.mark.slow
def test_a_rank_holds_as_many_microbatches_as_simulated(program):
    alive: list[list[StorageWeakRef]] = [[] for _ in program.ranks]
    peaks: list[list[int]] = [[] for _ in program.ranks]
    stages = [Stage(Held(alive[rank], peaks[rank]), s) for s, rank in enumerate(program.placement)]
    runner = PipelineRunner(program, stages, loss_fn=summed)
    for _ in range(2):
        losses = runner.step(torch.randn(8, WIDTH)).losses
        assert all(each.expired() for rank in alive for each in rank), "held after the step"
    chunks = program.stages // len(program.ranks)
    simulated = simulate(program, Costs.per_rank(program)).peak_activations
    assert [max(rank) / chunks for rank in peaks] == pytest.approx(list(simulated))
    assert all(loss.grad_fn is None for loss in losses)


class Leaves(nn.Module):
    """Its output is kept by nothing but the leaf that its taker makes of it: an addition saves no tensor."""

    def __init__(self, outputs: list[list[StorageWeakRef]], stage: int) -> None:
        super().__init__()
        self.shift, self.outputs, self.stage = nn.Parameter(torch.zeros(WIDTH)), outputs, stage
        self.done: set[int] = set()  # microbatches whose backward has left this stage

    def forward(self, x: Tensor) -> Tensor:
        k = len(self.outputs[self.stage])
        if self.stage:
            before = self.outputs[self.stage - 1]
            assert all(before[j].expired() for j in self.done), f"stage {self.stage} at F{k}: {self.done} are done"
            x.register_hook(lambda _: self.done.add(k))
        y = x + self.shift
        self.outputs[self.stage].append(StorageWeakRef(y.untyped_storage()))
        return y


@all_programs
def test_an_output_that_autograd_does_not_need_is_gone_once_its_taker_has_gone_back(program):
    outputs: list[list[StorageWeakRef]] = [[] for _ in range(program.stages)]
    modules = [Leaves(outputs, s) for s in range(program.stages)]
    PipelineRunner(program, [Stage(module, s) for s, module in enumerate(modules)], loss_fn=summed).step(
        torch.randn(4, WIDTH)
    )
    assert [module.done for module in modules[1:]] == [{0, 1, 2, 3}] * (program.stages - 1)
    assert all(each.expired() for stage in outputs for each in stage)


class Doubles(nn.Module):
    """Makes a gradient of its own, which nothing but its taker's backward needs."""

    def __init__(self, made: list[dict[int, StorageWeakRef]], stage: int) -> None:
        super().__init__()
        self.shift, self.made, self.stage, self.turn = nn.Parameter(torch.zeros(WIDTH)), made, stage, 0
        self.done: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        k, self.turn = self.turn, self.turn + 1
        y = (x + self.shift) * 2
        y.register_hook(lambda _: self.begins(k))
        if self.stage:
            x.register_post_accumulate_grad_hook(lambda leaf: self.hands_on(k, leaf.grad))
        return y

    def begins(self, k: int) -> None:
        behind = self.made[self.stage + 1]
        assert all(behind[j].expired() for j in self.done), f"stage {self.stage} at B{k}: {self.done} are done"
        self.done.add(k)

    def hands_on(self, k: int, gradient: Tensor) -> None:
        self.made[self.stage][k] = StorageWeakRef(gradient.untyped_storage())


class Last(Doubles):
    """Has nothing behind it."""

    def begins(self, k: int) -> None:
        self.done.add(k)


@all_programs
def test_a_gradient_is_gone_once_its_taker_has_run(program):
    made: list[dict[int, StorageWeakRef]] = [{} for _ in range(program.stages)]
    modules = [*(Doubles(made, s) for s in range(program.stages - 1)), Last(made, program.stages - 1)]
    PipelineRunner(program, [Stage(module, s) for s, module in enumerate(modules)], loss_fn=summed).step(
        torch.randn(4, WIDTH)
    )
    assert [set(each) for each in made[1:]] == [{0, 1, 2, 3}] * (program.stages - 1)
    assert all(each.expired() for stage in made for each in stage.values())
