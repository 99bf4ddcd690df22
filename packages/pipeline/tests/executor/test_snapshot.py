"""A runner that is saved between two steps and made anew goes on with the bits of one that never stopped."""

from __future__ import annotations

import copy
import io
import threading
import time
from typing import Any

import pytest
import torch
from overlapping_batches_helpers import PROGRAMS, runner_of
from pipeline_helpers import layers, square_loss
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn
from version_helpers import Batches, made_batches, same_weights

from sixfold.pipeline import (
    PipelineRunner,
    PipelineTimeout,
    Program,
    ScheduleError,
    Stage,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
)
from sixfold.pipeline.passes import optimizer_step
from sixfold.pipeline.proof.endless import endless


def through_a_file(state: Any) -> Any:
    """As ``torch.load`` gives it by default."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(
    group: Any, program: Program, modules: list[nn.Module], batches: Batches, cut: int | None, barrier: Any = None
) -> list[Any]:
    """Losses of every step; behind step ``cut`` the runner, its modules and optimizers are made anew."""
    runner, losses = runner_of(program, modules, group, "momentum", timeout_s=30.0), []
    for t, (inputs, targets) in enumerate(batches):
        losses.append(runner.step(list(inputs), list(targets)).losses)
        if t == cut:
            state = through_a_file(runner.state_dict())
            mine = range(len(modules)) if group is None else program.stages_of(group.rank)
            for s in mine:
                modules[s] = copy.deepcopy(modules[s])
                with torch.no_grad():
                    for tensor in modules[s].state_dict().values():
                        tensor.zero_()
            if barrier is not None:
                barrier.wait(30.0)
            runner = runner_of(program, modules, group, "momentum", timeout_s=30.0)
            torch.manual_seed(99)
            runner.load_state_dict(state)
    runner.drain()
    return losses


class Random(nn.Module):
    """Draws random numbers, has a buffer that moves, a frozen parameter and a checkpointed part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.layer.bias.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(hidden)))


@pytest.mark.parametrize("program", [pipedream_2bw(3, 3), pipedream(3, 4), PROGRAMS["gpipe"]], ids=lambda p: p.weights)
@pytest.mark.parametrize("cut", [0, 1, 3])
@pytest.mark.slow
def test_restored_in_one_process_with_random_numbers_and_buffers(program, cut):
    torch.manual_seed(5)
    first = [Random() for _ in range(3)]
    second = copy.deepcopy(first)
    found = endless(program)
    batches = made_batches(5, found.batch)
    torch.manual_seed(7)
    expected = run(None, program, first, batches, None)
    torch.manual_seed(7)
    assert run(None, program, second, batches, cut) == expected
    assert same_weights(first, second)


@pytest.mark.parametrize("name", [*PROGRAMS, "2bw", "pipedream"])
@pytest.mark.slow
def test_restored_on_threads_behind_every_step(name):
    program = {"2bw": pipedream_2bw(4, 3), "pipedream": pipedream(3, 4), **PROGRAMS}[name]
    batches, p = made_batches(5, endless(program).batch), len(program.ranks)
    expected = layers(program.stages)
    losses = values_or_raise(on_threads(p, run, program, expected, batches, None))
    for cut in range(5):
        modules = layers(program.stages)
        found = values_or_raise(on_threads(p, run, program, modules, batches, cut, threading.Barrier(p)))
        assert found == losses
        assert same_weights(modules, expected)


def test_of_a_flush_the_state_is_the_optimizers_and_the_random_numbers():
    program, batches = optimizer_step(one_f_one_b(2, 3)), made_batches(4, 3)
    plain = [Stage(module, s) for s, module in enumerate(layers(2))]
    state = PipelineRunner(one_f_one_b(2, 3), plain, loss_fn=square_loss).state_dict()
    assert (state["optimizers"], state["carried"]) == ({}, None)
    first, second = layers(2), layers(2)
    one, other = runner_of(program, first), runner_of(program, second)
    for batch in batches[:2]:
        one.step(*batch)
    for ours, theirs in zip(second, first, strict=True):
        ours.load_state_dict(theirs.state_dict())
    other.load_state_dict(through_a_file(one.state_dict()))
    for batch in batches[2:]:
        assert one.step(*batch).losses == other.step(*batch).losses
    assert same_weights(first, second)


