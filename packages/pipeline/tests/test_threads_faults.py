"""Every fault of a step ends it on all ranks, in time, with one line each; ranks are threads."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from pipeline_helpers import batch, layers, square_loss
from thread_helpers import on_threads
from torch import nn
from transport_helpers import Altered

from sixfold.pipeline import PipelineRunner, PipelineTimeout, ScheduleError, Stage, one_f_one_b, zb_h1
from sixfold.pipeline.passes import optimizer_step
from sixfold.pipeline.transport import threads

TIMEOUT_S = 0.4
RANKS, M = 3, 6
LINE = re.compile(
    r"rank \d waits at \[\d+/\d+\] \d+(SEND|RECV)_[FB]\d+ for rank \d(; rank \d (at \[\d+/\d+\] \S+|silent))*"
)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """What torch loads with the first optimizer takes seconds on a busy machine."""
    parameter = torch.zeros(1, requires_grad=True)
    parameter.sum().backward()
    torch.optim.SGD([parameter], lr=0.1).step()


class Acts(nn.Module):
    """Does something in its third forward."""

    def __init__(self, act) -> None:
        super().__init__()
        self.layer, self._calls, self._act = nn.Linear(8, 8), 0, act

    def forward(self, x):
        self._calls += 1
        return self._act(self.layer(x)) if self._calls == 3 else self.layer(x)


def step(transport, program, modules):
    """One step of one rank: what it raised, after how long, and what the runner says then."""
    module = modules[transport.rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stage = Stage(module, transport.rank, optimizer=optimizer)
    runner = PipelineRunner(program, [stage], transport, square_loss, timeout_s=TIMEOUT_S)
    begin = time.monotonic()
    try:
        runner.step(*batch(2 * M))
    except BaseException as error:
        took = time.monotonic() - begin
        with pytest.raises(ScheduleError):
            runner.check()
        with pytest.raises(ScheduleError, match="make a new one"):
            runner.step(*batch(2 * M))
        return error, took
    return None, 0.0


def lose(text):
    """Loses the message of this SEND."""
    return lambda action: str(action) != text


@pytest.mark.parametrize("lost", ["0SEND_F4", "1SEND_F0", "1SEND_B5", "2SEND_B2"])
@pytest.mark.parametrize("make", [one_f_one_b, zb_h1])
def test_a_lost_message_is_a_timeout_on_every_rank_and_no_optimizer_runs(make, lost):
    modules = layers(RANKS)
    before = [[p.clone() for p in module.parameters()] for module in modules]
    transports = [Altered(transport, lose(lost)) for transport in threads(RANKS)]
    program = optimizer_step(make(RANKS, M))
    results = on_threads(RANKS, step, program, modules, transports=transports)
    done = [rank for rank, (error, _) in enumerate(results) if error is None]
    assert done in ([], [2], [1, 2]) if lost == "1SEND_B5" else not done  # nothing is lost to the ranks behind it
    for rank, (error, took) in enumerate(results):
        if error is not None:
            assert type(error) is PipelineTimeout, error
            assert LINE.fullmatch(str(error)), error
            assert str(error).startswith(f"rank {rank} waits at [")
            assert took < TIMEOUT_S + 1
            for parameter, old in zip(modules[rank].parameters(), before[rank], strict=True):
                assert torch.equal(parameter, old)
    source, peer = int(lost[0]), int(lost[0]) + (1 if "F" in lost else -1)
    receive = f"{peer}RECV_{lost[6:]}"
    assert re.search(rf"rank {peer} (waits )?at \[\d+/\d+\] {receive}", str(results[peer][0]))
    assert f"for rank {source}" in str(results[peer][0])


def test_a_rank_that_stops_is_silent_in_the_line_of_every_other():
    go_on = threading.Event()
    modules: list[nn.Module] = [*layers(1), Acts(lambda x: go_on.wait(20) and x), *layers(1)]
    results = []

    def all_but_the_stopped():
        results.extend(on_threads(RANKS, step, one_f_one_b(RANKS, M), modules))

    watcher = threading.Thread(target=all_but_the_stopped)
    watcher.start()
    time.sleep(TIMEOUT_S + 1.2)
    go_on.set()
    watcher.join(20)
    for rank in (0, 2):
        error, took = results[rank]
        assert type(error) is PipelineTimeout
        assert took < TIMEOUT_S + 1
        other = 2 - rank
        assert re.fullmatch(
            rf"rank {rank} waits at \[\d+/\d+\] {rank}(RECV_F|RECV_B|SEND_F)\d for rank 1; "
            + (
                rf"rank 1 silent; rank {other} at \[\d+/\d+\] \S+"
                if rank == 0
                else r"rank 0 at \[\d+/\d+\] \S+; rank 1 silent"
            ),
            str(error),
        ), error


def interrupt(x):
    """Ctrl-C."""
    raise KeyboardInterrupt


def test_an_interrupt_on_one_rank_ends_the_step_on_all():
    modules: list[nn.Module] = [*layers(1), Acts(interrupt), *layers(1)]
    results = on_threads(RANKS, step, one_f_one_b(RANKS, M), modules)
    assert type(results[1][0]) is KeyboardInterrupt
    for rank in (0, 2):
        error, took = results[rank]
        assert type(error) is ScheduleError
        assert re.fullmatch(r"rank 1 failed at \[\d+/\d+\] 1F2: KeyboardInterrupt: ?", str(error)), error
        assert took < TIMEOUT_S + 1


def test_a_shape_that_the_next_stage_cannot_take_is_its_error_on_all():
    modules: list[nn.Module] = [Acts(lambda x: x[:, :5]), *layers(2)]
    results = on_threads(RANKS, step, one_f_one_b(RANKS, M), modules)
    for error, took in results:
        assert type(error) is ScheduleError
        assert re.match(r"rank 1 failed at \[\d+/\d+\] 1F2: RuntimeError: mat1 and mat2 shapes", str(error)), error
        assert took < TIMEOUT_S + 1


def test_a_rank_that_has_left_is_seen_at_once():
    modules = layers(RANKS)

    def leave(transport, program, modules):
        if transport.rank == 1:
            transport.join(torch.device("cpu"), TIMEOUT_S).close()
            return None, 0.0
        return step(transport, program, modules)

    begin = time.monotonic()
    results = on_threads(RANKS, leave, one_f_one_b(RANKS, M), modules)
    assert time.monotonic() - begin < TIMEOUT_S + 1
    for rank in (0, 2):
        assert type(results[rank]) is PipelineTimeout
        assert "for rank 1; " in str(results[rank])
        assert "rank 1 silent" in str(results[rank])
