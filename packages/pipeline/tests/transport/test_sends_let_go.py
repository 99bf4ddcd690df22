"""When edges of gloo drop what they sent: a work tells nothing until it is waited for, an answer of the peer does.

One rank's lane over a stand-in of gloo, whose works note who waits for them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from schedule_helpers import FLUSH
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sixfold.pipeline import Action, Kind, one_f_one_b
from sixfold.pipeline.failures.deadlines import HostWait, PeerLost
from sixfold.pipeline.passes import lower
from sixfold.pipeline.transport.acknowledgements import acknowledgements
from sixfold.pipeline.transport.messages import GroupLane
from sixfold.pipeline.transport.process_groups import Incoming, Outgoing
from sixfold.pipeline.transport.specs import pack_specs, specs_of

TIMEOUT_S, M = 7.0, 3


class Work:
    """gloo's: holds its tensor, and says nothing before it is waited for."""

    def __init__(self, tensor: Tensor, waits: list[tuple[int, timedelta]], serial: int) -> None:
        self.tensor, self.waits, self.serial, self.lost = tensor, waits, serial, False

    def is_completed(self) -> bool:
        return False

    def wait(self, limit: timedelta) -> None:
        self.waits.append((self.serial, limit))
        if self.lost:
            raise RuntimeError("Timed out waiting for send")


class Group:
    """One direction to or from the peer."""

    def __init__(self) -> None:
        self.works: list[Work | None] = []
        self.waits: list[tuple[int, timedelta]] = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        work = Work(tensors[0], self.waits, len(self.works))
        self.works.append(None)  # the edge alone holds it
        self.last = work
        return work

    recv = send

    def waited(self) -> list[int]:
        assert all(limit == timedelta(seconds=TIMEOUT_S) for _, limit in self.waits)
        return [serial for serial, _ in self.waits]


class Notes:
    """The control channel: the peer says that all of its first batch has headers of ``shape``."""

    def __init__(self, shape: Tensor) -> None:
        self.header = pack_specs(specs_of((shape,)), Action.parse("0SEND_F0"))
        self.flags = [1]

    def send_number(self, *_: Any) -> None: ...

    def send(self, *_: Any) -> None: ...

    def receive(self, *_: Any) -> bytes:
        return self.header

    def receive_number(self, *_: Any) -> int:
        return self.flags.pop() if self.flags else 0


class End:
    """One of two ranks."""

    def __init__(self, rank: int) -> None:
        self.out, self.back = Group(), Group()
        wait = HostWait(TIMEOUT_S)
        self.lane = GroupLane(
            (0, 1),
            M,
            Notes(torch.ones(2, requires_grad=True)),  # type: ignore[arg-type]
            {1 - rank: Outgoing(self.out, 0, wait, 1 - rank)},
            {1 - rank: Incoming(self.back, 0, wait, torch.device("cpu"), 1 - rank)},
            tag=2,
            number=0,
            dynamic_shapes=False,
        )
        self.lane.begin(None)

    def send(self, action: str, value: Tensor) -> StorageWeakRef:
        self.lane.sender(Action.parse(action))((value,))
        return StorageWeakRef(value.untyped_storage())

    def receive(self, action: str) -> None:
        receipt = self.lane.receiver(Action.parse(action))
        receipt.post()
        receipt.wait()


def output(*, grad: bool = True) -> Tensor:
    return torch.ones(2, requires_grad=True) * 2 if grad else torch.ones(2)


def alive(sent: list[StorageWeakRef]) -> list[bool]:
    return [not each.expired() for each in sent]


def test_gradients_let_go_of_the_output_that_they_are_of_and_of_no_other():
    end = End(0)
    sent = [end.send(f"0SEND_F{k}", output()) for k in range(M)]
    end.out.last = None  # type: ignore[assignment]
    assert alive(sent) == [True] * M
    end.receive("0RECV_B1")
    assert alive(sent) == [True, False, True]
    assert end.out.waited() == [1]  # not those before it, which may be under way
    end.receive("0RECV_B0")
    assert end.out.waited() == [1, 0]


def test_the_next_input_of_a_slot_lets_go_of_the_gradients_of_the_one_before():
    end = End(1)
    sent = []
    for k in range(M):
        end.receive(f"1RECV_F{k}")
        sent.append(end.send(f"1SEND_B{k}", torch.ones(2)))
    end.out.last = None  # type: ignore[assignment]
    assert alive(sent) == [True] * M
    for k in range(M):
        end.receive(f"1RECV_F{k}")
        assert alive(sent) == [False] * (k + 1) + [True] * (M - k - 1)
    assert end.out.waited() == [0, 1, 2]


