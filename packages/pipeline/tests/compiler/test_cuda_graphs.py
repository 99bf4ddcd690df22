"""F, I and W as graphs, over a stand-in that runs the work again where a device would replay it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, square_loss
from torch import nn

from sixfold.pipeline import (
    PipelineRunner,
    Program,
    ScheduleError,
    Stage,
    one_f_one_b,
    passes,
    pipedream_2bw,
    zb_h1,
    zb_v,
)
from sixfold.pipeline.compiler import cuda_graphs as graphs

STEPS, M = 6, 4


class Again:
    """A replay is the work once more; what it leaves in ``.grad`` is put back, as a replay would not touch it."""

    def __init__(self, made: list[Again], modules: list[nn.Module]) -> None:
        self.log: list[str] = []
        self.modules = modules
        made.append(self)

    def record(self, work: Callable[[], None]) -> Callable[[], object]:
        what = "FIW"[self.log.count("capture") % 3]
        self.log.append("capture")
        work()

        def replay() -> None:
            self.log.append(what)
            before = [(p, p.grad) for module in self.modules for p in module.parameters()]
            work()
            for parameter, gradient in before:
                parameter.grad = gradient

        return replay


@pytest.fixture
def stand_ins(monkeypatch):
    """What makes the recorders of modules, and those made, in the order in which slots capture."""
    monkeypatch.setattr(graphs, "_DEVICE", "cpu")
    made: list[Again] = []

    def take(modules: list[nn.Module]) -> None:
        monkeypatch.setattr(graphs, "graph_capture", lambda _: Again(made, modules))

    return made, take


def both(program: Program, take: Callable[[list[nn.Module]], None]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules after some steps, with graphs and without; losses are compared on the way."""
    found = []
    for graphed in (True, False):
        modules = layers(program.stages)
        take(modules)
        stages = [Stage(module, i, cuda_graphs=graphed) for i, module in enumerate(modules)]
        runner = PipelineRunner(program, stages, loss_fn=square_loss)
        losses = [torch.stack(runner.step(*batch(M * 2, seed=step)).losses) for step in range(STEPS)]
        found.append((modules, losses))
    (ours, first), (theirs, second) = found
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return ours, theirs


@pytest.mark.parametrize("program", [one_f_one_b(2, M), zb_h1(2, M), zb_v(2, M)], ids=lambda p: p.name)
def test_gradients_over_steps_have_the_bits_of_the_runner_without_graphs(program, stand_ins):
    made, take = stand_ins
    ours, theirs = both(program, take)
    for mine, other in zip(ours, theirs, strict=True):
        assert equal_bits(gradients(mine), gradients(other))
    assert len(made) == program.stages * M, "each slot of each stage has a pool of its own"


@pytest.mark.parametrize("program", [one_f_one_b(2, M), zb_h1(2, M)], ids=lambda p: p.name)
def test_a_slot_captures_once_and_replays_in_the_order_of_its_captures(program, stand_ins):
    made, take = stand_ins
    both(program, take)
    replayed = ["F", "I"] if program.name == "one_f_one_b" else ["F", "I", "W"]  # a B is an I that leaves nothing
    for slot in made:
        assert slot.log == ["capture"] * 3 + replayed * (STEPS - 3)


def test_other_shapes_are_captured_anew(stand_ins):
    made, take = stand_ins
    [module] = layers(1)
    take([module])
    runner = PipelineRunner(one_f_one_b(1, 2), [Stage(module, 0, cuda_graphs=True)], loss_fn=square_loss)
    for step in range(3):
        runner.step(*batch(4, seed=step))
    assert not made
    for rows in (4, 6, 6):
        runner.step(*batch(rows))
    assert [slot.log.count("capture") for slot in made] == [3, 3, 3, 3]


@pytest.mark.parametrize("program", [one_f_one_b(2, 2), zb_h1(2, 2)], ids=lambda p: p.name)
@pytest.mark.parametrize("thaws", [True, False])
def test_what_thaws_or_freezes_between_steps_gets_the_gradients_that_it_then_wants(program, thaws, stand_ins):
    _, take = stand_ins
    found = []
    for graphed in (True, False):
        modules = layers(program.stages)
        take(modules)
        stages = [Stage(module, i, cuda_graphs=graphed) for i, module in enumerate(modules)]
        runner = PipelineRunner(program, stages, loss_fn=square_loss)
        for step in range(STEPS):
            for module in modules:
                module[0].weight.requires_grad_((step >= STEPS - 1) == thaws)
            runner.step(*batch(4, seed=step))
        found.append(modules)
    for mine, other in zip(*found, strict=True):
        assert equal_bits(gradients(mine), gradients(other))


