"""Edges of shared memory, both ends in one process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sixfold.pipeline import Action, ScheduleError
from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.transport import shared_memory
from sixfold.pipeline.transport.alarm import LOOK_S
from sixfold.pipeline.transport.process_groups import _deliver
from sixfold.pipeline.transport.routes import Route
from sixfold.pipeline.transport.shared_memory import SharedIncoming, SharedOutgoing, accept, can_share, connect, listen

SEND, RECEIVE = Action.parse("0SEND_F0"), Action.parse("1RECV_F0")
FORWARD, BACKWARD = Route(0, True, 0), Route(0, False, 0)


def ends(timeout_s: float = 5.0) -> tuple[SharedOutgoing, SharedIncoming]:
    """An edge from rank 0 to rank 1."""
    listener, name = listen()
    sender, receiver = connect(name), accept(listener)
    assert sender is not None
    assert receiver is not None
    return SharedOutgoing(sender, 1, timeout_s), SharedIncoming(receiver, 0, timeout_s)


def exchange(source, destination, values, route=FORWARD, number=7):
    """One message, from end to end."""
    destination.post()
    source.send(number, route, False, values, SEND)
    return destination.wait(number, route, RECEIVE)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def test_every_dtype_and_layout_arrives():
    source, destination = ends()
    generator = torch.Generator().manual_seed(0)
    for dtype in [*DTYPES, torch.complex64]:
        whole = torch.randint(0, 2, (6, 5, 4), generator=generator).to(dtype)
        for value in (whole, whole.transpose(0, 2), whole[::2, 1], whole[0, 0, 0], whole[:0]):
            (got,) = exchange(source, destination, (value,))
            assert got.dtype == dtype
            assert torch.equal(got, value)
            assert got.is_contiguous()


def test_several_tensors_and_plain_values_arrive_with_their_wish_for_gradients():
    source, destination = ends()
    wanted = torch.randn(3, requires_grad=True)
    for _ in range(3):
        a, b, c, *plain = exchange(
            source, destination, (wanted * 2, torch.arange(5), torch.ones(2), None, True, 2, 0.5)
        )
        assert [a.requires_grad, b.requires_grad, c.requires_grad] == [True, False, False]
        assert a.is_leaf
        assert torch.equal(a, wanted * 2)
        assert b.tolist() == [0, 1, 2, 3, 4]
        assert plain == [None, True, 2, 0.5]
        a.sum().backward()
        assert torch.equal(a.grad, torch.ones(3))


def test_a_slot_is_used_again_when_its_tensors_have_died_and_never_before():
    source, destination = ends()
    kept = []
    for k in range(20):
        (got,) = exchange(source, destination, (torch.full((1000,), float(k)),))
        if k % 4 == 0:
            kept.append((k, got.view(10, 100)[3]))
        del got
    assert len(source._blocks) == 6  # five are kept, one goes round
    assert all(bool((part == k).all()) for k, part in kept)
    kept.clear()
    gc.collect()
    assert destination._held == [0]
    for _ in range(6):
        exchange(source, destination, (torch.zeros(1000),))
    assert len(source._blocks) == 6


def test_a_forked_process_frees_no_slot():
    """A worker that loads data drops its copy of a tensor; the slot is still that of the tensor here."""
    source, destination = ends()
    kept = [exchange(source, destination, (torch.zeros(1000),))[0]]
    if not (child := os.fork()):
        kept.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    exchange(source, destination, (torch.ones(1000),))
    assert not kept[0].any()
    assert len(source._blocks) == 2


@pytest.mark.parametrize("receives", [True, False])
def test_a_dead_peer_is_seen_though_a_fork_of_it_still_has_its_socket(receives):
    listener, name = listen()
    told, tell = os.pipe()
    if not (peer := os.fork()):
        link = connect(name)
        assert link is not None
        (SharedOutgoing if receives else SharedIncoming)(link, 1, 30.0)
        if not os.fork():  # as a worker that loads data
            os.close(tell)
            os.read(told, 1)  # until this test ends
        os._exit(0)
    here = accept(listener)
    assert here is not None
    begin = time.monotonic()
    with pytest.raises(PeerLost):
        if receives:
            SharedIncoming(here, 0, 30.0).wait(7, FORWARD, RECEIVE)
        source = SharedOutgoing(here, 0, 30.0)
        for k in range(20):
            source.send(7, FORWARD, False, (k,), SEND)
    assert time.monotonic() - begin < 10
    os.close(told)
    os.close(tell)
    os.waitpid(peer, 0)


@pytest.mark.parametrize("leaves", [False, True])
def test_the_memory_of_a_new_slot_may_come_late_or_never(monkeypatch, leaves):
    source, destination = ends()
    send = shared_memory.socket.send_fds

    def late(*args: Any) -> None:
        time.sleep(2 * LOOK_S)
        if leaves:
            source.close()
        else:
            send(*args)

    def sending() -> None:
        with contextlib.suppress(PeerLost):
            source.send(7, FORWARD, False, (torch.ones(8),), SEND)

    monkeypatch.setattr(shared_memory.socket, "send_fds", late)
    destination.post()
    thread = threading.Thread(target=sending, daemon=True)
    thread.start()
    if leaves:
        with pytest.raises(PeerLost):
            destination.wait(7, FORWARD, RECEIVE)
    else:
        assert torch.equal(destination.wait(7, FORWARD, RECEIVE)[0], torch.ones(8))
    thread.join()


def test_a_forked_process_delivers_nothing():
    class Edge:
        def deliver(self, deadline: float) -> None:
            delivered.append(deadline)

    delivered: list[float] = []
    for process in (os.getpid(), os.getpid() + 1):
        _deliver({1: Edge()}, Edge(), 5.0, process)
    assert len(delivered) == 2


def test_what_a_receiver_keeps_beyond_a_bound_is_copied(monkeypatch):
    monkeypatch.setattr("sixfold.pipeline.transport.shared_memory._HELD_BYTES", 3 * 4096)
    source, destination = ends()
    kept = [exchange(source, destination, (torch.full((1024,), float(k)),))[0] for k in range(10)]
    assert [float(tensor.mean()) for tensor in kept] == [float(k) for k in range(10)]
    assert len(source._blocks) == 4
    assert destination._held == [3 * 4096]


def test_slots_of_other_sizes_are_given_back(monkeypatch):
    monkeypatch.setattr("sixfold.pipeline.transport.shared_memory._FREE_BYTES", 100_000)
    source, destination = ends()
    for k in range(1, 40):
        (got,) = exchange(source, destination, (torch.full((k * 3000,), k),))
        assert int(got.sum()) == k * k * 3000
        del got
        assert sum(block.size for block in source._blocks.values()) < 100_000 + 2 * k * 24_000
        assert set(destination._blocks) <= set(source._blocks) | {0}


def test_messages_may_be_taken_in_another_order_than_they_came():
    source, destination = ends()
    for k in range(3):
        source.send(7, Route(0, True, k), False, (k, torch.tensor(k)), SEND)
    assert [int(destination.wait(7, Route(0, True, k), RECEIVE)[1]) for k in (2, 0, 1)] == [2, 0, 1]


@pytest.mark.slow
def test_many_shapes_are_not_remembered_for_ever():
    source, destination = ends()
    for k in range(2500):
        assert exchange(source, destination, (k, torch.ones(k % 3 + 1)))[0] == k
    assert len(source._known) <= 1024


def test_an_output_of_another_call_is_told_and_gradients_of_one_may_wait():
    source, destination = ends()
    source.send(8, BACKWARD, False, (torch.ones(1),), SEND)
    source.send(7, FORWARD, False, (1,), SEND)
    assert destination.wait(7, FORWARD, RECEIVE) == (1,)
    assert destination.wait(8, BACKWARD, RECEIVE)[0].item() == 1
    source.send(9, FORWARD, False, (1,), SEND)
    with pytest.raises(ScheduleError, match="rank 0 runs another program"):
        destination.wait(7, FORWARD, RECEIVE)


def test_a_silent_peer_is_a_timeout_and_one_that_left_is_seen_at_once():
    source, destination = ends(timeout_s=0.15)
    begin = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        destination.wait(7, FORWARD, RECEIVE)
    assert 0.1 < time.monotonic() - begin < 10
    assert (caught.value.action, caught.value.peer) == (RECEIVE, 0)
    with pytest.raises(PeerLost) as caught:
        for k in range(20):
            source.send(7, FORWARD, False, (k,), SEND)
    assert (k, caught.value.action, caught.value.peer) == (8, SEND, 1)

    source, destination = ends(timeout_s=30)
    source.send(7, FORWARD, False, (torch.ones(2),), SEND)
    source.close()
    begin = time.monotonic()
    assert destination.wait(7, FORWARD, RECEIVE)[0].tolist() == [1, 1]  # what was sent is not lost
    with pytest.raises(PeerLost):
        destination.wait(7, FORWARD, RECEIVE)
    source, destination = ends(timeout_s=30)
    destination.close()
    with pytest.raises(PeerLost):
        for _ in range(20):
            source.send(7, FORWARD, False, (torch.ones(2),), SEND)
    assert time.monotonic() - begin < 10


def test_a_process_may_have_more_than_1024_open_files():
    """``select`` knows no descriptor above; a message that does not come at once is waited for with one here."""
    import resource
    import threading

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this process may open {hard} files at most")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200) if soft != resource.RLIM_INFINITY else soft, hard))
    taken = []
    try:
        while not taken or taken[-1] < 1024:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        source, destination = ends()
        later = threading.Timer(0.8, source.send, (7, FORWARD, False, (torch.ones(2),), SEND))
        later.start()
        destination.post()
        assert destination.wait(7, FORWARD, RECEIVE)[0].tolist() == [1, 1]
        later.join()
        source.close()
        destination.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_has_a_name_and_nothing_stays_open():
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    source, destination = ends()
    for _ in range(5):
        got = exchange(source, destination, (torch.ones(100_000),))
    here = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
    assert not [name for (name,) in filter(None, here) if "sixfold" in name and not name.startswith("/memfd:")]
    assert len(os.listdir("/proc/self/fd")) == descriptors + 2  # the sockets
    source.close()
    destination.close()
    del source, destination
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert float(got[0].sum()) == 100_000  # a tensor outlives its edge
    del got
    assert "sixfold-slot" not in Path("/proc/self/maps").read_text()


def test_another_name_is_nobody():
    assert connect("sixfold-of-another-host") is None


def test_a_system_that_forbids_it_is_no_error(monkeypatch):
    assert can_share()

    def forbidden(*_):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert not can_share()
