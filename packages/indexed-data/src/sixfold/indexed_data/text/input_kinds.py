"""Inputs that hold no text: what they are, by their name and first bytes, and what to do with them.

    name, first bytes --> what_it_is (this file) --> inputs.py

Pure. Compressed text would end as "not UTF-8" at its first line, an archive as one document of its table.
"""

from __future__ import annotations

HEAD_BYTES = 512  # a tar names itself at byte 257

_DECOMPRESS = "decompress it to a file first ({}), or compress it as .gz"
_CONVERT = "convert it to jsonl first, one object with the text per line"
_UNPACK = "unpack it, and give its files"

# ending: (what it is, what to do)
_ENDINGS = {
    ".zst": ("zstd data", _DECOMPRESS.format("zstd -d")),
    ".zstd": ("zstd data", _DECOMPRESS.format("zstd -d")),
    ".bz2": ("bzip2 data", _DECOMPRESS.format("bzip2 -dk")),
    ".xz": ("xz data", _DECOMPRESS.format("xz -dk")),
    ".lz4": ("lz4 data", _DECOMPRESS.format("lz4 -d")),
    ".parquet": ("a parquet table", _CONVERT),
    ".arrow": ("an arrow table", _CONVERT),
    ".feather": ("an arrow table", _CONVERT),
    ".npy": ("a numpy array", "give text, or add its ids with IndexedDatasetBuilder"),
    ".npz": ("numpy arrays", "give text, or add their ids with IndexedDatasetBuilder"),
    ".tar": ("a tar archive", _UNPACK),
    ".tgz": ("a tar archive", _UNPACK),
    ".tar.gz": ("a tar archive", _UNPACK),
    ".zip": ("a zip archive", _UNPACK),
    ".7z": ("a 7z archive", _UNPACK),
    ".bin": ("the ids of a pair, by its name", "merge joins pairs; rename it if it is text"),  # small ids are UTF-8 too
}
_UTF16 = "UTF-16 text", "convert it to UTF-8 first (iconv)"
# (offset, bytes, what it is, what to do). Each holds bytes that no UTF-8 text begins with, or a NUL.
_MAGICS = (
    (0, b"\x28\xb5\x2f\xfd", *_ENDINGS[".zst"]),
    (0, b"\xfd7zXZ\0", *_ENDINGS[".xz"]),
    (0, b"\x04\x22\x4d\x18", *_ENDINGS[".lz4"]),
    (4, b"1AY&SY", *_ENDINGS[".bz2"]),
    (0, b"ARROW1\0\0", *_ENDINGS[".arrow"]),
    (0, b"\x93NUMPY", *_ENDINGS[".npy"]),
    (257, b"ustar\0", *_ENDINGS[".tar"]),
    (257, b"ustar  \0", *_ENDINGS[".tar"]),
    (0, b"PK\x03\x04", *_ENDINGS[".zip"]),
    (0, b"7z\xbc\xaf\x27\x1c", *_ENDINGS[".7z"]),
    (0, b"\x1f\x8b", "gzip data whose name does not end in .gz", "rename it"),
    (0, b"\xff\xfe", *_UTF16),
    (0, b"\xfe\xff", *_UTF16),
    (0, b"MMIDIDX\0\0", "the index of a pair", "merge joins pairs"),
)


def what_it_is(name: str, head: bytes, tail: bytes) -> tuple[str, str] | None:
    """(what it is, what to do) for an input that cannot be read as text, by its name and its ends; None for others."""
    for ending in (".tar.gz", *_ENDINGS):
        if name.lower().endswith(ending):
            return _ENDINGS[ending]
    if name.lower().endswith(".gz"):
        return None
    if head.startswith(b"PAR1") and tail.endswith(b"PAR1"):  # letters alone: only both ends tell
        return _ENDINGS[".parquet"]
    for offset, magic, what, remedy in _MAGICS:
        if head.startswith(magic, offset):
            return what, remedy
    if len(head) > 3 and not (any(head[::2]) and any(head[1::2])):  # without a mark, and Latin: valid UTF-8
        return _UTF16
    return None
