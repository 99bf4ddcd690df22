"""Random schedules, sizes and delays over threads: no run hangs, and each has the bits of the plain loop."""

from __future__ import annotations

import random

import pytest
import torch
from overlapping_batches_helpers import train as train_carried
from pipeline_helpers import equal_bits, gradients, layers, plain_loop
from random_program_helpers import Slow, nap, random_program, train
from thread_helpers import on_threads, values_or_raise
from transport_helpers import Altered
from version_helpers import OPTIMIZERS, delayed, made_batches, reads_of, same_weights, stashed

from sixfold.pipeline import pipedream, pipedream_2bw
from sixfold.pipeline.proof.endless import endless
from sixfold.pipeline.transport import threads

RUNS = 60
PER_TEST = 10


def delayed_threads(ranks: int, rng: random.Random) -> list[Altered]:
    """Transports whose messages take a while now and then."""
    found = []
    for transport in threads(ranks):
        sends, waits = (random.Random(rng.random()) for _ in range(2))
        found.append(Altered(transport, lambda _, of=sends: nap(of), lambda _, of=waits: nap(of)))
    return found


def run_at_random(seed: int) -> None:
    """One program, two steps on threads, beside the plain loop."""
    rng = random.Random(seed)
    program = random_program(rng, rng.randint(1, 4))
    m, ranks = program.microbatches, len(program.ranks)
    modules, oracle = layers(program.stages, seed), layers(program.stages, seed)
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (list(torch.randn(m, 2, 8, generator=generator)) for _ in range(2))
    transports = delayed_threads(ranks, rng)
    slow = [Slow(module, seed + s) for s, module in enumerate(modules)]
    arguments = (program, slow, inputs, targets, rng.choice([0, 1, 2, 8]), 2)
    name = f"seed {seed}: {program.name} p={ranks} m={m} stages={program.stages}"
    results = values_or_raise(on_threads(ranks, train, *arguments, transports=transports))
    losses = next(result for result in results if result[0])
    for step in losses:
        expected = plain_loop(oracle, inputs, targets)
        assert equal_bits([torch.stack(step)], [torch.stack(expected)]), name
    for mine, theirs in zip(modules, oracle, strict=True):
        assert equal_bits(gradients(mine), gradients(theirs)), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", range(RUNS // PER_TEST))
@pytest.mark.slow
def test_no_random_run_hangs(part, request):
    runs = request.config.getoption("--random-runs") * PER_TEST // RUNS
    for seed in range(part * runs, (part + 1) * runs):
        run_at_random(seed)


def run_overlapping_at_random(seed: int) -> None:
    """Batches that overlap, 2BW's with drains between, beside the recurrences."""
    rng = random.Random(seed)
    ranks, twice = rng.randint(1, 4), rng.random() < 0.5
    if twice:
        program = pipedream_2bw(ranks, rng.randint(max(1, ranks - 1), 2 * ranks), steps=rng.randint(2, 4))
    else:
        program = pipedream(ranks, rng.randint(2, 6))
    found, steps = endless(program), rng.randint(2, 5)
    assert found is not None
    batches = made_batches(steps, found.batch, seed=seed)
    modules, oracle = layers(ranks, seed), layers(ranks, seed)
    drains = {t for t in range(steps) if twice and rng.random() < 0.3}
    slow = [Slow(module, seed + s) for s, module in enumerate(modules)]
    arguments = (program, slow, batches, drains)
    results = values_or_raise(on_threads(ranks, train_carried, *arguments, transports=delayed_threads(ranks, rng)))
    if twice:
        expected = delayed(oracle, batches, OPTIMIZERS["adamw"])
    else:
        expected = stashed(oracle, batches, OPTIMIZERS["adamw"], reads_of(found.unrolled(steps)))
    name = f"seed {seed}: {program.name} p={ranks} m={found.batch} drains behind {sorted(drains)}"
    for mine, theirs in zip(results[-1], expected, strict=True):
        assert equal_bits([torch.stack(mine)], [torch.stack(theirs)]), name
    assert same_weights(modules, oracle), name


@pytest.mark.slow
def test_no_random_run_of_overlapping_batches_hangs(request):
    for seed in range(request.config.getoption("--random-runs") // 10):
        run_overlapping_at_random(seed)
