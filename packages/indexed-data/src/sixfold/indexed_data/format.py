"""The .idx header and the dtype codes, as data.

    bytes <--> Header (this file) --> index.py

Pure: no files. S is the number of sequences, D the number of document
boundaries, which is documents + 1.

    offset  bytes  content
    0       9      MMIDIDX 0 0
    9       8      version, 1
    17      1      dtype code
    18      8      S
    26      8      D
    34      4 S    int32 sequence lengths, in tokens
            8 S    int64 sequence pointers, in bytes from the start of .bin
            8 D    int64 document boundaries: 0, then the sequence count at each document end
            S      int8 modes, only in a multimodal pair; nothing in the header tells

Everything is little-endian and packed, so the arrays are unaligned. Source: the layout that Megatron-LM has
written since 2019, as megatron-core 0.16.1 writes it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError, Problem

MAGIC = b"MMIDIDX\0\0"
FAIRSEQ_MAGIC = b"TNTIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
UINT16_VOCABULARY = 65_500  # the peer's line, not 65,536: the dtype of a file must not depend on who wrote it


class DType(Enum):
    """The dtypes that have a code in the header. There is none for uint32."""

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, dtype: npt.DTypeLike) -> int:
        """The header code of a numpy dtype; IndexedDataError if it has none."""
        try:
            name = "None" if dtype is None else np.dtype(dtype).name  # numpy takes None for float64
        except TypeError:
            name = str(dtype)
        if name not in cls.__members__:
            raise IndexedDataError(
                f"dtype {name} has no code in an .idx header; those with one are {', '.join(cls.__members__)}"
            )
        return int(cls[name].value)

    @classmethod
    def dtype_from_code(cls, code: int) -> type[np.number[Any]]:
        """The numpy scalar type of a header code; IndexedDataError if there is none."""
        try:
            name = cls(code).name
        except ValueError:
            codes = ", ".join(f"{member.value} {member.name}" for member in cls)
            raise IndexedDataError(f"dtype code {code} is unknown; the codes are {codes}") from None
        scalar: type[np.number[Any]] = getattr(np, name)
        return scalar

    @classmethod
    def size(cls, key: int | npt.DTypeLike) -> int:
        """Bytes of one item of a dtype or of a header code."""
        if isinstance(key, int):
            return np.dtype(cls.dtype_from_code(key)).itemsize
        cls.code_from_dtype(key)
        return np.dtype(key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type[np.number[Any]]:
        """uint16 for vocabularies below 65,500, else (or for None) int32."""
        return np.uint16 if cardinality is not None and cardinality < UINT16_VOCABULARY else np.int32


_DTYPES: dict[int, np.dtype[Any]] = {member.value: np.dtype(member.name) for member in DType}


@dataclass(frozen=True, slots=True)
class Header:
    """The first 34 bytes of an .idx file."""

    dtype: np.dtype[Any]
    sequences: int  # S
    boundaries: int  # D: documents + 1

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, DType.code_from_dtype(self.dtype), self.sequences, self.boundaries)

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Where lengths, pointers, boundaries and modes begin. Python ints: a hostile S of 2^60 cannot overflow."""
        pointers = HEADER.size + 4 * self.sequences
        boundaries = pointers + 8 * self.sequences
        return HEADER.size, pointers, boundaries, boundaries + 8 * self.boundaries

    def index_bytes(self, multimodal: bool) -> int:
        """The size that the .idx file must have at least."""
        return self.offsets[3] + (self.sequences if multimodal else 0)

    @classmethod
    def unpack(cls, data: bytes, path: str) -> Header:
        """Read the header of the file at ``path``; ``data`` is its first 34 bytes, or all of them if it has fewer.

        Raises:
            IndexedDataError: too short, or magic, version or dtype code are not those of this format.
        """
        rewrite = "Write the pair again from its source"
        if len(data) < HEADER.size:
            rule = Problem(
                "an .idx begins with its header", path, f"{len(data)} bytes", f"at least {HEADER.size} bytes"
            )
            raise IndexedDataError.broken(rule, rewrite)
        magic, version, code, sequences, boundaries = HEADER.unpack(data[: HEADER.size])
        if magic.startswith(FAIRSEQ_MAGIC):
            rule = Problem(
                "this is the Megatron layout", path, f"{FAIRSEQ_MAGIC!r}, fairseq's older layout", f"{MAGIC!r}"
            )
            raise IndexedDataError.broken(
                rule, "Write the pair again with a Megatron-LM of 2020 or later, or with build"
            )
        if magic != MAGIC:
            raise IndexedDataError.broken(Problem("the magic begins an .idx", path, repr(magic), repr(MAGIC)), rewrite)
        if version != VERSION:
            rule = Problem("the version is known", path, f"version {version}", f"version {VERSION}")
            raise IndexedDataError.broken(rule, rewrite)
        dtype = _DTYPES.get(code)
        if dtype is None:
            rule = Problem("the dtype code is known", path, f"dtype code {code}", "a code from 1 to 8")
            raise IndexedDataError.broken(rule, rewrite)
        return cls(dtype, sequences, boundaries)
