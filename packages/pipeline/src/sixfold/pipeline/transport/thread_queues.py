"""Ranks that are threads of one process: queues, with deadlines.

    SEND --> queue of its message (this file) --> RECV

Tensors are handed over as they are. A rank that ends its links leaves a mark in every queue
that it writes to or reads from; what was sent before it is still received.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal

import torch

from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.failures.report import MemoryStore
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.transport.alarm import LOOK_S
from sixfold.pipeline.transport.call_count import CallCount
from sixfold.pipeline.transport.messages import other_call
from sixfold.pipeline.transport.routes import Edge, Route, route_of, window_of
from sixfold.pipeline.transport.same_thread import leaves
from sixfold.pipeline.transport.shape_agreement import AgreedShapes
from sixfold.pipeline.transport.specs import specs_of

__all__ = ["ThreadQueues", "ThreadTransport"]

_ENDED = object()

Shapes = bool | Literal["announced"]
Key = tuple[Any, ...]  # runner, what for


class ThreadQueues:
    """What the ranks have in common: the queue of each name, and who has ended.

    A queue's name starts with the number of the runner, its source and its destination.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.store = MemoryStore()
        self._lock = threading.Lock()
        self._queues: dict[Key, SimpleQueue[Any]] = {}
        self._ended: set[tuple[int, int]] = set()  # runner, rank
        self._calls: dict[int, dict[int, CallCount]] = {}  # by runner and rank

    def queue(self, runner: int, edge: Edge, *name: object, filled: int = 0) -> SimpleQueue[Any]:
        """The queue of that name, made with ``filled`` Nones in it by whoever asks first."""
        with self._lock:
            queue = self._queues.get((runner, edge, *name))
            if queue is None:
                queue = self._queues[runner, edge, *name] = SimpleQueue()
                for _ in range(filled):
                    queue.put(None)
                if any((runner, rank) in self._ended for rank in edge):
                    queue.put(_ENDED)
            return queue

    def calls(self, runner: int, rank: int) -> CallCount:
        """Those of one rank."""
        with self._lock:
            return self._calls.setdefault(runner, {}).setdefault(rank, CallCount())

    def bring(self, runner: int, rank: int) -> None:
        """``rank`` brings something new: all others hear it."""
        calls = self.calls(runner, rank)
        calls.bring()
        for other in range(self.ranks):
            if other != rank:
                self.calls(runner, other).hear(rank, calls.made)

    def someone_ended(self, runner: int) -> bool:
        """Whether a rank has ended its links."""
        return any(of == runner for of, _ in tuple(self._ended))

    def end(self, runner: int, rank: int) -> None:
        """``rank`` neither sends nor takes anything more."""
        with self._lock:
            if (runner, rank) not in self._ended:
                self._ended.add((runner, rank))
                for (of, edge, *_), queue in self._queues.items():
                    if of == runner and rank in edge:
                        queue.put(_ENDED)


class ThreadTransport:
    """One thread's place."""

    def __init__(self, queues: ThreadQueues, rank: int) -> None:
        self.rank, self.ranks = rank, queues.ranks
        self._queues = queues
        self._joined = 0

    def join(self, device: torch.device, timeout_s: float) -> _Links:
        """See Transport; ranks are told apart from runners before by how often they joined."""
        self._joined += 1
        return _Links(self._queues, self._joined, self.rank, timeout_s)


