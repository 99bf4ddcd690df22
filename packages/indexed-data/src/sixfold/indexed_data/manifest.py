"""What a pair was made of, and checksums of its bytes: PREFIX.manifest.json.

    build, merge --> Manifest (this file) --> PREFIX.manifest.json --> verify, info

A block is (bytes, CRC-32 of them). The blocks of .bin follow each other to its end. Blocks of a joined pair are those
of its parts, so that joining reads nothing. A manifest has no date: the same build writes the same one.
It also names the mask and the provenance of its pair, with the checksums that their headers say: one that is not there,
or that another build made, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sixfold.indexed_data.companions import MANIFEST, MANIFEST_HEAD, MASK, SOURCES, map_if_there
from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.storage import Bytes

BLOCK_BYTES = 16 << 20
_FORMAT, _VERSION = "sixfold-indexed-data manifest", 2
Blocks = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Blocks of both files, and a record of each build that made a run of the documents; None where it is unknown.

    ``beside`` has the ending and the checksum of each binary companion.
    """

    idx: Blocks
    bin: Blocks
    builds: list[dict[str, Any] | None]
    beside: Mapping[str, int]

    def text(self) -> str:
        import json  # only here: reading pairs should not load it

        fields = {"format": _FORMAT, "version": _VERSION, "builds": self.builds, "beside": dict(self.beside)}
        return json.dumps({**fields, "idx": self.idx, "bin": self.bin})


def blocks_of(data: Bytes) -> Blocks:
    """The blocks of a file's bytes. Reads them all."""
    import zlib  # only here: reading pairs should not load it

    pieces = (data[begin : begin + BLOCK_BYTES] for begin in range(0, data.size, BLOCK_BYTES))
    return [(piece.size, zlib.crc32(piece.data)) for piece in pieces]


def read_manifest(prefix: str) -> Manifest | Problem | None:
    """The manifest beside a pair, what is wrong with it or with a file that has its name, or None where there is none.

    Raises:
        IndexedDataError: its file cannot be opened.
    """
    raw, path = map_if_there(prefix + MANIFEST), prefix + MANIFEST
    if raw is not None and not _is_manifest(raw):
        return Problem("a manifest begins with its format", path, f"{raw[:44].tobytes()!r}", f"{MANIFEST_HEAD!r}")
    return None if raw is None else _parsed(path, raw)


def recorded_beside(prefix: str, load: Callable[[str], Bytes | None]) -> Mapping[str, int] | None:
    """The checksums of companions that a manifest says; None without one, or where the file is somebody else's.

    Raises:
        IndexedDataError: the manifest is damaged.
    """
    raw = load(prefix + MANIFEST)
    if raw is None or not _is_manifest(raw):
        return None
    found = _parsed(prefix + MANIFEST, raw)
    if isinstance(found, Problem):
        raise IndexedDataError.broken(found, "Build the pair again, or remove this file")
    return found.beside


def beside_problems(
    prefix: str, ending: str, beside: Mapping[str, int] | None, checksum: int | None
) -> Iterator[Problem]:
    """Whether a companion, of ``checksum`` or None where there is none, is the one that the manifest names."""
    if beside is None or beside.get(ending) == checksum:
        return
    found, expected = (
        "none" if each is None else f"one of CRC-32 {each:08x}" for each in (checksum, beside.get(ending))
    )
    yield Problem("a pair has the companions that its manifest names", prefix + ending, found, expected)


def _is_manifest(raw: Bytes) -> bool:
    return raw[: len(MANIFEST_HEAD)].tobytes() == MANIFEST_HEAD


def _parsed(path: str, raw: Bytes) -> Manifest | Problem:
    import json  # only here: reading pairs should not load it

    try:
        fields = json.loads(raw.tobytes())
        if fields["version"] != _VERSION:
            found = f"version {fields['version']}"
            return Problem("the version of a manifest is known", path, found, f"version {_VERSION}")
        idx, bin_ = ([(int(nbytes), int(crc)) for nbytes, crc in fields[name]] for name in ("idx", "bin"))
        beside = {ending: int(crc) for ending, crc in fields["beside"].items()}
        if not beside.keys() <= {MASK, SOURCES}:
            raise ValueError(f"companions {', '.join(sorted(beside))}")
        return Manifest(idx, bin_, list(fields["builds"]), beside)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
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
