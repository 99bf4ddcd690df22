"""Files that may lie beside a pair: their names, the header of the binary ones, and whether we made them.

    loss_mask.py, provenance.py, manifest.py --> companions (this file) --> writer.py, reader.py

A pair is whole without them. Each says which pair it belongs to, by counts and a checksum of some places of the index:
who replaces a pair by other means leaves a companion that does not fit, and opening it says so.

    offset  bytes  content of a binary companion
    0       8      its magic
    8       4      version, 1
    12      4      0
    16      8 x 4  sequences, boundaries, bytes of .bin, digest of the index
    48      8      number of rows of its array
    56      8      bytes behind the array
    64             the array, int64; then what its kind says
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.index import Index
from sixfold.indexed_data.storage import Bytes, map_file

MASK, SOURCES, MANIFEST = ".mask", ".sources", ".manifest.json"
ENDINGS = (MASK, SOURCES, MANIFEST)
_HEADS = {MASK: b"SIXMASK\0", SOURCES: b"SIXSRCS\0", MANIFEST: b'{"format": "sixfold-indexed-data manifest"'}
_HEADER = struct.Struct("<8sI4x6Q")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What tells one pair from another, at a cost that does not grow with it."""

    sequences: int
    boundaries: int
    bin_bytes: int
    digest: int

    @classmethod
    def of(cls, index: Index) -> Facts:
        return cls(index.sequences, index.header.boundaries, index.bin_bytes, index.digest())


def is_ours(path: str) -> bool:
    """Whether a companion's name holds what we write there."""
    ending = next(ending for ending in ENDINGS if path.endswith(ending))
    try:
        with open(path, "rb") as file:
            return file.read(len(_HEADS[ending])) == _HEADS[ending]
    except OSError:
        return False


def refuse_foreign(prefix: str, endings: tuple[str, ...]) -> None:
    """IndexedDataError if a companion would take the place of a file that is none."""
    for ending in endings:
        if os.path.lexists(prefix + ending) and not is_ours(prefix + ending):
            raise IndexedDataError(
                f"{prefix}{ending}: this file is not one that this package wrote, and the pair has one of that name; "
                "move it away, or choose another output"
            )


def pack(ending: str, facts: Facts, array: npt.NDArray[np.int64], behind: bytes = b"") -> list[Any]:
    """The pieces of a binary companion, in order."""
    numbers = (facts.sequences, facts.boundaries, facts.bin_bytes, facts.digest, len(array), len(behind))
    return [_HEADER.pack(_HEADS[ending], _VERSION, *numbers), np.ascontiguousarray(array), behind]


def replaced(prefix: str, made: Mapping[str, str]) -> list[tuple[str | None, str]]:
    """(new file, its name) of the companions of a pair that is published: those ``made``, and ours that go."""
    return [(made.get(ending), prefix + ending) for ending in ENDINGS if ending in made or is_ours(prefix + ending)]


def map_if_there(path: str) -> Bytes | None:
    """The bytes of a file, None if there is none."""
    return map_file(path) if os.path.exists(path) else None


def read_companion(
    prefix: str, ending: str, index: Index, columns: int, load: Callable[[str], Bytes | None] = map_if_there
) -> tuple[npt.NDArray[np.int64], bytes] | None:
    """(the array of ``columns`` columns, mapped; the bytes behind it) of a companion; None if the pair has none.

    Raises:
        IndexedDataError: it is no such file, is cut, or belongs to another pair.
    """
    path = prefix + ending
    raw = load(path)
    if raw is None:
        return None
    if raw.size < _HEADER.size or raw[: len(_HEADS[ending])].tobytes() != _HEADS[ending]:
        raise _wrong_companion(
            Problem("a companion of a pair begins with its header", path, f"{raw.size} bytes", "its header")
        )
    _, version, *numbers = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    rows, behind = numbers[4:]
    if version != _VERSION:
        raise _wrong_companion(
            Problem("the version of a companion is known", path, f"version {version}", f"version {_VERSION}")
        )
    need = _HEADER.size + 8 * columns * rows + behind
    if raw.size != need:
        raise _wrong_companion(
            Problem("a companion has the size that its header says", path, f"{raw.size} bytes", f"{need} bytes")
        )
    if Facts(*numbers[:4]) != (facts := Facts.of(index)):
        found = f"{numbers[0]} sequences in {numbers[2]} bytes, or another index"
        raise _wrong_companion(
            Problem("a companion belongs to its pair", path, found, f"{facts.sequences} in {facts.bin_bytes} bytes")
        )
    end = _HEADER.size + 8 * columns * rows
    array: npt.NDArray[np.int64] = raw[_HEADER.size : end].view("<i8")
    return array.reshape(rows, columns) if columns > 1 else array, raw[end:].tobytes()


def _wrong_companion(problem: Problem) -> IndexedDataError:
    return IndexedDataError.broken(problem, "Build the pair again, or remove this file")
