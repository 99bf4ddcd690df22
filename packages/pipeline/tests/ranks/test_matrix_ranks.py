"""All schedules on four ranks in one job: losses and gradients have the bits of the plain loop."""

from __future__ import annotations

import torch.distributed as dist
from matrix_helpers import differing, model, plain_loop, same_losses, word_loss, words

from ranktest import run_ranks
from sixfold.pipeline import PipelineRunner, Program, Stage
from sixfold.pipeline.schedules import registered


def by_placement(ranks: int, microbatches: int) -> dict[tuple[int, ...], list[Program]]:
    """The flushed programs that one runner can run, by where its stages are."""
    found: dict[tuple[int, ...], list[Program]] = {}
    for entry in registered():
        if entry.flushed:
            program = entry.with_chunks(ranks, microbatches, entry.chunks or 2)
            found.setdefault(program.placement, []).append(program)
    return found


def run_all(rank: int, ranks: int, microbatches: int) -> int:
    """A step of every program, a runner for each placement; the first program of each over groups too."""
    ran = 0
    for placement, programs in by_placement(ranks, microbatches).items():
        mine, theirs = model(len(placement)), model(len(placement))
        stages = [Stage(module, s) for s, module in enumerate(mine) if placement[s] == rank]
        for edges, some in ((None, programs), ("groups", programs[:1])):
            runner = PipelineRunner(some[0], stages, dist.group.WORLD, word_loss, timeout_s=30, edges=edges)
            for program in some:
                batch = words(microbatches, seed=ran)
                losses = runner.step(*batch, program=program).losses
                expected = plain_loop(theirs, *batch)
                assert same_losses(losses, expected if placement[-1] == rank else []), f"{program.name}, {edges}"
                for stage in stages:
                    assert stage.module is not None
                    names = differing(stage.module, theirs[stage.index])
                    assert not names, f"{program.name}, {edges}: stage {stage.index}: {names}"
                ran += 1
    return ran


def test_every_schedule_on_four_ranks_has_the_bits_of_the_plain_loop():
    programs = by_placement(4, 5)
    assert run_ranks(run_all, 4, 5) == [sum(map(len, programs.values())) + len(programs)] * 4
