"""Messages between the ranks of a group.

    group --> one communicator per directed edge, one control channel (this file) --> messages.py, run

Two channels. Tensors move on edge communicators of the group's own back end, one
per directed edge, so that the two directions between neighbours never wait for
each other (NVIDIA#750, pytorch#172668). Shapes, flags and counts move on a gloo
communicator, whatever the group is.

[Note: own communicators] They are made from the group's store, not by
``new_group(use_local_synchronization=True)``: that names a group by its ranks and
by how many groups this process has made, and ranks that hold different numbers
of edges then wait for each other under different names (torch 2.13,
``_hash_ranks_to_str``). The store is asked how many runners came before, so that
a second runner on the same group gets its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from sixfold.pipeline.action import Action
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.watchdog import HostWait, PeerLost, StreamWait, within

__all__ = ["Control", "Incoming", "Outgoing", "Transport"]

_SENDS_IN_FLIGHT = 8  # per edge; then a SEND waits for the oldest, so that a slow peer bounds memory
_UNUSED_TAG = 2**20


class Outgoing:
    """The sending end of a directed edge; keeps each tensor until it was sent."""

    def __init__(self, group: Any, peer: int, wait: HostWait | StreamWait) -> None:
        self._group = group
        self._send = group.send
        self._peer = peer  # in the edge's group
        self._wait = wait
        self._in_flight: deque[tuple[Any, Tensor, Action]] = deque()

    def send(self, tensors: tuple[Tensor, ...], action: Action) -> None:
        """Start to send; returns at once unless the peer is far behind."""
        for tensor in tensors:
            tensor = tensor.detach().contiguous()
            try:
                work = self._send([tensor], self._peer, 0)
            except RuntimeError as error:  # the connection has ended
                raise PeerLost(action) from error
            self._in_flight.append((work, tensor, action))
        while len(self._in_flight) > _SENDS_IN_FLIGHT:
            self._finish_oldest()

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _, action = self._in_flight[0]
        self._wait(work, action)
        self._in_flight.popleft()

    def close(self) -> None:
        """Let the peer notice that nothing more will come."""
        _close(self._group, self._peer)
        self._in_flight.clear()


class Incoming:
    """The receiving end of a directed edge."""

    def __init__(self, group: Any, peer: int, wait: HostWait | StreamWait, device: torch.device) -> None:
        self._group = group
        self._receive = group.recv
        self._peer = peer
        self._device = device
        self.wait = wait

    def post(
        self, specs: list[tuple[torch.Size, torch.dtype, bool]], action: Action
    ) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Ask for one message into fresh buffers of these shapes and dtypes.

        Returns:
            the buffers, and a work per buffer; the data is there when its work was waited for.
        """
        buffers = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype, _ in specs)
        try:
            return buffers, [self._receive([buffer], self._peer, 0) for buffer in buffers]
        except RuntimeError as error:  # the connection has ended
            raise PeerLost(action) from error

    def close(self) -> None:
        """Let the peer notice that nothing more will be taken."""
        _close(self._group, self._peer)


class Control:
    """Small integers and one float between CPU hosts, in order per peer and tag."""

    def __init__(self, group: Any, ranks: int, rank: int, wait: HostWait) -> None:
        self._group = group
        self._peers = [peer for peer in range(ranks) if peer != rank]
        self._wait = wait
        self._in_flight: deque[tuple[Any, Tensor, Action]] = deque()

    def send(self, numbers: Tensor, peer: int, tag: int, action: Action) -> None:
        """Start to send a CPU tensor; the peer knows its size."""
        try:
            work = self._group.send([numbers], peer, tag)
        except RuntimeError as error:
            raise PeerLost(action) from error
        self._in_flight.append((work, numbers, action))

    def post(
        self, size: int, peer: int, tag: int, action: Action | None, dtype: torch.dtype = torch.int64
    ) -> tuple[Tensor, Any]:
        """Ask for ``size`` numbers; they are there when the work was waited for."""
        numbers = torch.empty(size, dtype=dtype)
        try:
            return numbers, self._group.recv([numbers], peer, tag)
        except RuntimeError as error:
            raise PeerLost(action) from error

    def wait(self, work: Any, action: Action) -> None:
        """Wait for a work of ``post``."""
        self._wait(work, action)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        while self._in_flight:
            work, _, action = self._in_flight[0]
            self._wait(work, action)
            self._in_flight.popleft()

    def gather(self, number: int) -> list[int]:
        """``number`` of every rank, by rank.

        Raises:
            PeerLost: a rank did not take part before the deadline.
        """
        mine = torch.tensor([number], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(len(self._peers) + 1)]
        self._wait(self._group.allgather([everyone], [mine]), None)
        return [int(value) for value in everyone]

    def close(self) -> None:
        """Let all peers notice that nothing more will come."""
        for peer in self._peers:
            _close(self._group, peer)
        self._in_flight.clear()