def test_another_mode_of_a_part_is_captured_anew(stand_ins):
    made, take = stand_ins
    [module] = layers(1)
    take([module])
    runner = PipelineRunner(one_f_one_b(1, 2), [Stage(module, 0, cuda_graphs=True)], loss_fn=square_loss)
    for step in range(STEPS):
        if step == STEPS - 1:
            module[1].eval()
        runner.step(*batch(4))
    assert [slot.log.count("capture") for slot in made] == [3, 3, 3, 3]


REFUSED = [
    (lambda: Stage(nn.Linear(8, 8), 0, cuda_graphs=True, checkpoint=True), "without checkpoint"),
    (lambda: Stage(None, 0, cuda_graphs=True), "without checkpoint"),
    (lambda: run(one_f_one_b(1, 2), device="cuda"), "work of a CUDA device"),
    (lambda: run(one_f_one_b(1, 2), dynamic_shapes=True), "dynamic_shapes=False"),
    (lambda: run(one_f_one_b(1, 2), overlap="streams"), "overlap='order'"),
    (lambda: run(pipedream_2bw(1, 2)), "one version of the weights"),
    (lambda: run(passes.recompute(one_f_one_b(1, 2), microbatches=1)), "without RECOMPUTE"),
    (lambda: run(one_f_one_b(1, 2)).step(*batch(4), kwargs=[{"a": 1}, {}]), "without kwargs"),
]


def run(program: Program, device: str = "cpu", **options: object) -> PipelineRunner:
    graphs._DEVICE = device
    stages = [
        Stage(module, i, cuda_graphs=True, optimizer=torch.optim.SGD(module.parameters()))
        for i, module in enumerate(layers(program.stages))
    ]
    return PipelineRunner(program, stages, loss_fn=square_loss, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_graphs_would_get_wrong_is_refused_by_name(call, words, stand_ins):
    with pytest.raises(ScheduleError, match=words):
        call()


class Smoothed(nn.Module):
    """A running mean that is another tensor after each forward, or the same one."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        [self.layer] = layers(1)
        self.register_buffer("mean", torch.zeros(8))
        self.in_place = in_place
        self.older: list[torch.Tensor] = []  # kept, so that no later one gets the memory of an earlier one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            self.older.append(self.mean)
            self.mean = self.mean.copy_(mean) if self.in_place else mean
        return self.layer(x - self.mean)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_lies_elsewhere_in_each_step_is_told_and_not_captured_for_ever(in_place, stand_ins):
    made, take = stand_ins
    module = Smoothed(in_place)
    take([module])
    runner = PipelineRunner(one_f_one_b(1, 1), [Stage(module, 0, cuda_graphs=True)], loss_fn=square_loss)

    def steps() -> None:
        for _ in range(12):
            runner.step(*batch(2))

    if in_place:
        steps()
        assert made[0].log.count("capture") == 3
        return
    with pytest.raises(ScheduleError, match=r"mean has another address in each call; change it in place"):
        steps()


def test_a_hook_and_autocast_are_refused(stand_ins):
    _, take = stand_ins
    runner = run(one_f_one_b(1, 2))
    with pytest.raises(ScheduleError, match="cannot run under autocast"), torch.autocast("cpu", dtype=torch.bfloat16):
        runner.step(*batch(4))
    [module] = layers(1)
    take([module])
    runner = PipelineRunner(one_f_one_b(1, 2), [Stage(module, 0, cuda_graphs=True)], loss_fn=square_loss)
    for _ in range(4):
        runner.step(*batch(4))
    of_all = torch.nn.modules.module.register_module_forward_hook(lambda module, given, output: None)
    with of_all, pytest.raises(ScheduleError, match="run no hooks, and every module of the process has one"):
        runner.step(*batch(4))
    module[0].weight.register_hook(lambda gradient: None)
    with pytest.raises(ScheduleError, match=r"run no hooks, and 0\.weight has one"):
        runner.step(*batch(4))
