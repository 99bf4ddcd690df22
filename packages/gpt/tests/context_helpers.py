"""Rows cut over context-parallel ranks, by loops that share no code with the package."""

from __future__ import annotations

import torch
from torch import Tensor


def places_of(rank: int, ranks: int, row: int) -> list[int]:
    """Where in a row of ``row`` tokens the tokens of a rank lie, token by token."""
    chunk = row // (2 * ranks)
    return [place for place in range(row) if place // chunk in (rank, 2 * ranks - 1 - rank)]


def cut(rows: Tensor, rank: int, ranks: int) -> Tensor:
    """A rank's tokens of (b, S, ...)."""
    return rows[:, places_of(rank, ranks, rows.shape[1])]


def put_back(parts: list[Tensor]) -> Tensor:
    """(b, S, ...) of what all ranks have."""
    ranks = len(parts)
    row = ranks * parts[0].shape[1]
    whole = parts[0].new_zeros(parts[0].shape[0], row, *parts[0].shape[2:])
    for rank, part in enumerate(parts):
        whole[:, places_of(rank, ranks, row)] = part
    return whole


def sees(cu_seqlens: Tensor, row: int) -> Tensor:
    """(b, S, S): whether a query (row) sees a key (column) of its row, document by document."""
    b = int(cu_seqlens[-1]) // row
    seen = torch.zeros(b, row, row, dtype=torch.bool)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for query in range(begin, end):
            seen[query // row, query % row, begin % row : query % row + 1] = True
    return seen
