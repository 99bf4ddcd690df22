"""Edges over process groups: gloo and NCCL.

    group --> one communicator per directed edge, one control channel (this file) --> messages.py --> Lane

Two channels. Tensors move on edge communicators of the group's own back end, one
per directed edge, so that the two directions between neighbours never wait for
each other (NVIDIA#750, pytorch#172668). Shapes, flags and counts move on a gloo
communicator, whatever the group is.

[Note: own communicators] They are made from the group's store, not by ``new_group(use_local_synchronization=True)``.
That names a group by its ranks and by how many groups this process has made. Ranks that hold different numbers of
edges then wait for each other under different names (torch 2.13, ``_hash_ranks_to_str``). The store is asked how many
runners came before, so that a second runner on the same group gets its own. All of a runner's gloo communicators share
one device, that is one thread that moves bytes.

[Note: sends in flight] A SEND is not waited for, not even at the end of a step: a peer may ask for it only in its next
one. A tensor is kept until it was sent. NCCL reports it, and is asked at each SEND. gloo does not (``is_completed``
stays False until ``wait``), but messages of the peer prove it. Gradients prove their output. What the peer sends after
a backward proves the gradients that this backward took (``acknowledgements.py``). At the latest the next input of the
same place does. That message alone is then waited for, at once: older ones may be under way (gloo has an order per
tag). Where nothing comes back (no gradients, an evaluation) the oldest of more than a batch in flight is waited for.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from socket import socket
from typing import Any, Literal
from uuid import uuid4
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.failures.deadlines import HostWait, InFlight, PeerLost, Sent, StreamWait, within
from sixfold.pipeline.failures.report import Store
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.transport.alarm import Alarm
from sixfold.pipeline.transport.call_count import CallCount
from sixfold.pipeline.transport.control_channel import GroupControl, close_connection, wait_until_sent
from sixfold.pipeline.transport.devices import HostMemoryReceive, StreamMark, nccl_options, wants_host_memory
from sixfold.pipeline.transport.messages import GroupLane
from sixfold.pipeline.transport.messages import Receipt as GroupReceipt
from sixfold.pipeline.transport.one_communicator import OneCommunicator
from sixfold.pipeline.transport.receive_buffers import Ring
from sixfold.pipeline.transport.routes import Edge, Route, forward_edges, in_rounds, route_of, window_of
from sixfold.pipeline.transport.shape_agreement import Outputs
from sixfold.pipeline.transport.shared_memory import SharedIncoming, SharedOutgoing, accept, can_share, connect, listen
from sixfold.pipeline.transport.specs import TensorSpec, specs_of

__all__ = ["GroupLinks", "GroupTransport", "Incoming", "Outgoing"]

Values = tuple[Any, ...]
Shapes = bool | Literal["announced"]
EdgeFactory = Callable[[int, int], dist.ProcessGroup]
Edges = EdgeFactory | Literal["groups", "one", "host"] | None
_POLL_S = 0.01
_LATE_S = 1.0  # after which a rank that brings a new program says so to those of its host
_WINDOW = 8  # tensors per edge that were sent and not waited for, at least


class Outgoing:
    """The sending end of a directed edge; keeps each tensor until it was sent. ``host``: as CPU tensors."""

    def __init__(self, group: Any, peer: int, wait: HostWait | StreamWait, rank: int, *, host: bool = False) -> None:
        self._group = group
        self._send = group.send
        self._peer, self._rank = peer, rank  # in the edge's group, in the pipeline
        self._wait, self._host = wait, host
        self._in_flight: InFlight = deque()
        self._last: dict[int, list[Sent]] = {}  # by tag its last message, where the host waits
        self._let_go = wait.let_go if isinstance(wait, HostWait) else None
        self.window = _WINDOW  # messages; see routes.window_of
        self._widest = 1  # tensors of the largest message: of gradients there may be fewer than of outputs, or none

    def send(self, tensors: Sequence[Tensor], tag: int, action: Action) -> None:
        """Start to send; returns at once unless the peer is far behind."""
        message = []
        for tensor in tensors:
            tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()  # what is sent is memory
            tensor = tensor.cpu() if self._host else tensor
            try:
                work = self._send([tensor], self._peer, tag)
            except RuntimeError as error:  # the connection has ended
                raise PeerLost(action, self._rank) from error
            message.append(Sent(work, tensor, action))
        self._in_flight += message
        if self._let_go is not None:
            self._last[tag] = message
        self._widest = max(self._widest, len(message))
        self._wait.release(self._in_flight, self.window * self._widest, self._rank)

    def received(self, tag: int) -> None:
        """The peer is known to have the last message of this tag: drop its tensors. [Note: sends in flight]"""
        if self._let_go is not None:
            for sent in self._last.pop(tag, ()):
                self._let_go(sent, self._rank)

    def deliver(self, deadline: float) -> None:
        """Wait until everything has been sent."""
        wait_until_sent(self._in_flight, deadline)

    def close(self) -> None:
        """Let the peer notice that nothing more will come."""
        close_connection(self._group, self._peer)
        self._in_flight.clear()
        self._last.clear()


class Incoming:
    """The receiving end of a directed edge; ``host``: messages come as CPU tensors, whatever ``device`` is."""

    def __init__(
        self,
        group: Any,
        peer: int,
        wait: HostWait | StreamWait,
        device: torch.device,
        rank: int,
        *,
        host: bool = False,
        debug_memory: bool = False,
    ) -> None:
        self._group = group
        self._receive = group.recv
        self._peer, self._rank = peer, rank
        self.ring = Ring(device, debug_memory=debug_memory)
        self._landing = Ring(torch.device("cpu"), debug_memory=debug_memory) if host else None
        self._wait = wait

    def post(self, specs: Sequence[TensorSpec], tag: int, action: Action) -> tuple[list[Tensor], list[Any]]:
        """Ask for one message into buffers of these shapes and dtypes that nobody holds.

        Returns:
            the buffers, and a work per buffer; the data is there when its work was waited for.
        """
        buffers = [self.ring.take(spec) for spec in specs]
        try:
            if self._landing is None:
                return buffers, [self._receive([buffer], self._peer, tag) for buffer in buffers]
            pairs = [(self._landing.take(spec), buffer) for spec, buffer in zip(specs, buffers, strict=True)]
            return buffers, [
                HostMemoryReceive(self._receive([host], self._peer, tag), host, buffer) for host, buffer in pairs
            ]
        except RuntimeError as error:  # the connection has ended
            raise PeerLost(action, self._rank) from error

    def forget(self, specs: Sequence[TensorSpec]) -> None:
        """No more messages of these shapes and dtypes come."""
        for ring in (self.ring, self._landing):
            if ring is not None:
                ring.forget(specs)

    def wait(self, work: Any, action: Action) -> None:
        """Wait for a work of ``post``."""
        self._wait(work, action, self._rank)

    def close(self) -> None:
        """Let the peer notice that nothing more will be taken."""
        close_connection(self._group, self._peer)


def _names(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Numbers of its ranks among all ranks of the job; of a group that torch did not register, in the group."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return tuple(range(group.size()))


class GroupTransport:
    """One rank of a process group.

    Args:
        group: the pipeline's ranks; group rank r runs the program's rank r.
        edges: makes the group of the edge (source, destination), group ranks; called on both
            ranks of each edge, in one order on all ranks. None makes an edge of shared memory where both ranks
            have CPU tensors and are on one host, else a communicator of two; "groups" always the latter; "one" a
            single communicator for all edges (one_communicator.py); "host" gloo's, for tensors of
            any device. [Note: over host memory]
        debug_memory: free receive buffers and shared memory are NaN. [Note: free memory is NaN]
    """

    def __init__(self, group: dist.ProcessGroup, edges: Edges = None, *, debug_memory: bool = False) -> None:
        if not (edges in (None, "groups", "one", "host") or callable(edges)):
            raise ScheduleError(
                f"edges is {edges!r}; it makes the group of an edge, or is 'groups', 'one', 'host' or None"
            )
        self.rank, self.ranks = group.rank(), group.size()
        self.one = edges == "one"
        self.names = _names(group)
        self._group, self._edges, self._debug_memory = group, edges, debug_memory

    def join(self, device: torch.device, timeout_s: float) -> GroupLinks:
        """See Transport."""
        return GroupLinks(self._group, device, timeout_s, self._edges, debug_memory=self._debug_memory)


class GroupLinks:
    """All edges of one rank, made when a program first needs them.

    Args:
        device: where stages compute; its type chooses the back end of the edges.
        timeout_s: deadline of every single wait.
    """

    store: Store | None

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        edges: Edges,
        *,
        debug_memory: bool = False,
    ) -> None:
        self._debug = debug_memory
        self.rank, self.ranks = group.rank(), group.size()
        self._group = group
        self._device = device
        self._timeout_s, self._timeout = timeout_s, timedelta(seconds=timeout_s)
        self._factory = edges if callable(edges) else None
        self._share = edges is None and device.type == "cpu" and can_share()
        self._host = edges == "host"
        self._host_wait = host = HostWait(timeout_s)
        self.calls = CallCount()
        self._wait: HostWait | StreamWait = host
        if device.type != "cpu" and not self._host:
            self._wait = StreamWait(timeout_s, self.close, partial(StreamMark, device))
        everyone = within(timeout_s, self._meet)
        self.control = GroupControl(everyone, self.ranks, self.rank, host)
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._shared_outgoing: dict[int, SharedOutgoing] = {}
        self._shared_incoming: dict[int, SharedIncoming] = {}
        self._connected: set[Edge] = set()
        self._lanes: list[GroupLane] = []
        self._tags = 2  # 0 and 1 are of the control channel
        self._one_for_all = edges == "one"
        self._batched: OneCommunicator | None = None
        self._leave = finalize(self, _deliver, self._outgoing, self.control, timeout_s, os.getpid())

    def lane(
        self, placement: Sequence[int], microbatches: int, *, backward: bool, number: int, dynamic_shapes: Shapes
    ) -> _Lane:
        """See Links."""
        edges = set(forward_edges(placement))
        edges = {edge for edge in edges | {(b, a) for a, b in edges if backward} if self.rank in edge}
        if self._one_for_all and self._batched is None:
            # Not in join: a rank that was given other arguments does not come to it.
            self._batched = OneCommunicator(self._made_together(self._one))
        self.connect(edges)
        for outgoing in (self._outgoing, self._shared_outgoing):
            for to, end in outgoing.items():
                end.window = max(end.window, window_of(placement, microbatches, (self.rank, to)))
        over_groups = GroupLane(
            tuple(placement),
            microbatches,
            self.control,
            {to: self._outgoing[to] for source, to in edges if source == self.rank and to in self._outgoing},
            {source: self._incoming[source] for source, to in edges if to == self.rank and source in self._incoming},
            tag=self._tags,
            number=number,
            dynamic_shapes=dynamic_shapes,
            flush=None if self._batched is None else self._batched.flush,
        )
        self._tags += 2 * len(placement) * microbatches
        self._lanes.append(over_groups)
        lane = _Lane(over_groups, self._shared_outgoing, self._shared_incoming, tuple(placement), microbatches)
        lane.together = None if self._batched is None else (self._batched.begin, self._batched.end)
        return lane

    def connect(self, edges: set[Edge]) -> None:
        """Make the communicators of those directed edges of this rank that are new.

        All ranks make theirs in one order, each by both its ends, so none waits in a circle.

        Raises:
            PeerLost: the other end of an edge did not come before the deadline, or failed and left.
        """
        for source, destination in in_rounds(edges):
            peer = destination if source == self.rank else source
            try:
                if (source, destination) not in self._connected:
                    self._connect(source, destination, peer)
                    self._connected.add((source, destination))
            except (RuntimeError, TimeoutError) as error:
                raise PeerLost(None, peer) from error

    def _connect(self, source: int, destination: int, peer: int) -> None:
        sends = source == self.rank
        if self._factory is None and self._batched is None:
            link = within(self._timeout_s, lambda: self._link(f"{source}>{destination}", sends))
            if link is not None and sends:
                self._shared_outgoing[peer] = SharedOutgoing(link, peer, self._timeout_s, self._alarm)
                return
            if link is not None:
                self._shared_incoming[peer] = SharedIncoming(
                    link, peer, self._timeout_s, self._alarm, debug_memory=self._debug
                )
                return
        group, there = self._edge(source, destination, peer)
        host = self._host or (self._factory is not None and wants_host_memory(group, self._device))
        wait = self._host_wait if host else self._wait
        if sends:
            self._outgoing[peer] = Outgoing(group, there, wait, peer, host=host)
        else:
            debug = self._debug
            self._incoming[peer] = Incoming(group, there, wait, self._device, peer, host=host, debug_memory=debug)

    def _made_together(self, make: Callable[[], Any]) -> Any:
        try:
            return within(self._timeout_s, make)
        except (RuntimeError, TimeoutError) as error:
            raise PeerLost(None) from error

    def _link(self, name: str, sends: bool) -> socket | None:
        """A connection between the two ends of an edge that are on one host; both get one, or none."""
        offer, answer = f"offer {name}", f"answer {name}"
        if sends:
            there = self._store.get(offer).decode()
            link = connect(there) if there and self._share else None
            self._store.set(answer, "no" if link is None else "yes")
            return link
        listener, here = listen() if self._share else (None, "")
        self._store.set(offer, here)
        agreed = self._store.get(answer) == b"yes"
        if listener is None or not agreed:
            return None
        return accept(listener)

    def check(self) -> None:
        """See Links."""
        self._wait.settle()
        for lane in self._lanes:
            lane.settle()
        for incoming in self._incoming.values() if self._debug else ():
            incoming.ring.fill_free()
        if self._alarm is not None and self._alarm.heard():
            raise PeerLost(None)

    def close(self) -> None:
        """See Links."""
        self._leave.detach()
        if self._alarm is not None:
            self._alarm.ring()
        ends: list[Any] = [*self._shared_outgoing.values(), *self._shared_incoming.values()]
        ends += [*self._outgoing.values(), *self._incoming.values(), self.control]
        for end in ends:
            end.close()

    def _meet(self) -> Any:
        """The communicator of all ranks; sets what tells this runner's keys in the group's store from others'."""
        store = self._group.get_group_store()
        serial = int(store.add(f"sixfold.pipeline/{self.rank}", 1))
        members = "-".join(map(str, dist.get_process_group_ranks(self._group)))
        self.key = f"sixfold.pipeline/{members}/{serial}"
        self._store = PrefixStore(f"sixfold.pipeline.{serial}", store)
        self.store = self._store
        if self.rank == 0:
            self._store.set("alarm", f"sixfold-{uuid4().hex}")
        self._alarm = self._alarm_of(self._store.get("alarm").decode()) if can_share() else None
        everyone: Any = dist.ProcessGroupGloo(PrefixStore("control", self._store), self.rank, self.ranks, self._timeout)
        self._store.set(f"met {self.rank}", "yes")
        self._options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        self._options._devices = everyone.options._devices
        self._options._timeout = self._timeout
        self._options._threads = 1  # collectives' own, which edges have none of
        return everyone

    def wait_for_all(self) -> None:
        """Every rank has its connections: a rank that leaves after this differs from one that never came."""
        keys = [f"met {rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _alarm_of(self, name: str) -> Alarm:
        return Alarm(name, self.rank, self.ranks, self.calls)

    def meet(self, number: int) -> list[int]:
        """See Links."""
        self.calls.bring()
        alarm = self._alarm
        if alarm is None:
            return self.control.meet(number)
        late = threading.Timer(_LATE_S, alarm.bring)  # where all come at once nobody need be told
        late.daemon = True
        late.start()
        try:
            numbers = self.control.meet(number)
        finally:
            late.cancel()
        alarm.heard()  # so that what was told does not fill its socket
        return numbers

    def _one(self) -> Any:
        """The one communicator of all edges; all ranks are in its first operation."""
        store = PrefixStore("one", self._store)
        if self._device.type == "cpu":
            return dist.ProcessGroupGloo(store, self.rank, self.ranks, self._options)
        nccl: Any = dist.ProcessGroupNCCL(store, self.rank, self.ranks, nccl_options(self._timeout_s))
        with torch.cuda.device(self._device):
            nccl.allreduce([torch.zeros(1, device=self._device)]).wait()
        return nccl

    def _gloo(self, name: str, rank: int) -> Any:
        return dist.ProcessGroupGloo(PrefixStore(name, self._store), rank, 2, self._options)

    def _edge(self, source: int, destination: int, peer: int) -> tuple[Any, int]:
        """The communicator of an edge and the peer's rank in it."""
        if self._batched is not None:
            return self._batched, peer
        if self._factory is not None:
            made = self._factory(source, destination)
            return made, dist.get_group_rank(made, dist.get_global_rank(self._group, peer))
        name, mine = f"{source}>{destination}", 0 if self.rank == source else 1
        if self._host or self._device.type == "cpu":
            return within(self._timeout_s, partial(self._gloo, name, mine)), 1 - mine
        if self._device.type != "cuda":
            raise ScheduleError(f"device is {self._device}; edges are made for cpu and cuda, give edges='host'")
        nccl: Any = dist.ProcessGroupNCCL(PrefixStore(name, self._store), mine, 2, nccl_options(self._timeout_s))
        first = torch.zeros(1, device=self._device)

        def meet() -> None:
            # NCCL connects at the first message and blocks both hosts: do it here, where all ranks go edge by edge.
            with torch.cuda.device(self._device):
                (nccl.send([first], 1, 0) if mine == 0 else nccl.recv([first], 0, 0)).wait()

        within(self._timeout_s, meet)
        return nccl, 1 - mine


def _deliver(outgoing: dict[int, Outgoing], control: GroupControl, timeout_s: float, process: int) -> None:
    """A runner ends, with its ``process`` or before it: what it sent is still asked for by slower ranks.

    Ends at the latest after ``timeout_s``, and at once where the peer has ended; shared memory needs no such wait.
    """
    if os.getpid() != process:  # forked from it: what moves bytes is not here
        return
    deadline = time.monotonic() + timeout_s
    for edge in outgoing.values():
        edge.deliver(deadline)
    control.deliver(deadline)


class _Lane:
    """A lane whose edges are of both sorts.

    Attributes:
        together: what begins and ends a batch of messages, where edges have one communicator.
    """

    together: tuple[Callable[[], None], Callable[[], None]] | None = None

    def __init__(
        self,
        groups: GroupLane,
        outgoing: dict[int, SharedOutgoing],
        incoming: dict[int, SharedIncoming],
        placement: tuple[int, ...],
        microbatches: int,
    ) -> None:
        self._groups, self._outgoing, self._incoming = groups, outgoing, incoming
        self._placement, self._microbatches = placement, microbatches
        self.begin, self.clear, self.resume = groups.begin, groups.clear, groups.resume
        self.renew, self.acknowledges = groups.renew, groups.acknowledges

    def sender(self, action: Action) -> Callable[[Values], None]:
        """See Lane."""
        edge = self._outgoing.get(self._placement[action.peer_stage])
        if edge is None:
            return self._groups.sender(action)
        route = route_of(action, self._microbatches)
        if not route.forward:
            return partial(_send_gradients, edge.send, self._groups.number, route, action)
        outputs = self._groups.outputs_of(route.stage)
        return partial(_send_output, edge.send, outputs, self._groups.number, route, action)

    def receiver(self, action: Action) -> _SharedReceipt | GroupReceipt:
        """See Lane."""
        edge = self._incoming.get(self._placement[action.peer_stage])
        if edge is None:
            return self._groups.receiver(action)
        return _SharedReceipt(edge, self._groups, route_of(action, self._microbatches), action)


def _send_output(
    send: Callable[..., None], outputs: Outputs, number: int, route: Route, action: Action, values: Values
) -> None:
    specs = specs_of(values)
    outputs.look((route.stage, route.slot), specs, action)  # [Note: one rule] in shape_agreement.py
    send(number, route, outputs.open, values, action, specs)


def _send_gradients(send: Callable[..., None], number: int, route: Route, action: Action, values: Values) -> None:
    send(number, route, False, values, action)


class _SharedReceipt:
    __slots__ = ("_action", "_edge", "_lane", "_route", "post")

    def __init__(self, edge: SharedIncoming, lane: GroupLane, route: Route, action: Action) -> None:
        self._edge, self._lane, self._route, self._action = edge, lane, route, action
        self.post = edge.post

    def wait(self) -> Values:
        values = self._edge.wait(self._lane.number, self._route, self._action)
        if self._edge.may_change:
            self._lane.open = True  # edges behind this one agree anew
        return values
