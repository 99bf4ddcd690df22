"""Shard tables: what ranks must know of each other's shards, as integers in one array, and what can be wrong with it.

    records --> tabulate (this file) --> bytes that travel --> merge --> table_problems, metadata

A job of 1,024 ranks with 10,000 tensors has ten million shards: as objects they would take gigabytes and minutes. A
table has one row of int64 for each box, and names, dtypes and shapes apart. Ranks that hold parts of the same tensors
have the same names, which are then read once. All problems are listed, not the first. Pure: no files, no ranks.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import product
from typing import NamedTuple

import torch

from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.geometry.box import Box, Ints, cover_weight, describe, holes, overlaps, whole
from sixfold.dist_ckpt.state.records import Piece, ShardedObject, ShardedTensor, is_main_replica
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes

_AT_ONCE = 1 << 18  # rows that stay in the cache
_FEW_ROWS = 1 << 6  # of which Python is through before a dozen operations on arrays have begun


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


def tabulate(records: Sequence[ShardedTensor], most_bytes: int | None = None) -> tuple[Table, list[list[Piece]]]:
    """The table of one rank's records, and the pieces that it is made of. An empty shard has a row too.

    ``most_bytes``: of a piece; larger ones are cut, along their rows.
    """
    dims = max((len(record.global_shape) for record in records), default=0)
    kinds: dict[Kind, int] = {}
    flat = array("q")
    pieces = []
    for record in records:
        shape = record.global_shape
        kind = kinds.setdefault(Kind(record.key, record.dtype, shape), len(kinds))
        own = [*record.pieces()]
        if most_bytes is not None:
            own = [part for piece in own for part in piece.cut(most_bytes // record.dtype.itemsize)]
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


def _few_covered_once(table: Table) -> list[bool]:
    """``covered_once`` of few rows."""
    left = [cover_weight(whole(kind.shape)) for kind in table.kinds]
    fine = [True] * len(left)
    for number, main, *numbers in table.rows_NW.tolist():
        shape = table.kinds[number].shape
        box = Box(tuple(numbers[: len(shape)]), tuple(numbers[table.dims : table.dims + len(shape)]))
        fine[number] &= box.within(shape)
        left[number] -= cover_weight(box) if main else 0
    return [inside and not rest for inside, rest in zip(fine, left, strict=True)]


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


def table_problems(table: Table, verb: str, *, copies: bool = False, is_load: bool = False) -> list[str]:
    """Everything wrong with the shards of all ranks together, one line each, in the order of the kinds.

    Per key: one dtype, one global shape, boxes inside it, and main replicas that cover each element
    exactly once. ``verb`` is "saved" or "asked for". ``copies``: several ranks may be main for the same box.
    ``is_load``: a replica that asks for the whole tensor leaves no hole, as a plain tensor that one rank alone loads.
    Cost: linear in the rows, a few array operations; only keys that fail are looked at box by box.
    """
    fine = _few_covered_once(table) if len(table.rows_NW) <= _FEW_ROWS else covered_once(table).tolist()
    keys = Counter(kind.key for kind in table.kinds)
    bad = {kind.key for kind, ok in zip(table.kinds, fine, strict=True) if not ok or keys[kind.key] > 1}
    found: dict[str, list[Row]] = {kind.key: [] for kind in table.kinds if kind.key in bad}
    numbers = torch.tensor([number for number, kind in enumerate(table.kinds) if kind.key in bad], device="cpu")
    for index in torch.isin(table.rows_NW[:, 0], numbers).nonzero().flatten().tolist() if bad else ():
        row = table.row(index)
        found[row.kind.key].append(row)
    return [problem for rows in found.values() for problem in _key_problems(rows, verb, copies, is_load)]


def _key_problems(rows: list[Row], verb: str, copies: bool, is_load: bool) -> list[str]:
    key, _, shape = rows[0].kind
    for label, number in (("dtype", 1), ("global shape", 2)):
        for row in rows:
            ours, theirs = rows[0].kind[number], row.kind[number]
            if ours != theirs:
                return [
                    f"{key}: rank {rows[0].rank} says {label} {ours}, rank {row.rank} says {theirs}; ranks must agree"
                ]
    full = [row for row in rows if row.box.volume]
    outside = [
        f"{describe(key, row.box, shape)}: rank {row.rank}'s box leaves the global shape {shape}"
        for row in full
        if not row.box.within(shape)
    ]
    if outside:
        return outside
    owners = [row for row in full if row.main]
    if copies:
        owners = [*{row.box: row for row in reversed(owners)}.values()]
    boxes = [row.box for row in owners]
    problems = [_overlap(owners[a], owners[b], verb) for a, b in overlaps(boxes)]
    is_whole = is_load and any(row.box.size == shape for row in full)
    if not is_whole and (left := holes(shape, boxes)):
        problems.append(_hole(left, owners, rows, verb))
    return problems


def _overlap(one: Row, other: Row, verb: str) -> str:
    key, _, shape = one.kind
    first, second = describe(key, one.box, shape), describe(key, other.box, shape)
    if one.rank == other.rank:
        return (
            f"{first} of rank {one.rank} and {second} of rank {other.rank} overlap, and both are main replicas: each "
            f"element is {verb} by one. Two tensors of one rank have this key: rename one. (The key of a DTensor is "
            "its path joined by dots, so that {'a.b': x} and {'a': {'b': y}} collide)"
        )
    return (
        f"{first} of rank {one.rank} and {second} of rank {other.rank} overlap, and both are main replicas: each "
        f"element is {verb} by one; give the copies another replica_id than 0 (of DTensors on slices of a mesh by "
        "ShardedTensor.from_dtensor)"
    )


def _hole(left: list[Box], owners: list[Row], rows: list[Row], verb: str) -> str:
    key, _, shape = rows[0].kind
    where = ", ".join(describe(key, box, shape) for box in left[:4]) + (", ..." if len(left) > 4 else "")
    if owners:
        owned = ", ".join(f"rank {row.rank} has {describe('', row.box, shape)}" for row in owners[:4])
        more = ", ..." if len(owners) > 4 else ""
        return f"{where}: {verb} by no main replica ({owned}{more}). A rank or a shard is missing from the state dict"
    if any(row.main for row in rows):
        return f"{where}: {verb} by no rank; only empty shards of {key} were given. A rank or a shard is missing"
    ranks = sorted({row.rank for row in rows})
    return f"{where}: {verb} by no main replica; ranks {ranks} hold replicas only. One rank needs replica_id 0"


def object_problems(by_rank: Sequence[Sequence[ShardedObject]], verb: str) -> list[str]:
    """The same for grids of objects: one shape per key, each cell held by one main replica."""
    shapes: dict[str, set[Ints]] = defaultdict(set)
    holders: dict[str, dict[Ints, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, record in ((rank, record) for rank, records in enumerate(by_rank) for record in records):
        shapes[record.key].add(record.global_shape)
        if is_main_replica(record.replica_id):
            holders[record.key][record.global_offset].append(rank)
    problems = []
    for key, (shape, *others) in shapes.items():
        if others:
            problems.append(f"{key}: ranks name the object grids {sorted((shape, *others))}; ranks must agree")
            continue
        problems += [
            f"{key}: cell {cell} is {verb} by ranks {ranks}; one is the main replica"
            for cell, ranks in holders[key].items()
            if len(ranks) > 1
        ]
        empty = [cell for cell in product(*map(range, shape)) if cell not in holders[key]]
        if empty:
            problems.append(f"{key}: cells {empty[:8]} are {verb} by no main replica; a rank or its object is missing")
    return problems


def raise_problems(problems: Sequence[str], verb: str, kind: type[CheckpointError]) -> None:
    """One error that lists every problem."""
    if problems:
        raise kind(
            problems[0] if len(problems) == 1 else listed(f"{len(problems)} problems in what is {verb}", problems)
        )


def listed(title: str, lines: Sequence[str]) -> str:
    """A text of several lines, one for each problem."""
    return "\n  ".join([f"{title}:", *lines])
