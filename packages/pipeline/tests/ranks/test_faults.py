"""What goes wrong on one rank is raised on every rank, in time and by name."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from functools import partial

import pytest
import torch.distributed as dist
from fault_helpers import Acts, Report, end_the_stopped, report, runner_of, step_of, stop, timeout_of
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from torch import nn
from torch.distributed import PrefixStore
from transport_helpers import Altered

from ranktest import run_ranks, store
from sixfold.pipeline import PipelineRunner, Program, ScheduleError, Stage, gpipe, one_f_one_b
from sixfold.pipeline.transport import over
from sixfold.pipeline.transport.process_groups import Outgoing

TIMEOUT_S = 3.0


def fail() -> None:
    """What a stage may raise."""
    raise RuntimeError("the disk is full")


def die() -> None:
    """What the system may do."""
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    """Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


def heed_interrupts() -> None:
    """Python's own answer to Ctrl-C, also where the shell that runs the tests ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


ACTS = {"raise": fail, "kill": die, "interrupt": interrupt}


def step_with_a_failing_stage(rank: int, ranks: int, act: str, culprit: int, with_store: bool) -> Report:
    """Run one step in which the stage of ``culprit`` fails; what this rank got, and after how long."""
    heed_interrupts()
    program = one_f_one_b(ranks, 6)
    module = Acts(3, ACTS[act]) if rank == culprit else layers(ranks)[rank]
    runner = runner_of(program, rank, module, TIMEOUT_S, store=store() if with_store else None)
    found = report(lambda: runner.step(*batch(12)), BaseException)
    with pytest.raises(ScheduleError, match="make a new one"):
        runner.step(*batch(12))
    with pytest.raises(ScheduleError):
        runner.check()
    return found


@pytest.mark.slow
def test_an_exception_in_a_stage_reaches_every_rank_with_its_rank_and_action():
    results = run_ranks(step_with_a_failing_stage, 3, "raise", 1, True)
    for kind, text, took in results:
        assert kind == "ScheduleError"
        assert re.match(r"rank 1 failed at \[\d+/\d+\] 1F2: RuntimeError: the disk is full", text), text
        assert took < TIMEOUT_S


def hears_of_a_failure(rank: int, ranks: int) -> bool:
    """Whether this rank's error says that it is of another rank; the stage of rank 1 fails."""
    runner = runner_of(one_f_one_b(ranks, 4), rank, Acts(1, fail) if rank == 1 else layers(3)[0], 20.0)
    with pytest.raises(ScheduleError, match="rank 1 failed at") as raised:
        runner.step(*batch(8))
    return raised.value.of_peer


def test_an_error_says_whether_it_is_of_another_rank():
    assert run_ranks(hears_of_a_failure, 3) == [True, False, True]


def step_in_a_part_of_the_job(rank: int, ranks: int, faults: tuple[str, ...]) -> list[Report]:
    """Steps of a pipeline of the last two of three ranks, the last of which fails in one of the ways in each."""
    found = []
    for fault in faults:
        group = dist.new_group([1, 2])
        if rank == 0:
            continue
        module = Acts(3, fail if fault == "raise" else lambda: time.sleep(2.5)) if rank == 2 else layers(2)[0]
        stage, own = Stage(module, rank - 1), PrefixStore(fault, store())
        timeout_s = 1.0 if fault == "hang" else TIMEOUT_S
        dist.barrier(group)  # both are up: on a busy machine one may be late by more than the deadline
        runner = PipelineRunner(one_f_one_b(2, 6), [stage], group, square_loss, timeout_s=timeout_s, store=own)
        found.append(report(partial(runner.step, *batch(12))))
    return found


@pytest.mark.slow
def test_reports_call_ranks_by_their_numbers_in_the_job_and_not_in_their_pipeline():
    _, first, second = run_ranks(step_in_a_part_of_the_job, 3, ("raise", "hang"))
    for _, text, _ in (first[0], second[0]):
        assert re.match(r"rank 2 failed at \[\d+/\d+\] 1F2: RuntimeError: the disk is full", text), text
    assert re.match(r"rank 1 waits at \[\d+/\d+\] 0(RECV_B|SEND_F)\d for rank 2; rank 2 (silent|at)", first[1][1]), (
        first[1]
    )


def test_without_a_store_of_the_callers_the_groups_own_tells_what_failed():
    for _, text, took in run_ranks(step_with_a_failing_stage, 2, "raise", 1, False):
        assert re.match(r"rank 1 failed at \[\d+/\d+\] 1F2: RuntimeError: the disk is full", text), text
        assert took < TIMEOUT_S


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.slow
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


def test_an_interrupt_reaches_every_rank():
    results = run_ranks(step_with_a_failing_stage, 3, "interrupt", 1, True)
    assert results[1][0] == "KeyboardInterrupt"
    for kind, text, took in (results[0], results[2]):
        assert kind == "ScheduleError"
        assert re.fullmatch(r"rank 1 failed at \[\d+/\d+\] \S+: KeyboardInterrupt: ?", text), text
        assert took < TIMEOUT_S


def interrupted_while_it_waits(rank: int, ranks: int) -> Report:
    """Rank 0 gets Ctrl-C while it waits for rank 1, whose stage takes 2 s."""
    heed_interrupts()
    if rank == 0:
        threading.Timer(0.5, interrupt).start()
    module = Acts(1, lambda: time.sleep(2)) if rank else layers(1)[0]
    return step_of(one_f_one_b(ranks, 4), rank, module, 20)


