"""Ranks as threads, and all ranks in one thread: what a Transport promises."""

from __future__ import annotations

import gc
import re
import time
import weakref

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from thread_helpers import on_threads, values_or_raise

from sixfold.pipeline import (
    Action,
    PipelineRunner,
    PipelineTimeout,
    ScheduleError,
    Stage,
    interleaved,
    one_f_one_b,
    transport,
)
from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.transport import Transport, one_thread, threads

CPU = torch.device("cpu")
SEND, RECEIVE = Action.parse("0SEND_F0"), Action.parse("1RECV_F0")


def lanes(transports, timeout_s=5.0, microbatches=1):
    """One lane of two stages for each rank."""
    return [
        transport.join(CPU, timeout_s).lane((0, 1), microbatches, backward=True, number=7, dynamic_shapes=False)
        for transport in transports
    ]


@pytest.mark.parametrize("make", [threads, one_thread])
def test_a_message_arrives_as_it_is_and_without_a_copy(make):
    source, destination = lanes(make(2))
    inputs = torch.randn(2, requires_grad=True)
    output = inputs * 2
    receipt = destination.receiver(RECEIVE)
    receipt.post()
    source.sender(SEND)((output, torch.arange(3), None, True, 2, 0.5))
    leaf, index, *plain = receipt.wait()
    assert leaf.data_ptr() == output.data_ptr()
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert not index.requires_grad
    assert plain == [None, True, 2, 0.5]
    assert type(plain[1]) is bool
    gradient = torch.ones(2)
    source.receiver(Action.parse("0RECV_B0")).post()
    destination.sender(Action.parse("1SEND_B0"))((gradient,))
    (got,) = source.receiver(Action.parse("0RECV_B0")).wait()
    assert got is gradient


@pytest.mark.parametrize("make", [threads, one_thread])
def test_a_message_that_was_taken_is_not_kept(make):
    source, destination = lanes(make(2))
    value = torch.zeros(3)
    alive = weakref.ref(value)
    receipt = destination.receiver(RECEIVE)
    receipt.post()
    source.sender(SEND)((value,))
    got = receipt.wait()
    del value, got
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("make", [threads, one_thread])
def test_messages_may_be_taken_in_another_order_than_they_came(make):
    source, destination = lanes(make(2), microbatches=3)
    receipts = [destination.receiver(Action.parse(f"1RECV_F{k}")) for k in range(3)]
    for k, receipt in enumerate(receipts):
        receipt.post()
        source.sender(Action.parse(f"0SEND_F{k}"))((k,))
    assert [receipts[k].wait() for k in (2, 0, 1)] == [(2,), (0,), (1,)]


def test_a_send_waits_for_a_peer_that_is_far_behind_and_no_longer_than_the_deadline():
    source, _ = lanes(threads(2), timeout_s=0.1, microbatches=8)  # a batch is not waited for
    send, begin = source.sender(SEND), time.monotonic()
    with pytest.raises(PeerLost) as caught:
        for k in range(20):
            send((k,))
    assert (k, caught.value.peer, caught.value.action) == (8, 1, SEND)
    assert 0.1 <= time.monotonic() - begin < 10


def test_two_runners_on_the_same_threads_do_not_take_each_others_messages():
    transports = threads(2)
    (source, destination), (_, other) = lanes(transports), lanes(transports, timeout_s=0.05)
    source.sender(SEND)((1,))
    with pytest.raises(PeerLost):
        other.receiver(RECEIVE).wait()
    assert destination.receiver(RECEIVE).wait() == (1,)


def train(transport: Transport, program, modules, steps: int) -> list[float]:
    """Some steps on one rank."""
    stages = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
    runner = PipelineRunner(program, stages, transport, square_loss, timeout_s=20)
    losses = []
    for seed in range(steps):
        losses += runner.step(*batch(12, seed)).losses
        runner.evaluate(*batch(12, seed))
    return losses


@pytest.mark.parametrize("program", [one_f_one_b(3, 6), interleaved(2, 4, 2)], ids=lambda program: program.name)
def test_ranks_as_threads_have_the_bits_of_the_plain_loop(program):
    modules, oracle = layers(program.stages), layers(program.stages)
    results = values_or_raise(on_threads(len(program.ranks), train, program, modules, 2))
    losses = [
        loss
        for seed in range(2)
        for loss in plain_loop(oracle, *(list(t.tensor_split(program.microbatches)) for t in batch(12, seed)))
    ]
    assert equal_bits([torch.stack(results[-1])], [torch.stack(losses)])
    for mine, theirs in zip(modules, oracle, strict=True):
        assert equal_bits(gradients(mine), gradients(theirs))


class Fails(torch.nn.Module):
    """Raises."""

    def forward(self, x):
        raise OSError("the disk is full")


def test_a_failing_thread_ends_the_step_on_all_of_them():
    modules = layers(3)
    modules[1] = Fails()
    results = on_threads(3, train, one_f_one_b(3, 6), modules, 1)
    for result in results:
        assert type(result) is ScheduleError
        assert re.match(r"rank 1 failed at \[\d+/\d+\] 1F0: OSError: the disk is full", str(result)), result


def test_a_thread_that_never_comes_is_a_timeout_that_names_everyone():
    program, modules = one_f_one_b(2, 2), layers(2)

    def only_rank_0(transport):
        if transport.rank == 1:
            return None
        runner = PipelineRunner(program, [Stage(modules[0], 0)], transport, square_loss, timeout_s=0.2)
        return runner.step(*batch(4))

    error, _ = on_threads(2, only_rank_0)
    assert type(error) is PipelineTimeout
    assert "rank 0 waits at the start of the step for rank 1; rank 1 silent" in str(error)


def test_the_functions_are_there_at_every_call():
    """A module of a function's name would take its place once it is loaded."""
    for _ in range(2):
        for make in ("threads", "one_thread"):
            assert len(getattr(transport, make)(2)) == 2
