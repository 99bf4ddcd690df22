"""``check``: where waits return before the data is there, nothing that did not come is applied."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from late_helpers import Late
from pipeline_helpers import WIDTH, batch, equal_bits, gradients, layers, plain_loop, square_loss
from thread_helpers import on_threads, values_or_raise

from sixfold.pipeline import PipelineRunner, PipelineTimeout, ScheduleError, Stage, one_f_one_b, zb_h1
from sixfold.pipeline.transport import threads

TIMEOUT_S = 0.4
GARBAGE = (torch.full((2, WIDTH), 3.0),)


def train(transport, program, failed: threading.Event) -> tuple[object, ...]:
    """One step, the check, and the optimizer behind it; rank 1 checks once rank 0 has failed."""
    module = layers(2)[transport.rank]
    before = [parameter.clone() for parameter in module.parameters()]
    runner = PipelineRunner(program, [Stage(module, transport.rank)], transport, square_loss, timeout_s=TIMEOUT_S)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    runner.step(*batch(8))
    begin = time.monotonic()
    try:
        if transport.rank == 1:
            assert failed.wait(20)
        runner.check()
        optimizer.step()
    except ScheduleError as error:
        failed.set()
        applied = not equal_bits(before, list(module.parameters()))
        with pytest.raises(ScheduleError, match="make a new one"):
            runner.check()
        return type(error), str(error), error.position, applied, time.monotonic() - begin
    return (None,)


@pytest.mark.parametrize("make", [one_f_one_b, zb_h1])
def test_a_message_that_never_came_is_raised_before_the_optimizer_on_all_ranks(make):
    program, lost = make(2, 4), {"1SEND_B1", "0RECV_B1"}
    transports = [Late(transport, lost, GARBAGE) for transport in threads(2)]
    first, other = values_or_raise(on_threads(2, train, program, threading.Event(), transports=transports))
    kind, line, position, applied, took = first
    assert kind is PipelineTimeout and not applied and took < TIMEOUT_S + 1
    assert re.match(rf"rank 0 waits at \[{position}/\d+\] 0RECV_B1 for rank 1", line), line
    assert other[0] is PipelineTimeout and not other[3]
    assert re.fullmatch(rf"rank 1 waits at the end of the step; rank 0 at \[{position}/\d+\] 0RECV_B1", other[1])
    assert transports[0].noted  # before the links were ended, behind which every wait returns


def pass_on(transport) -> list[object]:
    modules = layers(2)
    stages = [Stage(modules[transport.rank], transport.rank)]
    runner = PipelineRunner(one_f_one_b(2, 4), stages, transport, square_loss, timeout_s=20)
    runner.check()
    runner.step(*batch(8))
    runner.check()
    return gradients(modules[transport.rank])


def test_where_all_came_it_passes_and_changes_nothing():
    transports = [Late(transport, set(), ()) for transport in threads(2)]
    found = values_or_raise(on_threads(2, pass_on, transports=transports))
    oracle, (x, y) = layers(2), batch(8)
    plain_loop(oracle, list(x.tensor_split(4)), list(y.tensor_split(4)))
    assert all(equal_bits(mine, gradients(theirs)) for mine, theirs in zip(found, oracle, strict=True))
