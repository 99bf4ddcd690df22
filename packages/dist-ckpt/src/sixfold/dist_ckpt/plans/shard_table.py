"""Shard tables: what ranks must know of each other's shards, as integers in one array.

    records --> tabulate (this file) --> bytes that travel --> merge --> validation.py, metadata

A job of 1,024 ranks with 10,000 tensors has ten million shards: as objects they would take gigabytes and minutes. A
table has one row of int64 for each box, and names, dtypes and shapes apart; ranks that hold parts of
the same tensors have the same names, which are then read once. Pure: no files, no ranks.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import NamedTuple

import torch

from sixfold.dist_ckpt.formats.frame import tensor_bytes
from sixfold.dist_ckpt.geometry.box import Box, Ints
from sixfold.dist_ckpt.state.records import Piece, ShardedTensor, is_main_replica

_AT_ONCE = 1 << 18  # rows that stay in the cache


class Kind(NamedTuple):
    """What all shards of a tensor share."""

    key: str
    dtype: torch.dtype
    shape: Ints


class Row(NamedTuple):
    """A box of a kind, whose replica it is, and the rank that has it."""

    rank: int
    kind: Kind
    main: bool
    box: Box


class Encoded(NamedTuple):
    """A table as it travels; ``names`` are compressed, and equal bytes on ranks with equal kinds."""

    names: bytes
    dims: int
    rows: bytes

    @property
    def digest(self) -> str:
        """Equal for equal tables."""
        return sha256(b"%d %d " % (len(self.names), self.dims) + self.names + self.rows).hexdigest()


@dataclass(frozen=True)
class Table:
    """Boxes of one rank or, merged, of all.

    ``rows_NW`` is int64 of N rows and ``2 + 2 * dims`` columns: number of the kind, 1 for a main replica,
    offset, size. Tensors of fewer dimensions than ``dims`` have further axes of offset 0 and size 1, which change
    no volume. ``ranks_N`` is the rank of each row.
    """

    kinds: tuple[Kind, ...]
    dims: int
    rows_NW: torch.Tensor
    ranks_N: torch.Tensor

    @cached_property
    def keys(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(kind.key for kind in self.kinds)

    @property
    def offsets_ND(self) -> torch.Tensor:
        """Where the boxes start."""
        return self.rows_NW[:, 2 : 2 + self.dims]

    @property
    def sizes_ND(self) -> torch.Tensor:
        """How long the boxes are."""
        return self.rows_NW[:, 2 + self.dims :]

    @cached_property
    def shapes_KD(self) -> torch.Tensor:
        """Global shapes of the kinds, further axes 1."""
        shapes = [(*kind.shape, *(1,) * (self.dims - len(kind.shape))) for kind in self.kinds]
        return torch.tensor(shapes, dtype=torch.int64, device="cpu").view(len(shapes), self.dims)

    def row(self, index: int) -> Row:
        """One row read back."""
        number, main, *numbers = self.rows_NW[index].tolist()
        kind = self.kinds[number]
        axes = len(kind.shape)
        box = Box(tuple(numbers[:axes]), tuple(numbers[self.dims : self.dims + axes]))
        return Row(int(self.ranks_N[index]), kind, bool(main), box)

    def main_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of main replicas that have elements, by kind and then by place in the tensor, and their order.

        The second is each row's number among all rows of main replicas with elements, as they stand in the table.
        """
        has = (self.rows_NW[:, 1] != 0) & (self.sizes_ND != 0).all(1)
        row_M = torch.nonzero(has)[:, 0]
        order_M = torch.arange(len(row_M), device="cpu")
        for axis in (*range(1 + self.dims, 1, -1), 0):  # the last axis first, the kind last; each sort is stable
            values_M = self.rows_NW[row_M[order_M], axis]
            if bool((values_M[1:] < values_M[:-1]).any()):
                order_M = order_M[torch.argsort(values_M, stable=True)]
        return row_M[order_M], order_M

    def encode(self) -> Encoded:
        """The bytes that travel."""
        keys, dtypes, shapes = zip(*self.kinds, strict=True) if self.kinds else ((), (), ())
        names = zlib.compress(pickle.dumps((keys, dtypes, shapes), 4), 1)
        return Encoded(names, self.dims, bytes(tensor_bytes(self.rows_NW)))


