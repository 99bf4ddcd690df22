"""Ctrl-C in the midst of a split backward's bookkeeping: the layers train on, alone and under a new runner."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, Stage, passes, zb_h1
from sixfold.pipeline.split_backward.weight_gradients import WeightGradientStore


class Interrupt:
    """Raises KeyboardInterrupt before ``function`` of the package runs line ``at`` for the first time."""

    def __init__(self, function: str, at: int = -1) -> None:
        self.function, self.at, self.lines, self.raised = function, at, dict[int, None](), False

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        mine = code.co_name == self.function and code.co_filename.endswith("split_backward/weight_gradients.py")
        return self._line if mine else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            self.lines[frame.f_lineno] = None
            if frame.f_lineno == self.at and not self.raised:
                self.raised = True
                raise KeyboardInterrupt
        return self._line

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def model() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]


def runner_of(modules: list[nn.Module], recompute: bool = False) -> PipelineRunner:
    program = passes.recompute(zb_h1(2, 2), microbatches=1) if recompute else zb_h1(2, 2)
    return PipelineRunner(program, [Stage(m, i) for i, m in enumerate(modules)], None, square_loss)


def trained(modules: list[nn.Module]) -> list[Tensor | None]:
    """Gradients of one batch in plain torch."""
    for k in range(2):
        x, y = (part.chunk(2)[k] for part in batch(8))
        (square_loss(modules[1](modules[0](x)), y) / 2).backward()
    return [gradient for module in modules for gradient in gradients(module)]


def stepped(runner: PipelineRunner, modules: list[nn.Module]) -> list[Tensor | None]:
    runner.step(*batch(8))
    return [gradient for module in modules for gradient in gradients(module)]


def patched(modules: list[nn.Module]) -> list[str]:
    return [name for module in modules for name, part in module.named_modules() if "forward" in vars(part)]


def zero(modules: list[nn.Module]) -> None:
    for module in modules:
        module.zero_grad()


def lines_of(function: str, recompute: bool) -> list[int]:
    runner, count = runner_of(model(), recompute), Interrupt(function)
    runner.step(*batch(8))
    with count.armed():
        runner.step(*batch(8))
    return list(count.lines)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("function", ["forward", "close", "backward"])
def test_after_ctrl_c_at_any_line_layers_train_alone_and_in_a_new_runner(function, recompute):
    expected = trained(model())
    lines = lines_of(function, recompute)
    assert len(lines) > 3
    for line in lines:
        modules = model()
        runner, interrupt = runner_of(modules, recompute), Interrupt(function, line)
        runner.step(*batch(8))
        zero(modules)
        with interrupt.armed():
            try:
                runner.step(*batch(8))
            except KeyboardInterrupt:
                pass
        assert interrupt.raised and not patched(modules), line
        zero(modules)
        assert equal_bits(trained(modules), expected), line
        zero(modules)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # "W makes the gradients of 0%" among them
            assert equal_bits(stepped(runner_of(modules, recompute), modules), expected), line


class Cut(nn.Module):
    """Ctrl-C in a layer's neighbour."""

    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


@pytest.mark.parametrize("again", ["new runner", "the runner beside it", "its copy"])
def test_a_layer_whose_place_was_never_given_back_is_freed_by_the_next_step(again, monkeypatch):
    expected = trained(model())
    modules = model()
    beside = runner_of(modules)
    beside.step(*batch(8))
    runner = runner_of(modules)
    runner.step(*batch(8))
    zero(modules)
    last = modules[1][1]
    modules[1][1] = Cut()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(WeightGradientStore, "close", lambda store: None)  # as if Ctrl-C came again and again
        runner.step(*batch(8))
    modules[1][1] = last
    assert patched(modules)
    if again == "its copy":
        modules = copy.deepcopy(modules)
    following = beside if again == "the runner beside it" else runner_of(modules)
    assert equal_bits(stepped(following, modules), expected)
    assert not patched(modules)
    zero(modules)
    assert equal_bits(trained(modules), expected)
