"""The index of a pair: views over the bytes of the .idx, and the rules that every sound pair keeps.

    .idx bytes --> Index (this file) --> reader.py, verifying.py

No files are touched here: the bytes come in as one array, and the size of .bin as a number. A name that ends in _S
is an array of shape (S,), in _D of shape (D,): S sequences, D = documents + 1 boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.format import HEADER, Header

DAMAGED = "Run `sixfold-data verify`, then write the pair again"
BLOCK = 1 << 18  # sequences per step of a full check: temporaries stay in the cache and small beside the index

Bytes = npt.NDArray[np.uint8]


class Index:
    """The arrays of one .idx, not copied, and the one place that turns a sequence number into a place in .bin."""

    __slots__ = (
        "bin_bytes",
        "bin_path",
        "boundaries_D",
        "header",
        "idx_path",
        "itemsize",
        "lengths_S",
        "modes_S",
        "pointers_S",
        "sequences",
        "trailing_bytes",
    )

    def __init__(self, raw: Bytes, prefix: str, bin_bytes: int, multimodal: bool) -> None:
        """View ``raw``, the whole .idx of ``prefix``, whose .bin has ``bin_bytes`` bytes. O(1).

        Raises:
            IndexedDataError: the header is wrong, or its counts ask for more bytes than there are.
        """
        self.idx_path, self.bin_path = prefix + ".idx", prefix + ".bin"
        self.header = header = Header.unpack(raw[: HEADER.size].tobytes(), self.idx_path)
        need = header.index_bytes(multimodal)
        if raw.size < need:
            counts = f"{header.sequences} sequences, {header.boundaries} boundaries"
            problem = Problem(
                f"an .idx holds the {counts}{' and the modes' if multimodal else ''} that its header counts",
                self.idx_path,
                f"{raw.size} bytes",
                f"at least {need} bytes",
            )
            raise IndexedDataError.broken(
                problem,
                "The file was cut or its header damaged: write the pair again",
            )
        lengths, pointers, boundaries, modes = header.offsets
        self.lengths_S = raw[lengths:pointers].view("<i4")
        self.pointers_S = raw[pointers:boundaries].view("<i8")
        self.boundaries_D = raw[boundaries:modes].view("<i8")
        self.modes_S = raw[modes : modes + header.sequences].view("i1") if multimodal else None
        self.sequences, self.itemsize = header.sequences, header.dtype.itemsize
        self.bin_bytes, self.trailing_bytes = bin_bytes, int(raw.size - need)

    def span(self, i: int) -> tuple[int, int]:
        """(first token in .bin, number of tokens) of sequence ``i``, 0 <= i < S. Checked, O(1).

        [Note: checked on every read] A sequence ends where the next one begins. So the read that meets a changed
        length or pointer raises, and never gives the tokens of a neighbour. numpy takes a length of -1 for
        "everything", so the sign is checked too.
        """
        pointer, length = self.pointers_S.item(i), self.lengths_S.item(i)
        end = pointer + length * self.itemsize
        following = self.pointers_S.item(i + 1) if i + 1 < self.sequences else self.bin_bytes
        if end != following or length < 0 or pointer < 0 or end > self.bin_bytes or pointer % self.itemsize:
            problem = Problem(
                "a sequence ends where the next one begins, inside .bin",
                f"{self.idx_path}: sequence {i}",
                f"{length} tokens from byte {pointer}, so an end at byte {end}",
                f"an end at byte {following} of {self.bin_bytes}",
            )
            raise IndexedDataError.broken(problem, DAMAGED)
        return pointer // self.itemsize, length


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