def test_a_rank_is_interrupted_in_the_midst_of_a_wait():
    waiting, other = run_ranks(interrupted_while_it_waits, 2)
    assert waiting[0] == "KeyboardInterrupt"
    assert waiting[2] < 1.5
    assert other[0] == "ScheduleError"
    assert other[1].startswith("rank 0 failed at [")


def lose_a_message(rank: int, ranks: int, lost: str, edges: str | None) -> Report:
    """One step over an edge that loses a message."""
    if edges == "groups":  # its tensors; what was agreed about them has come
        send = Outgoing.send
        Outgoing.send = lambda edge, tensors, tag, action: (  # type: ignore[method-assign]
            None if str(action) == lost else send(edge, tensors, tag, action)
        )
    dist.barrier()  # all are up: on a busy machine one may be late by more than the deadline
    transport = Altered(over(dist.group.WORLD, edges), lambda action: bool(edges) or str(action) != lost)
    runner = PipelineRunner(
        one_f_one_b(ranks, 6), [Stage(layers(ranks)[rank], rank)], transport, square_loss, timeout_s=0.5, store=store()
    )
    return report(lambda: runner.step(*batch(12)))


@pytest.mark.parametrize("edges", ["groups", None])
@pytest.mark.slow
def test_a_lost_message_is_a_timeout_that_says_where_everyone_stands(edges):
    results = run_ranks(lose_a_message, 3, "1SEND_F1", edges)
    place = r"\[\d+/\d+\] \d(RECV|SEND)_[FB]\d"
    for rank, (kind, text, took) in enumerate(results):
        assert kind == "PipelineTimeout", results
        assert re.match(rf"rank {rank} waits at {place} for rank \d", text), text
        assert took < 0.5 + 1
    assert re.search(r"rank 2 (waits )?at \[\d+/\d+\] 2RECV_F1", results[2][1])
    if edges is None:  # who is not a neighbour of who fails is woken too
        assert all("silent" not in text for _, text, _ in results), results


def step_with_a_wrong_shape(rank: int, ranks: int, edges: str | None) -> Report:
    """The stage of rank 1 makes what that of rank 2 cannot take."""
    module = nn.Linear(8, 9) if rank == 1 else layers(ranks)[rank]
    return step_of(one_f_one_b(ranks, 6), rank, module, TIMEOUT_S, edges=edges)


@pytest.mark.parametrize("edges", ["groups", None])
@pytest.mark.slow
def test_a_shape_that_the_next_stage_cannot_take_is_that_stages_error_on_every_rank(edges):
    for kind, text, took in run_ranks(step_with_a_wrong_shape, 3, edges):
        assert kind == "ScheduleError"
        assert re.match(r"rank 2 failed at \[\d+/\d+\] 2F0: RuntimeError: mat1 and mat2 shapes", text), text
        assert "\n" not in text and took < TIMEOUT_S + 1


def stop_between_two(rank: int, ranks: int) -> Report:
    """Rank 1 stops; the others are no neighbours of each other."""
    module = Acts(3, stop) if rank == 1 else layers(ranks)[rank]
    found = step_of(one_f_one_b(ranks, 6), rank, module, 0.6)
    if rank == 0:
        end_the_stopped()
    return found


@pytest.mark.slow
def test_beside_a_stopped_rank_each_other_says_where_all_stand():
    results = run_ranks(stop_between_two, 3, allow_exit=(1,))
    for rank in (0, 2):
        kind, text, took = results[rank]
        assert kind == "PipelineTimeout"
        assert took < 0.6 + 1
        assert re.match(rf"rank {rank} waits at \[\d+/\d+\] {rank}\S+ for rank 1; ", text), text
        assert "rank 1 silent" in text
        assert re.search(rf"rank {2 - rank} at \[\d+/\d+\] {2 - rank}\S+", text), text


def leave_behind_a_step(rank: int, ranks: int, edges: str | None) -> str:
    """Rank 1 drops its runner right behind a step whose gradients rank 0 has not asked for yet."""
    modules, oracle = layers(ranks), layers(ranks)
    module = modules[rank]
    if rank == 0:
        module.register_full_backward_pre_hook(lambda *_: time.sleep(0.05))
    runner = runner_of(gpipe(ranks, 4), rank, module, 10, edges=edges, lookahead=0)
    inputs, targets = batch(8)
    found = report(partial(runner.step, inputs, targets))
    del runner
    gc.collect()
    plain_loop(oracle, list(inputs.tensor_split(4)), list(targets.tensor_split(4)))
    assert equal_bits(gradients(module), gradients(oracle[rank]))
    return found[0]


@pytest.mark.parametrize("edges", ["groups", None])
def test_what_was_sent_arrives_though_the_sender_has_dropped_its_runner(edges):
    assert run_ranks(leave_behind_a_step, 2, edges) == ["none", "none"]


def step_beside_a_stopped_rank(rank: int, ranks: int) -> Report:
    """Rank 1 stops itself after a step; the other reports how its next step ended."""
    dist.barrier()
    runner = runner_of(gpipe(ranks, 4), rank, layers(ranks)[rank], 0.6)
    runner.step(*batch(8))
    dist.barrier()  # a step does not wait for what it sent: now rank 0 has received it
    if rank == 1:
        stop()
    return timeout_of(lambda: runner.step(*batch(8)))


def test_a_stopped_peer_is_a_timeout_within_the_deadline():
    results = run_ranks(step_beside_a_stopped_rank, 2, allow_exit=(1,))
    _, text, took = results[0]
    assert text.endswith("for rank 1; rank 1 silent. A silent rank ended, hangs or runs other code: read its log first")
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
