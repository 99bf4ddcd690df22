"""What a pair was made of, and checksums of its bytes: PREFIX.manifest.json.

    build, merge --> Manifest (this file) --> PREFIX.manifest.json --> verify, info

A block is (bytes, CRC-32 of them). The blocks of .bin follow each other to its end. Blocks of a joined pair are those
of its parts, so that joining reads nothing. A manifest has no date: the same build writes the same one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sixfold.indexed_data.companions import MANIFEST, is_ours
from sixfold.indexed_data.errors import Problem
from sixfold.indexed_data.storage import Bytes

BLOCK_BYTES = 16 << 20
_FORMAT, _VERSION = "sixfold-indexed-data manifest", 1
Blocks = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Blocks of both files, and a record of each build that made a run of the documents; None where it is unknown."""

    idx: Blocks
    bin: Blocks
    builds: list[dict[str, Any] | None]

    def text(self) -> str:
        import json  # only here: reading pairs should not load it

        fields = {"format": _FORMAT, "version": _VERSION, "builds": self.builds, "idx": self.idx, "bin": self.bin}
        return json.dumps(fields)


def blocks_of(data: Bytes) -> Blocks:
    """The blocks of a file's bytes. Reads them all."""
    import zlib  # only here: reading pairs should not load it

    pieces = (data[begin : begin + BLOCK_BYTES] for begin in range(0, data.size, BLOCK_BYTES))
    return [(piece.size, zlib.crc32(piece.data)) for piece in pieces]


def read_manifest(prefix: str) -> Manifest | Problem | None:
    """The manifest beside a pair, what is wrong with it, or None where there is none or a file of somebody else."""
    import json  # only here: reading pairs should not load it

    path = prefix + MANIFEST
    if not os.path.exists(path) or not is_ours(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            fields = json.load(file)
        if fields["version"] != _VERSION:
            found = f"version {fields['version']}"
            return Problem("the version of a manifest is known", path, found, f"version {_VERSION}")
        idx, bin_ = ([(int(nbytes), int(crc)) for nbytes, crc in fields[name]] for name in ("idx", "bin"))
        return Manifest(idx, bin_, list(fields["builds"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Problem("a manifest can be read", path, str(error), "the JSON that build wrote")


def block_problems(path: str, data: Bytes, blocks: Sequence[tuple[int, int]]) -> Iterator[Problem]:
    """The first block of a file that is not what the manifest says. Reads all bytes up to it."""
    import zlib  # only here: reading pairs should not load it

    total = sum(nbytes for nbytes, _ in blocks)
    if total != data.size:
        yield Problem(
            "a file of a pair has the size that its manifest says", path, f"{data.size} bytes", f"{total} bytes"
        )
        return
    begin = 0
    for nbytes, expected in blocks:
        found = zlib.crc32(data[begin : begin + nbytes].data)
        if found != expected:
            where = f"{path}: bytes {begin} to {begin + nbytes}"
            rule = "a block has the checksum that the manifest says"
            yield Problem(rule, where, f"CRC-32 {found:08x}", f"{expected:08x}")
            return
        begin += nbytes
