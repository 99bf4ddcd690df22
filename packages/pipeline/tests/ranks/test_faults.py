"""What goes wrong on one rank is raised on every rank, in time and by name."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch.distributed as dist
from pipeline_helpers import batch, layers, square_loss
from torch import Tensor, nn

from ranktest import run_ranks, store
from sixfold.pipeline import PipelineRunner, PipelineTimeout, Program, ScheduleError, Stage, gpipe, one_f_one_b

TIMEOUT_S = 3.0


class Fails(nn.Module):
    """Does ``act`` in its third forward."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.act, self.calls = act, 0
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            if self.act == "raise":
                raise RuntimeError("the disk is full")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def step_with_a_failing_stage(
    rank: int, ranks: int, act: str, culprit: int, with_store: bool
) -> tuple[str, str, float]:
    """Run one step in which the stage of ``culprit`` fails; what this rank got, and after how long."""
    program = one_f_one_b(ranks, 6)
    module = Fails(act) if rank == culprit else layers(ranks)[rank]
    shared = store() if with_store else None
    runner = PipelineRunner(
        program, [Stage(module, rank)], dist.group.WORLD, square_loss, timeout_s=TIMEOUT_S, store=shared
    )
    begin = time.monotonic()
    try:
        runner.step(*batch(12))
    except ScheduleError as error:
        took = time.monotonic() - begin
        with pytest.raises(ScheduleError, match="make a new one"):
            runner.step(*batch(12))
        return type(error).__name__, str(error), took
    return "none", "", 0.0


def test_an_exception_in_a_stage_reaches_every_rank_with_its_rank_and_action():
    results = run_ranks(step_with_a_failing_stage, 3, "raise", 1, True)
    for kind, text, took in results:
        assert kind == "ScheduleError"
        assert re.match(r"rank 1 failed at \[\d+/\d+\] 1F2: RuntimeError: the disk is full", text), text
        assert took < TIMEOUT_S


def test_without_a_store_the_others_time_out_and_name_their_peer():
    results = run_ranks(step_with_a_failing_stage, 2, "raise", 1, False)
    assert results[0][0] == "PipelineTimeout"
    assert re.fullmatch(r"rank 0 waits at \[\d+/\d+\] 0(RECV_B|SEND_F)\d for rank 1", results[0][1]), results[0][1]
    assert results[1][1].endswith("RuntimeError: the disk is full")


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_killed_peer_is_a_timeout_on_every_live_rank(culprit):
    results = run_ranks(step_with_a_failing_stage, 3, "kill", culprit, True, allow_exit=(culprit,))
    assert results[culprit] is None
    for rank, result in enumerate(results):
        if rank != culprit:
            kind, text, took = result
            assert kind == "PipelineTimeout"
            assert text.startswith(f"rank {rank} waits at [")
            assert f"rank {culprit} silent" in text
            assert took < TIMEOUT_S + 1


def step_beside_a_stopped_rank(rank: int, ranks: int) -> tuple[str, float] | None:
    """Rank 1 stops itself after a step; the other reports how its next step ended."""
    program = gpipe(ranks, 4)
    runner = PipelineRunner(
        program, [Stage(layers(ranks)[rank], rank)], dist.group.WORLD, square_loss, timeout_s=0.6, store=store()
    )
    runner.step(*batch(8))
    dist.barrier()  # a step does not wait for what it sent: now rank 0 has received it
    if rank == 1:
        store().set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    begin = time.monotonic()
    try:
        runner.step(*batch(8))
    except PipelineTimeout as error:
        took = time.monotonic() - begin
        os.kill(int(store().get("stopped")), signal.SIGKILL)
        return str(error), took
    return None


def test_a_stopped_peer_is_a_timeout_within_the_deadline():
    results = run_ranks(step_beside_a_stopped_rank, 2, allow_exit=(1,))
    text, took = results[0]
    assert text.endswith("for rank 1; rank 1 silent"), text
    assert took < 0.6 + 1


def make_with_another_program(rank: int, ranks: int) -> str:
    """Rank 1 is given another m than rank 0."""
    runner = PipelineRunner(
        one_f_one_b(ranks, 4 + rank), [Stage(layers(ranks)[rank], rank)], dist.group.WORLD, square_loss, timeout_s=5
    )
    with pytest.raises(ScheduleError) as caught:
        runner.step(*batch(16))
    return str(caught.value)


def test_ranks_with_different_programs_are_told_so():
    for rank, text in enumerate(run_ranks(make_with_another_program, 2)):
        assert f"rank {rank} was given another program to step than rank {1 - rank}" in text


def step_with_a_bad_argument(rank: int, ranks: int) -> str:
    """Rank 0 forgets its inputs."""
    program = Program.parse(str(one_f_one_b(ranks, 4)))
    runner = PipelineRunner(
        program, [Stage(layers(ranks)[rank], rank)], dist.group.WORLD, square_loss, timeout_s=5, store=store()
    )
    with pytest.raises(ScheduleError) as caught:
        runner.step(None, batch(16)[1])
    return str(caught.value)


def test_inputs_missing_on_one_rank_are_reported_on_both():
    mine, other = run_ranks(step_with_a_bad_argument, 2)
    assert "inputs is None on the rank of stage 0" in mine
    assert other.startswith("rank 0 failed at the start of the step: inputs is None")
