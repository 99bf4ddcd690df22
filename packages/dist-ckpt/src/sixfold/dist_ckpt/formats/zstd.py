"""zstd frames around frames: what ``save(compress="zstd")`` stores of a chunk.

    head, raw bytes, tail of frame.py --> compress (this file) --> the chunk in its file
    bytes of the file --> decompress, begins_with (this file) --> what ``torch.load`` reads

Each chunk is one zstd frame, which torch DCP knows by ``DESCRIPTOR``. It states its length and ends with a checksum of
its content, which every reader compares. The module ``zstandard`` (extra ``zstd``) is imported when it is needed. It
releases the GIL while it works.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError

DESCRIPTOR = "stream.zstd/1"  # as torch's ``_extension.ZStandard`` calls it
LEAST_BYTES = 1 << 14  # less is stored as it is: a frame around it would be as long
_LEVEL = 1  # 3, the default, makes weights no smaller and takes half as long again
_HEAD_BYTES = 1 << 16  # of a frame, at most, besides its raw bytes


def check_option(compress: str | None) -> None:
    """CheckpointError for what ``compress`` cannot be, MismatchError if its module is missing."""
    if compress not in (None, "zstd"):
        raise CheckpointError(f"compress is {compress!r}; it is None or 'zstd'")
    if compress is not None:
        _library(f"compress={compress!r}")


def check_readable() -> None:
    """MismatchError if the module is missing that compressed chunks need."""
    _library("the checkpoint is compressed by zstd, and a load of it")


def compress(parts: Sequence[bytes]) -> bytes:
    """One zstd frame of the parts end to end."""
    coder = _library("a save with compress").ZstdCompressor(level=_LEVEL, write_checksum=True)
    return bytes(coder.compress(b"".join(parts)))


def decompress(data: memoryview, raw_bytes: int) -> bytes:
    """The frame inside, which holds ``raw_bytes`` of values or fewer; no more is decoded.

    Raises:
        CorruptError: damaged, cut short, or longer. MismatchError: the module is missing.
    """
    library, most = _library("a chunk that is compressed by zstd"), raw_bytes + _HEAD_BYTES
    try:
        stated = library.get_frame_parameters(data).content_size
        if stated != library.CONTENTSIZE_UNKNOWN and stated > most:  # torch's writer states none
            raise CorruptError(f"the zstd frame holds {stated} bytes, its chunk {raw_bytes} and a head")
        return bytes(library.ZstdDecompressor().decompress(data, max_output_size=most, allow_extra_data=False))
    except library.ZstdError as error:
        raise CorruptError(f"the zstd frame is damaged: {error}") from error


def begins_with(data: memoryview, at: int, first: bytes) -> bool:
    """Whether bytes ``first`` stand at byte ``at`` of the frame inside, of which no more than that is decoded."""
    library = _library("since= of a checkpoint that is compressed by zstd")
    try:
        with library.ZstdDecompressor().stream_reader(data) as reader:
            return bool(reader.read(at + len(first))[at:] == first)
    except library.ZstdError as error:
        raise CorruptError(f"the zstd frame is damaged: {error}") from error


def _library(what: str) -> Any:
    try:
        return import_module("zstandard")
    except ImportError as error:
        raise MismatchError(f"{what} needs the module zstandard: pip install 'sixfold-dist-ckpt[zstd]'") from error
