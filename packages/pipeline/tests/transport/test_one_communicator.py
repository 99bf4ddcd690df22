"""All edges on one communicator: what starts together, that nothing hangs where all is in order, and the bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipeline_helpers import batch, equal_bits, gradients, layers, plain_loop, square_loss
from thread_helpers import on_threads, values_or_raise
from torch import nn
from wire_helpers import DEADLINE_S, Control, InOrder, StreamMark, Wires

from sixfold.pipeline import (
    Action,
    PipelineRunner,
    Program,
    ScheduleError,
    Stage,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    zb_h1,
    zb_v,
)
from sixfold.pipeline.executor.arguments import check_program
from sixfold.pipeline.failures.deadlines import HostWait, PeerLost, StreamWait
from sixfold.pipeline.program.action import Kind
from sixfold.pipeline.transport.messages import GroupLane
from sixfold.pipeline.transport.one_communicator import OneCommunicator
from sixfold.pipeline.transport.process_groups import Incoming, Outgoing, _Lane

PROGRAMS = [gpipe(2, 3), one_f_one_b(3, 5), interleaved(2, 4), zb_h1(3, 5), zb_v(2, 4)]


class One:
    """One thread's place, where all edges are one communicator that runs in order; also its own Links."""

    store, key, one = None, "one", True

    def __init__(self, wires: Wires, rank: int) -> None:
        self.rank, self.ranks = rank, wires.ranks
        self.control = Control(wires, rank)
        self.group = InOrder(wires, rank)
        self.batched = OneCommunicator(self.group)
        self.wait = StreamWait(DEADLINE_S, self.close, lambda later: StreamMark(later.work.over))

    def join(self, device: torch.device, timeout_s: float) -> One:
        peers = range(self.ranks)
        self.outgoing = {peer: Outgoing(self.batched, peer, self.wait, peer) for peer in peers}
        self.incoming = {peer: Incoming(self.batched, peer, self.wait, device, peer) for peer in peers}
        return self

    def lane(self, placement: Any, microbatches: int, *, backward: bool, number: int, dynamic_shapes: Any) -> Any:
        lane = GroupLane(
            tuple(placement),
            microbatches,
            self.control,
            self.outgoing,
            self.incoming,
            tag=2,
            number=number,
            dynamic_shapes=dynamic_shapes,
            flush=self.batched.flush,
        )
        joined = _Lane(lane, {}, {}, tuple(placement), microbatches)
        joined.together = self.batched.begin, self.batched.end
        return joined

    def check(self) -> None:
        self.wait.settle()

    def close(self) -> None: ...


def train(transport: One, program: Program) -> tuple[list[list[str]], dict[int, list]]:
    modules = layers(program.stages)
    stages = [Stage(modules[s], s) for s in program.stages_of(transport.rank)]
    runner = PipelineRunner(program, stages, transport, square_loss, timeout_s=20)
    for seed in range(3):
        del transport.group.batches[:]
        runner.step(*batch(2 * program.microbatches, seed))
    return transport.group.batches, {s: gradients(modules[s]) for s in program.stages_of(transport.rank)}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.slow
def test_the_bits_of_the_plain_loop_where_each_rank_runs_one_message_after_another(program):
    ranks = len(program.ranks)
    shared = Wires(ranks)
    found = values_or_raise(on_threads(ranks, train, program, transports=[One(shared, r) for r in range(ranks)]))
    oracle, m = layers(program.stages), program.microbatches
    for seed in range(3):
        x, y = batch(2 * m, seed)
        plain_loop(oracle, list(x.tensor_split(m)), list(y.tensor_split(m)))
    for batches, made in found:
        assert all(equal_bits(made[stage], gradients(oracle[stage])) for stage in made)
        assert batches and all(batches)  # every message was in a batch, and no batch was empty


def test_a_send_and_the_receive_beside_it_start_together():
    shared = Wires(2)
    found = values_or_raise(on_threads(2, train, one_f_one_b(2, 4), transports=[One(shared, r) for r in range(2)]))
    first = [" ".join(batch) for batch in found[0][0]]
    assert first.count("recv send") + first.count("send recv") >= 2  # a forward out and gradients in: the steady state


class Quiet:
    """A group that takes notes and cannot launch several messages at once."""

    supports_coalescing = False

    def __init__(self) -> None:
        self.notes: list[tuple[str, int, int]] = []

    def name(self) -> str:
        return "gloo"

    def send(self, tensors: list, peer: int, tag: int) -> str:
        self.notes.append(("send", peer, tag))
        return "work"

    recv = send


def test_outside_of_a_batch_a_message_starts_at_once_and_a_wait_starts_its_batch():
    group = Quiet()
    one = OneCommunicator(group)
    assert one.send([], 1, 7).work == "work" and group.notes == [("send", 1, 7)]
    one.begin()
    later = one.send([], 2, 8)
    assert not later.is_completed() and len(group.notes) == 1
    with pytest.raises(AttributeError):  # "work".wait
        later.wait()
    assert len(group.notes) == 2
    one.end()
    assert len(group.notes) == 2


def test_a_message_to_a_rank_that_has_left_is_a_lost_peer_for_who_waits_for_it():
    """Where its batch starts nobody knows which message it is, and a report would name this rank for the culprit."""

    class Left(Quiet):
        def recv(self, *_: Any) -> Any:
            raise RuntimeError("Connection closed by peer")

    together, action = OneCommunicator(Left()), Action(1, Kind.RECV_F, 2)
    edge = Incoming(together, 3, HostWait(1.0), torch.device("cpu"), 3)
    together.begin()
    _, works = edge.post([(torch.Size([2]), torch.float32, False)], 5, action)
    together.end()
    with pytest.raises(PeerLost) as lost:
        edge.wait(works[0], action)
    assert (lost.value.action, lost.value.peer) == (action, 3)


def test_what_is_no_rendezvous_or_has_no_end_is_refused_by_name():
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    crossed = Program(tuple(tuple(map(Action.parse, row.split())) for row in rows), 2, (0, 1))
    stages = {0: Stage(nn.Identity(), 0)}
    check_program(crossed, stages, 0, 2)
    with pytest.raises(ScheduleError) as caught:
        check_program(crossed, stages, 0, 2, one=True)
    assert caught.value.cycle
    stages = {0: Stage(nn.Identity(), 0, optimizer=torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))}
    with pytest.raises(ScheduleError, match="edges='one' needs a proof of the whole order"):
        check_program(pipedream(2, 4), stages, 0, 2, one=True)
