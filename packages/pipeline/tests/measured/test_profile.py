"""What ran when, one rank's program for all, and the passage before an optimizer."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from pipeline_helpers import batch, layers, square_loss
from thread_helpers import on_threads, values_or_raise
from torch import Tensor, nn

from sixfold.pipeline import (
    Action,
    PipelineRunner,
    Program,
    ScheduleError,
    Stage,
    dualpipe_v,
    gpipe,
    one_f_one_b,
    pipedream_2bw,
    zb_h1,
    zb_v,
)
from sixfold.pipeline.compiler import compile as compiling
from sixfold.pipeline.measured import action_times as timer
from sixfold.pipeline.passes import lower


class Sleeps(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.003)
        return self.module(x)


def stages_of(program: Program, wrap: Any = lambda module: module) -> list[Stage]:
    return [Stage(wrap(module), i) for i, module in enumerate(layers(program.stages))]


@pytest.mark.parametrize("program", [one_f_one_b(2, 3), zb_v(2, 4), dualpipe_v(2, 4)], ids=lambda p: p.name)
def test_a_profiled_step_has_an_event_for_every_action_in_the_order_of_its_rank(program):
    runner = PipelineRunner(program, stages_of(program, Sleeps), loss_fn=square_loss, profile=True)
    begin = time.perf_counter()
    for _ in range(2):
        result = runner.step(*batch(8 if program.microbatches == 4 else 6))
    assert all(begin < start <= end < time.perf_counter() for *_, start, end in result.events)
    lowered = lower(program)
    for rank in range(2):
        mine = [(action, start, end) for r, action, start, end in result.events if r == rank]
        wanted = [part for entry in lowered.ranks[rank] for part in entry.each() if part.microbatch is not None]
        assert sorted(map(str, (action for action, *_ in mine))) == sorted(map(str, wanted))
        work = [action for action, *_ in mine if action.kind in ("F", "B", "I", "W")]
        assert work == [part for entry in program.ranks[rank] for part in entry.each()]
        assert all(end <= after for (*_, end), (_, after, _) in pairwise(mine))
        assert all(end - start >= 0.003 for action, start, end in mine if action.kind == "F")
    assert result.timeline.events[0][2] == 0
    assert runner.gather_timeline(result) is result.timeline


def test_a_profiled_step_takes_two_readings_per_call_and_makes_no_timeline_until_it_is_asked_for(monkeypatch):
    program, readings, made = zb_v(2, 4), [], []
    monkeypatch.setattr(timer, "perf_counter_ns", lambda: readings.append(0) or time.perf_counter_ns())
    measured = compiling.measured
    monkeypatch.setattr(compiling, "measured", lambda *args: made.append(args) or measured(*args))
    result = PipelineRunner(program, stages_of(program), loss_fn=square_loss, profile=True).step(*batch(8))
    assert len(readings) == 2 * len(result.events)
    assert not made
    assert result.timeline is result.timeline and len(made) == 1


def test_without_profile_there_are_no_events():
    runner = PipelineRunner(gpipe(2, 2), stages_of(gpipe(2, 2)), loss_fn=square_loss)
    result = runner.step(*batch(4))
    assert (result.events, result.timeline) == ((), None)
    with pytest.raises(ScheduleError, match="make the runner with profile=True"):
        runner.gather_timeline(result)


@pytest.mark.parametrize("program", [zb_h1(2, 3), pipedream_2bw(2, 3)], ids=lambda p: p.name)
def test_a_step_that_is_not_to_be_timed_has_no_events_and_the_next_one_has_its_own(program):
    stages = stages_of(program)
    for stage in stages:
        stage.optimizer = torch.optim.SGD(stage.module.parameters(), lr=0.01)
    runner = PipelineRunner(program, stages, loss_fn=square_loss, profile=True)
    x, y = batch(6)
    assert runner.step(x, y).events
    quiet = runner.step(x, y, profile=False)
    assert (quiet.events, quiet.timeline, len(quiet.losses)) == ((), None, 3)
    assert runner.evaluate(x, y, profile=False).events == ()
    began = time.perf_counter()
    later = runner.step(x, y).events
    assert later and all(begin > began for *_, begin, _ in later)


def test_a_step_that_is_not_timed_asks_nothing_of_a_device(monkeypatch):
    asked: list[str] = []

    class OnDevice:
        def record(self, stream: object) -> None:
            asked.append("record")

        def synchronize(self) -> None:
            asked.append("synchronize")

        def elapsed_time(self, end: object) -> float:
            return 1.0

    monkeypatch.setattr(timer, "_event", OnDevice)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    times, ran = timer.ActionTimer(), []
    call = times.timed(lambda: ran.append(0), 0, Action.parse("0F0"), torch.device("cuda"))
    times.begin(False)
    call()
    assert (times.events(), asked, ran) == ((), [], [0])
    times.begin()
    call()
    assert len(times.events()) == 1 and asked == ["record"] * 4 + ["synchronize"], "base, begin, end, last"


def gather(transport: Any) -> Any:
    program = zb_h1(2, 3)
    mine = [stages_of(program)[transport.rank]]
    runner = PipelineRunner(program, mine, transport, square_loss, timeout_s=20, profile=True)
    result = runner.step(*batch(6))
    assert result.timeline is None
    assert {rank for rank, *_ in result.events} == {transport.rank}
    return runner.gather_timeline(result)


def test_the_events_of_all_ranks_are_gathered_on_rank_0():
    timeline, other = values_or_raise(on_threads(2, gather))
    assert other is None
    assert len(timeline.events) == sum(1 for _, _, a in lower(zb_h1(2, 3)).entries() if a.microbatch is not None)
    starts = {str(action): start for _, action, start, _ in timeline.events}
    ends = {str(action): end for _, action, _, end in timeline.events}
    assert ends["0F0"] <= starts["1F0"] + 1e-3  # one clock
    assert ends["1I2"] <= starts["0I2"] + 1e-3


def agree(transport: Any) -> list[str]:
    program = gpipe(2, 2)
    runner = PipelineRunner(program, [stages_of(program)[transport.rank]], transport, square_loss, timeout_s=20)
    better = zb_h1(2, 4) if transport.rank == 1 else None
    agreed = runner.agree(better, source=1)
    runner.step(*batch(8), program=agreed)
    runner.check()
    found = [agreed.name, str(agreed)]
    try:
        runner.agree(None)
    except ScheduleError as error:
        found.append(str(error))
    try:
        runner.check()
    except ScheduleError as error:
        found.append(str(error)[:26])
    return found


def test_the_program_of_one_rank_is_agreed_on_by_all():
    words = "program is None on rank 0, which decides; give it there"
    told = ["zb_h1", str(zb_h1(2, 4)), words, "this runner failed before "]
    assert values_or_raise(on_threads(2, agree)) == [told, told]


def test_one_process_agrees_with_itself_and_a_source_is_a_rank():
    runner = PipelineRunner(gpipe(2, 2), stages_of(gpipe(2, 2)), loss_fn=square_loss)
    assert runner.agree(zb_h1(2, 4)) == zb_h1(2, 4)
    with pytest.raises(ScheduleError, match=r"source is 2; ranks are 0\.\.1"):
        runner.agree(zb_h1(2, 4), source=2)
    with pytest.raises(ScheduleError, match="program is None on the rank that decides"):
        runner.agree()
