"""Timelines of real steps: each action once, none before its inputs, none shorter than it can be."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pipeline_helpers import WIDTH, batch, square_loss
from torch import Tensor, nn

from sixfold.pipeline import (
    Costs,
    Kind,
    PipelineRunner,
    Program,
    Stage,
    defer_weight_grad,
    draw,
    naive,
    replan,
    schedules,
    simulate,
    zb_v,
)
from sixfold.pipeline.program.action import WORK
from sixfold.pipeline.transport import threads

MAKERS = (Kind.F, Kind.B, Kind.I)
TIMES_S = (0.002, 0.003, 0.001)  # F, I and W


class Sleep(torch.autograd.Function):
    """Takes a time in the forward, and one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(TIMES_S[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(TIMES_S[1])
        return gradient


class Sleeper(nn.Module):
    """One stage; the first gets no gradient of its input, and sleeps for W alone in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        def weight_gradient(gradient: Tensor) -> Tensor:
            time.sleep(TIMES_S[2])
            return (gradient * x.detach()).sum(0)

        return defer_weight_grad(self.weight, weight_gradient, Sleep.apply(x) * self.weight.detach())


def true_costs(program: Program) -> Costs:
    """What the stages sleep, at least."""
    each = [[seconds] * program.stages for seconds in TIMES_S]
    each[1][0] = 0.0
    return Costs(*each)


def on_threads(program: Program, do: Any) -> list[Any]:
    """``do(runner, inputs, targets)`` on every rank, as threads."""
    transports = threads(len(program.ranks))
    x, y = batch(program.microbatches)

    def work(rank: int) -> Any:
        stages = [Stage(Sleeper(), s) for s in program.stages_of(rank)]
        return do(PipelineRunner(program, stages, transports[rank], square_loss, profile=True, timeout_s=30), x, y)

    with ThreadPoolExecutor(len(program.ranks)) as pool:
        return list(pool.map(work, range(len(program.ranks))))


def check(program: Program, timeline: Any) -> None:
    """``timeline`` is one of ``program`` whose actions sleep."""
    wanted = sorted(str(a) for _, _, a in program.entries() if a.kind in WORK)
    assert sorted(str(action) for _, action, *_ in timeline.events if action.kind in WORK) == wanted
    made = {(a.kind is Kind.F, a.stage, a.microbatch): end for _, a, _, end in timeline.events if a.kind in MAKERS}
    for rank, action, start, end in timeline.events:
        assert rank == program.placement[action.stage]
        if action.kind not in WORK:
            continue
        times = dict(zip((Kind.F, Kind.I, Kind.W, Kind.B), (*TIMES_S, TIMES_S[2]), strict=True))
        least = times[action.kind] if action.stage or action.kind is not Kind.I else 0.0
        least += TIMES_S[1] if action.kind is Kind.B and action.stage else 0.0
        assert end - start >= least - 1e-6, action
        before = action.stage + (-1 if action.kind is Kind.F else 1)
        if action.kind is not Kind.W and 0 <= before < program.stages:
            input_made = made[action.kind is Kind.F, before, action.microbatch]
            assert start >= input_made, f"{action} began before its input was made"
    # Sleeping is never shorter, and nothing else is free: no step beats its simulation.
    assert timeline.makespan >= simulate(program, true_costs(program)).makespan - 1e-6


@pytest.mark.parametrize("name", ["zb_v", "interleaved", "zb_interleaved"])
def test_a_step_of_threads_is_measured_action_by_action(name):
    program = schedules.by_name(name).with_chunks(2, 3, 2)

    def do(runner: PipelineRunner, x: Tensor, y: Tensor) -> Any:
        return runner.gather_timeline(runner.step(x, y))

    timeline, elsewhere = on_threads(program, do)
    assert elsewhere is None
    check(program, timeline)
    fitted = Costs.fit(timeline, assume=true_costs(program))
    for known, true in ((fitted.forward, TIMES_S[0]), (fitted.backward_weight[1:], TIMES_S[2])):
        assert all(seconds >= true - 1e-6 for seconds in known)
    assert "measured" in draw(simulate(program, fitted), beside=timeline)


def test_a_step_in_one_process_is_measured_too():
    program = zb_v(2, 3)
    runner = PipelineRunner(program, [Stage(Sleeper(), s) for s in range(4)], loss_fn=square_loss, profile=True)
    check(program, runner.gather_timeline(runner.step(*batch(3))))


def test_ranks_measure_fit_plan_and_go_on_with_one_program():
    program = naive(2, 4)  # whatever is planned is better, if more than one microbatch may be held

    def do(runner: PipelineRunner, x: Tensor, y: Tensor) -> Any:
        timeline, found = runner.gather_timeline(runner.step(x, y)), None
        if timeline is not None:
            costs = Costs.fit(timeline, assume=true_costs(program))
            found = replan(program, costs, memory_cap=4, time_limit_s=0.1)
        agreed = runner.agree(None if found is None else found.program, source=0)
        return agreed, runner.gather_timeline(runner.step(x, y, program=agreed))

    (agreed, timeline), (same, _) = on_threads(program, do)
    assert agreed == same and agreed != program
    check(agreed, timeline)
