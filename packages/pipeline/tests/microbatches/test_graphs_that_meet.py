"""Arguments that come out of graphs of the caller's, which meet in front of their leaves, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_helpers import batch, layers, square_loss
from torch import Tensor, nn

from sixfold.pipeline import PipelineRunner, ScheduleError, Stage, one_f_one_b, pipedream, zb_h1, zb_v

M = 4
PROGRAMS = [one_f_one_b(2, M), zb_h1(2, M), zb_v(2, M)]


class Scaled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        made: Tensor = self.layer(x)
        return made if scale is None else made * scale


class Remembers(nn.Module):
    """A recurrent layer that keeps its state with its history."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x) if self.state is None else self.layer(x + self.state)
        self.state = made.tanh()
        return made


def chunks(front: nn.Module, x: Tensor) -> list[Tensor]:
    return list(front(x).tanh().chunk(M))


def table(front: nn.Module, x: Tensor) -> list[Tensor]:
    weight = front.weight.tanh()  # type: ignore[operator]
    return [part @ weight for part in x.chunk(M)]


def pairs(front: nn.Module, x: Tensor) -> list[Any]:
    return [(part, part.sin()) for part in chunks(front, x)]


class Adds(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        made: Tensor = self.layer(x if y is None else x + y)
        return made


@pytest.mark.parametrize("make", [chunks, table, pairs])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_microbatches_of_one_graph_train_what_is_in_front_as_plain_torch_does(program, make):
    x, y = batch(8)
    fronts, stacks = [], []
    for _ in range(2):
        torch.manual_seed(0)
        fronts.append(nn.Linear(8, 8))
        stacks.append([Adds(layer) for layer in layers(program.stages)])
    stages = [Stage(module, index) for index, module in enumerate(stacks[0])]
    PipelineRunner(program, stages, None, square_loss).step(make(fronts[0], x), y)
    total: Any = 0.0
    for part, target in zip(make(fronts[1], x), y.chunk(M), strict=True):
        hidden: Any = part if isinstance(part, tuple) else (part,)
        for module in stacks[1]:
            hidden = (module(*hidden),)
        total = total + square_loss(hidden[0], target) / M
    total.backward()
    ours, theirs = (nn.ModuleList([front, *stack]) for front, stack in zip(fronts, stacks, strict=True))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def step_of(program: Any, first: nn.Module, **arguments: Any) -> None:
    modules = [first, *layers(program.stages)[1:]]
    runner = PipelineRunner(program, [Stage(m, s) for s, m in enumerate(modules)], None, square_loss)
    runner.step(**arguments)


@pytest.mark.parametrize("program", PROGRAMS[:2], ids=lambda p: p.name)
def test_other_arguments_of_one_graph_are_named_with_the_remedy(program):
    x, y = batch(8)
    front = nn.Linear(8, 8)
    words = (
        r"an earlier backward has freed .*: {0}\[0\]{1} and {0}\[1\]{1} come out of one autograd graph of yours; detach"
    )
    with pytest.raises(ScheduleError, match=words.format("targets", "")):
        step_of(program, layers(2)[0], inputs=x, targets=table(front, y))
    scales = [{"scale": part} for part in table(front, x)]
    stages = [Stage(Scaled(layer), index) for index, layer in enumerate(layers(2))]
    with pytest.raises(ScheduleError, match=words.format("kwargs", r"\['scale'\]")):
        PipelineRunner(program, stages, None, square_loss).step(x, y, kwargs=scales)
    own = [{"scale": front(part).tanh()} for part in x.chunk(M)]  # one each, which both stages use
    with pytest.raises(
        ScheduleError, match=r"kwargs\[0\]\['scale'\] comes out of .* and several stages may use it; detach"
    ):
        PipelineRunner(program, stages, None, square_loss).step(x, y, kwargs=own)


@pytest.mark.parametrize("program", PROGRAMS[:2], ids=lambda p: p.name)
def test_a_stage_that_keeps_its_history_is_named(program):
    x, y = batch(8)
    with pytest.raises(ScheduleError, match=r"stage 0 or loss_fn keeps a tensor with its graph .*; detach it there"):
        step_of(program, Remembers(layers(1)[0]), inputs=x, targets=y)


def test_microbatches_of_one_graph_are_refused_where_batches_overlap():
    x, y = batch(8)
    modules = layers(2)
    stages = [Stage(m, s, optimizer=torch.optim.SGD(m.parameters(), 0.1)) for s, m in enumerate(modules)]
    with pytest.raises(ScheduleError, match="inputs come out of one autograd graph, and batches overlap"):
        PipelineRunner(pipedream(2, M), stages, None, square_loss).step(chunks(nn.Linear(8, 8), x), y)
