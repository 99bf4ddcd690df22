"""Do the ranks agree? Signatures of what each is about to do, and what they say when they differ.

    rows of integers --> odd_ranks, OrderDigest (this file) --> signatures.py, initial.py

Pure: the exchange itself is control.py's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

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


def tensor_digest(tensor: Tensor) -> int:
    """64 bits of a tensor's values: a weighted sum of its bytes modulo 2**64. Reads the device (at wrap time only)."""
    flat = tensor.detach().reshape(-1).contiguous()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.dtype.itemsize]
    total = 0
    step = 1 << 22  # elements at a time: a digest must not double a large embedding
    for start in range(0, flat.numel(), step):
        words = flat[start : start + step].view(width).to(torch.int64)
        weights = torch.arange(start, start + words.numel(), dtype=torch.int64, device=flat.device)
        weights = (weights * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01) | 1  # odd: no bit of a word is lost
        total = (total + int((words * weights).sum())) & 0xFFFFFFFFFFFFFFFF
    return total - (1 << 64) if total >= 1 << 63 else total
