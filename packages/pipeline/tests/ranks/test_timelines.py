"""Timelines of several processes, whose clocks differ."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist
from pipeline_helpers import batch, layers, square_loss

from ranktest import run_ranks, store
from sixfold.pipeline import Action, Kind, PipelineRunner, PipelineTimeout, ScheduleError, Stage, one_f_one_b
from sixfold.pipeline.measured import action_times as timer

M = 4
CLOSE_S = 0.05  # far more than the offsets' error, far less than the clocks' difference


def with_another_clock(rank: int, ranks: int) -> None:
    """Rank r's clock is r days ahead."""
    ahead_s = 86400 * rank
    seconds, nanoseconds = time.perf_counter, time.perf_counter_ns
    time.perf_counter = lambda: seconds() + ahead_s
    timer.perf_counter_ns = lambda: nanoseconds() + ahead_s * 10**9
    program = one_f_one_b(ranks, M)
    stage = Stage(layers(ranks)[rank], rank)
    runner = PipelineRunner(program, [stage], dist.group.WORLD, square_loss, profile=True, timeout_s=20)
    runner.step(*batch(M))
    timeline = runner.gather_timeline(runner.step(*batch(M)))
    assert (timeline is None) == (rank > 0)
    if timeline is None:
        return
    ended = {action: end for _, action, _, end in timeline.events}
    assert sum(action.kind in (Kind.F, Kind.B) for action in ended) == 2 * M * ranks
    for _, action, start, _ in timeline.events:
        before = action.stage + (-1 if action.kind is Kind.F else 1)
        if action.kind in (Kind.F, Kind.B) and 0 <= before < ranks:
            assert start >= ended[Action(before, action.kind, action.microbatch)] - CLOSE_S
    assert timeline.makespan < 60


@pytest.mark.slow
def test_events_of_processes_are_on_the_clock_of_rank_0():
    run_ranks(with_another_clock, 3)


def beside_a_stopped_rank(rank: int, ranks: int) -> tuple[str, float] | None:
    """Rank 1 runs its step and stops; rank 0 waits for its events."""
    program, timeout_s = one_f_one_b(ranks, M), 0.5
    dist.barrier()
    stage = Stage(layers(ranks)[rank], rank)
    runner = PipelineRunner(
        program, [stage], dist.group.WORLD, square_loss, profile=True, timeout_s=timeout_s, store=store()
    )
    result = runner.step(*batch(M))
    if rank == 1:
        store().set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    stopped = int(store().get("stopped"))
    begin = time.monotonic()
    with pytest.raises(PipelineTimeout) as caught:
        runner.gather_timeline(result)
    took = time.monotonic() - begin
    os.kill(stopped, signal.SIGKILL)
    with pytest.raises(ScheduleError, match="failed before"):
        runner.gather_timeline(result)
    return str(caught.value), took


def test_events_of_a_stopped_rank_are_waited_for_until_the_deadline():
    text, took = run_ranks(beside_a_stopped_rank, 2, allow_exit=(1,))[0]
    assert took < 10, "timeout_s is 0.5 s; every other deadline of the job is longer than this"
    assert "rank 0 waits" in text and "rank 1 silent" in text, text
