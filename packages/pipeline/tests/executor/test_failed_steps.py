"""A step that failed leaves nothing in gradients that a retry would add to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_helpers import batch, equal_bits, layers, square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b, pipedream_2bw, zb_h1

SCALES: dict[str, Any] = {
    "mean": square_loss,
    "sum": square_loss,
    "token": lambda o, t: (((o - t) ** 2).sum(), o.numel()),
}
M = 4


class Fails(nn.Module):
    """Fails once, in its call of that number."""

    def __init__(self, module: nn.Module, call: int) -> None:
        super().__init__()
        self.module, self.left = module, call

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("out of memory")
        return self.module(x)


def grads(modules: list[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


def runner_of(program: Any, modules: list[nn.Module], scale: str) -> PipelineRunner:
    stages = [Stage(module, index) for index, module in enumerate(modules)]
    return PipelineRunner(program, stages, None, SCALES[scale], scale=scale)


@pytest.mark.parametrize("program", [one_f_one_b(2, M), zb_h1(2, M)], ids=["1f1b", "zb_h1"])
@pytest.mark.parametrize("scale", list(SCALES))
def test_a_retry_has_the_gradients_of_one_step(program, scale):
    modules, oracle = layers(2), layers(2)
    runner_of(program, oracle, scale).step(*batch(8))
    failing = [modules[0], Fails(modules[1], M)]
    runner = runner_of(program, failing, scale)
    with pytest.raises(ScheduleError, match="out of memory"):
        runner.step(*batch(8))
    assert grads(modules) == [None] * 4
    runner.step(*batch(8))
    assert equal_bits(grads(modules), grads(oracle))


@pytest.mark.parametrize("zero", ["set_to_none", "zero", "grad = None"])
@pytest.mark.parametrize("scale", list(SCALES))
def test_sums_over_several_steps_are_restored_or_refused_until_they_are_zeroed(scale, zero):
    modules, oracle = layers(2), layers(2)
    failing = [modules[0], Fails(modules[1], 2 * M)]
    runner = runner_of(one_f_one_b(2, M), failing, scale)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    runner.step(*batch(8, 5))
    before = [gradient.clone() for gradient in grads(modules)]
    with pytest.raises(ScheduleError, match="out of memory"):
        runner.step(*batch(8, 6))
    if scale == "token":  # they were set aside
        assert equal_bits(grads(modules), before)
        theirs = runner_of(one_f_one_b(2, M), oracle, scale)
        theirs.step(*batch(8, 5))
    else:
        for again in (runner, runner_of(one_f_one_b(2, M), modules, scale)):
            with pytest.raises(ScheduleError, match=r"holds a part of a step that failed; call zero_grad\(\)"):
                again.step(*batch(8, 6))
        if zero == "grad = None":
            for module in modules:
                for parameter in module.parameters():
                    parameter.grad = None
        else:
            optimizer.zero_grad(set_to_none=zero == "set_to_none")
        theirs = runner_of(one_f_one_b(2, M), oracle, scale)
        if zero == "zero":
            for module in oracle:
                for parameter in module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
    runner.step(*batch(8, 6))
    theirs.step(*batch(8, 6))
    assert equal_bits(grads(modules), grads(oracle))


class Weighs(nn.Module):
    """A loss that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean() * self.weight


class Scaled(nn.Module):
    """The second stage, which reads a tensor of the caller's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return self.module(x) * scale


class First(Fails):
    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return super().forward(x)


def everything(program: Any, scale: str) -> tuple[Any, dict[str, Tensor]]:
    """A step that fails in the ``call``-th forward of the first stage, and what it gives gradients to."""
    modules, loss = layers(2), Weighs()
    x, y = batch(8)
    found = {
        "loss": loss.weight,
        "keyword": torch.ones(1, requires_grad=True),
        "behind a keyword": torch.ones(1, requires_grad=True),
        "input": x[:2].detach().requires_grad_(),
        "behind an input": torch.ones(1, requires_grad=True),
    }

    def step(call: int) -> None:
        stages = [Stage(First(modules[0], call), 0), Stage(Scaled(modules[1]), 1)]
        scales = [found["keyword"] if k % 2 else found["behind a keyword"] * 2 for k in range(M)]
        inputs = [found["input"] if k == 0 else part * found["behind an input"] for k, part in enumerate(x.chunk(M))]
        runner = PipelineRunner(program, stages, None, loss, scale=scale)
        runner.step(inputs, list(y.chunk(M)), kwargs=[{"scale": scale} for scale in scales])

    return step, found


@pytest.mark.parametrize("program", [one_f_one_b(2, M), zb_h1(2, M)], ids=["1f1b", "zb_h1"])
@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_what_else_a_step_gives_gradients_to_is_left_as_it_was(program, scale):
    step, found = everything(program, scale)
    with pytest.raises(ScheduleError, match="out of memory"):
        step(M)
    assert {name: one.grad for name, one in found.items()} == dict.fromkeys(found)
    step(0)
    other, expected = everything(program, scale)
    other(0)
    for name, one in found.items():
        assert one.grad is not None and torch.equal(one.grad, expected[name].grad), name


@pytest.mark.parametrize("name", ["loss", "keyword", "behind a keyword", "input", "behind an input"])
def test_what_else_had_a_gradient_before_a_step_failed_is_refused_until_it_is_zeroed(name):
    step, found = everything(one_f_one_b(2, M), "mean")
    found[name].grad = torch.ones_like(found[name])
    with pytest.raises(ScheduleError, match="out of memory"):
        step(M)
    whose = "loss_fn" if name == "loss" else "inputs, targets or kwargs"
    with pytest.raises(ScheduleError, match=f"a gradient of {whose} holds a part of a step that failed"):
        step(0)
    found[name].grad = None
    step(0)


def test_a_step_that_is_refused_before_it_begins_changes_no_gradient():
    modules = layers(2)
    runner = runner_of(one_f_one_b(2, M), modules, "mean")
    runner.step(*batch(8))
    before = [gradient.clone() for gradient in grads(modules)]
    with pytest.raises(ScheduleError):
        runner.step(batch(7)[0], batch(7)[1])
    runner.step(*batch(8))
    assert all(torch.allclose(a, 2 * b) for a, b in zip(grads(modules), before, strict=True))


def test_a_failed_runner_does_not_drain_as_if_all_were_done():
    modules = layers(2)
    modules[1] = Fails(modules[1], 2 * M + 2)
    stages = [
        Stage(module, index, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
        for index, module in enumerate(modules)
    ]
    runner = PipelineRunner(pipedream_2bw(2, M), stages, None, square_loss)
    runner.step(*batch(8))
    runner.step(*batch(8))
    with pytest.raises(ScheduleError, match="out of memory"):
        runner.step(*batch(8))
    with pytest.raises(ScheduleError, match=r"this runner failed before \(.*out of memory\); make a new one"):
        runner.drain()
