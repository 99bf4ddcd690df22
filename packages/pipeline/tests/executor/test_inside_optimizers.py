"""Optimizers that a program's STEPs run: what a training script does around ``optimizer.step()`` elsewhere."""

from __future__ import annotations

import pytest
import torch
from pipeline_helpers import layers, square_loss
from torch import nn
from version_helpers import delayed, made_batches, same_weights, stashed

from sixfold.pipeline import (
    PipelineRunner,
    Program,
    ScheduleError,
    Stage,
    one_f_one_b,
    passes,
    pipedream,
    pipedream_2bw,
)

P, M, STEPS = 3, 4, 5
FLUSHED = passes.optimizer_step(one_f_one_b(P, M))
PROGRAMS = [
    pytest.param(program, id=str(program.weights)) for program in (FLUSHED, pipedream(P, M), pipedream_2bw(P, M))
]


def made(program: Program, modules: list[nn.Module], make) -> PipelineRunner:
    stages = [Stage(module, s, optimizer=make(list(module.parameters()))) for s, module in enumerate(modules)]
    return PipelineRunner(program, stages, loss_fn=square_loss)


def batch_of(program: Program) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    [batch] = made_batches(1, 1 if program.weights == "pipedream" else M)
    return batch


@pytest.mark.parametrize("program", PROGRAMS)
def test_clipping_behind_steps_that_ran_the_optimizers_is_refused(program):
    runner = made(program, layers(P), lambda p: torch.optim.SGD(p, lr=0.1))
    runner.step(*batch_of(program))
    with pytest.raises(ScheduleError, match=r"no gradients are left to clip; .*register_step_pre_hook"):
        runner.clip_grad_norm_(1e-3)
    if program is FLUSHED:  # the other remedy: a program without STEPs
        runner.step(*batch_of(program), program=one_f_one_b(P, M))
        assert float(runner.clip_grad_norm_(1e-3)) > 1e-3


def hooked(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a warmup, and gradients of the stage clipped: the remedy of the error and of the guide."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (t + 1) / STEPS)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, 1e-2) and None)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


@pytest.mark.parametrize("weights", ["pipedream", "2bw"])
def test_hooks_of_optimizers_clip_and_schedule_each_batch_of_overlapping_ones(weights):
    modules, oracle, batches = layers(P), layers(P), made_batches(STEPS, M if weights == "2bw" else 1)
    runner = made(pipedream_2bw(P, M) if weights == "2bw" else pipedream(P, M), modules, hooked)
    losses = [runner.step(*batch).losses for batch in batches]
    runner.drain()
    if weights == "2bw":
        expected = delayed(oracle, batches, hooked)
    else:
        # A step behind each microbatch; stage s runs P - 1 - s microbatches ahead of its backwards.
        expected = stashed(oracle, batches, hooked, lambda s, k: max(0, k - (P - 1 - s)))
    assert losses == expected
    assert same_weights(modules, oracle)


def test_an_optimizer_that_steps_two_stages_is_refused():
    modules = layers(P)
    one = torch.optim.AdamW([p for module in modules for p in module.parameters()])
    stages = [Stage(module, s, optimizer=one) for s, module in enumerate(modules)]
    for program in (FLUSHED, pipedream(P, M), pipedream_2bw(P, M)):
        with pytest.raises(ScheduleError, match=r"STEP0: the optimizer of stage . has parameters of stage .*its own"):
            PipelineRunner(program, stages, loss_fn=square_loss)
    runner = PipelineRunner(one_f_one_b(P, M), stages, loss_fn=square_loss)  # whose script steps it
    runner.step(*batch_of(FLUSHED))
    one.step()


def test_gradients_that_a_stage_s_optimizer_does_not_hold_are_left_to_another_one():
    """One optimizer for matrices, which STEPs run, and one for the rest, which the script steps (Muon and AdamW)."""
    modules, oracle, batches = layers(P), layers(P), made_batches(STEPS, M)

    def two(of: list[nn.Module]) -> tuple[list[torch.optim.Optimizer], torch.optim.Optimizer]:
        every = [[p for p in module.parameters() if p.dim() > 1] for module in of]
        rest = [p for module in of for p in module.parameters() if p.dim() == 1]
        return [torch.optim.SGD(some, lr=0.1) for some in every], torch.optim.AdamW(rest, lr=0.1)

    inside, behind = two(modules)
    stages = [Stage(module, s, optimizer=inside[s]) for s, module in enumerate(modules)]
    runner = PipelineRunner(FLUSHED, stages, loss_fn=square_loss)
    steps, other = two(oracle)
    for x, y in batches:
        runner.step(x, y)
        behind.step()
        behind.zero_grad()
        for a, b in zip(x, y, strict=True):
            (square_loss(nn.Sequential(*oracle)(a), b) / M).backward()
        for one in (*steps, other):
            one.step()
            one.zero_grad()
    assert same_weights(modules, oracle)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_that_no_optimizer_holds_add_up_over_steps(program):
    modules, oracle, m = layers(P), layers(P), len(batch_of(program)[0])
    batches = made_batches(STEPS, m)
    stages = [
        Stage(module, s, optimizer=torch.optim.SGD([p for p in module.parameters() if p.dim() > 1], lr=0.0))
        for s, module in enumerate(modules)
    ]
    runner = PipelineRunner(program, stages, loss_fn=square_loss)
    for x, y in batches:
        runner.step(x, y)
        for a, b in zip(x, y, strict=True):
            (square_loss(nn.Sequential(*oracle)(a), b) / m).backward()
    runner.drain()
    for module, other in zip(modules, oracle, strict=True):
        for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
            if ours.dim() == 1:
                torch.testing.assert_close(ours.grad, theirs.grad)
            else:
                assert ours.grad is None, "the STEP's own"
