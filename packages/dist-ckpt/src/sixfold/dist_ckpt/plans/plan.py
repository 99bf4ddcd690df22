"""Plans: which boxes a rank writes, and which parts of which frames it reads.

    records --> plan_save (this file) --> writer.write
    records + manifest --> plan_load (this file) --> reader.py

Pure: no files, no ranks, no tensor data. Each step prints as one line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError
from sixfold.dist_ckpt.formats.integrity import Span
from sixfold.dist_ckpt.geometry.box import Box, cover_weight, describe, first_element, intersect, whole
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk
from sixfold.dist_ckpt.state.records import Piece, ShardedTensor, is_main_replica
from sixfold.dist_ckpt.state.tensor_memory import converts

DTYPE_POLICIES = ("exact", "cast", "strict")
_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 1 << 25, 1 << 30


class Write(NamedTuple):
    """One box to write: a piece of record number ``record`` of this rank."""

    record: int
    key: str
    dtype: torch.dtype
    piece: Piece
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.piece.box.size) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"write {describe(self.key, self.piece.box, self.shape)}"


class Read(NamedTuple):
    """One part to read: what a piece of record number ``record`` and a stored chunk share."""

    record: int
    key: str
    piece: Piece
    chunk: StoredChunk
    part: Box
    stored_dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of the stored values."""
        return prod(self.part.size) * self.stored_dtype.itemsize

    def places(self) -> tuple[int, int] | None:
        """The elements of the chunk and of the record's data at which the part begins; None if it is no run in both."""
        in_chunk = first_element(self.part, self.chunk.box)
        in_piece = first_element(self.part, self.piece.box)
        if in_chunk is None or in_piece is None:
            return None
        return in_chunk, in_piece if self.piece.flat is None else self.piece.flat[0] + in_piece

    def __str__(self) -> str:
        return f"read {describe(self.key, self.part, self.shape)} from {self.chunk.frame}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """Reads in the order of files and offsets; pieces to zero first; what cannot be read at all.

    ``unexpected`` are indices of records whose key is not stored, ``mismatches`` one line each.
    """

    reads: Sequence[Read]
    zeroed: Sequence[tuple[int, Piece]]
    unexpected: Sequence[int]
    mismatches: Sequence[str]

    @property
    def nbytes(self) -> int:
        """Stored bytes that are read."""
        return sum(read.nbytes for read in self.reads)

    def frames(self) -> set[ByteRange]:
        """Every frame that is touched."""
        return {read.chunk.frame for read in self.reads}


def plan_save(records: Sequence[ShardedTensor], pieces: Sequence[Sequence[Piece]]) -> tuple[Write, ...]:
    """The pieces of this rank's main replicas, in the order of the records, whose pieces are given."""
    return tuple(
        Write(index, record.key, record.dtype, piece, record.global_shape)
        for index, (record, own) in enumerate(zip(records, pieces, strict=True))
        if is_main_replica(record.replica_id)
        for piece in own
    )


def plan_load(
    records: Sequence[ShardedTensor],
    manifest: Manifest,
    *,
    dtype_policy: str,
    pieces: Sequence[Sequence[Piece]] | None = None,
) -> LoadPlan:
    """Intersect what is asked for with what is stored; ``pieces`` of the records, if they are known already.

    Raises:
        CorruptError: the stored chunks leave a hole in a wanted part (peers return what was in memory), or overlap.
    Cost: near linear in pieces and the chunks that they share elements with.
    """
    reads: list[Read] = []
    zeroed: list[tuple[int, Piece]] = []
    unexpected: list[int] = []
    mismatches: list[str] = []
    for index, record in enumerate(records):
        stored = manifest.tensors.get(record.key)
        if stored is None:
            unexpected.append(index)
            continue
        problem = mismatch(record, stored.shape, stored.dtype, dtype_policy)
        if problem:
            mismatches.append(problem)
            continue
        for piece in record.pieces() if pieces is None else pieces[index]:
            wanted: Box | None = piece.box
            if not piece.box.within(stored.shape):
                wanted = intersect(piece.box, whole(stored.shape))
                zeroed.append((index, piece))
            if wanted is None:
                continue
            found, begin, elements = 0, len(reads), prod(wanted.size)
            for chunk in stored.near(wanted):
                part = wanted if wanted == chunk.box else intersect(wanted, chunk.box)
                if part is not None:
                    found += prod(part.size)
                    reads.append(Read(index, record.key, piece, chunk, part, stored.dtype, stored.shape))
            problem, several = "", len(reads) > begin + 1
            if found < elements:
                problem = f"{elements - found} of its elements are in no chunk of the checkpoint"
            elif several and sum(cover_weight(read.part) for read in reads[begin:]) != cover_weight(wanted):
                problem = "chunks of the checkpoint overlap there; which one holds is not known"
            if problem:
                raise CorruptError(f"{describe(record.key, wanted, stored.shape)}: {problem}")
    reads.sort(key=lambda read: (read.chunk.frame.file, read.chunk.frame.offset))
    return LoadPlan(reads=reads, zeroed=zeroed, unexpected=unexpected, mismatches=mismatches)


