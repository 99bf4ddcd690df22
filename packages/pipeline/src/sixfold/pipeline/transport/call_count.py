"""Which call a rank is in, so that ranks whose calls differ raise an error.

    a rank comes with a program that is new --> Calls of the others (this file) --> "all ranks make the same calls"

[Note: a new program beside a known one] A rank that brings a new program waits for all ranks to bring it. One that runs
a program it knows asks nobody, and may wait for a message of the first. So the first tells all others which of its
calls it is in. Whoever waits looks: if it came to the same call, or a later one, without bringing anything new, the two
make different calls.
"""

from __future__ import annotations

__all__ = ["CallCount"]


class CallCount:
    """One rank's.

    Attributes:
        made: calls that this rank began.
        brought: the last of them in which it brought something new.
    """

    def __init__(self) -> None:
        self.made = 0
        self.brought = 0
        self._theirs: dict[int, int] = {}

    def begin(self) -> None:
        """One more call."""
        self.made += 1

    def bring(self) -> None:
        """This call is about something new, and waits for all ranks."""
        self.brought = self.made

    def hear(self, rank: int, call: int) -> None:
        """``rank`` brings something new in its call of this number."""
        self._theirs[rank] = call

    def stray(self) -> int | None:
        """A rank that waits for this one to bring what it does not bring; None where there is none."""
        for rank, call in self._theirs.items():
            if self.brought < call <= self.made:
                return rank
        return None
