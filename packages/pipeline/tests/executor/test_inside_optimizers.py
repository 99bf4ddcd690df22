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