def check_policy(dtype_policy: str) -> None:
    """Refuse a policy that does not exist."""
    if dtype_policy not in DTYPE_POLICIES:
        raise CheckpointError(f"dtype_policy is {dtype_policy!r}; it is one of {DTYPE_POLICIES}")


def mismatch(record: ShardedTensor, shape: tuple[int, ...], dtype: torch.dtype, dtype_policy: str) -> str | None:
    """Why a stored tensor of this shape and dtype does not go into the record; None if it does."""
    asked = record.global_shape
    if asked != shape and not (record.allow_shape_mismatch and len(asked) == len(shape)):
        told = f"{record.key}: asked for global shape {asked}, stored is {shape}"
        if record.is_on_slice:  # of no record that the caller made
            return f"{told}; ask for the stored shape"
        return f"{told}; ask for the stored shape, or set allow_shape_mismatch where only padding differs"
    if record.dtype != dtype and dtype_policy == "strict":
        return f"{record.key}: asked for {record.dtype}, stored is {dtype}; dtype_policy is 'strict'"
    if record.dtype != dtype and not (converts(record.dtype) and converts(dtype)):
        return f"{record.key}: asked for {record.dtype}, stored is {dtype}; torch converts no packed numbers"
    if record.dtype.is_complex != dtype.is_complex:
        return f"{record.key}: asked for {record.dtype}, stored is {dtype}; complex and real do not convert"
    return None


def assign(touched: Sequence[Sequence[Span]], *, marks_alone: bool = False) -> list[list[Span]]:
    """Share the blocks that ranks touch: each to one rank that reads it anyway, evenly.

    Args:
        touched: spans of blocks by rank, sorted.
        marks_alone: give blocks that one rank alone touches as spans of their own, which say so.
    Returns:
        Spans by rank, disjoint, in the order of files and blocks; together all that is touched.
    """
    events: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, spans in enumerate(touched):
        for span in spans:
            events[span.file] += [(span.first, 1, rank), (span.stop, 0, rank)]
    shares: list[list[Span]] = [[] for _ in touched]
    load = [0] * len(touched)
    for file in sorted(events):
        active: dict[int, None] = {}
        at = 0
        for place, begins, rank in sorted(events[file]):
            if active and place > at:
                _deal(Span(file, at, place, marks_alone and len(active) == 1), list(active), load, shares)
            at = place
            if begins:
                active[rank] = None
            else:
                del active[rank]
    return shares


def _deal(span: Span, ranks: list[int], load: list[int], shares: list[list[Span]]) -> None:
    """Cut a span that all of ``ranks`` read into runs, each for the one of them with the least so far."""
    step = max(4, (span.stop - span.first) // (4 * len(ranks))) if len(ranks) > 1 else span.stop - span.first
    for turn, first in enumerate(range(span.first, span.stop, step)):
        candidates = [ranks[(turn + i) % len(ranks)] for i in range(min(16, len(ranks)))]
        rank = min(candidates, key=load.__getitem__)
        part = span._replace(first=first, stop=min(first + step, span.stop))
        load[rank] += part.stop - part.first
        own = shares[rank]
        if own and own[-1] == (part.file, own[-1].first, part.first, part.alone):
            part = part._replace(first=own.pop().first)
        own.append(part)


def file_counts(sizes: Sequence[int], streams: int) -> tuple[int, ...]:
    """How many frames of these bytes, one after the other, go into each file of a rank: one number if one file does.

    Files are about equally large, of at least 32 MiB and at most 1 GiB as far as frames go, which lie in one file each.
    """
    total = sum(sizes) if streams > 1 else 0
    files = max(min(streams, total // _LEAST_FILE_BYTES), -(-total // _MOST_FILE_BYTES))
    if files < 2:
        return (len(sizes),)
    counts, done = [0], 0
    for nbytes in sizes:
        # By the middle of the frame, so that a large one leaves files to those behind it.
        if counts[-1] and len(counts) < files and done + nbytes // 2 >= len(counts) * total / files:
            counts.append(0)
        counts[-1] += 1
        done += nbytes
    return tuple(counts)


def total_bytes(writes: Sequence[Write]) -> int:
    """Bytes on disk with an upper bound of what frames add."""
    sizes = [write.nbytes for write in writes]
    return sum(nbytes + 1024 + (4096 if nbytes >= 1 << 18 else 64) for nbytes in sizes)
