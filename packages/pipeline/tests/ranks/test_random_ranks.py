"""Random schedules, sizes and delays over processes: a few, over both sorts of edges."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from pipeline_helpers import equal_bits, gradients, layers, plain_loop
from random_program_helpers import Slow, nap, random_program, train
from transport_helpers import Altered

from ranktest import run_ranks
from sixfold.pipeline.transport import over

RUNS = 4


def run_at_random(rank: int, ranks: int, seed: int, edges: str | None) -> str:
    """A few programs of these ranks; the first that has other bits than the plain loop."""
    rng, mine = random.Random(seed), random.Random(seed * 10 + rank)
    for _ in range(RUNS):
        program = random_program(rng, ranks)
        m, lookahead = program.microbatches, rng.choice([0, 2, 8])
        modules, oracle = layers(program.stages, seed), layers(program.stages, seed)
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = (list(torch.randn(m, 2, 8, generator=generator)) for _ in range(2))
        transport = Altered(over(dist.group.WORLD, edges), lambda _: nap(mine), lambda _: nap(mine))
        slow = [Slow(module, rng.randrange(99)) for module in modules]
        train(transport, program, slow, inputs, targets, lookahead, 2)
        for _ in range(2):
            plain_loop(oracle, inputs, targets)
        for s in program.stages_of(rank):
            if not equal_bits(gradients(modules[s]), gradients(oracle[s])):
                return f"{program.name} m={m}: stage {s}"
    return ""


@pytest.mark.parametrize(("ranks", "edges"), [(2, "groups"), (3, "groups"), (3, None)])
@pytest.mark.slow
def test_no_random_run_of_processes_hangs(ranks, edges):
    assert run_ranks(run_at_random, ranks, ranks, edges) == [""] * ranks