class _Links:
    def __init__(self, queues: ThreadQueues, runner: int, rank: int, timeout_s: float) -> None:
        self.rank, self.ranks = rank, queues.ranks
        self.store = queues.store
        self.key = f"runner {runner}"
        self._queues, self._runner = queues, runner
        self._timeout_s = timeout_s
        self.control = _Control(self)
        self.calls = queues.calls(runner, rank)

    def meet(self, number: int) -> list[int]:
        """See Links."""
        self._queues.bring(self._runner, self.rank)
        return self.control.gather(number)

    def lane(
        self, placement: Sequence[int], microbatches: int, *, backward: bool, number: int, dynamic_shapes: Shapes
    ) -> _Lane:
        """See Links."""
        return _Lane(self, tuple(placement), microbatches, number, dynamic_shapes)

    def check(self) -> None:
        """See Links; nothing is overdue behind the caller's back."""
        if self._queues.someone_ended(self._runner):
            raise PeerLost(None)

    def close(self) -> None:
        """See Links."""
        self._queues.end(self._runner, self.rank)

    def queue(self, edge: Edge, *name: object, filled: int = 0) -> SimpleQueue[Any]:
        """A queue of this runner."""
        return self._queues.queue(self._runner, edge, *name, filled=filled)

    def take(self, queue: SimpleQueue[Any], action: Action | None, peer: int) -> Any:
        """The next of a queue, waited for; its end stays in it."""
        try:
            taken = queue.get(timeout=min(self._timeout_s, LOOK_S))
        except Empty:
            taken = self._keep_waiting(queue, action, peer)
        if taken is _ENDED:
            queue.put(_ENDED)
            raise PeerLost(action, peer)
        return taken

    def _keep_waiting(self, queue: SimpleQueue[Any], action: Action | None, peer: int) -> Any:
        """What did not come at once; a rank that fails elsewhere ends the wait too."""
        deadline = time.monotonic() + self._timeout_s - LOOK_S
        while (left := deadline - time.monotonic()) > 0 and not self._queues.someone_ended(self._runner):
            try:
                return queue.get(timeout=min(LOOK_S, left))
            except Empty:
                if (stray := self.calls.stray()) is not None:
                    raise other_call(stray) from None
        raise PeerLost(action, peer)


class _Lane(AgreedShapes):
    def __init__(
        self, links: _Links, placement: tuple[int, ...], microbatches: int, number: int, dynamic_shapes: Shapes
    ) -> None:
        super().__init__(placement, microbatches, dynamic_shapes)
        self._links, self._number = links, number

    def sender(self, action: Action) -> Callable[[tuple[Any, ...]], None]:
        links, peer = self._links, self._placement[action.peer_stage]
        edge, route = (links.rank, peer), route_of(action, self._microbatches)
        put = links.queue(edge, self._number, route).put
        room = links.queue(edge, self._number, "room", filled=self._window(edge))
        outputs, slot = self.outputs_of(route.stage), (route.stage, route.slot)

        def send(values: tuple[Any, ...]) -> None:
            if route.forward:
                outputs.look(slot, specs_of(values), action)
            links.take(room, action, peer)
            put((values, route.forward and outputs.open))

        return send

    def receiver(self, action: Action) -> _Receipt:
        edge = (self._placement[action.peer_stage], self._links.rank)
        room = self._links.queue(edge, self._number, "room", filled=self._window(edge))
        return _Receipt(self, self._links, edge, self._number, action, route_of(action, self._microbatches), room)

    def _window(self, edge: Edge) -> int:
        return window_of(self._placement, self._microbatches, edge)

    def clear(self) -> None:
        """The links are ended instead."""


class _Receipt:
    __slots__ = ("_action", "_forward", "_lane", "_links", "_peer", "_queue", "post")

    def __init__(
        self,
        lane: _Lane,
        links: _Links,
        edge: Edge,
        number: int,
        action: Action,
        route: Route,
        room: SimpleQueue[Any],
    ) -> None:
        self._lane, self._links, self._peer, self._action, self._forward = lane, links, edge[0], action, route.forward
        self._queue = links.queue(edge, number, route)
        put = room.put
        self.post: Callable[[], None] = lambda: put(None)

    def wait(self) -> tuple[Any, ...]:
        values: tuple[Any, ...]
        values, may_change = self._links.take(self._queue, self._action, self._peer)
        self._lane.open |= may_change
        return leaves(values) if self._forward else values


class _Control:
    def __init__(self, links: _Links) -> None:
        self._links = links

    def send(self, data: bytes, peer: int, action: Action | None = None) -> None:
        self._links.queue((self._links.rank, peer), "control").put(data)

    def receive(self, peer: int, action: Action | None = None) -> bytes:
        data: bytes = self._links.take(self._links.queue((peer, self._links.rank), "control"), action, peer)
        return data

    def gather(self, number: int) -> list[int]:
        links = self._links
        for peer in range(links.ranks):
            if peer != links.rank:
                links.queue((links.rank, peer), "gather").put(number)
        return [
            number if peer == links.rank else links.take(links.queue((peer, links.rank), "gather"), None, peer)
            for peer in range(links.ranks)
        ]
