"""Random programs, and modules that sometimes take a while: what tests with random delays share."""

from __future__ import annotations

import random
import time

import torch
from pipeline_helpers import square_loss

from sixfold.pipeline import PipelineRunner, Program, Stage
from sixfold.pipeline.schedules import registered


def random_program(rng: random.Random, ranks: int) -> Program:
    """Any flushed schedule, m to 3p."""
    schedule = rng.choice([each for each in registered() if each.flushed])
    chunks = rng.choice([chunks for chunks in (1, 2, 3, 4) if schedule.arguments_for(chunks) is not None])
    return schedule.with_chunks(ranks, rng.randint(1, 3 * ranks), chunks)


class Slow(torch.nn.Module):
    """A module that sometimes takes a while."""

    def __init__(self, module: torch.nn.Module, seed: int) -> None:
        super().__init__()
        self.module, self._random = module, random.Random(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nap(self._random)
        return self.module(x)


def nap(rng: random.Random) -> bool:
    """Mostly nothing, now and then up to two milliseconds."""
    if rng.random() < 0.2:
        time.sleep(rng.random() * 0.002)
    return True


def train(transport, program, modules, inputs, targets, lookahead, steps):
    """The steps of one rank."""
    stages = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
    runner = PipelineRunner(program, stages, transport, square_loss, timeout_s=30, lookahead=lookahead)
    return [runner.step(inputs, targets).losses for _ in range(steps)]
