"""The rules that every sound pair keeps: those that opening a pair checks, and all that verify checks.

    Index, size of .bin --> problems (this file) --> reader.py, verifying.py

No files are touched here. A name that ends in _S is an array of shape (S,), in _D of shape (D,): S sequences,
D = documents + 1 boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import Problem
from sixfold.indexed_data.index import Index

BLOCK = 1 << 18  # sequences per step of a full check: temporaries stay in the cache and small beside the index


def open_problems(index: Index) -> Iterator[Problem]:
    """The rules that cost O(1): both ends of every array, and the size of .bin."""
    if index.header.boundaries == 0:
        yield Problem("the document index starts at 0", index.idx_path, "an empty document index", "0 first")
    else:
        first, last = index.boundaries_D.item(0), index.boundaries_D.item(-1)
        if first != 0:
            yield Problem("the document index starts at 0", index.idx_path, str(first), "0")
        if last != index.sequences:
            rule = "the document index ends at the number of sequences"
            yield Problem(rule, index.idx_path, str(last), str(index.sequences))
    need = 0
    if index.sequences:
        if index.pointers_S.item(0) != 0:
            rule = "the first sequence begins at byte 0"
            yield Problem(rule, f"{index.idx_path}: sequence 0", f"byte {index.pointers_S.item(0)}", "byte 0")
        need = index.pointers_S.item(-1) + index.lengths_S.item(-1) * index.itemsize
    if need != index.bin_bytes:
        rule = "the last sequence ends where .bin ends"
        yield Problem(rule, index.bin_path, f"{index.bin_bytes} bytes", f"{need} bytes, as {index.idx_path} says")
    elif index.bin_bytes % index.itemsize:
        rule = f"a .bin of {index.header.dtype} holds whole ids"
        yield Problem(rule, index.bin_path, f"{index.bin_bytes} bytes", f"a multiple of {index.itemsize}")


def all_problems(index: Index) -> Iterator[Problem]:
    """Every rule, the first place of each and how many more there are. O(S + D), vectorised in blocks."""
    yield from open_problems(index)
    yield from _first_break(
        "a length is not negative",
        "sequence",
        index,
        lambda a, b: index.lengths_S[a:b] < 0,
        lambda i: (f"{index.lengths_S.item(i)} tokens", ">= 0"),
    )
    yield from _first_break(
        "a sequence ends where the next one begins",
        "sequence",
        index,
        lambda a, b: _ends(index, a, b) != index.pointers_S[a + 1 : b + 1],
        lambda i: (f"an end at byte {_ends(index, i, i + 1).item()}", f"byte {index.pointers_S.item(i + 1)}"),
        count=max(0, index.sequences - 1),
    )
    yield from _first_break(
        "the document index never decreases",
        "document",
        index,
        lambda a, b: index.boundaries_D[a + 1 : b + 1] < index.boundaries_D[a:b],
        lambda i: (f"an end at sequence {index.boundaries_D.item(i + 1)}", f">= {index.boundaries_D.item(i)}"),
        count=max(0, index.header.boundaries - 1),
    )


def _ends(index: Index, a: int, b: int) -> npt.NDArray[np.int64]:
    """The byte after each of the sequences a..b."""
    ends: npt.NDArray[np.int64] = index.pointers_S[a:b] + index.lengths_S[a:b].astype(np.int64) * index.itemsize
    return ends


def _first_break(
    rule: str,
    noun: str,
    index: Index,
    broken: Callable[[int, int], npt.NDArray[np.bool_]],
    describe: Callable[[int], tuple[str, str]],
    count: int | None = None,
) -> Iterator[Problem]:
    """At most one Problem: the first i below ``count`` (default S) whose ``broken(a, b)[i - a]`` is set."""
    count = index.sequences if count is None else count
    first, total = -1, 0
    for a, b in pairwise([*range(0, count, BLOCK), count]):
        bad: npt.NDArray[Any] = np.flatnonzero(broken(a, b))
        if bad.size and first < 0:
            first = a + int(bad[0])
        total += int(bad.size)
    if total:
        value, expected = describe(first)
        more = f", and {total - 1} more" if total > 1 else ""
        yield Problem(rule, f"{index.idx_path}: {noun} {first}{more}", value, expected)
