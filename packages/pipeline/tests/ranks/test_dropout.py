"""Random numbers of forwards: ranks that are seeded by rank have the bits of one process, under every schedule."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pipeline_helpers import batch, equal_bits, gradients, layers, square_loss
from torch import nn

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, Stage, gpipe, one_f_one_b, passes, zb_h1

M, SEED = 4, 11
PROGRAMS = [gpipe(2, M), one_f_one_b(2, M), zb_h1(2, M), passes.recompute(one_f_one_b(2, M))]


def parts() -> list[nn.Module]:
    return [nn.Sequential(layer, nn.Dropout(0.5)) for layer in layers(2)]


def of_one_process(steps: int) -> list[nn.Module]:
    """A plain loop over microbatches in which each stage draws from a generator of its own, seeded ``SEED + stage``."""
    modules, states = parts(), []
    for stage in range(2):
        torch.manual_seed(SEED + stage)
        states.append(torch.get_rng_state())
    for step in range(steps):
        for x, y in zip(*(part.chunk(M) for part in batch(2 * M, step)), strict=True):
            for stage, module in enumerate(modules):
                torch.set_rng_state(states[stage])
                x = module(x)
                states[stage] = torch.get_rng_state()
            (square_loss(x, y) / M).backward()
    return modules


def seeded_by_rank(rank: int, ranks: int) -> list[Any]:
    """As docs/guide/pipeline-several-ranks.md says: one generator per rank, whatever the schedule."""
    found = []
    for program in PROGRAMS:
        module = parts()[rank]
        torch.manual_seed(SEED + rank)  # behind the model, which draws alike on all ranks
        runner = PipelineRunner(program, Stage(module, rank), dist.group.WORLD, square_loss, timeout_s=20)
        for step in range(2):
            runner.step(*batch(2 * M, step))
        found.append(gradients(module))
    return found


def test_dropout_on_ranks_seeded_by_rank_has_the_bits_of_one_process_under_every_schedule():
    expected = [gradients(module) for module in of_one_process(2)]
    for mine, theirs in zip(run_ranks(seeded_by_rank, 2), expected, strict=True):
        assert [equal_bits(found, theirs) for found in mine] == [True] * len(PROGRAMS)


def test_one_stage_in_one_process_draws_as_a_plain_loop_does():
    for program in (gpipe(1, M), zb_h1(1, M)):
        module, plain = parts()[0], parts()[0]
        torch.manual_seed(SEED)
        PipelineRunner(program, Stage(module, 0), None, square_loss).step(*batch(2 * M))
        torch.manual_seed(SEED)
        for x, y in zip(*(part.chunk(M) for part in batch(2 * M)), strict=True):
            (square_loss(plain(x), y) / M).backward()
        assert equal_bits(gradients(module), gradients(plain))