def test_a_state_is_a_cut_that_later_steps_of_its_runner_may_go_past():
    program, batches = pipedream_2bw(2, 2), made_batches(4, 2)
    first, second = layers(2), layers(2)
    runner = runner_of(program, first)
    runner.step(*batches[0])
    state = copy.deepcopy(runner.state_dict())
    later = [runner.step(*batch).losses for batch in batches[1:]]
    other = runner_of(program, second)
    other.load_state_dict(state)
    assert [other.step(*batch).losses for batch in batches[1:]] == later


STATES = {
    "no dict": (lambda state: [state], "the state is a list"),
    "no format": (lambda state: state.pop("format"), "the state has no 'format'"),
    "another format": (lambda state: state.update(format="x"), "the state's format is 'x'"),
    "other stages": (lambda state: state.update(stages=[0]), r"the state is of stages \[0\]; here are \[0, 1\]"),
    "an optimizer less": (lambda state: state["optimizers"].pop(1), r"optimizers of stages \[0\]"),
    "another order": (lambda state: state["carried"].update(order="x"), "the state is of another program"),
    "no weights": (lambda state: state["carried"].pop("weights"), "'carried' has no 'weights'"),
    "a stage less": (lambda state: state["carried"]["slots"].pop(0), r"the state's 'slots' are of stages \[1\]"),
    "a version less": (lambda state: state["carried"]["weights"][0].pop("older"), "stage 0 has no 'older'"),
    "a weight less": (lambda state: state["carried"]["weights"][0]["newest"].pop("0.bias"), "their names and shapes"),
    "a slot less": (lambda state: state["carried"]["slots"][0].pop(), "stage 0: the state lacks microbatches"),
    "a slot's input less": (lambda state: state["carried"]["slots"][0][0].pop("inputs"), "has no 'inputs'"),
    "a text": (lambda state: state["carried"].update(batch="1"), "'batch' is a str"),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.slow
def test_what_is_no_state_of_this_runner_is_refused_and_changes_nothing(name):
    change, words = STATES[name]
    program, batches = pipedream_2bw(2, 2), made_batches(2, 2)
    runner = runner_of(program, layers(2))
    runner.step(*batches[0])
    state = through_a_file(runner.state_dict())
    given = change(state) if name == "no dict" else state
    if name != "no dict":
        change(state)
    modules, fresh = layers(2), layers(2)
    other = runner_of(program, modules)
    with pytest.raises(ScheduleError, match=words):
        other.load_state_dict(given)
    assert same_weights(modules, fresh)
    assert len(other.step(*batches[0]).losses) == 2


def test_a_state_of_another_program_or_into_a_runner_in_flight_is_refused():
    runner = runner_of(pipedream_2bw(2, 2), layers(2))
    runner.step(*made_batches(1, 2)[0])
    state = runner.state_dict()
    for program in (pipedream_2bw(2, 3), pipedream(2, 2), one_f_one_b(2, 4)):
        with pytest.raises(ScheduleError, match="another program"):
            runner_of(program, layers(2)).load_state_dict(state)
    runner_of(pipedream_2bw(2, 2, steps=5), layers(2)).load_state_dict(state)  # goes on in the same order
    with pytest.raises(ScheduleError, match="in flight here"):
        runner.load_state_dict(state)


def test_a_state_waits_no_longer_than_the_deadline_for_a_rank_that_does_not_step():
    program, over = pipedream_2bw(2, 1), threading.Event()

    def act(group: Any) -> float:
        runner = runner_of(program, layers(2), group, timeout_s=0.3)
        runner.agree(program)
        if group.rank:
            over.wait(20.0)  # never makes the gradient that rank 0 asked for in its step
            return 0.0
        runner.step(*made_batches(1, 1)[0])
        begin = time.monotonic()
        with pytest.raises(PipelineTimeout, match="0RECV_B0"):
            runner.state_dict()
        over.set()
        return time.monotonic() - begin

    assert values_or_raise(on_threads(2, act))[0] < 1.3


def test_what_a_state_cannot_hold_is_named():
    runner = runner_of(pipedream_2bw(2, 2), layers(2))
    inputs, targets = made_batches(1, 2)[0]
    graph = [x.requires_grad_() * 2 for x in inputs]
    runner.step(graph, targets)
    with pytest.raises(ScheduleError, match="stage 0, a microbatch in flight has inputs with a graph"):
        runner.state_dict()
