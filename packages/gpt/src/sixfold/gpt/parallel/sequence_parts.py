"""Which tokens of each row a context-parallel rank has, and what of its row each of them sees.

    cu_seqlens (numpy) --> documents_here (this file), on the thread of the data --> host_to_device.py --> attention.py

A row of S tokens is cut in 2 * cp chunks. Rank r has chunks r and 2 * cp - 1 - r, in this order. So under a causal mask
all ranks have equally many pairs of a query and a key. Integers and numpy alone: what decides how much a rank computes
is worked out on the host, and the device is never asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

A = TypeVar("A")
B = TypeVar("B")
Span = tuple[int, int]  # [begin, end)
MaskKind = Literal["full", "causal", "masked"]


@dataclass(frozen=True, slots=True)
class SequencePart:
    """The part of each row that rank ``rank`` of ``size`` has."""

    rank: int = 0
    size: int = 1

    def spans(self, row: int) -> tuple[Span, ...]:
        """Where in a row of ``row`` tokens the tokens lie that are here, in their order here."""
        if self.size == 1:
            return ((0, row),)
        chunk, rest = divmod(row, 2 * self.size)
        assert rest == 0, f"a row of {row} tokens in {2 * self.size} chunks"
        return tuple((n * chunk, (n + 1) * chunk) for n in (self.rank, 2 * self.size - 1 - self.rank))

    def cut(self, rows_BS: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(B, S) -> (B, S / size)."""
        return np.concatenate([rows_BS[:, begin:end] for begin, end in self.spans(rows_BS.shape[1])], axis=1)


