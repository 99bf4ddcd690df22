"""Do the ranks agree? Who is about to do something else, and what to say of it.

    rows of integers --> odd_ranks (this file) --> engine/rank_agreement.py, setup/start_values.py

Pure: the exchange itself is collectives/host_messages.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Entry = TypeVar("Entry", bound=Hashable)

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
