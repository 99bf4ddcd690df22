"""How far another machine's clock is from ours, from round trips.

    exchange() --> ClockOffset (this file) --> all_ranks.py

Torch-free, and no clock of its own: both come in, so that a test can give clocks that it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sixfold.pipeline.errors import whole

__all__ = ["ClockOffset", "clock_offset"]


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
