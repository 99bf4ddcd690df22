"""Gradients on several ranks have the bits of the plain loop."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from schedule_helpers import FLUSH

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, Stage


def check_bits(rank: int, ranks: int, names: list[str]) -> None:
    """Two steps of each program, and compare the gradients of the local stages with the plain loop's."""
    for name in names:
        program = FLUSH[name](ranks, 5)
        mine = program.stages_of(rank)
        modules, oracle = layers(program.stages), layers(program.stages)
        stages = [Stage(modules[s], s) for s in mine]
        runner = PipelineRunner(program, stages, dist.group.WORLD, square_loss, timeout_s=20)
        for seed in (2, 3):
            inputs, targets = batch(11, seed)
            parts = list(inputs.tensor_split(5)), list(targets.tensor_split(5))  # unequal, which a list may be
            losses = runner.step(*parts).losses
            expected = plain_loop(oracle, *parts)
            for s in mine:
                assert equal_bits(gradients(modules[s]), gradients(oracle[s])), f"{name}: stage {s} differs"
            if program.placement[-1] == rank:
                assert torch.equal(torch.stack(losses), torch.stack(expected)), f"{name}: losses differ"
            else:
                assert losses == []


@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, list(FLUSH)), (4, ["interleaved", "hanayo", "zb_h2", "zb_v", "v_min", "dualpipe_v"])],
)
@pytest.mark.slow
def test_gradients_of_all_schedules_have_the_bits_of_the_plain_loop(ranks, names):
    run_ranks(check_bits, ranks, names)