class Transport:
    """All edges of one rank, made when a program first needs them.

    Args:
        group: the pipeline's ranks; group rank r runs the program's rank r.
        device: where stages compute; its type chooses the back end of the edges.
        timeout_s: deadline of every single wait.
        edges: makes the group of the edge (source, destination), group ranks; called on both
            ranks of each edge, edges ascending. None makes a communicator of two.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
        edges: Callable[[int, int], dist.ProcessGroup] | None,
    ) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        self._group = group
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._factory = edges
        host = HostWait(timeout_s)
        self._wait: HostWait | StreamWait = host if device.type == "cpu" else StreamWait(timeout_s, self.close)
        everyone = within(timeout_s, self._meet)
        self.control = Control(everyone, self.ranks, self.rank, host)
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}

    def _meet(self) -> Any:
        """The communicator of all ranks; sets what tells this runner's keys in the group's store from others'."""
        store = self._group.get_group_store()
        self.serial = int(store.add(f"sixfold.pipeline/{self.rank}", 1))
        self._store = PrefixStore(f"sixfold.pipeline.{self.serial}", store)
        return dist.ProcessGroupGloo(PrefixStore("control", self._store), self.rank, self.ranks, self._timeout)

    def connect(self, pairs: set[tuple[int, int]]) -> None:
        """Make the communicators of those directed edges of this rank that are new.

        Edges are made in one order on all ranks, each by both its ends, so none waits in a circle.

        Raises:
            PeerLost: the other end of an edge did not come before the deadline, or failed and left.
        """
        for source, destination in sorted(pairs):
            try:
                if source == self.rank and destination not in self._outgoing:
                    group, peer = self._edge(source, destination, destination)
                    self._outgoing[destination] = Outgoing(group, peer, self._wait)
                elif destination == self.rank and source not in self._incoming:
                    group, peer = self._edge(source, destination, source)
                    self._incoming[source] = Incoming(group, peer, self._wait, self._device)
            except (RuntimeError, TimeoutError) as error:
                other = destination if source == self.rank else source
                raise PeerLost(None, peer=other) from error

    def to(self, rank: int) -> Outgoing:
        """The edge from here to ``rank``."""
        return self._outgoing[rank]

    def from_(self, rank: int) -> Incoming:
        """The edge from ``rank`` to here."""
        return self._incoming[rank]

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for edge in self._outgoing.values():
            edge.finish()
        self.control.finish()

    def close(self) -> None:
        """End every edge, so that all neighbours stop waiting for this rank."""
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()
        self.control.close()

    def _edge(self, source: int, destination: int, peer: int) -> tuple[Any, int]:
        """The communicator of an edge and the peer's rank in it."""
        if self._factory is not None:
            made = self._factory(source, destination)
            return made, dist.get_group_rank(made, dist.get_global_rank(self._group, peer))
        store = PrefixStore(f"{source}>{destination}", self._store)
        mine = 0 if self.rank == source else 1
        if self._device.type == "cpu":
            ours = within(self._timeout.total_seconds(), lambda: dist.ProcessGroupGloo(store, mine, 2, self._timeout))
            return ours, 1 - mine
        if self._device.type != "cuda":
            raise ScheduleError(f"device is {self._device}; edges are made for cpu and cuda, give edges= for others")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        nccl: Any = dist.ProcessGroupNCCL(store, mine, 2, options)
        # NCCL connects at the first message and blocks both hosts: do it here, where all ranks go edge by edge.
        first = torch.zeros(1, device=self._device)
        (nccl.send([first], 1, 0) if mine == 0 else nccl.recv([first], 0, 0)).wait()
        return nccl, 1 - mine


def _close(group: Any, peer: int) -> None:
    """End the connection to ``peer``.

    gloo's abort leaves its sockets open, but an operation that timed out closes the pair,
    which the peer sees at once. NCCL's abort is what it says.
    """
    try:
        if group.name() == "nccl":
            group.abort()
        else:
            group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass  # it timed out, as intended, or was gone already
