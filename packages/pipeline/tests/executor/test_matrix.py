"""Every registered schedule at p = 1 to 4 and m = 1 to 4p: losses and gradients have the bits of the plain loop.

nox -s "tests(pipeline)" -- --full-matrix      all m from 1 to 4p; three of each p without it
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matrix_helpers import differing, model, plain_loop, same_losses, word_loss, words
from thread_helpers import on_threads, values_or_raise

from sixfold.pipeline import PipelineRunner, Program, Stage
from sixfold.pipeline.schedules import registered
from sixfold.pipeline.schedules.registry import Schedule

FLUSHED = [entry for entry in registered() if entry.flushed]
SAMPLE = {1: (1, 2, 3), 2: (1, 3, 6), 3: (1, 4, 8), 4: (1, 6, 9)}  # no schedule may want p to divide m
by_name = pytest.mark.parametrize("schedule", FLUSHED, ids=lambda entry: entry.name)


def programs(schedule: Schedule, ranks: int, full: bool) -> Iterator[Program]:
    """All sizes, each with all numbers of chunks; the sample has the larger ones at one m."""
    chunks = [schedule.chunks] if schedule.chunks else [c for c in (1, 2, 3, 4) if schedule.arguments_for(c)]
    for m in range(1, 4 * ranks + 1) if full else SAMPLE[ranks]:
        for c in chunks:
            if full or c == min(chunks, key=lambda each: abs(each - 2)) or m == SAMPLE[ranks][1]:
                yield schedule.with_chunks(ranks, m, c)


def words_of(program: Program) -> str:
    """For the message of a failure."""
    return f"{program.name} p={len(program.ranks)} m={program.microbatches} stages={program.stages}"


@by_name
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.slow
def test_losses_and_gradients_have_the_bits_of_the_plain_loop(schedule, ranks, request):
    for program in programs(schedule, ranks, request.config.getoption("--full-matrix")):
        m = program.microbatches
        mine, theirs = model(program.stages), model(program.stages)
        runner = PipelineRunner(program, [Stage(module, s) for s, module in enumerate(mine)], loss_fn=word_loss)
        losses = runner.step(*words(m)).losses
        assert same_losses(losses, plain_loop(theirs, *words(m))), words_of(program)
        for s, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert not differing(a, b), f"{words_of(program)}: stage {s}: {differing(a, b)}"


def train(transport, program, modules, steps):
    """``steps`` steps of one rank; the losses of each."""
    stages = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
    runner = PipelineRunner(program, stages, transport, word_loss, timeout_s=30)
    return [runner.step(*words(program.microbatches, seed)).losses for seed in range(steps)]


@pytest.mark.sampled
@by_name
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 5), (3, 4), (4, 6)])
@pytest.mark.slow
def test_over_threads_too(schedule, ranks, microbatches):
    program = schedule.with_chunks(ranks, microbatches, schedule.chunks or 2)
    mine, theirs = model(program.stages), model(program.stages)
    results = values_or_raise(on_threads(ranks, train, program, mine, 2))
    for seed in range(2):
        expected = plain_loop(theirs, *words(microbatches, seed))
        for rank, result in enumerate(results):
            assert same_losses(result[seed], expected if rank == program.placement[-1] else []), words_of(program)
    for s, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert not differing(a, b), f"{words_of(program)}: stage {s}: {differing(a, b)}"
