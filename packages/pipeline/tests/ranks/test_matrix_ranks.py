"""All schedules on four ranks in one job: losses and gradients have the bits of the plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from matrix_helpers import WIDTH, differing, model, plain_loop, same_losses, word_loss, words
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ranktest import run_ranks
from sixfold.pipeline import Costs, PipelineRunner, Program, Stage, gpipe, simulate
from sixfold.pipeline.schedules import registered


def by_placement(ranks: int, microbatches: int) -> dict[tuple[int, ...], list[Program]]:
    """The flushed programs that one runner can run, by where its stages are."""
    found: dict[tuple[int, ...], list[Program]] = {}
    for entry in registered():
        if entry.flushed:
            program = entry.with_chunks(ranks, microbatches, entry.chunks or 2)
            found.setdefault(program.placement, []).append(program)
    return found


def run_all(rank: int, ranks: int, microbatches: int) -> int:
    """A step of every program, a runner for each placement; the first program of each over groups too."""
    ran = 0
    for placement, programs in by_placement(ranks, microbatches).items():
        mine, theirs = model(len(placement)), model(len(placement))
        stages = [Stage(module, s) for s, module in enumerate(mine) if placement[s] == rank]
        for edges, some in ((None, programs), ("groups", programs[:1])):
            runner = PipelineRunner(some[0], stages, dist.group.WORLD, word_loss, timeout_s=30, edges=edges)
            for program in some:
                batch = words(microbatches, seed=ran)
                losses = runner.step(*batch, program=program).losses
                expected = plain_loop(theirs, *batch)
                assert same_losses(losses, expected if placement[-1] == rank else []), f"{program.name}, {edges}"
                for stage in stages:
                    assert stage.module is not None
                    names = differing(stage.module, theirs[stage.index])
                    assert not names, f"{program.name}, {edges}: stage {stage.index}: {names}"
                ran += 1
    return ran


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.slow
def test_every_schedule_on_four_ranks_has_the_bits_of_the_plain_loop(m):
    programs = by_placement(4, m)
    assert run_ranks(run_all, 4, m) == [sum(map(len, programs.values())) + len(programs)] * 4


class Adds(nn.Module):
    """Notes at each forward which of its outputs live; an addition keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.outputs: list[StorageWeakRef] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(not each.expired() for each in self.outputs))
        y = x + self.shift
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        return y


def send_far_ahead(rank: int, ranks: int) -> list[int]:
    """Six forwards before the first backward; how many outputs lived at each."""
    module = Adds()
    stage = Stage(module, rank)
    PipelineRunner(gpipe(2, 6), [stage], dist.group.WORLD, lambda o, _: o.sum(), timeout_s=20).step(
        torch.ones(6, WIDTH)
    )
    assert all(each.expired() for each in module.outputs)
    return module.alive


def test_an_output_is_released_when_it_is_sent_and_not_at_the_end_of_the_step():
    sender, _ = run_ranks(send_far_ahead, 2)
    assert sender == [0] * 6  # a shared slot has a copy of it


class Scales(nn.Module):
    """Autograd saves its output, and its input until I; notes the most outputs of its rank that live."""

    def __init__(self, made: list[StorageWeakRef], most: list[int]) -> None:
        super().__init__()
        self.weight, self.made, self.most = nn.Parameter(torch.ones(WIDTH)), made, most

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.weight)
        self.made.append(StorageWeakRef(y.untyped_storage()))
        self.most.append(sum(not each.expired() for each in self.made))
        return y


def most_outputs(rank: int, ranks: int, edges: str | None, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Of each schedule, in its second step: outputs that live on this rank at most, and as simulated."""
    found = {}
    for entry in registered():
        if entry.flushed and entry.name in names:
            program = entry.with_chunks(ranks, 6, entry.chunks or 2)
            made: list[StorageWeakRef] = []
            most: list[int] = []
            stages = [Stage(Scales(made, most), s) for s in program.stages_of(rank)]
            runner = PipelineRunner(program, stages, dist.group.WORLD, lambda o, _: o.sum(), timeout_s=20, edges=edges)
            for _ in range(2):
                made.clear()
                most.clear()
                runner.step(torch.ones(6, WIDTH))
            found[entry.name] = max(most), simulate(program, Costs.per_rank(program)).peak_outputs[rank]
    return found


SOME = ("naive", "one_f_one_b", "interleaved", "zb_v")  # over gloo, without --full-matrix


@pytest.mark.parametrize("edges", [None, "groups"])
@pytest.mark.slow
def test_live_outputs_of_processes_are_those_of_the_simulator(edges, request):
    every = tuple(entry.name for entry in registered())
    names = every if edges is None or request.config.getoption("--full-matrix") else SOME
    for rank, found in enumerate(run_ranks(most_outputs, 3, edges, names)):
        assert found, f"rank {rank} ran none of {names}"
        assert all(lived == simulated for lived, simulated in found.values()), f"rank {rank}: {found}"
