"""Parcels: what ranks send, a small pickle and the arrays that it names, which are neither pickled nor copied.

    value --> pack (this file) --> tensors that travel --> unpack --> value

Arrays are what an object gives to pickle as ``PickleBuffer`` (``plans.table.Encoded`` does). A rank that sends on what
others have sent puts their parcels into one ``Bundle``: it unpickles none of them, and of arrays that are equal, as the
names of tensors are on most ranks, it keeps and sends one.
"""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any, NamedTuple

_MOST_ALIKE = 8  # arrays of one length that a new one is compared with


class Parcel(NamedTuple):
    """A pickle and its arrays."""

    head: bytes
    arrays: tuple[bytes | memoryview, ...] = ()


def pack(value: Any) -> Parcel:
    """A value as it travels."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return Parcel(head, tuple(buffer.raw() for buffer in buffers))


def unpack(parcel: Parcel) -> Any:
    """The value: of a rank of this job, never of a file."""
    return pickle.loads(parcel.head, buffers=parcel.arrays)


class Bundle:
    """Parcels of several ranks, equal arrays once."""

    def __init__(self) -> None:
        self.heads: list[tuple[bytes, tuple[int, ...]]] = []
        self.arrays: list[bytes | memoryview] = []
        self._alike: dict[int, list[int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of heads and arrays."""
        return sum(len(head) for head, _ in self.heads) + sum(map(len, self.arrays))

    def add(self, parcel: Parcel) -> None:
        """The next one."""
        self.heads.append((parcel.head, tuple(map(self._number, parcel.arrays))))

    def _number(self, array: bytes | memoryview) -> int:
        known = self._alike.setdefault(len(array), [])
        for number in known:
            if self.arrays[number] == array:
                return number
        if len(known) < _MOST_ALIKE:
            known.append(len(self.arrays))
        self.arrays.append(array)
        return len(self.arrays) - 1

    def parcels(self) -> list[Parcel]:
        """All of them, in their order; those that share an array share its memory."""
        uses = Counter(number for _, numbers in self.heads for number in numbers)
        arrays = [bytes(array) if uses[number] > 1 else array for number, array in enumerate(self.arrays)]
        return [Parcel(head, tuple(arrays[number] for number in numbers)) for head, numbers in self.heads]


def encode_index(bundle: Bundle) -> bytes:
    """What is sent before the arrays."""
    return pickle.dumps((bundle.heads, [len(array) for array in bundle.arrays]))


def decode_index(data: bytes) -> tuple[list[tuple[bytes, tuple[int, ...]]], list[int]]:
    """The heads with the numbers of their arrays, and the lengths of all arrays."""
    heads, lengths = pickle.loads(data)  # from a rank of this job
    return heads, lengths
