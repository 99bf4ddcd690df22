"""The compact manifest's integers and texts by their places in the mapped file; compact.py says what they mean.

Nothing in the file is believed: a place lies in it, and the blocks of a place are checked before it is looked at.
"""

from __future__ import annotations

import struct
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from operator import le
from typing import NamedTuple

import torch

from sixfold.dist_ckpt.errors import CorruptError
from sixfold.dist_ckpt.files.dcp_pickle import sort_key

MAGIC = int.from_bytes(b"6FCKPT\x00\x01", "little")
FIXED = 5  # integers of a tensor before its shape
_HEAD = 9  # integers
_MOST_AXES = 1 << 12
_FEW = 16  # who asks for more than one of so many keys has them all decoded, once
_MOST_KNOWN = 1 << 18  # keys decoded and kept
_KEYS_AT_ONCE = 1 << 12


class _Numbers(NamedTuple):
    """Numbers of the head."""

    is_alone: int
    dtypes: int
    files: int
    objects: int
    tensors: int
    chunks: int
    dims: int
    text_bytes: int


class _Head(_Numbers):
    """And where what follows begins, in bytes; each place is worked out once."""

    @cached_property
    def texts(self) -> int:
        return 1 + self.dtypes + self.files + self.objects + self.tensors

    @cached_property
    def at_objects(self) -> int:
        return 8 * (_HEAD + self.texts)

    @cached_property
    def at_tensors(self) -> int:
        return self.at_objects + 24 * self.objects

    @cached_property
    def at_starts(self) -> int:
        return self.at_tensors + 8 * (self.tensors + 1) * (FIXED + self.dims)

    @cached_property
    def at_chunks(self) -> int:
        return self.at_starts + 8 * self.chunks

    @cached_property
    def at_text(self) -> int:
        return self.at_chunks + 8 * self.chunks * (2 * self.dims + 3)

    @cached_property
    def nbytes(self) -> int:
        return self.at_text + self.text_bytes


class Reader:
    """Integers and texts of the file by their places."""

    def __init__(self, data: memoryview, check: Callable[[int, int], None]) -> None:
        self._data, self._check = data, check
        # How often ``find`` was, and what it then read, by the run of texts: two runs begin alike where one is empty.
        self._asked: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int], dict[bytes, int]] = {}
        if len(data) < 8 * _HEAD:
            raise CorruptError(f"{len(data)} bytes are no compact manifest")
        magic, *numbers = self.int64s(0, _HEAD)
        if magic != MAGIC:
            raise CorruptError("not a compact manifest, or one of a version that is not read here")
        self.head = head = _Head(*numbers)
        if min(head) < 0 or head.dims > _MOST_AXES or head.nbytes != len(data):
            raise CorruptError(f"{len(data)} bytes do not hold {head}")

    def int64s(self, at: int, count: int) -> tuple[int, ...]:
        """``count`` integers from byte ``at`` on."""
        self._check(at, at + 8 * count)
        return struct.unpack_from(f"<{count}q", self._data, at)

    def array(self, at: int, count: int) -> torch.Tensor:
        """The same as a tensor, where they are mapped; ``count`` > 0."""
        self._check(at, at + 8 * count)
        if sys.byteorder == "big":
            swapped = torch.frombuffer(bytearray(self._data[at : at + 8 * count]), dtype=torch.uint8)
            return swapped.view(-1, 8).flip(1).contiguous().view(torch.int64).view(-1)
        return torch.frombuffer(self._data, dtype=torch.int64, count=count, offset=at)

    def text(self, number: int) -> str:
        """Text ``number``."""
        try:
            return self.encoded(number).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptError(f"text {number} is not UTF-8: {error}") from error

    def encoded(self, number: int) -> bytes:
        """Its bytes."""
        at = 8 * (_HEAD + number - 1)
        start, stop = self.int64s(at, 2) if number else (0, *self.int64s(at + 8, 1))
        if not 0 <= start <= stop <= self.head.text_bytes:
            raise CorruptError(f"text {number} is bytes {start} to {stop} of {self.head.text_bytes}")
        first = self.head.at_text + start
        self._check(first, first + stop - start)
        return bytes(self._data[first : first + stop - start])

    def sorted_texts(self, first: int, count: int) -> Iterator[str]:
        """All of ``count`` keys from text ``first`` on, each of which ``find`` finds."""
        for _ in self._sorted(first, count):
            pass
        return (self.text(number) for number in range(first, first + count))

    def _sorted(self, first: int, count: int) -> Iterator[bytes]:
        """``encoded`` of ``count`` keys from text ``first`` > 0 on, many at once; each is past the one before."""
        last = b""
        for low in range(first, first + count, _KEYS_AT_ONCE):
            ends = self.int64s(8 * (_HEAD + low - 1), 1 + min(_KEYS_AT_ONCE, first + count - low))
            if ends[0] < 0 or ends[-1] > self.head.text_bytes or not all(map(le, ends, ends[1:])):
                raise CorruptError(f"texts from {low} on are no bytes of {self.head.text_bytes} in order")
            at = self.head.at_text
            self._check(at + ends[0], at + ends[-1])
            for number, (start, stop) in enumerate(pairwise(ends), low):
                if (key := bytes(self._data[at + start : at + stop])) <= last and number > first:
                    raise CorruptError(f"the keys are not sorted at text {number}")
                yield key
                last = key

    def find(self, first: int, count: int, key: object) -> int | None:
        """The number of a key among ``count`` sorted texts from ``first`` on."""
        if not isinstance(key, str):
            return None
        wanted = sort_key(key)
        texts = first, count
        if texts in self._known:
            return self._known[texts].get(wanted)
        asked = self._asked[texts] = self._asked.get(texts, 0) + 1
        if asked * _FEW > count and count <= _MOST_KNOWN:
            known = self._known[texts] = {key: number for number, key in enumerate(self._sorted(first, count))}
            return known.get(wanted)
        number = first + bisect_left(range(first, first + count), wanted, key=self.encoded)
        return number - first if number < first + count and self.encoded(number) == wanted else None
