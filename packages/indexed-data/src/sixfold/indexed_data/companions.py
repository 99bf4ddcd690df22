"""Files that may lie beside a pair: their names, the header of the binary ones, and whether we made them.

    loss_mask.py, provenance.py, manifest.py --> companions (this file) --> writer.py, reader.py

A pair is whole without them. Each says which pair it belongs to, by counts and a checksum of sixteen places of each
array of the index and of the ids, both ends among them: who replaces a pair by other means leaves a companion that does
not fit, and opening it says so. A pair that differs only between those places is found by ``verify``, by its manifest.

    offset  bytes  content of a binary companion
    0       8      its magic
    8       4      version, 2
    12      4      CRC-32 of the whole file, with 0 in these bytes
    16      8 x 4  sequences, boundaries, bytes of .bin, digest of the index and of ids
    48      8      number of rows of its array
    56      8      bytes behind the array
    64             the array, int64; then what its kind says
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.index import LOOKED_AT, Index, places
from sixfold.indexed_data.storage import Bytes, IdSource, map_file

MASK, SOURCES, MANIFEST = ".mask", ".sources", ".manifest.json"
ENDINGS = (MASK, SOURCES, MANIFEST)
MANIFEST_HEAD = b'{"format": "sixfold-indexed-data manifest"'
_HEADS = {MASK: b"SIXMASK\0", SOURCES: b"SIXSRCS\0", MANIFEST: MANIFEST_HEAD}
_HEADER = struct.Struct("<8sII6Q")
_VERSION = 2
CHECKSUM = slice(12, 16)  # where the header of a companion, and of a view, has its checksum


@dataclass(frozen=True, slots=True)
class Facts:
    """What tells one pair from another, at a cost that does not grow with it."""

    sequences: int
    boundaries: int
    bin_bytes: int
    digest: int

    @classmethod
    def of(cls, index: Index, ids: IdSource) -> Facts:
        return cls(index.sequences, index.header.boundaries, index.bin_bytes, digest_of(index, ids))


def digest_of(index: Index, ids: IdSource) -> int:
    """A checksum of some places of the index and of the ids. O(1): 16 reads of 64 ids, asked together of a store."""
    import zlib  # only here: most readers need none

    digest, total = index.digest(), index.bin_bytes // index.itemsize
    begins = np.asarray(places(total), np.int64)
    ids.prefetch(begins, np.minimum(begins + LOOKED_AT, total))
    for begin in begins.tolist():
        digest = zlib.crc32(ids.ids(begin, min(LOOKED_AT, total - begin)).tobytes(), digest)
    return digest


@dataclass(frozen=True, slots=True)
class Companion:
    """A binary companion, mapped."""

    path: str
    array: npt.NDArray[np.int64]
    behind: bytes
    checksum: int  # as its header says
    raw: Bytes

    def problems(self) -> Iterator[Problem]:
        """Whether it holds what was written. Reads it whole."""
        yield from checksum_problems(self.path, self.raw)


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
    return with_checksum([_HEADER.pack(_HEADS[ending], _VERSION, 0, *numbers), np.ascontiguousarray(array), behind])


def with_checksum(pieces: Sequence[Any]) -> list[Any]:
    """The pieces of a file, with their checksum in the header, which is the first of them."""
    header = bytearray(pieces[0])
    header[CHECKSUM] = struct.pack("<I", _crc(pieces))
    return [bytes(header), *pieces[1:]]


def checksum_in(header: bytes | bytearray) -> int:
    """The checksum that the header of a companion or a view says."""
    return int.from_bytes(header[CHECKSUM], "little")


def checksum_problems(path: str, raw: Bytes) -> Iterator[Problem]:
    """Whether a companion or a view has the checksum that its header says. Reads it whole."""
    head = bytearray(raw[: CHECKSUM.stop].tobytes())
    expected = checksum_in(head)
    head[CHECKSUM] = bytes(4)
    found = _crc([head, raw[CHECKSUM.stop :]])
    if found != expected:
        rule = "a companion has the checksum that its header says"
        yield Problem(rule, path, f"CRC-32 {found:08x}", f"{expected:08x}")


def _crc(pieces: Sequence[Any]) -> int:
    import zlib  # only here: most readers need none

    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


def replaced(prefix: str, made: Mapping[str, str]) -> list[tuple[str | None, str]]:
    """(new file, its name) of the companions of a pair that is published: those ``made``, and ours that go."""
    return [(made.get(ending), prefix + ending) for ending in ENDINGS if ending in made or is_ours(prefix + ending)]


def map_if_there(path: str) -> Bytes | None:
    """The bytes of a file, None if there is none."""
    return map_file(path) if os.path.exists(path) else None


def read_companion(
    prefix: str, ending: str, index: Index, ids: IdSource, columns: int, load: Callable[[str], Bytes | None]
) -> Companion | None:
    """A companion whose array has ``columns`` columns; None if the pair has none.

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
    _, version, checksum, *numbers = _HEADER.unpack(raw[: _HEADER.size].tobytes())
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
    if Facts(*numbers[:4]) != (facts := Facts.of(index, ids)):
        found = f"{numbers[0]} sequences in {numbers[2]} bytes, or another index, or other ids"
        raise _wrong_companion(
            Problem("a companion belongs to its pair", path, found, f"{facts.sequences} in {facts.bin_bytes} bytes")
        )
    end = _HEADER.size + 8 * columns * rows
    array: npt.NDArray[np.int64] = raw[_HEADER.size : end].view("<i8")
    return Companion(path, array.reshape(rows, columns) if columns > 1 else array, raw[end:].tobytes(), checksum, raw)


def _wrong_companion(problem: Problem) -> IndexedDataError:
    return IndexedDataError.broken(problem, "Build the pair again, or remove this file")