def test_where_no_gradients_come_back_nothing_is_known_and_the_window_bounds_what_is_kept():
    end = End(0)
    sent = [end.send(f"0SEND_F{k % M}", output(grad=False)) for k in range(M)]
    for k in range(M):
        end.receive(f"0RECV_B{k}")
    assert end.out.waited() == []
    assert alive(sent) == [True] * M
    sent += [end.send(f"0SEND_F{k % M}", output(grad=False)) for k in range(9)]
    assert end.out.waited() == [0, 1, 2, 3]  # 12 sent, 8 kept


def test_each_send_is_waited_for_once():
    end = End(0)
    for _ in range(6):
        for k in range(M):
            end.send(f"0SEND_F{k}", output())
        for k in range(M):
            end.receive(f"0RECV_B{k}")
    assert end.out.waited() == list(range(6 * M))


def test_a_send_that_fails_behind_its_answer_is_a_lost_peer_and_has_the_deadline():
    end = End(0)
    end.send("0SEND_F0", output())
    end.out.last.lost = True
    with pytest.raises(PeerLost) as caught:
        end.receive("0RECV_B0")
    assert str(caught.value.action) == "0SEND_F0"
    assert caught.value.peer == 1
    assert end.out.waited() == [0]


def test_what_a_peer_sends_behind_its_backward_lets_go_of_the_gradients_that_this_took():
    end = End(1)
    for k in range(M):
        end.receive(f"1RECV_F{k}")
    end.lane.acknowledges(Action.parse("1RECV_F2"), Action.parse("1SEND_B0"))
    sent = [end.send(f"1SEND_B{k}", torch.ones(2)) for k in range(M)]
    end.out.last = None  # type: ignore[assignment]
    end.receive("1RECV_F2")
    assert alive(sent) == [False, True, False]  # the slot's own, as ever, and the one that was proved
    end.receive("1RECV_F0")
    assert sorted(end.out.waited()) == [0, 2], "each once"


@pytest.mark.parametrize("name", FLUSH)
def test_proofs_stand_behind_the_backward_that_took_the_gradients(name):
    program = lower(FLUSH[name](3, 6))
    rank_of = program.placement.__getitem__
    shown = 0
    for rank in range(3):
        for received, sent in acknowledgements(program, rank):
            peer = program.ranks[rank_of(sent.stage - 1)]
            assert received in program.ranks[rank] and sent in program.ranks[rank]
            forward = received.kind is Kind.RECV_F
            step, kind = (-1, Kind.SEND_F) if forward else (1, Kind.SEND_B)
            answer = Action(received.stage + step, kind, received.microbatch)
            taker = next(
                place
                for place, entry in enumerate(peer)
                for part in entry.each()
                if part.kind in (Kind.B, Kind.I) and (part.stage, part.microbatch) == (sent.stage - 1, sent.microbatch)
            )
            assert peer.index(answer) > taker
            shown += 1
    assert shown or name.partition(" ")[0] in ("naive", "gpipe", "looped_bfs"), "from there nothing comes behind it"


def test_of_1f1b_all_gradients_but_the_last_of_a_batch_are_proved_within_it():
    program = lower(one_f_one_b(2, 6))
    assert sorted(str(sent) for _, sent in acknowledgements(program, 1)) == [f"1SEND_B{k}" for k in range(4)]


@pytest.mark.parametrize("fewer", [0, 1])
def test_a_message_of_fewer_tensors_waits_for_none_before_it(fewer):
    """Of frozen stages no gradients are sent; a wait for all that was sent would stop the list."""
    group = Group()
    edge = Outgoing(group, 0, HostWait(TIMEOUT_S), 1)
    for k in range(edge.window):
        edge.send([torch.ones(2)] * 3, 2 * k, Action.parse(f"0SEND_F{k}"))
    edge.send([torch.ones(2)] * fewer, 1, Action.parse("0SEND_B0"))
    assert len(group.waited()) <= fewer, (
        "a window of messages of three tensors is in flight, and waited for in no order"
    )
    edge.send([torch.ones(2)] * 3, 2 * edge.window, Action.parse(f"0SEND_F{edge.window}"))
    assert len(group.waited()) == 3 + fewer, "what is in flight is bounded"
