"""Runners of programs whose batches overlap: what tests of them share."""

from __future__ import annotations

from typing import Any

from pipeline_helpers import square_loss
from torch import nn
from version_helpers import OPTIMIZERS, Batches

from sixfold.pipeline import PipelineRunner, Program, Stage, gpipe, interleaved, one_f_one_b, pipedream_2bw
from sixfold.pipeline.passes import lower, optimizer_step, recompute, split_backward

PROGRAMS = {
    "split": split_backward(pipedream_2bw(3, 4)),
    "lowered": lower(pipedream_2bw(3, 3)),
    "recomputed": recompute(pipedream_2bw(3, 3)),
    "split and recomputed": recompute(split_backward(pipedream_2bw(2, 3))),
    "gpipe": optimizer_step(gpipe(3, 6), when="2bw", steps=2),
    "two stages a rank": optimizer_step(interleaved(2, 8, 2), when="2bw", steps=2),
    "pipedream in batches": optimizer_step(one_f_one_b(3, 9), when="pipedream", steps=3),
}


def runner_of(program: Program, modules: list[nn.Module], group: Any = None, make: str = "adamw", **options: Any):
    """Of one rank, or of all."""
    mine = range(program.stages) if group is None else program.stages_of(group.rank)
    stages = [Stage(modules[s], s, optimizer=OPTIMIZERS[make](list(modules[s].parameters()))) for s in mine]
    return PipelineRunner(program, stages, group, square_loss, **options)


def train(
    group: Any, program: Program, modules: list[nn.Module], batches: Batches, drains: Any = (), make: str = "adamw"
) -> list[Any]:
    """Losses of every step; a drain behind those named, and at the end."""
    runner = runner_of(program, modules, group, make, timeout_s=30.0)
    losses = []
    for t, (inputs, targets) in enumerate(batches):
        losses.append(runner.step(list(inputs), list(targets)).losses)
        if t in drains:
            runner.drain()
    runner.drain()
    return losses
