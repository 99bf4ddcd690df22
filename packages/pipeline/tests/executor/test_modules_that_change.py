"""Parameters and layers that a user replaces between steps are those that the next step trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_helpers import batch, square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, gpipe, passes, zb_h1
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.stage.distributed_data_parallel import Parts

M = 4


class Part(nn.Module):
    """Layers whose gradients W makes, and positions between, whose gradient may share memory with theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.positions = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        placed = (self.first(x).squeeze(0) + self.positions.view(8)).unsqueeze(0)  # one memory for three gradients
        return self.head(torch.tanh(placed))


def assign(part: Part) -> None:
    other = copy.deepcopy(part)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    part.load_state_dict(other.state_dict(), assign=True)


def replace_head(part: Part) -> None:
    torch.manual_seed(9)
    part.head = nn.Linear(8, 8)


def replace_head_and_positions(part: Part) -> None:
    replace_head(part)
    part.positions = nn.Parameter(torch.randn(8))


def other_data(part: Part) -> None:
    for parameter in part.parameters():
        parameter.data = parameter.detach() * 0.5
        parameter.grad = None


def adapt(part: Part) -> None:
    """A low rank beside a frozen layer, as LoRA has it."""

    class Adapted(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.b(self.a(x))

    torch.manual_seed(9)
    part.first = Adapted(part.first)
    for parameter in part.parameters():
        parameter.grad = None


def freeze_and_tie(part: Part) -> None:
    part.first.weight = part.head.weight
    part.head.bias.requires_grad_(False)
    part.head.bias.grad = None


CHANGES = [assign, replace_head, replace_head_and_positions, other_data, adapt, freeze_and_tie]
LATE_W = "0: " + " ".join(f"{stage}{kind}{k}" for stage, kind in ("0F", "1F", "1I", "0I", "1W", "0W") for k in range(M))
PROGRAMS = {
    "gpipe": gpipe(2, M),
    "late W": Program.parse(LATE_W),
    "recompute": passes.recompute(zb_h1(2, M)),
}


def grads(parts: list[Part]) -> dict[str, Any]:
    return {f"{i}.{name}": p.grad for i, part in enumerate(parts) for name, p in part.named_parameters()}


def run(change: Callable[[Part], None], step: Callable[[Tensor, Tensor], object], parts: list[Part]) -> dict[str, Any]:
    """Two steps before and two behind the change, whose gradients add up."""
    for at in range(4):
        if at == 2:
            for part in parts:
                change(part)
        step(*batch(M, at))
    return grads(parts)


def check(change: Callable[[Part], None], program: Program, scale: str) -> PipelineRunner:
    torch.manual_seed(1)
    parts = [Part(), Part()]
    plain = copy.deepcopy(parts)

    def loop(x: Tensor, y: Tensor) -> None:
        step = {name: None if g is None else g.clone() for name, g in grads(plain).items()}
        for part in plain if scale == "token" else ():
            part.zero_grad()
        for each, target in zip(x.chunk(M), y.chunk(M), strict=True):
            for part in plain:
                each = part(each)
            (square_loss(each, target) / M if scale == "mean" else ((each - target) ** 2).sum()).backward()
        for i, part in enumerate(plain if scale == "token" else ()):
            for name, p in part.named_parameters():
                before = step[f"{i}.{name}"]
                if p.grad is not None:
                    p.grad.div_(8 * M)
                    p.grad = p.grad if before is None else before.add_(p.grad)
                else:
                    p.grad = before

    def loss(output: Tensor, target: Tensor) -> Any:
        if scale == "mean":
            return square_loss(output, target)
        return ((output - target) ** 2).sum(), torch.tensor(output.numel())

    runner = PipelineRunner(program, [Stage(part, i) for i, part in enumerate(parts)], None, loss, scale=scale)
    ours, theirs = run(change, runner.step, parts), run(change, loop, plain)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if (ours[name] is None) != (theirs[name] is None):
            raise AssertionError(f"{name}: {ours[name]} beside {theirs[name]}")
        if ours[name] is not None:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, msg=lambda t, n=name: f"{n}: {t}")
    return runner


@pytest.mark.sampled
@pytest.mark.parametrize("scale", ["mean", "token"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_replaced_between_steps_has_the_gradients_of_a_plain_loop(change, program, scale):
    check(change, PROGRAMS[program], scale)


def by_hand(part: Part) -> None:
    """A head whose class is its own, which W does not know."""

    class Own(nn.Linear): ...

    part.head = Own(8, 8)


@pytest.mark.parametrize(("change", "share"), [(assign, 1.0), (replace_head, 1.0), (by_hand, 0.5)])
def test_the_share_that_w_makes_is_that_of_the_layers_that_are_there_now(change, share):
    torch.manual_seed(1)
    parts = [Part(), Part()]
    stages = [Stage(part, i) for i, part in enumerate(parts)]
    runner = PipelineRunner(zb_h1(2, M), stages, None, square_loss)
    runner.step(*batch(M))
    before = runner.deferred
    for part in parts:
        change(part)
    runner.deferred = {}
    runner.step(*batch(M))
    assert runner.deferred == {index: pytest.approx(was * share) for index, was in before.items()}


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_module_that_a_stage_gets_behind_the_runner_is_refused_and_a_new_runner_trains_it(call):
    stages = [Stage(Part(), 0), Stage(Part(), 1)]
    runner = PipelineRunner(zb_h1(2, M), stages, None, square_loss)
    runner.step(*batch(M))
    stages[1].module = other = Part()
    with pytest.raises(ScheduleError, match="module of stage 1 was replaced"):
        getattr(runner, call)(*batch(M))
    assert other.head.weight.grad is None
    PipelineRunner(zb_h1(2, M), stages, None, square_loss).step(*batch(M))
    assert other.head.weight.grad is not None


@pytest.mark.parametrize(("name", "value"), [("checkpoint", True), ("data_parallel", object()), ("cuda_graphs", True)])
def test_an_option_of_a_stage_that_is_set_after_its_runner_was_made_is_refused(name, value):
    x, y = batch(2 * M)
    stages = [Stage(nn.Linear(8, 8), index) for index in range(2)]
    runner = PipelineRunner(gpipe(2, M), stages, None, square_loss)
    runner.step(x, y)
    setattr(stages[1], name, value)
    with pytest.raises(ScheduleError, match=f"{name} of stage 1 was set after its runner was made"):
        runner.step(x, y)


def test_modules_that_come_go_or_get_another_class_are_seen_and_equal_ones_are_not_walked(monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    parts = Parts(model)
    inner: Any = model[1]

    def another_class() -> None:
        model[0].__class__ = type("Other", (nn.Linear,), {})

    for change in (
        lambda: None,  # the first look
        lambda: inner.append(nn.Linear(8, 8)),
        lambda: inner.__setitem__(1, nn.ReLU()),
        lambda: inner.__delitem__(2),
        lambda: model.register_module("none", None),
        another_class,
    ):
        change()
        assert parts.changed()
        parts.keep()
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "modules", None)
            assert not parts.changed()
