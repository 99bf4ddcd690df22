"""PipeDream and 2BW at p = 1 to 4: losses and weights have the bits of a loop that reloads the weights to be read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix_helpers import model, plain_loop, same_losses, word_loss, words
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Program, Stage, pipedream, pipedream_2bw

BATCHES = 6


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """With a state of its own."""
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def recurrence(stages: int, m: int, version: Callable[[int, int], int]) -> tuple[list[nn.Module], list[list[Tensor]]]:
    """Batch t runs on stage s with weights number ``version(s, t)``; its gradient makes number t + 1 out of t.

    Returns:
        modules of the newest weights, losses of each batch.
    """
    modules = model(stages)
    optimizers = [optimizer_of(module) for module in modules]
    made = [[weights_of(module)] for module in modules]
    losses = []
    for t in range(BATCHES):
        for s, module in enumerate(modules):
            module.load_state_dict(made[s][version(s, t)])
        losses.append(plain_loop(modules, *words(m, seed=t)))
        for s, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            module.load_state_dict(made[s][t])
            optimizer.step()
            optimizer.zero_grad()
            made[s].append(weights_of(module))
    return modules, losses


def train(transport: Any, program: Program, modules: list[nn.Module], m: int) -> list[list[Tensor]]:
    """All batches on one rank, or on all of them in one process."""
    mine = range(program.stages) if transport is None else program.stages_of(transport.rank)
    stages = [Stage(modules[s], s, optimizer=optimizer_of(modules[s])) for s in mine]
    runner = PipelineRunner(program, stages, transport, word_loss, timeout_s=30)
    losses = [runner.step(*words(m, seed=t)).losses for t in range(BATCHES)]
    runner.drain()
    return losses


def check(program: Program, m: int, version: Callable[[int, int], int], *, over_threads: bool) -> None:
    """Losses of every batch, and the weights after ``drain``."""
    modules = model(program.stages)
    if over_threads:
        results = values_or_raise(on_threads(len(program.ranks), train, program, modules, m))
        assert all(not any(result) for result in results[:-1])
        got = results[-1]
    else:
        got = train(None, program, modules, m)
    expected, losses = recurrence(program.stages, m, version)
    for t in range(BATCHES):
        assert same_losses(got[t], losses[t]), f"{program.name} m={m}: batch {t}"
    for s, (mine, theirs) in enumerate(zip(modules, expected, strict=True)):
        for (name, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
            assert torch.equal(a, b), f"{program.name} m={m}: stage {s}: {name}"


@pytest.mark.sampled
@pytest.mark.parametrize("over_threads", [False, True], ids=["one process", "threads"])
@pytest.mark.parametrize(
    ("ranks", "m", "steps"),
    [(1, 1, 2), (1, 3, 3), (2, 1, 2), (2, 1, 3), (2, 4, 2), (3, 2, 2), (3, 5, 2), (3, 2, 3), (4, 3, 2), (4, 6, 3)],
)
@pytest.mark.slow
def test_2bw_runs_a_batch_with_the_weights_of_one_batch_before(ranks, m, steps, over_threads):
    check(pipedream_2bw(ranks, m, steps=steps), m, lambda s, t: max(t - 1, 0), over_threads=over_threads)


@pytest.mark.sampled
@pytest.mark.parametrize("over_threads", [False, True], ids=["one process", "threads"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_pipedream_keeps_each_microbatch_on_the_weights_of_its_forward(ranks, microbatches, over_threads):
    def version(s: int, t: int) -> int:
        # As many microbatches are in flight as ranks come behind, or as the program holds at a time.
        return max(t - min(ranks - 1 - s, microbatches - 1), 0)

    check(pipedream(ranks, microbatches), 1, version, over_threads=over_threads)