def tabulate(records: Sequence[ShardedTensor]) -> tuple[Table, list[list[Piece]]]:
    """The table of one rank's records, and the pieces that it is made of. An empty shard has a row too."""
    dims = max((len(record.global_shape) for record in records), default=0)
    kinds: dict[Kind, int] = {}
    flat = array("q")
    pieces = []
    for record in records:
        shape = record.global_shape
        kind = kinds.setdefault(Kind(record.key, record.dtype, shape), len(kinds))
        own = [*record.pieces()]
        # An empty range of a scalar: its box has volume 1, being of no dimensions.
        main, more = int(is_main_replica(record.replica_id) and bool(own or shape)), dims - len(shape)
        pieces.append(own)
        for offset, size in (piece.box for piece in own) if own else ((record.global_offset, (0,) * len(shape)),):
            flat.extend((kind, main, *offset, *(0,) * more, *size, *(1,) * more))
    width = 2 + 2 * dims
    rows = torch.frombuffer(flat, dtype=torch.int64) if flat else torch.empty(0, dtype=torch.int64, device="cpu")
    rows = rows.view(len(flat) // width, width)
    return Table(tuple(kinds), dims, rows, torch.zeros(len(rows), dtype=torch.int64, device="cpu")), pieces


def merge(tables: Sequence[Encoded]) -> Table:
    """The tables of all ranks, in rank order, as one; kinds in the order of their keys' bytes."""
    dims = max((table.dims for table in tables), default=0)
    counts = [len(table.rows) // (8 * (2 + 2 * table.dims)) for table in tables]
    rows_NW = torch.empty(sum(counts), 2 + 2 * dims, dtype=torch.int64, device="cpu")
    ranks_N = torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device="cpu"))
    own: dict[bytes, list[Kind]] = {}
    for names in dict.fromkeys(table.names for table in tables):
        # From a rank of this job.
        own[names] = [Kind(*kind) for kind in zip(*pickle.loads(zlib.decompress(names)), strict=True)]
    kinds = sorted({kind for known in own.values() for kind in known}, key=lambda kind: kind.key)
    number = {kind: n for n, kind in enumerate(kinds)}
    known = {
        names: torch.tensor([number[kind] for kind in found], dtype=torch.int64, device="cpu")
        for names, found in own.items()
    }
    at = 0
    for table, count in zip(tables, counts, strict=True):
        if count:
            part, more = rows_NW[at : at + count], dims - table.dims
            rows = torch.frombuffer(bytearray(table.rows), dtype=torch.int64).view(count, 2 + 2 * table.dims)
            part[:, : 2 + table.dims] = rows[:, : 2 + table.dims]
            part[:, 2 + dims : 2 + dims + table.dims] = rows[:, 2 + table.dims :]
            if more:
                part[:, 2 + table.dims : 2 + dims] = 0
                part[:, 2 + dims + table.dims :] = 1
            part[:, 0] = known[table.names][rows[:, 0]]
            at += count
    return Table(tuple(kinds), dims, rows_NW, ranks_N)


def covered_once(table: Table) -> torch.Tensor:
    """Which kinds' boxes all lie inside, those of main replicas covering each element exactly once: (K,) bool.

    [Note: cover by hashes] Let h_d be a hash of places on axis d, and the weight of the interval [a, b) be
    h_d(b) - h_d(a), that of a box the product over its axes, modulo 2**64. Weights of boxes that tile a
    tensor add up to the weight of the tensor: sums telescope, exactly. Any hole or overlap leaves a sum of random
    numbers, which is the weight of the whole by an accident of about 2**-60. No sorting and no pairs of boxes.
    """
    total_K = torch.zeros(len(table.kinds), dtype=torch.int64, device="cpu")
    inside_K, dims, shapes_KD = torch.ones_like(total_K, dtype=torch.bool), table.dims, table.shapes_KD
    for part in torch.split(table.rows_NW, _AT_ONCE):
        offsets_ND, sizes_ND = part[:, 2 : 2 + dims], part[:, 2 + dims :]
        bad_N = ((offsets_ND < 0) | (sizes_ND < 0) | (offsets_ND + sizes_ND > shapes_KD[part[:, 0]])).any(1)
        inside_K[part[bad_N, 0]] = False
        main_N = part[:, 1] != 0
        total_K.index_add_(0, part[main_N, 0], _weights(offsets_ND[main_N], sizes_ND[main_N]))
    return inside_K & (total_K == _weights(torch.zeros_like(shapes_KD), shapes_KD))


def _weights(offsets_ND: torch.Tensor, sizes_ND: torch.Tensor) -> torch.Tensor:
    weights_N = torch.ones(len(offsets_ND), dtype=torch.int64, device="cpu")
    for axis in range(offsets_ND.shape[1]):
        offset_N = offsets_ND[:, axis].contiguous()
        weights_N *= _mixed(offset_N + sizes_ND[:, axis], axis) - _mixed(offset_N, axis)
    return weights_N


def _mixed(places_N: torch.Tensor, axis: int) -> torch.Tensor:
    """splitmix64 of places, another one for each axis; int64 wraps around."""
    mixed = places_N + (axis + 1) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ _shifted(mixed, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    mixed = (mixed ^ _shifted(mixed, 27)) * (0x94D049BB133111EB - (1 << 64))
    return mixed ^ _shifted(mixed, 31)


def _shifted(values_N: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    return (values_N >> bits) & ((1 << (64 - bits)) - 1)
