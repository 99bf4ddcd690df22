"""Edges between threads that behave as NCCL's do, and take notes.

The package's own lanes and edges run over a stand-in of the group: messages have no tags, a send's memory is read when
its receive is there and not before, the host is told whether a work is done, and waiting for one is noted.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.failures.deadlines import StreamWait
from sixfold.pipeline.transport.messages import GroupLane
from sixfold.pipeline.transport.process_groups import Incoming, Outgoing

DEADLINE_S = 3.0


class Work:
    """A send or receive; ``over`` once both ends met."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.over, self.waited = tensor, threading.Event(), 0

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        """A stream would wait; here the host does, for it is the stream."""
        self.waited += 1
        assert self.over.wait(DEADLINE_S), "a message did not come"


class StreamMark:
    """An event of the stream; it does not hold the memory of the work."""

    def __init__(self, over: threading.Event) -> None:
        self.is_completed = over.is_set


class Wires:
    """All communicators of all ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.lock = threading.Lock()
        self.sends: dict[Any, deque[Work]] = defaultdict(deque)  # by communicator and direction
        self.receives: dict[Any, deque[Work]] = defaultdict(deque)
        self.notes: dict[Any, SimpleQueue[Any]] = defaultdict(SimpleQueue)

    def meet(self, key: Any, work: Work, sends: bool) -> Work:
        with self.lock:
            mine, theirs = (self.sends, self.receives) if sends else (self.receives, self.sends)
            mine[key].append(work)
            if theirs[key]:
                sent, received = self.sends[key].popleft(), self.receives[key].popleft()
                assert sent.tensor.shape == received.tensor.shape, "NCCL would hang, or write elsewhere"
                with torch.no_grad():
                    received.tensor.copy_(sent.tensor)
                sent.over.set()
                received.over.set()
        return work


class Group:
    """What is used of a ProcessGroupNCCL, by one rank; a communicator of the edge ``name``."""

    def __init__(self, wires: Wires, name: Any) -> None:
        self.wires, self.key = wires, name
        self.sent: list[Work] = []
        self.received: list[tuple[int, int]] = []  # tag, address

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None: ...

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        self.sent.append(self.wires.meet(self.key, Work(tensors[0]), True))
        return self.sent[-1]

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        work = self.wires.meet(self.key, Work(tensors[0]), False)
        self.received.append((tag, tensors[0].data_ptr()))
        return work


class Control:
    """The host's channel, which counts how often the host waits."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank = wires, rank
        self.waits = 0

    def _take(self, peer: int, tag: Any) -> Any:
        queue = self.wires.notes[peer, self.rank, tag]
        self.waits += queue.empty() or tag == 0
        return queue.get(timeout=DEADLINE_S)

    def send(self, data: Any, peer: int, action: Any = None, tag: int = 0) -> None:
        self.wires.notes[self.rank, peer, tag].put(data)

    def receive(self, peer: int, action: Any = None, tag: int = 0) -> Any:
        self.waits += 1
        return self.wires.notes[peer, self.rank, tag].get(timeout=DEADLINE_S)

    def send_number(self, number: int, peer: int, tag: int, action: Any) -> None:
        self.send(number, peer, tag=("number", tag))

    def receive_number(self, peer: int, tag: int, action: Any) -> Any:
        return self.receive(peer, tag=("number", tag))

    def ask_number(self, peer: int, tag: int, action: Any) -> Any:
        return lambda: self._take(peer, ("number", tag))

    def gather(self, number: int) -> list[int]:
        for peer in range(self.wires.ranks):
            self.send(number, peer, tag="gather")
        return [self.receive(peer, tag="gather") for peer in range(self.wires.ranks)]


class WireTransport:
    """One thread's place; also its own Links."""

    store, key = None, "wires"

    def __init__(self, wires: Wires, rank: int) -> None:
        self.rank, self.ranks, self.wires = rank, wires.ranks, wires
        self.control = Control(wires, rank)
        self.wait = StreamWait(DEADLINE_S, self.close, lambda work: StreamMark(work.over))
        self.groups: dict[Any, Group] = {}
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.lanes: list[GroupLane] = []

    def join(self, device: torch.device, timeout_s: float) -> WireTransport:
        for peer in range(self.ranks):
            out, back = (self.rank, peer), (peer, self.rank)
            self.groups[out], self.groups[back] = Group(self.wires, out), Group(self.wires, back)
            self.outgoing[peer] = Outgoing(self.groups[out], 1, self.wait, peer)
            self.incoming[peer] = Incoming(self.groups[back], 0, self.wait, device, peer)
        return self

    def lane(self, placement: Any, microbatches: int, *, backward: bool, number: int, dynamic_shapes: Any) -> GroupLane:
        self.lanes.append(
            GroupLane(
                tuple(placement),
                microbatches,
                self.control,
                self.outgoing,
                self.incoming,
                tag=2 + 10_000 * len(self.lanes),
                number=number,
                dynamic_shapes=dynamic_shapes,
            )
        )
        return self.lanes[-1]

    def check(self) -> None:
        self.wait.settle()
        for lane in self.lanes:
            lane.settle()

    def close(self) -> None: ...


def wires(ranks: int) -> list[WireTransport]:
    """One per rank."""
    shared = Wires(ranks)
    return [WireTransport(shared, rank) for rank in range(ranks)]


class InOrder:
    """One communicator of all ranks, as NCCL runs it: a batch starts when all before it on this rank is over.

    Attributes:
        batches: what was started together.
    """

    supports_coalescing = True

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.rank = wires, rank
        self.batches: list[list[str]] = []
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.batch: list[tuple[str, Tensor, int]] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None: ...

    def _start_coalescing(self) -> None:
        assert self.batch is None
        self.batch = []

    def _end_coalescing(self) -> Work:
        batch, self.batch = self.batch, None
        assert batch, "an empty batch"
        self.batches.append([name for name, _, _ in batch])
        whole = Work(batch[0][1])
        self.queue.put((batch, whole))
        return whole

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.batch.append(("send", tensors[0], peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
        self.batch.append(("recv", tensors[0], peer))

    def _run(self) -> None:
        while True:
            batch, whole = self.queue.get()
            for name, tensor, peer in batch:
                edge = (self.rank, peer) if name == "send" else (peer, self.rank)
                started = [self.wires.meet(edge, Work(tensor), name == "send")]
                whole.parts = [*getattr(whole, "parts", []), *started]
            for part in whole.parts:
                if not part.over.wait(DEADLINE_S):
                    return
            whole.over.set()
