"""Validation across ranks: does the job's state dict describe each tensor once and whole?

    reports of all ranks --> validation.py (this file) --> list of problems, or strict's key sets

All problems are listed, not the first. Pure: no files, no group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import product

import torch

from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.geometry.box import Box, Ints, describe, holes, overlaps
from sixfold.dist_ckpt.plans.shard_table import Row, Table, covered_once
from sixfold.dist_ckpt.state.records import ShardedObject, is_main_replica


class StrictHandling(Enum):
    """What a load does with keys that only one side knows.

    *Unexpected* keys are asked for and not stored; *missing* keys are stored and asked for by no
    rank (torch's words the other way round).
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @property
    def raises_unexpected(self) -> bool:
        """Unexpected keys are an error."""
        return self.value in ("assume_ok_unexpected", "raise_unexpected", "raise_all")

    @property
    def logs(self) -> bool:
        """Keys become a warning."""
        return self.value.startswith("log")

    @property
    def returns(self) -> bool:
        """``load`` returns (state, missing, unexpected)."""
        return self.value.startswith("return")

    @property
    def minds_missing(self) -> bool:
        """Missing keys count too."""
        return self.value in ("log_all", "raise_all", "return_all")


def parse_strict(strict: StrictHandling | str) -> StrictHandling:
    """The enum of a value or its string."""
    try:
        return StrictHandling(strict)
    except ValueError:
        raise CheckpointError(f"strict is {strict!r}; it is one of {[mode.value for mode in StrictHandling]}") from None


def check_keys(strict: StrictHandling, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """MismatchError that lists every key, if ``strict`` says that they are an error."""
    stored, wrong = sorted(missing), sorted(unexpected) if strict.raises_unexpected else []
    lines = [f"{key}: asked for, not in the checkpoint" for key in wrong]
    if strict is StrictHandling.RAISE_ALL:
        lines += [f"{key}: in the checkpoint, asked for by no rank" for key in stored]
    if lines:
        kinds = ["Unexpected keys (not found in the checkpoint)"] * bool(wrong)
        kinds += ["Missing keys (asked for by no rank)"] * (len(lines) > len(wrong))
        what = "1 key does not match" if len(lines) == 1 else f"{len(lines)} keys do not match"
        remedy = "correct them, or leave them out by strict='log_unexpected'" if wrong else "ask for them too"
        raise MismatchError(_listed(f"{', '.join(kinds)}: {what} (strict={strict.value!r}); {remedy}", lines))


def table_problems(table: Table, verb: str, *, copies: bool = False) -> list[str]:
    """Everything wrong with the shards of all ranks together, one line each, in the order of the kinds.

    Per key: one dtype, one global shape, boxes inside it, and main replicas that cover each element
    exactly once. ``verb`` is "saved" or "asked for". ``copies``: several ranks may be main for the same box.
    Cost: linear in the rows, a few array operations; only keys that fail are looked at box by box.
    """
    fine = covered_once(table).tolist()
    keys = Counter(kind.key for kind in table.kinds)
    bad = {kind.key for kind, ok in zip(table.kinds, fine, strict=True) if not ok or keys[kind.key] > 1}
    found: dict[str, list[Row]] = {kind.key: [] for kind in table.kinds if kind.key in bad}
    numbers = torch.tensor([number for number, kind in enumerate(table.kinds) if kind.key in bad], device="cpu")
    for index in torch.isin(table.rows_NW[:, 0], numbers).nonzero().flatten().tolist() if bad else ():
        row = table.row(index)
        found[row.kind.key].append(row)
    return [problem for rows in found.values() for problem in _key_problems(rows, verb, copies)]


def _key_problems(rows: list[Row], verb: str, copies: bool) -> list[str]:
    key, _, shape = rows[0].kind
    for label, number in (("dtype", 1), ("global shape", 2)):
        for row in rows:
            ours, theirs = rows[0].kind[number], row.kind[number]
            if ours != theirs:
                return [
                    f"{key}: rank {rows[0].rank} says {label} {ours}, rank {row.rank} says {theirs}; all ranks agree"
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
    if left := holes(shape, boxes):
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
            problems.append(f"{key}: ranks name the object grids {sorted((shape, *others))}; all ranks agree")
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
            problems[0] if len(problems) == 1 else _listed(f"{len(problems)} problems in what is {verb}", problems)
        )


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n  ".join([f"{title}:", *lines])
