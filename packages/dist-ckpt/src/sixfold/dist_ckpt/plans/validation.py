"""Validation across ranks: does the job's state dict describe each tensor once and whole?

    reports of all ranks --> validation.py (this file) --> list of problems, or strict's key sets

All problems are listed, not the first. Pure: no files, no group.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import product
from math import prod

import torch

from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.geometry.box import Box, describe, holes, overlaps
from sixfold.dist_ckpt.plans.plan import ObjectReport, ShardReport
from sixfold.dist_ckpt.plans.table import Table, covered_once, inside

_MOST_GUESSES = 8  # each looks at all stored keys


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
    lines = [
        f"{key}: asked for, not in the checkpoint" + (_like(key, stored) if number < _MOST_GUESSES else "")
        for number, key in enumerate(wrong)
    ]
    if strict is StrictHandling.RAISE_ALL:
        lines += [f"{key}: in the checkpoint, asked for by no rank" for key in stored]
    if lines:
        kinds = ["Unexpected keys (not found in the checkpoint)"] * bool(wrong)
        kinds += ["Missing keys (asked for by no rank)"] * (len(lines) > len(wrong))
        what = "1 key does not match" if len(lines) == 1 else f"{len(lines)} keys do not match"
        remedy = "correct them, or leave them out by strict='log_unexpected'" if wrong else "ask for them too"
        raise MismatchError(_listed(f"{', '.join(kinds)}: {what} (strict={strict.value!r}); {remedy}", lines))


def _like(key: str, stored: Sequence[str]) -> str:
    """A guess at what was meant."""
    close = difflib.get_close_matches(key, stored, 1)
    return f"; did you mean {close[0]}?" if close else ""


def table_problems(table: Table, verb: str) -> list[str]:
    """``tensor_problems`` of a merged table: the same lines, in the order of the kinds.

    Cost: linear in the rows, a few array operations; only keys that fail are looked at one by one.
    """
    fine = (covered_once(table) & inside(table)).tolist()
    keys = Counter(kind.key for kind in table.kinds)
    bad = {kind.key for kind, ok in zip(table.kinds, fine, strict=True) if not ok or keys[kind.key] > 1}
    if not bad:
        return []
    numbers = [number for number, kind in enumerate(table.kinds) if kind.key in bad]
    found: dict[str, list[tuple[int, ShardReport]]] = {kind.key: [] for kind in table.kinds if kind.key in bad}
    for index in torch.isin(table.rows_NW[:, 0], torch.tensor(numbers, device="cpu")).nonzero().flatten().tolist():
        rank, shard = table.report(index)
        found[shard.key].append((rank, shard))
    return [problem for key, shards in found.items() for problem in _key_problems(key, shards, verb)]


def tensor_problems(by_rank: Sequence[Sequence[ShardReport]], verb: str) -> list[str]:
    """Everything wrong with the shards of all ranks together, one line each.

    Per key: one dtype, one global shape, boxes inside it, and main replicas that cover each element
    exactly once. ``verb`` is "saved" or "asked for".
    Cost: near linear in the boxes for grids and flattened ranges; holes are worked out only where
    the count of elements says that there are some.
    """
    shards: dict[str, list[tuple[int, ShardReport]]] = defaultdict(list)
    for rank, reports in enumerate(by_rank):
        for report in reports:
            shards[report.key].append((rank, report))
    return [problem for key, found in shards.items() for problem in _key_problems(key, found, verb)]


def _key_problems(key: str, found: list[tuple[int, ShardReport]], verb: str) -> list[str]:
    first_rank, first = found[0]
    for name in ("dtype", "shape"):
        for rank, report in found:
            ours, theirs = getattr(first, name), getattr(report, name)
            if ours != theirs:
                label = "global shape" if name == "shape" else name
                return [f"{key}: rank {first_rank} says {label} {ours}, rank {rank} says {theirs}; all ranks agree"]
    outside = [
        f"{describe(key, box, first.shape)}: rank {rank}'s box leaves the global shape {first.shape}"
        for rank, report in found
        for box in report.boxes
        if not box.within(first.shape)
    ]
    if outside:
        return outside
    owners = [(rank, box) for rank, report in found if report.main for box in report.boxes]
    boxes = [box for _, box in owners]
    problems = [_overlap(key, first.shape, owners[a], owners[b], verb) for a, b in overlaps(boxes)]
    if problems or sum(box.volume for box in boxes) < prod(first.shape):
        left = holes(first.shape, boxes)
        if left:
            problems.append(_hole(key, first.shape, left, owners, found, verb))
    return problems


def _overlap(key: str, shape: tuple[int, ...], a: tuple[int, Box], b: tuple[int, Box], verb: str) -> str:
    return (
        f"{describe(key, a[1], shape)} of rank {a[0]} and {describe(key, b[1], shape)} of rank {b[0]} overlap, and "
        f"both are main replicas: each element is {verb} by one; give the copies another replica_id than 0 "
        "(of DTensors on slices of a mesh by ShardedTensor.from_dtensor)"
    )


def _hole(
    key: str,
    shape: tuple[int, ...],
    left: list[Box],
    owners: list[tuple[int, Box]],
    found: list[tuple[int, ShardReport]],
    verb: str,
) -> str:
    where = ", ".join(describe(key, box, shape) for box in left[:4]) + (", ..." if len(left) > 4 else "")
    if owners:
        owned = ", ".join(f"rank {rank} has {describe('', box, shape)}" for rank, box in owners[:4])
        more = ", ..." if len(owners) > 4 else ""
        return f"{where}: {verb} by no main replica ({owned}{more}). A rank or a shard is missing from the state dict"
    if any(report.main for _, report in found):
        return f"{where}: {verb} by no rank; only empty shards of {key} were given. A rank or a shard is missing"
    ranks = sorted({rank for rank, _ in found})
    return f"{where}: {verb} by no main replica; ranks {ranks} hold replicas only. One rank needs replica_id 0"


def object_problems(by_rank: Sequence[Sequence[ObjectReport]], verb: str) -> list[str]:
    """The same for grids of objects: one shape per key, each cell held by one main replica."""
    cells: dict[str, list[tuple[int, ObjectReport]]] = defaultdict(list)
    for rank, reports in enumerate(by_rank):
        for report in reports:
            cells[report.key].append((rank, report))
    problems = []
    for key, found in cells.items():
        shapes = {report.shape for _, report in found}
        if len(shapes) > 1:
            problems.append(f"{key}: ranks name the object grids {sorted(shapes)}; all ranks agree")
            continue
        holders: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, report in found:
            if report.main:
                holders[report.offset].append(rank)
        twice = {cell: ranks for cell, ranks in holders.items() if len(ranks) > 1}
        problems += [
            f"{key}: cell {cell} is {verb} by ranks {ranks}; one is the main replica" for cell, ranks in twice.items()
        ]
        empty = [cell for cell in product(*map(range, shapes.pop())) if cell not in holders]
        if empty:
            problems.append(f"{key}: cells {empty[:8]} are {verb} by no main replica; a rank or its object is missing")
    return problems


def name_clashes(tensors: Iterable[str], objects: Iterable[str]) -> list[str]:
    """Keys that are both a tensor and a stored object."""
    return [f"{key}: a tensor and an object share this key" for key in sorted(set(tensors) & set(objects))]


def raise_problems(problems: Sequence[str], verb: str, kind: type[CheckpointError]) -> None:
    """One error that lists every problem."""
    if problems:
        raise kind(
            problems[0] if len(problems) == 1 else _listed(f"{len(problems)} problems in what is {verb}", problems)
        )


def _listed(title: str, lines: Sequence[str]) -> str:
    return "\n  ".join([f"{title}:", *lines])
