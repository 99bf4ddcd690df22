"""Stages that are frozen and trained by turns, over process groups and shared memory, beside a plain loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch.distributed as dist
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, Stage, interleaved, one_f_one_b, zb_v

STEPS = 8


def by_turns(rank: int, ranks: int) -> None:
    programs = [one_f_one_b(ranks, 4), interleaved(ranks, 4, 3), zb_v(ranks, 4)]
    ways: list[dict[str, Any]] = [{}, {"edges": "groups"}, {"edges": "one"}, {"dynamic_shapes": "announced"}]
    for program, options in [(program, way) for program in programs for way in ways]:
        draw = random.Random(3)
        ours, theirs = layers(program.stages), layers(program.stages)
        mine = program.stages_of(rank)
        stages = [Stage(ours[index], index) for index in mine]
        runner = PipelineRunner(program, stages, dist.group.WORLD, square_loss, timeout_s=20, **options)
        for step in range(STEPS):
            frozen = [draw.random() < 0.7 for _ in range(program.stages - 1)] + [False]
            for module, off in zip((*ours, *theirs), 2 * frozen, strict=True):
                module.requires_grad_(not off)
                module.zero_grad()
            x, y = batch(8, step)
            runner.step(x, y, new_shapes="dynamic_shapes" in options)
            plain_loop(theirs, list(x.chunk(4)), list(y.chunk(4)))
            for index in mine:
                same = equal_bits(gradients(ours[index]), gradients(theirs[index]))
                assert same, (program.name, options, step, index, frozen)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_stages_may_be_frozen_and_trained_by_turns_on_several_ranks(ranks):
    run_ranks(by_turns, ranks)
