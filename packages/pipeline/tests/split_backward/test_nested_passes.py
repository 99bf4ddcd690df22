"""Backwards inside of a backward or a forward (an implicit layer's solver, an attack, a checkpoint): plain loop's bits.

The runner's I goes through layers whose weight gradients wait for W; another pass through them has gradients of its
own to make, or none. The oracle is autograd, microbatch by microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nested_helpers import MODULES, Auxiliary, Deep, DeepInside, Pair, check
from pipeline_helpers import batch, equal_bits, gradients, square_loss
from torch import Tensor

from sixfold.pipeline import PipelineRunner, Program, ScheduleError, Stage, one_f_one_b, zb_h1
from sixfold.pipeline.passes import recompute

M = 4
PROGRAMS = [one_f_one_b(2, M), zb_h1(2, M)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.slow
def test_a_pass_inside_of_another_makes_the_gradients_that_it_was_asked_for(kind, program):
    check(MODULES[kind], program)


def test_where_a_forward_that_runs_a_backward_is_recomputed_a_checkpoint_is_named():
    def gradients_by(program: Program, checkpoint: bool) -> list[Any]:
        modules = [MODULES["attack"](seed) for seed in range(2)]
        stages = [Stage(module, i, checkpoint=checkpoint) for i, module in enumerate(modules)]
        PipelineRunner(program, stages, loss_fn=square_loss).step(*batch(2 * M))
        return [one for module in modules for one in gradients(module)]

    with pytest.raises(ScheduleError, match=r"0F0: .* runs a backward of its own, .* Stage\(checkpoint=True\)"):
        gradients_by(recompute(zb_h1(2, M)), False)
    assert equal_bits(gradients_by(zb_h1(2, M), True), gradients_by(one_f_one_b(2, M), False))


@pytest.mark.parametrize("make", [Deep, DeepInside])
@pytest.mark.slow
def test_a_pass_on_a_thread_of_autograds_is_known_by_who_runs_the_step(make, monkeypatch):
    asked: list[int] = []
    frames = sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: asked.append(1) or frames())
    check(make, zb_h1(1, 1), steps=1)
    assert asked, "it was on the thread of the step"


def test_a_backward_in_a_forward_is_added_in_the_order_of_microbatches():
    check(Auxiliary, zb_h1(2, M))  # where B adds what it makes at once, so that later forwards come before


class Named(Pair):
    """What a hook asks for, beside the input."""

    def __init__(self, seed: int, asked: Callable[[Named], Any], **options: Any) -> None:
        super().__init__(seed)
        self.asked, self.options = asked, options

    def forward(self, x: Tensor) -> Tensor:
        start = x.detach().requires_grad_()
        inner = torch.tanh(self.f(start))
        hidden = self.f(x)
        hidden.register_hook(lambda g: torch.autograd.grad(inner, [start, self.asked(self)], g, **self.options)[0])
        return self.o(hidden)


@pytest.mark.parametrize(
    "asked",
    [lambda module: module.f.weight, lambda module: torch.autograd.graph.get_gradient_edge(module.f.bias)],
    ids=["tensor", "edge"],
)
def test_a_pass_that_asks_for_a_weight_that_waits_is_refused(asked):
    def step(program: Program) -> None:
        modules = [Named(seed, asked, allow_unused=True) for seed in range(2)]
        stages = [Stage(module, i) for i, module in enumerate(modules)]
        PipelineRunner(program, stages, loss_fn=square_loss).step(*batch(2 * M))

    step(one_f_one_b(2, M))
    with pytest.raises(ScheduleError, match=r"stage 1: a backward of its own .* whose backwards are B"):
        step(zb_h1(2, M))
