"""The runner in a time that only its stages and messages move: what it measures is what simulate says, to the digit.

Ranks are threads; each has a clock of its own, which a stage's work moves on, and which a message sets to when it is
there: a hop behind the moment at which it was sent. No load of the machine can change what is measured.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from pipeline_helpers import batch, square_loss
from torch import Tensor, nn

from sixfold.pipeline import (
    Action,
    Costs,
    Kind,
    PipelineRunner,
    Program,
    Stage,
    defer_weight_grad,
    interleaved,
    pipedream_2bw,
    replan,
    schedules,
    simulate,
)
from sixfold.pipeline.measured import action_times as timer
from sixfold.pipeline.passes import recompute
from sixfold.pipeline.transport import threads

RANKS, M, HOP_S = 3, 5, 7.0
PEER = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}


class Clock(threading.local):
    """Seconds, of each thread."""

    now = 0.0


class Delayed:
    """A transport whose messages take ``hop`` of ``clock``; it passes on what it does not know."""

    def __init__(self, inner: Any, clock: Clock, hop: Callable[[int, int], float], sent: Any, rank: int) -> None:
        self._inner, self._clock, self._hop, self._sent = inner, clock, hop, sent
        self.rank, self.ranks = rank, inner.ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _over(self, inner: Any) -> Delayed:
        return type(self)(inner, self._clock, self._hop, self._sent, self.rank)

    def join(self, device: torch.device, timeout_s: float) -> Any:
        return self._over(self._inner.join(device, timeout_s))

    def lane(self, placement: tuple[int, ...], microbatches: int, **more: Any) -> Any:
        return DelayedLane(self, self._inner.lane(placement, microbatches, **more), placement, microbatches)


class DelayedLane:
    """The ends of messages; the queue of a message holds when it will be there."""

    def __init__(self, links: Any, inner: Any, placement: tuple[int, ...], microbatches: int) -> None:
        self._links, self._inner, self._placement, self._batch = links, inner, placement, microbatches
        self.begin, self.clear = inner.begin, inner.clear

    def sender(self, action: Action) -> Callable[[Any], None]:
        send, links = self._inner.sender(action), self._links
        takes = links._hop(links.rank, self._placement[action.peer_stage])
        there = links._sent[action.stage, action.kind, action.microbatch % self._batch]

        def later(values: Any) -> None:
            there.put(links._clock.now + takes)
            send(values)

        return later

    def receiver(self, action: Action) -> Any:
        receipt, links = self._inner.receiver(action), self._links
        sent = links._sent[action.peer_stage, PEER[action.kind], action.microbatch % self._batch]

        class Late:
            post = staticmethod(receipt.post)

            @staticmethod
            def wait() -> Any:
                values = receipt.wait()
                links._clock.now = max(links._clock.now, sent.get(timeout=20))
                return values

        return Late()


class Works(nn.Module):
    """A stage whose F, I and W move the clock on."""

    def __init__(self, clock: Clock, forward_s: float, input_s: float, weight_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

        class Work(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                clock.now += forward_s
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                clock.now += input_s
                return gradient

        def weight_gradient(gradient: Tensor) -> Tensor:
            clock.now += weight_s
            return gradient.sum(0)

        self.work: Callable[[Tensor], Tensor] = Work.apply
        self.weight_gradient = weight_gradient

    def forward(self, x: Tensor) -> Tensor:
        return defer_weight_grad(self.weight, self.weight_gradient, self.work(x))


def on_ranks(
    program: Program, costs: Costs, monkeypatch: pytest.MonkeyPatch, do: Callable[[PipelineRunner, Any], Any]
) -> list[Any]:
    """What ``do(runner, step)`` gives on each rank; ``step(program)`` is a step's timeline, from time 0 on."""
    clock = Clock()
    monkeypatch.setattr(timer, "perf_counter_ns", lambda: round(clock.now * 1e9))
    ways = product(range(program.stages), PEER.values(), range(program.microbatches))
    sent = {way: SimpleQueue[float]() for way in ways}  # made before the threads ask for them
    stepping = any(action.kind is Kind.STEP for _, _, action in program.entries())
    transports = threads(len(program.ranks))
    x, y = batch(program.microbatches)

    def work(rank: int) -> Any:
        times = list(zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True))
        made = {s: Works(clock, *times[s]) for s in program.stages_of(rank)}
        stages = [Stage(m, s, optimizer=torch.optim.SGD(m.parameters()) if stepping else None) for s, m in made.items()]
        transport = Delayed(transports[rank], clock, costs.between, sent, rank)
        runner = PipelineRunner(program, stages, transport, square_loss, profile=True, timeout_s=60)

        def step(program: Program | None = None) -> Any:
            clock.now = 0.0
            return runner.gather_timeline(runner.step(x, y, program=program))

        return do(runner, step)

    with ThreadPoolExecutor(len(program.ranks)) as pool:
        return list(pool.map(work, range(len(program.ranks))))


