"""Compressors and filters of zarr chunks: a closed list, by name, and none of a library's registry.

    .zarray --> parse_coding (this file) --> Coding
    bytes of a chunk file + Coding --> Coding.decode (this file) --> its values

[Note: no codec by name] A ``.zarray`` is a file of a stranger, and numcodecs' registry has codecs that unpickle what
they decode. So no configuration of a folder reaches a library. Names stand in the list below, and each is decoded by
the function written beside it. Anything else is an UnsafeError. The standard library has zlib, gzip, bz2 and lzma.
Blosc, zstd and lz4 come from numcodecs (extra ``zarr``). The result has the length that the chunk's shape says: more
is refused before it is decompressed.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError, UnsafeError
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes

_LZMA_MEMORY_BYTES = 1 << 28  # the strongest preset needs a quarter of it
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class Coding:
    """How the chunks of an array were coded: bytes of so many-byte elements shuffled in turn, then compressed."""

    compressor: str | None = None
    shuffles: tuple[int, ...] = ()

    @property
    def is_none(self) -> bool:
        """Whether a chunk file is simply its values."""
        return self.compressor is None and not self.shuffles

    def decode(self, data: bytes, nbytes: int) -> bytes:
        """The ``nbytes`` of values of a chunk.

        Raises:
            CorruptError: damaged, or another number of bytes. MismatchError: numcodecs is needed and missing.
        """
        try:
            if self.compressor is not None:
                data = _COMPRESSORS[self.compressor](data, nbytes)
            if len(data) != nbytes:
                raise CorruptError(f"the chunk holds {len(data)} bytes and not the {nbytes} bytes of its shape")
            for size in reversed(self.shuffles):
                planes = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(size, -1)
                data = bytes(tensor_bytes(planes.t().contiguous()))
        except CheckpointError:
            raise
        except Exception as error:  # decoders raise whatever they like on damage
            raise CorruptError(f"the chunk cannot be decoded: {type(error).__name__}: {error}") from error
        return data


def parse_coding(compressor: Any, filters: Any, nbytes: int) -> Coding:
    """What a ``.zarray`` says of its chunks of ``nbytes``. See [Note: no codec by name].

    Raises:
        UnsafeError: a codec outside the list. CorruptError: one of the list that cannot be as it is described.
    """
    name = None if compressor is None else _known(compressor, "compressor", _COMPRESSORS)
    if filters is not None and not isinstance(filters, list):
        raise UnsafeError(f"filters is {filters!r}, and no list of codecs")
    sizes = []
    for config in filters or ():
        _known(config, "filter", ("shuffle",))
        size = config.get("elementsize")
        if type(size) is not int or not 0 < size <= 256 or nbytes % size:
            raise CorruptError(f"a shuffle of elements of {size!r} bytes does not fit chunks of {nbytes} bytes")
        sizes.append(size)
    if name == "lzma" and compressor.get("format", 1) == 3:
        raise MismatchError("lzma chunks without a header (format 3) are not read; write them with format 1")
    return Coding(name, tuple(sizes))


def _known(config: Any, what: str, known: Collection[str]) -> str:
    name = config.get("id") if isinstance(config, dict) else config
    if not isinstance(config, dict) or not isinstance(name, str) or name not in known:
        raise UnsafeError(
            f"the {what} is the codec {name!r}; only {', '.join(sorted(known))} are decoded, because a codec may run "
            "what it reads. Write the array with one of these, or without"
        )
    return name


def _of_python(decoder: Callable[[], Any]) -> Callable[[bytes, int], bytes]:
    """A decoder of the standard library, which is asked for no more than fits, and one byte."""

    def decompress(data: bytes, nbytes: int) -> bytes:
        found = decoder()
        out: bytes = found.decompress(data, nbytes + 1)
        if len(out) > nbytes:
            raise CorruptError(f"the chunk decompresses to more than the {nbytes} bytes of its shape")
        if not found.eof:
            raise CorruptError(f"the compressed chunk ends early, after {len(out)} of its {nbytes} bytes")
        return out

    return decompress


def _of_numcodecs(name: str, kind: str, stated: Callable[[bytes], int]) -> Callable[[bytes, int], bytes]:
    """A decoder of numcodecs, asked only where the chunk itself states the length that its shape says."""

    def decompress(data: bytes, nbytes: int) -> bytes:
        try:
            library = import_module(f"numcodecs.{name}")  # of three names of this file, none of a folder
        except ImportError as error:
            raise MismatchError(
                f"chunks coded with {name} need the numcodecs library: pip install 'sixfold-dist-ckpt[zarr]'"
            ) from error
        length = stated(data)
        if length != nbytes:
            raise CorruptError(f"the chunk decompresses to {length} bytes and not to the {nbytes} bytes of its shape")
        return bytes(getattr(library, kind)().decode(data))

    return decompress


def _little(data: bytes, start: int, nbytes: int) -> int:
    if start + nbytes > len(data):
        raise CorruptError("the compressed chunk ends in its header")
    return int.from_bytes(data[start : start + nbytes], "little")


def _blosc_length(data: bytes) -> int:
    if _little(data, 12, 4) != len(data):  # blosc believes it, and reads behind the end
        raise CorruptError(f"the compressed chunk has {len(data)} bytes, its header says {_little(data, 12, 4)}")
    return _little(data, 4, 4)


def _zstd_length(data: bytes) -> int:
    """What the header of a zstd frame states (RFC 8878, 3.1.1.1)."""
    if data[:4] != _ZSTD_MAGIC:
        raise CorruptError("the chunk is no zstd frame")
    flags = _little(data, 4, 1)
    single, field = flags >> 5 & 1, flags >> 6
    size = (single, 2, 4, 8)[field]
    if not size:
        raise MismatchError("the zstd frame does not state its length; write it with one, as numcodecs does")
    return _little(data, 5 + (1 - single) + (0, 1, 2, 4)[flags & 3], size) + (256 if field == 1 else 0)


_COMPRESSORS: dict[str, Callable[[bytes, int], bytes]] = {
    "zlib": _of_python(partial(zlib.decompressobj, zlib.MAX_WBITS)),
    "gzip": _of_python(partial(zlib.decompressobj, zlib.MAX_WBITS | 16)),
    "bz2": _of_python(bz2.BZ2Decompressor),
    "lzma": _of_python(partial(lzma.LZMADecompressor, memlimit=_LZMA_MEMORY_BYTES)),
    "blosc": _of_numcodecs("blosc", "Blosc", _blosc_length),
    "zstd": _of_numcodecs("zstd", "Zstd", _zstd_length),
    "lz4": _of_numcodecs("lz4", "LZ4", lambda data: _little(data, 0, 4)),
}
