"""PipelineRunner with programs whose batches overlap: in one process and with ranks as threads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from overlapping_batches_helpers import PROGRAMS, runner_of, train
from pipeline_helpers import layers, square_loss
from thread_helpers import on_threads, values_or_raise
from torch import nn
from version_helpers import OPTIMIZERS, delayed, made_batches, reads_of, same_weights, stashed

from sixfold.pipeline import (
    Program,
    ScheduleError,
    pipedream,
    pipedream_2bw,
)
from sixfold.pipeline.passes import strip
from sixfold.pipeline.proof.endless import endless


def check(program: Program, drains: Any = (), steps: int = 5, make: str = "adamw", threads: bool = False) -> None:
    """The weights and losses are those of the plain recurrence."""
    found = endless(program)
    assert found is not None
    modules, oracle, batches = layers(program.stages), layers(program.stages), made_batches(steps, found.batch)
    if program.weights == "2bw":
        expected = delayed(oracle, batches, OPTIMIZERS[make])
    else:
        expected = stashed(oracle, batches, OPTIMIZERS[make], reads_of(found.unrolled(steps)))
    if threads:
        p = len(program.ranks)
        losses = values_or_raise(on_threads(p, train, program, modules, batches, drains, make))
        losses = losses[program.placement[-1]]
    else:
        losses = train(None, program, modules, batches, drains, make)
    assert losses == expected
    assert same_weights(modules, oracle)
    assert all(p.grad is None for module in modules for p in module.parameters())


@pytest.mark.sampled
@pytest.mark.parametrize("threads", [False, True], ids=["one", "threads"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 2), (3, 4), (4, 3), (4, 8)])
@pytest.mark.slow
def test_2bw_is_the_delayed_recurrence_whatever_drains_happen(p, m, threads):
    check(pipedream_2bw(p, m, 2 + m % 2), threads=threads)
    check(pipedream_2bw(p, m), drains=(0, 2, 3), make="momentum", threads=threads)


@pytest.mark.parametrize("threads", [False, True], ids=["one", "threads"])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.slow
def test_pipedream_reads_what_it_read_at_the_forward(p, threads):
    check(pipedream(p, max(2, p)), steps=7, threads=threads)


@pytest.mark.parametrize("threads", [False, True], ids=["one", "threads"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.slow
def test_any_program_that_can_be_continued_runs(name, threads):
    check(PROGRAMS[name], threads=threads)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.slow
def test_any_optimizer(make):
    check(pipedream_2bw(3, 3), make=make, threads=True)


def test_evaluation_between_steps_has_the_newest_weights_and_leaves_no_trace():
    program, batches = pipedream_2bw(3, 3), made_batches(5, 3)
    modules, oracle = layers(3), layers(3)
    expected = delayed(oracle, batches, OPTIMIZERS["adamw"])

    def run(group: Any) -> Any:
        runner, losses = runner_of(program, modules, group, timeout_s=30.0), []
        for inputs, targets in batches:
            losses.append(runner.step(list(inputs), list(targets)).losses)
            now = runner.evaluate(list(inputs), list(targets)).losses
            outputs = runner.forward(list(inputs)).outputs
            assert len(now) == len(outputs) == (3 if group.rank == 2 else 0)
        runner.drain()
        now = runner.evaluate(list(inputs), list(targets)).losses
        return losses, now

    losses, now = values_or_raise(on_threads(3, run))[2]
    assert losses == expected
    assert same_weights(modules, oracle)
    hidden = batches[-1][0][0]
    for module in oracle:
        hidden = module(hidden)
    assert torch.equal(now[0], square_loss(hidden, batches[-1][1][0]))


def test_what_differs_while_microbatches_are_in_flight_is_refused():
    program, batches = pipedream_2bw(2, 2), made_batches(3, 2)
    runner = runner_of(program, layers(2))
    runner.drain()
    runner.step(*batches[0])
    other = pipedream_2bw(2, 1)
    with pytest.raises(ScheduleError, match=r"call drain\(\)"):
        runner.step(*made_batches(1, 1)[0], program=other)
    runner = runner_of(program, layers(2))
    runner.step(*batches[0])
    runner.drain()
    runner.step(*made_batches(1, 1)[0], program=other)  # a batch of another size is the next
    runner.drain()
    with pytest.raises(ScheduleError, match="ran weights: 2bw; make one for pipedream"):
        runner.step(*made_batches(1, 1)[0], program=pipedream(2, 3))
    with pytest.raises(ScheduleError, match="scale='token'"):
        runner_of(program, layers(2), scale="token").step(*batches[0])
    broken = runner_of(program, layers(2))
    broken.step(*batches[0])
    with pytest.raises(ScheduleError, match="microbatches"):
        broken.step(batches[0][0][:1], batches[0][1][:1])
    with pytest.raises(ScheduleError, match="failed before"):
        broken.step(*batches[0])


def test_a_program_of_one_batch_ends_with_it_and_a_stripped_one_too():
    for program in (pipedream_2bw(2, 2, 1), strip(pipedream_2bw(2, 2, 1))):
        modules, (batch,) = layers(2), made_batches(1, 2)
        runner = runner_of(program, modules, make="sgd")
        assert len(runner.step(*batch).losses) == 2
        runner.drain()


def test_events_are_numbered_by_the_batches_that_ran():
    program, batches = pipedream_2bw(2, 2), made_batches(6, 2)
    found, runner = endless(program), runner_of(program, layers(2), profile=True)
    for t, batch in enumerate(batches):
        result = runner.step(*batch)
        ran = {(rank, str(action)) for rank, action, *_ in result.events if action.kind in ("F", "B", "STEP")}
        rows = enumerate(found.step(t))
        assert ran == {(rank, str(a)) for rank, row in rows for a in row if a.kind in ("F", "B", "STEP")}
    assert result.timeline.makespan > 0


@pytest.mark.slow
def test_behind_a_drain_nothing_of_a_batch_is_held_and_before_it_only_what_is_in_flight():
    seen: list[weakref.ref[Any]] = []  # what the first stage is given: the runner's own copies

    class Hooked(nn.Sequential):
        def forward(self, x, *, hook):
            if self is modules[0]:
                seen.extend((weakref.ref(x), weakref.ref(hook)))
            return super().forward(x)

    modules: list[nn.Module] = [Hooked(module) for module in layers(2)]
    runner, held, theirs = runner_of(pipedream_2bw(2, 3), modules), [], []
    for t in range(3):
        inputs, targets = made_batches(1, 3, seed=t)[0]
        kwargs = [{"hook": torch.zeros(1)} for _ in range(3)]
        theirs += [weakref.ref(x) for x in (*inputs, *targets, *(each["hook"] for each in kwargs))]
        runner.step(inputs, targets, kwargs=kwargs)
        del inputs, targets, kwargs
        held.append(seen[:])
        seen.clear()
        gc.collect()
        assert not any(ref() is not None for ref in theirs)
        alive = [sum(ref() is not None for ref in of) for of in held]
        assert alive == [0] * t + [2]  # the last input and its keywords, whose backward is to come on rank 0
    runner.drain()
    gc.collect()
    assert not any(ref() is not None for of in held for ref in of)
