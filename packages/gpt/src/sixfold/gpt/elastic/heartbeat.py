"""How far each member's process has come, where the supervisor can read it: a mapped file of slots.

    loop.py --> Heartbeat (this file) --> a file of numbers --> Slots (this file) --> processes.py --> leader.py

[Note: a step's deadline] A rank writes when a step begins and when it has ended. Of ranks that wait for each other one
cannot tell which is the cause, and a first step, an evaluation or a save may take any time: they have deadlines of
their own. So only a step counts, from the second of a generation on. A process that a signal has stopped is seen for
certain; a late step may only be slow, and has ``LATE`` times as long, and ``TIMES`` as long as the longest so far.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

TIMES = 4.0  # as long as the longest step
LATE = 5.0  # times hung_after_seconds
MEMBERS = 4096  # that a file has room for: one that is lost leaves its slot unused
_SLOT = struct.Struct("=qqdd")  # as the fields of Slot


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """What a member has written.

    Attributes:
        step: updates done. begun: steps that this process began.
        began_at: when the step at hand began; 0 outside of one, and in the first of a generation.
        longest_s: seconds of its longest step.
    """

    step: int
    begun: int
    began_at: float
    longest_s: float


class Slots:
    """The file, as the supervisor makes and reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("xb") as file:
            file.truncate(MEMBERS * _SLOT.size)
        self._map = _mapped(path)

    def read(self, member: int) -> Slot:
        """A member's slot; one that has written nothing has zeros."""
        step, begun, began_at, longest_s = _SLOT.unpack_from(self._map, member % MEMBERS * _SLOT.size)
        return Slot(step=step, begun=begun, began_at=began_at, longest_s=longest_s)

    def clear(self, member: int) -> None:
        """Nobody has written a member's slot yet."""
        _SLOT.pack_into(self._map, member % MEMBERS * _SLOT.size, 0, 0, 0.0, 0.0)

    def close(self) -> None:
        """Give the memory back."""
        self._map.close()


class GenerationOverError(Exception):
    """The generation has ended, and this rank has a step to do that it would do in vain."""


class Heartbeat:
    """A member's own slot.

    Attributes:
        is_over: the generation at hand has ended. A rank that waits for no other hears of it here alone.
    """

    is_over = False

    def __init__(self, path: Path, member: int) -> None:
        self._map, self._offset = _mapped(path), member % MEMBERS * _SLOT.size
        self._step, self._begun, self._began_at, self._longest_s, self._first = 0, 0, 0.0, 0.0, True
        self._write(0.0)

    @property
    def longest_s(self) -> float:
        """Seconds of the longest step of this process."""
        return self._longest_s

    def generation(self) -> None:
        """A generation begins: its first step may take any time."""
        self._first, self.is_over = True, False
        self._write(0.0)

    def step_begins(self) -> None:
        """The step's data is there; from here on ranks wait for each other.

        Raises:
            GenerationOverError: there is no next step.
        """
        if self.is_over:
            raise GenerationOverError("this generation has ended")
        self._began_at, self._begun = time.monotonic(), self._begun + 1
        self._write(0.0 if self._first else self._began_at)

    def step_ends(self, step: int) -> None:
        """``step`` updates are done."""
        if not self._first:
            self._longest_s = max(self._longest_s, time.monotonic() - self._began_at)
        self._step, self._first = step, False
        self._write(0.0)

    def rests(self) -> None:
        """Outside of a step, however it ended."""
        self._write(0.0)

    def _write(self, began_at: float) -> None:
        _SLOT.pack_into(self._map, self._offset, self._step, self._begun, began_at, self._longest_s)


def _mapped(path: Path) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, MEMBERS * _SLOT.size)
    finally:
        os.close(file)


def patience_s(slots: list[Slot], hung_after_s: float) -> float:
    """How long a step, or dropping a generation, may take."""
    return max(LATE * hung_after_s, TIMES * max((slot.longest_s for slot in slots), default=0.0))


def overdue_s(slots: list[Slot], now: float, hung_after_s: float) -> float:
    """By how many seconds the step at hand is behind its deadline; <= 0 if it is not."""
    began = [slot.began_at for slot in slots if slot.began_at > 0]
    return now - min(began) - patience_s(slots, hung_after_s) if began else 0.0
