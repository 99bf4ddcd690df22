"""Records: what a rank wrote of a generation, in a small file beside its frames.

    Written of writer.py --> Record.encode (this file) --> rank-<n> --> Record.decode --> restoring.py makes an index

A checkpoint on a disk has one index, which the first rank makes. Hosts share no disk. So each rank's record travels
with its frames, and whoever loads makes the index of all of them. A record is there last: frames without one count
for nothing.

Plain values in a pickle, behind its CRC-32; it is read by the unpickler that runs nothing.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, UnsafeError
from sixfold.dist_ckpt.formats import unpickle
from sixfold.dist_ckpt.formats.integrity import BLOCK_BYTES, FileDigest, Piece, crc32, join_pieces
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.memory_tier.generations import Generation
from sixfold.dist_ckpt.plans.shard_table import Encoded
from sixfold.dist_ckpt.save_load.writer import Written

_MAGIC = b"sixfold memory tier 1\n"


class Record(NamedTuple):
    """What a rank wrote, and what only the first rank has to say of a whole checkpoint.

    Attributes:
        common_bytes: as of ``RankContent``; "" but on the first rank. in_common, crc_names: likewise.
    """

    generation: Generation
    rank: int
    ranks: int
    written: Written
    common_bytes: bytes = b""
    in_common: tuple[str, ...] = ()
    crc_names: tuple[str, ...] = ()

    @property
    def file_bytes(self) -> dict[str, int]:
        """Sizes of the files of frames by name."""
        return {name: file.size for name, file in self.written.files.items()}

    def encode(self) -> bytes:
        """The content of the file."""
        own = self.written
        assert not own.contents and not own.compressed, "a tier writes plain files, and links none"
        plain = {
            "generation": [*self.generation],
            "rank": self.rank,
            "ranks": self.ranks,
            "table": [*own.table],
            "places": own.places,
            "objects": [[key, *place] for key, place in own.objects],
            "files": {name: [file.size, [*file.digests]] for name, file in own.files.items()},
            "numbers": own.numbers,
            "crcs": own.crcs,
            "common_bytes": self.common_bytes,
            "in_common": [*self.in_common],
            "crc_names": [*self.crc_names],
        }
        body = pickle.dumps(plain, protocol=4)
        return _MAGIC + crc32(body).to_bytes(4, "little") + body

    @classmethod
    def decode(cls, data: bytes, path: Path | str) -> Record:
        """What ``encode`` gave.

        Raises:
            CorruptError: it is something else. UnsafeError: it names a class.
        """
        start = len(_MAGIC) + 4
        body = data[start:]
        if not data.startswith(_MAGIC) or int.from_bytes(data[start - 4 : start], "little") != crc32(body):
            raise CorruptError(f"{path} is damaged: it does not match its own digest")
        try:
            return _of_plain(unpickle.loads(body, trusted_bytes=False))
        except UnsafeError:
            raise
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(f"{path} is no record of a snapshot: {type(error).__name__}: {error}") from error


def _of_plain(plain: Any) -> Record:
    attempt, step, save_id = plain["generation"]
    names, dims, rows = plain["table"]
    written = Written(
        Encoded(bytes(names), int(dims), bytes(rows)),
        places=bytes(plain["places"]),
        objects=[(str(key), ByteRange(str(file), int(at), int(size))) for key, file, at, size in plain["objects"]],
        files={
            str(name): FileDigest(int(size), tuple(map(str, digests)))
            for name, (size, digests) in plain["files"].items()
        },
        numbers=bytes(plain["numbers"]),
        crcs=bytes(plain["crcs"]),
    )
    return Record(
        Generation(int(attempt), int(step), str(save_id)),
        int(plain["rank"]),
        int(plain["ranks"]),
        written,
        bytes(plain["common_bytes"]),
        tuple(map(str, plain["in_common"])),
        tuple(map(str, plain["crc_names"])),
    )


def crc_of(file: FileDigest) -> int:
    """The CRC-32 of a file, of those of its blocks."""
    starts = range(0, file.size, BLOCK_BYTES)
    pieces = zip(file.digests, starts, strict=False)  # an empty file has a digest, and no block
    return join_pieces(Piece(int(digest, 16), min(BLOCK_BYTES, file.size - at)) for digest, at in pieces)