WHOLE_ROWS = SequencePart()


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Queries of this rank and keys of another (or this) one that some of them see, places counted on each.

    Attributes:
        first_key: where in its row the first of the keys lies; of account in "masked" alone.
        seen: every query sees "full" all keys, or "causal" those up to its own number; "masked" tells each by places.
    """

    queries: Span
    keys: Span
    first_key: int
    seen: MaskKind


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentsHere(Generic[A]):
    """Documents of a micro-batch of b rows of S tokens, of which a rank has b rows of s; arrays or tensors.

    A segment is what lies here of a document in one chunk: its queries see the keys from the document's start to its
    own end.

    Attributes:
        first: (b, s) int64: where in its row the document of each token starts.
        queries: (segments + 1,) int32: where segments start in the flattened tokens of this rank.
        keys: (segments + 1,) int32: where their keys start in ``index``.
        index: (keys[-1],) int64: the keys of one segment after the other, as places in the flattened b * S tokens.
        longest: queries and keys of the longest segment.
        blocks: by rank of the group: what of its keys is seen here.
    """

    first: A
    queries: A
    keys: A
    index: A
    longest: tuple[int, int]
    blocks: tuple[tuple[KeyBlock, ...], ...]

    def to(self, put: Callable[[A], B]) -> DocumentsHere[B]:
        """The same in other arrays."""
        return DocumentsHere(
            first=put(self.first),
            queries=put(self.queries),
            keys=put(self.keys),
            index=put(self.index),
            longest=self.longest,
            blocks=self.blocks,
        )


def documents_here(cu_seqlens: npt.NDArray[Any], rows: int, part: SequencePart) -> DocumentsHere[npt.NDArray[Any]]:
    """What a rank needs to know of the documents of a micro-batch.

    Args:
        cu_seqlens: boundaries of the flattened micro-batch of all ranks, 0 ... rows * S with every multiple of S.
    """
    row = int(cu_seqlens[-1]) // rows
    first_BS = _document_starts(cu_seqlens, rows, row)
    first = part.cut(first_BS)
    spans, s = part.spans(row), first.shape[1]
    places = np.concatenate([np.arange(begin, end) for begin, end in spans])
    begins = np.ones((rows, s), dtype=np.bool_)
    begins[:, 1:] = first[:, 1:] != first[:, :-1]
    begins[:, [0, *(np.cumsum([end - begin for begin, end in spans])[:-1])]] = True
    starts = np.flatnonzero(begins)
    ends = np.append(starts[1:], rows * s)
    row_of = starts // s
    key_starts = row_of * row + first.reshape(-1)[starts]
    lengths = row_of * row + places[(ends - 1) % s] + 1 - key_starts
    bounds = np.append(0, np.cumsum(lengths))
    index = np.arange(bounds[-1]) + np.repeat(key_starts - bounds[:-1], lengths)
    return DocumentsHere(
        first=first,
        queries=np.append(starts, rows * s).astype(np.int32),
        keys=bounds.astype(np.int32),
        index=index.astype(np.int64),
        longest=(int((ends - starts).max()), int(lengths.max())),
        blocks=key_blocks(part, row, first),
    )


def key_blocks(
    part: SequencePart, row: int, first: npt.NDArray[Any] | None = None, *, window: int = 0
) -> tuple[tuple[KeyBlock, ...], ...]:
    """By rank of the group: the blocks of its keys of which queries of ``part`` see something.

    Args:
        first: (b, s), where in its row the document of each query starts; None: a row is one document.
        window: keys that a query sees, its own among them, in rows of one document; 0: all before it.
    """
    ranks = range(part.size)
    if window:
        assert first is None, "blocks of windows are those of rows of one document"
        places = np.concatenate([np.arange(begin, end) for begin, end in part.spans(row)])
        first = np.maximum(places - (window - 1), 0)[None]
    if first is None or not first.any():
        return tuple(_blocks_by_rows(part, source, row) for source in ranks)
    return tuple(_blocks_by_documents(part, source, row, first) for source in ranks)


def masked(blocks: tuple[tuple[KeyBlock, ...], ...]) -> tuple[tuple[KeyBlock, ...], ...]:
    """The same blocks, of which each query is told what it sees."""
    return tuple(tuple(replace(block, seen="masked") for block in some) for some in blocks)


def _document_starts(cu_seqlens: npt.NDArray[Any], rows: int, row: int) -> npt.NDArray[np.int64]:
    """(rows, row) int64: where in its row the document of each token starts."""
    starts = np.repeat(cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens)).reshape(rows, row)
    return starts - np.arange(0, rows * row, row)[:, None]


def _blocks_by_rows(part: SequencePart, source: int, row: int) -> tuple[KeyBlock, ...]:
    """Chunks are in the row's order on every rank, so two of them are one block where nothing lies between."""
    s = row // part.size
    half, begin = s // 2, SequencePart(source, part.size).spans(row)[0][0]
    if source == part.rank:
        return (KeyBlock((0, s), (0, s), begin, "causal"),)
    if source < part.rank:  # its first chunk is before both of mine, its last behind them
        return (KeyBlock((0, s), (0, half), begin, "full"),)
    return (KeyBlock((half, s), (0, s), begin, "full"),)  # both of its chunks lie between mine


def _blocks_by_documents(part: SequencePart, source: int, row: int, first: npt.NDArray[Any]) -> tuple[KeyBlock, ...]:
    found = []
    at = 0
    for begin, end in part.spans(row):
        queries = at, at + end - begin
        key_at = 0
        for key_begin, key_end in SequencePart(source, part.size).spans(row):
            seen = _seen(first[:, slice(*queries)], begin, key_begin, key_end)
            keys = key_at, key_at + key_end - key_begin
            if seen is not None:
                found.append(KeyBlock(queries, keys, key_begin, seen))
            key_at = keys[1]
        at = queries[1]
    return tuple(found)


def _seen(first: npt.NDArray[Any], begin: int, key_begin: int, key_end: int) -> MaskKind | None:
    """What queries from place ``begin`` of their rows on see of a chunk; documents start later the later a query is."""
    if key_begin > begin or first[:, 0].min() >= key_end:
        return None
    if first[:, -1].max() > key_begin:
        return "masked"
    return "causal" if key_begin == begin else "full"
