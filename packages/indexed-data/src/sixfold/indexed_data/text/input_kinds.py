"""Kinds of input, by name and first bytes: how each is read, or what it is and what to do with it.

    name, first bytes --> format_of, compression_of, what_it_is (this file) --> inputs.py

Pure. Compressed text would end as "not UTF-8" at its first line, an archive as one document of its table.
"""

from __future__ import annotations

import os
import re

HEAD_BYTES = 512  # a tar names itself at byte 257
TABLES = ("parquet", "arrow")

# ending: how it is read. All other names are text.
_FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}  # of jsonl and text: a table has its own
_NUMBER = re.compile(r"\.\d+$")  # of a log that was rotated, of split -d

_DECOMPRESS = "decompress it to a file first ({}), or compress it as .gz or .zst"
_UNPACK = "unpack it, and give its files"
_RENAME = "rename it"
# ending: (what it is, what to do), of what is not read
_ENDINGS = {
    ".bz2": ("bzip2 data", _DECOMPRESS.format("bzip2 -dk")),
    ".xz": ("xz data", _DECOMPRESS.format("xz -dk")),
    ".lz4": ("lz4 data", _DECOMPRESS.format("lz4 -d")),
    ".npy": ("a numpy array", "give text, or add its ids with IndexedDatasetBuilder"),
    ".npz": ("numpy arrays", "give text, or add their ids with IndexedDatasetBuilder"),
    ".tar": ("a tar archive", _UNPACK),
    ".tgz": ("a tar archive", _UNPACK),
    ".tar.gz": ("a tar archive", _UNPACK),
    ".tar.zst": ("a tar archive", _UNPACK),
    ".zip": ("a zip archive", _UNPACK),
    ".7z": ("a 7z archive", _UNPACK),
    ".bin": ("the ids of a pair, by its name", "merge joins pairs; rename it if it is text"),  # small ids are UTF-8 too
}
_UTF16 = "UTF-16 text", "convert it to UTF-8 first (iconv)"
_PARQUET = "a parquet table whose name does not end in .parquet", f'{_RENAME}, or say format="parquet"'
_ARROW = "an arrow table whose name does not end in .arrow", f'{_RENAME}, or say format="arrow"'
# (offset, bytes, what it is, what to do). Each holds bytes that no UTF-8 text begins with, or a NUL.
_MAGICS = (
    (0, b"\x28\xb5\x2f\xfd", "zstd data whose name does not end in .zst", _RENAME),
    (0, b"\xfd7zXZ\0", *_ENDINGS[".xz"]),
    (0, b"\x04\x22\x4d\x18", *_ENDINGS[".lz4"]),
    (4, b"1AY&SY", *_ENDINGS[".bz2"]),
    (0, b"ARROW1\0\0", *_ARROW),
    (0, b"\xff\xff\xff\xff", *_ARROW),  # a stream of record batches
    (0, b"\x93NUMPY", *_ENDINGS[".npy"]),
    (257, b"ustar\0", *_ENDINGS[".tar"]),
    (257, b"ustar  \0", *_ENDINGS[".tar"]),
    (0, b"PK\x03\x04", *_ENDINGS[".zip"]),
    (0, b"7z\xbc\xaf\x27\x1c", *_ENDINGS[".7z"]),
    (0, b"\x1f\x8b", "gzip data whose name does not end in .gz", _RENAME),
    (0, b"\xff\xfe", *_UTF16),
    (0, b"\xfe\xff", *_UTF16),
    (0, b"MMIDIDX\0\0", "the index of a pair", "merge joins pairs"),
)


def format_of(path: str) -> str:
    """``jsonl``, ``parquet``, ``arrow`` or ``text``, by the name."""
    return _FORMATS.get(_ending(_plain(path)), "text")


def compression_of(path: str) -> str:
    """``gzip``, ``zstd`` or nothing, by the name."""
    return _COMPRESSIONS.get(_ending(path), "")


def what_it_is(path: str, head: bytes, tail: bytes, format: str) -> tuple[str, str] | None:
    """(what it is, what to do) for an input that cannot be read as ``format``; None for one that can, as far as seen.

    Args:
        head, tail: its first ``HEAD_BYTES`` and its last four.
    """
    name = path.lower()
    for ending in (".tar.gz", ".tar.zst", *_ENDINGS):
        if name.endswith(ending):
            return _ENDINGS[ending]
    compressed = compression_of(path)
    if format in TABLES:
        return ("a compressed table", "decompress it: a table is compressed inside") if compressed else None
    if compressed:
        return None
    if head.startswith(b"PAR1") and tail.endswith(b"PAR1"):  # letters alone: only both ends tell
        return _PARQUET
    for offset, magic, what, remedy in _MAGICS:
        if head.startswith(magic, offset):
            return what, remedy
    if len(head) > 3 and not (any(head[::2]) and any(head[1::2])):  # without a mark, and Latin: valid UTF-8
        return _UTF16
    return None


def _plain(path: str) -> str:
    """The name without the ending of its compression."""
    return _NUMBER.sub("", path)[: -len(_ending(path))] if compression_of(path) else path


def _ending(path: str) -> str:
    name = _NUMBER.sub("", os.path.basename(path).lower())
    return "." + name.rpartition(".")[2] if "." in name else ""
