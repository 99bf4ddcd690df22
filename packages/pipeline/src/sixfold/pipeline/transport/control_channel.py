"""The control channel of process groups: small things between CPU hosts, over gloo whatever the group is.

flags, headers, counts, reports --> notes (this file) --> process_groups.py
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from sys import byteorder
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.failures.deadlines import HostWait, InFlight, PeerLost, Sent
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.transport.messages import FLAGS, other_call

__all__ = ["GroupControl", "close_connection", "wait_until_sent"]

_NOTES_IN_FLIGHT = 64  # to a peer; then a note waits for the oldest
_NOTE = 256  # bytes that one message holds; a longer one is followed by the rest
_LENGTH = 8  # bytes of its length
_UNUSED_TAG = 2**31 - 1


class GroupControl:
    """Small things between CPU hosts, in order per peer and tag."""

    def __init__(self, group: Any, ranks: int, rank: int, wait: HostWait) -> None:
        self._group = group
        self._peers = [peer for peer in range(ranks) if peer != rank]
        self._wait = wait
        self._in_flight: InFlight = deque()

    def send(self, data: bytes, peer: int, action: Action | None = None, tag: int = 0) -> None:
        """See Control."""
        note = bytearray(_NOTE)
        note[:_LENGTH] = len(data).to_bytes(_LENGTH)
        first = _NOTE - _LENGTH
        note[_LENGTH : _LENGTH + len(data[:first])] = data[:first]
        self._send(torch.frombuffer(note, dtype=torch.uint8), peer, tag, action)
        if rest := data[first:]:
            self._send(torch.frombuffer(bytearray(rest), dtype=torch.uint8), peer, tag, action)

    def receive(self, peer: int, action: Action | None = None, tag: int = 0) -> bytes:
        """See Control."""
        note = self._receive(_NOTE, peer, tag, action)
        length = int.from_bytes(note[:_LENGTH])
        data = note[_LENGTH : _LENGTH + length]
        if (rest := length - len(data)) > 0:
            data += self._receive(rest, peer, tag, action)
        return data

    def send_number(self, number: int, peer: int, tag: int, action: Action) -> None:
        """Start to send one number; ``receive_number`` takes it."""
        self._send(torch.tensor([number]), peer, tag, action)

    def receive_number(self, peer: int, tag: int, action: Action) -> int:
        """What ``send_number`` sent."""
        return self.ask_number(peer, tag, action)()

    def ask_number(self, peer: int, tag: int, action: Action) -> Callable[[], int]:
        """Ask for what ``send_number`` sends; what is returned waits for it, and gives it."""
        data, work = self._ask(_LENGTH, peer, tag, action)

        def number() -> int:
            self._wait(work, action, peer)
            return int.from_bytes(bytes(data.numpy()), byteorder, signed=True)

        return number

    def gather(self, number: int) -> list[int]:
        """See Control."""
        mine = torch.tensor([number], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(len(self._peers) + 1)]
        try:
            work = self._group.allgather([everyone], [mine])
        except RuntimeError as error:
            raise PeerLost(None) from error
        self._wait(work, None, None)
        return [int(value) for value in everyone]

    def meet(self, number: int) -> list[int]:
        """As ``gather``, of ranks that bring something new; one that runs what it knows is found out.

        Such a rank reads what is sent here where the number of its batch should be, or sends that number here.
        [Note: a new program beside a known one] Any rank's number wakes the listener, the end of a rank the gather.

        Raises:
            ScheduleError: a rank makes another call.
        """
        for peer in self._peers:
            self._send(torch.tensor([-1 - number]), peer, FLAGS, None)
        strays: list[int] = []
        listener = threading.Thread(target=self._listen, args=(strays,), name="sixfold-pipeline-meet", daemon=True)
        listener.start()
        try:
            numbers = self.gather(number)
        except PeerLost:
            if strays:
                raise other_call(strays[0]) from None
            raise
        listener.join()
        return numbers

    def _listen(self, strays: list[int]) -> None:
        """Take one number of every rank; that of a batch ends the gather."""
        try:
            for _ in self._peers:
                data = torch.empty(1, dtype=torch.int64)
                work = self._group.recv_anysource([data], FLAGS)
                self._wait(work, None, None)
                if int(data) >= 0:
                    strays.append(int(work._source_rank()))
                    self.close()
                    return
        except (PeerLost, RuntimeError):
            return  # the gather has failed too

    def deliver(self, deadline: float) -> None:
        """Wait until everything has been sent."""
        wait_until_sent(self._in_flight, deadline)

    def close(self) -> None:
        """Let all peers notice that nothing more will come."""
        for peer in self._peers:
            close_connection(self._group, peer)
        self._in_flight.clear()

    def _send(self, data: Tensor, peer: int, tag: int, action: Action | None) -> None:
        try:
            work = self._group.send([data], peer, tag)
        except RuntimeError as error:
            raise PeerLost(action, peer) from error
        self._in_flight.append(Sent(work, data, action))
        self._wait.release(self._in_flight, _NOTES_IN_FLIGHT, peer)

    def _receive(self, size: int, peer: int, tag: int, action: Action | None) -> bytes:
        data, work = self._ask(size, peer, tag, action)
        self._wait(work, action, peer)
        return bytes(data.numpy())

    def _ask(self, size: int, peer: int, tag: int, action: Action | None) -> tuple[Tensor, Any]:
        data = torch.empty(size, dtype=torch.uint8)
        try:
            return data, self._group.recv([data], peer, tag)
        except RuntimeError as error:
            raise PeerLost(action, peer) from error


def wait_until_sent(in_flight: InFlight, deadline: float) -> None:
    """What is overdue or has failed is skipped: nobody is left to whom an error would matter."""
    while in_flight:
        work = in_flight.popleft().work
        try:
            if work is not None and not work.is_completed():
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError:
            pass


def close_connection(group: Any, peer: int) -> None:
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
