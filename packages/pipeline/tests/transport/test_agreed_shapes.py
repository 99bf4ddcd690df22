"""Outputs whose rows depend on data: one answer at one moment, whatever joins the ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, interleaved, one_f_one_b, zb_interleaved, zb_v
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.transport import Transport

M = 3


class Keeps(nn.Module):
    """A layer that hands on the rows that ``kept`` says; another stage's numbers are ignored."""

    def __init__(self, layer: nn.Module, index: int) -> None:
        super().__init__()
        self.layer, self.index = layer, index

    def forward(self, x: Tensor, *, kept: list[int]) -> Tensor:
        return self.layer(x)[: kept[self.index]]


def stages_of(program: Program) -> list[Stage]:
    return [Stage(Keeps(layer, index), index) for index, layer in enumerate(layers(program.stages))]


def answers(runner: PipelineRunner, plan: list[list[list[int]]], announce: set[int]) -> list[Any]:
    """Per step "fine" or the error; the runner's life ends with the first."""
    seen: list[Any] = []
    for step, kept in enumerate(plan):
        try:
            runner.step(torch.ones(4 * M, 8), kwargs=[{"kept": rows} for rows in kept], new_shapes=step in announce)
        except ScheduleError as error:
            return [*seen, str(error)]
        seen.append("fine")
    return seen


def by_the_rule(program: Program, plan: list[list[list[int]]], dynamic: Any, announce: set[int]) -> list[Any]:
    """The rule written out for a chain of stages, each on another rank than the one before.

    A batch is open on an edge if it is the first, or its first output changed, or the batch of the edge before is open;
    only then may any output of it change.
    """
    seen: list[Any] = []
    for step, kept in enumerate(plan):
        before = plan[step - 1] if step else None
        opened = step == 0
        for stage in range(program.stages - 1):
            rows = [min(4, *kept[k][: stage + 1]) for k in range(M)]
            was = rows if before is None else [min(4, *before[k][: stage + 1]) for k in range(M)]
            opened |= rows[0] != was[0] and dynamic != "announced"
            if dynamic is not True and not opened and step not in announce and rows != was:
                return [*seen, stage]
        seen.append("fine")
    return seen


@pytest.mark.parametrize("dynamic", [False, True, "announced"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_threads_and_one_process_answer_as_groups_do(seed, dynamic):
    draw = random.Random(seed)
    program = one_f_one_b(3, M)
    plan = [[[4] * 3 for _ in range(M)]]
    for _ in range(4):
        plan.append([list(rows) for rows in plan[-1]])
        for _ in range(draw.randrange(3)):
            plan[-1][draw.randrange(M)][draw.randrange(2)] = draw.randrange(1, 5)
    announce = {step for step in range(5) if dynamic == "announced" and draw.random() < 0.7}

    def loss(output: Tensor, _: Any) -> Tensor:
        return output.sum()

    here = answers(PipelineRunner(program, stages_of(program), None, loss, dynamic_shapes=dynamic), plan, announce)

    def rank(transport: Transport) -> list[Any]:
        mine = stages_of(program)[transport.rank]
        runner = PipelineRunner(program, mine, transport, loss, dynamic_shapes=dynamic, timeout_s=20)
        return answers(runner, plan, announce)

    there = values_or_raise(on_threads(3, rank))
    expected = by_the_rule(program, plan, dynamic, announce)
    for seen in (here, *there):
        assert seen[:-1] == expected[:-1]
    if isinstance(expected[-1], int):
        assert f"stage {expected[-1]} made torch.float32" in here[-1]
        assert "make the runner with dynamic_shapes=True" in here[-1]
        assert all("make the runner with dynamic_shapes=True" in seen[-1] for seen in there)
    else:
        assert all(seen == expected for seen in (here, *there))


def trained_or_not(program: Program, where: Any) -> None:
    """Stages of ``where`` that are frozen and trained by turns, after each step beside a plain loop of all stages."""
    draw = random.Random(5)
    ours, theirs = layers(program.stages), layers(program.stages)
    mine = range(program.stages) if where is None else program.stages_of(where.rank)
    stages = [Stage(ours[index], index) for index in mine]
    runner = PipelineRunner(program, stages, where, square_loss, timeout_s=20)
    for step in range(12):
        frozen = [draw.random() < 0.7 for _ in range(program.stages - 1)] + [False]
        for module, off in zip((*ours, *theirs), 2 * frozen, strict=True):
            module.requires_grad_(not off)
            module.zero_grad()
        x, y = batch(8, step)
        runner.step(x, y)
        plain_loop(theirs, list(x.chunk(4)), list(y.chunk(4)))
        for index in mine:
            assert equal_bits(gradients(ours[index]), gradients(theirs[index])), (step, index, frozen)


@pytest.mark.parametrize("program", [interleaved(2, 4, 3), zb_v(2, 4), zb_interleaved(2, 4, 2)], ids=lambda p: p.name)
def test_stages_may_be_frozen_and_trained_by_turns_between_steps(program):
    trained_or_not(program, None)
    values_or_raise(on_threads(2, lambda transport: trained_or_not(program, transport)))
