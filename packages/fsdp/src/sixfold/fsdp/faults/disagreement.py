"""Do the ranks agree? Signatures of what each is about to do, and what they say when they differ.

    rows of integers --> odd_ranks, OrderDigest (this file) --> engine/order_check.py, setup/start_values.py

Pure: the exchange itself is collectives/host_messages.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Entry = TypeVar("Entry", bound=Hashable)

_MASK = (1 << 63) - 1
_EMPTY = 7

DRAWN_ALIKE = (
    "Every rank must use the same units in the same order. Draw what drops a layer from a generator that all ranks "
    "seed alike, or drop none (transformers: config.layerdrop = 0)"
)


def odd_ranks(rows: Sequence[Sequence[Entry]]) -> tuple[tuple[Entry, ...], tuple[int, ...]]:
    """The most common row (tie: that of the lowest rank) and the ranks whose row is another."""
    counts = Counter(tuple(row) for row in rows)
    most = max(counts.values())
    common = next(tuple(row) for row in rows if counts[tuple(row)] == most)
    return common, tuple(rank for rank, row in enumerate(rows) if tuple(row) != common)


class OrderDigest:
    """One integer for the order of uses and reductions in a step."""

    def __init__(self) -> None:
        self._value = _EMPTY

    def add(self, unit: int, op: int) -> None:
        """The next event."""
        self._value = (self._value * 1_000_003 + unit * 8 + op + 1) & _MASK

    @property
    def value(self) -> int:
        """The digest so far."""
        return self._value

    @property
    def empty(self) -> bool:
        """No event since the last ``take``."""
        return self._value == _EMPTY

    def take(self) -> int:
        """The digest so far; the next one begins."""
        value, self._value = self._value, _EMPTY
        return value
