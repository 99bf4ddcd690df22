"""The events of all ranks on one clock.

    each rank's events, control channel --> offsets of the clocks --> events on rank 0's clock (this file) --> Timeline

Torch-free: the channel and the clocks come in, so that a test can give clocks that it knows. Rank 0 asks every other
rank for its time (``clock``), then for what it saw; nothing of it runs in a step. Clocks drift apart by some 10 us in a
second, so the offsets are of this gathering.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from sixfold.pipeline.errors import whole
from sixfold.pipeline.program.action import Action
from sixfold.pipeline.simulation.simulate import Event

__all__ = ["ClockOffset", "clock_offset", "gathered"]

_ROUNDS = 16
_TIME = struct.Struct("<d")


class Channel(Protocol):
    """What is used of a transport's control channel."""

    def send(self, data: bytes, peer: int) -> None:
        """Start to send."""

    def receive(self, peer: int) -> bytes:
        """The next that ``peer`` sent here."""


def gathered(
    events: Iterable[Event], *, rank: int, ranks: int, channel: Channel, clock: Callable[[], float]
) -> list[Event] | None:
    """Every rank's events in seconds since the first of them began; on rank 0, None elsewhere. All ranks call it.

    Args:
        events: this rank's, by ``clock``.
        clock: that which the events were taken with.
    Raises:
        PeerLost: a rank did not take part before the channel's deadline.
    """
    mine = list(events)
    if rank > 0:
        for _ in range(_ROUNDS):
            channel.receive(0)
            channel.send(_TIME.pack(clock()), 0)
        channel.send(_written(mine), 0)
        return None
    for peer in range(1, ranks):
        offset = clock_offset(partial(_time_of, peer, channel), clock, rounds=_ROUNDS)
        mine += (
            (peer, action, a - offset.ahead_s, b - offset.ahead_s) for action, a, b in _read(channel.receive(peer))
        )
    begin = min((start for _, _, start, _ in mine), default=0.0)
    return [(at, action, start - begin, end - begin) for at, action, start, end in mine]


def _time_of(peer: int, channel: Channel) -> float:
    channel.send(b"?", peer)
    (time,) = _TIME.unpack(channel.receive(peer))
    return float(time)


def _written(events: Sequence[Event]) -> bytes:
    return json.dumps([[str(action), start, end] for _, action, start, end in events]).encode()


def _read(data: bytes) -> list[tuple[Action, float, float]]:
    return [(Action.parse(text), start, end) for text, start, end in json.loads(data)]


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The other clock is ``ahead_s`` ahead of ours, within ``error_s`` either way, whatever the way's asymmetry."""

    ahead_s: float
    error_s: float


def clock_offset(exchange: Callable[[], float], clock: Callable[[], float], *, rounds: int = 16) -> ClockOffset:
    """Ask the other side for its time ``rounds`` times; the shortest round trip is believed (as NTP does).

    The other side read its clock at some moment of the round trip: in its middle if both ways took equally long,
    never further from it than half the trip.

    Args:
        exchange: sends a request and returns the other clock's time, read when the request was there.
        clock: ours, in seconds.
        rounds: >= 1; the first trip is often the longest, since connections are made then.
    Raises:
        ScheduleError: ``rounds`` is below one.
    """
    best: ClockOffset | None = None
    for _ in range(whole("rounds", rounds, least=1)):
        sent = clock()
        theirs = exchange()
        took = clock() - sent
        if best is None or took / 2 < best.error_s:
            best = ClockOffset(theirs - (sent + took / 2), took / 2)
    assert best is not None, f"{rounds} rounds have a best one"
    return best