def uneven(stages: int, rng: random.Random) -> Costs:
    """Stages of 20 to 90 seconds, stage 0 without an input gradient; hops far over the clocks' error."""
    times = [[rng.uniform(20, 90) for _ in range(stages)] for _ in range(3)]
    times[1][0] = 0.0
    hops = [[rng.uniform(HOP_S, 3 * HOP_S) for _ in range(RANKS)] for _ in range(RANKS)]
    return Costs(*times, hops, activation=[RANKS / stages] * stages)


NEAR_S = 0.5  # clocks of threads are compared by round trips, which a busy machine makes long


@pytest.mark.parametrize("name", [entry.name for entry in schedules.registered() if entry.flushed])
@pytest.mark.slow
def test_what_a_runner_measures_is_what_was_simulated_action_by_action(name, monkeypatch):
    entry = schedules.by_name(name)
    program = entry.with_chunks(RANKS, M, entry.chunks or 2)
    costs = uneven(program.stages, random.Random(name))
    timeline = on_ranks(program, costs, monkeypatch, lambda _, step: step())[0]
    wanted = simulate(program, costs)
    measured = {part: times for _, action, *times in timeline.events for part in action.each()}
    for _, action, start, end in wanted.events:
        if not action.parts:
            assert measured[action] == pytest.approx([start, end], abs=NEAR_S), action
    assert timeline.makespan == pytest.approx(wanted.makespan, abs=NEAR_S)
    fitted = Costs.fit(timeline, assume=costs)
    for what in ("forward", "backward_input", "backward_weight"):
        assert getattr(fitted, what) == pytest.approx(getattr(costs, what), abs=NEAR_S)
    assert simulate(program, fitted).makespan == pytest.approx(wanted.makespan, abs=2 * M * NEAR_S)


def test_a_forward_again_is_measured_as_simulated(monkeypatch):
    program = recompute(interleaved(RANKS, M), microbatches=2)
    costs = uneven(program.stages, random.Random(1))
    timeline = on_ranks(program, costs, monkeypatch, lambda _, step: step())[0]
    assert timeline.makespan == pytest.approx(simulate(program, costs).makespan, abs=NEAR_S)


@pytest.mark.slow
def test_measuring_and_planning_end_with_a_smaller_bubble_than_any_schedule_shipped(monkeypatch):
    """The example's loop: a cheap first stage, an expensive last one."""
    whole = [[60.0, *[100.0] * 4, 150.0], [0.0, *[130.0] * 4, 180.0], [90.0, *[70.0] * 4, 120.0]]
    best, ideal = {}, M * sum(map(sum, whole)) / RANKS
    for entry in schedules.registered():
        if not entry.flushed:
            continue
        program = entry.with_chunks(RANKS, M, entry.chunks or 2)
        each = 6 // program.stages
        times = [[sum(row[s : s + each]) for s in range(0, 6, each)] for row in whole]
        costs = Costs(*times, HOP_S, activation=[RANKS / program.stages] * program.stages)
        best[entry.name] = on_ranks(program, costs, monkeypatch, lambda _, step: step())[0].makespan / ideal - 1
    start = schedules.by_name("zb_v").make(RANKS, M)

    def go_on(runner: PipelineRunner, step: Callable[..., Any]) -> Any:
        timeline, found = step(), None
        if timeline is not None:
            costs = Costs.fit(timeline, assume=Costs.per_rank(start))
            found = replan(start, costs, memory_cap=1.25 * RANKS, time_limit_s=0.7).program
        return step(runner.agree(found, source=0))

    costs = Costs(*whole, HOP_S, activation=[0.5] * 6)
    planned = on_ranks(start, costs, monkeypatch, go_on)[0].makespan / ideal - 1
    assert planned < min(best.values()) - 0.02, (planned, best)


def test_batches_of_2bw_follow_each_other_without_idle_time(monkeypatch):
    """Until it is drained; all of it takes what is simulated."""
    batches, costs = 4, Costs([50.0] * 3, [0.0, 40.0, 40.0], [100.0, 60.0, 60.0])

    def several(runner: PipelineRunner, step: Any) -> list[float]:
        ends = []
        for _ in range(batches):
            runner.step(*batch(M))
            ends.append(timer.perf_counter_ns() * 1e-9)
        runner.drain()
        return [*ends, timer.perf_counter_ns() * 1e-9]

    program = pipedream_2bw(RANKS, M, steps=2)
    rows = on_ranks(program, costs, monkeypatch, several)
    for ends in rows:
        for before, after in pairwise(ends[:-1]):
            assert after - before == pytest.approx(M * 150.0)
    whole = simulate(pipedream_2bw(RANKS, M, steps=batches), costs)
    assert max(ends[-1] for ends in rows) == pytest.approx(whole.makespan)
