"""The zarr folder that megatron-core 0.12 wrote: arrays as folders of bare chunk files, without any library.

    folder --> read_manifest (this file) --> Manifest --> the same engine that reads torch_dist
    record --> array_header, chunk_name (this file) --> strategies/zarr.py

An array is a folder named by its key with a ``.zarray`` (zarr v2) and one file per chunk, ``i.j.k``. Chunks that
are compressed or filtered are decoded by zarr_codecs.py, by a closed list; no other file of the folder is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch

from sixfold.dist_ckpt.errors import CorruptError, MismatchError, ShardingError
from sixfold.dist_ckpt.errors import at as at_path
from sixfold.dist_ckpt.formats.zarr_codecs import Coding, parse_coding
from sixfold.dist_ckpt.geometry.box import Box, Ints, intersect, whole
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.state.records import ShardedObject
from sixfold.dist_ckpt.storage import local as storage

HEADER_NAME = ".zarray"
BACKEND = ("zarr", 1)
_DTYPES = {
    torch.bool: "|b1",
    torch.uint8: "|u1",
    torch.int8: "|i1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
    torch.bfloat16: "bfloat16",  # no numpy name: what tensorstore writes
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}
_MOST_CHUNKS = 1_000_000
_PADDED_BYTES = 1 << 26  # a chunk may be larger than its array up to here: it is decompressed whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a ``.zarray`` says."""

    dtype: torch.dtype
    shape: Ints
    chunk: Ints
    coding: Coding

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a plain chunk file; chunks at the edge are padded to it."""
        return prod(self.chunk) * self.dtype.itemsize

    @property
    def grid(self) -> Ints:
        """Chunks per axis."""
        return tuple(-(-length // step) for length, step in zip(self.shape, self.chunk, strict=True))

    def chunks(self) -> Iterator[tuple[str, Box]]:
        """Names of chunk files and the boxes that they fill."""
        for at in product(*map(range, self.grid)):
            box = intersect(
                Box(tuple(i * n for i, n in zip(at, self.chunk, strict=True)), self.chunk), whole(self.shape)
            )
            assert box is not None, f"chunk {at} lies outside {self.shape}"
            yield chunk_name(at), box


def chunk_name(at: Ints) -> str:
    """File name of a chunk; ``0`` for an array without axes."""
    return ".".join(map(str, at)) or "0"


def array_header(key: str, dtype: torch.dtype, shape: Ints, chunk: Ints) -> bytes:
    """The bytes of ``.zarray``, as megatron-core 0.12 with zarr 2 writes them.

    Raises:
        ShardingError: a dtype that zarr has no name for.
    """
    if dtype not in _DTYPES:
        raise ShardingError(f"{key}: zarr has no name for {dtype}; the torch_dist format stores every dtype")
    content = {
        "chunks": [max(1, length) for length in chunk],
        "compressor": None,
        "dtype": _DTYPES[dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return json.dumps(content, indent=4, sort_keys=True).encode()


def parse_header(path: Path) -> Header:
    """Read a ``.zarray``.

    Raises:
        CorruptError: it is none. MismatchError: another zarr format, or a dtype unknown here.
        UnsafeError: a codec outside the closed list.
    """
    try:
        content = json.loads(storage.read_small(path))
        shape, chunk, name = tuple(content["shape"]), tuple(content["chunks"]), content["dtype"]
        version, compressor, filters = content["zarr_format"], content["compressor"], content["filters"]
        order, separator = content["order"], content.get("dimension_separator", ".")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if (version, order, separator) != (2, "C", "."):
        raise MismatchError(
            f"{path}: zarr format {version!r}, order {order!r}, separator {separator!r} are not read; "
            "megatron-core wrote 2, 'C', '.'"
        )
    counts = all(type(n) is int and 0 <= n < 2**63 for n in (*shape, *chunk)) and len(shape) == len(chunk)
    if not counts or 0 in chunk:
        raise CorruptError(f"{path}: shape {shape}, chunks {chunk}")
    dtype = _BY_NAME.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise MismatchError(f"{path}: dtype {name!r}; known are {sorted(_BY_NAME)}")
    coding = at_path(path, lambda: parse_coding(compressor, filters, prod(chunk) * dtype.itemsize))
    if prod(chunk) > max(prod(shape), _PADDED_BYTES // dtype.itemsize):
        raise CorruptError(f"{path}: chunks {chunk} of {dtype} are larger than the array, {shape}")
    return Header(dtype=dtype, shape=shape, chunk=chunk, coding=coding)


def read_manifest(folder: Path) -> Manifest:
    """What a zarr checkpoint holds. No chunk is read.

    Raises:
        CorruptError: a damaged ``.zarray``, a missing chunk file, one of another size.
        MismatchError: what ``parse_header`` does not know.
    """
    decoder = _Decoder({})
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, ByteRange] = {}
    for at, names in storage.walk(folder):
        key = at.relative_to(folder).as_posix()
        if HEADER_NAME in names and at != folder:
            tensors[key] = _array(folder, key, set(names), decoder)
        for name in names:
            if name.startswith("shard_") and name.endswith(".pt"):
                stored_key = f"{key}/{name.removesuffix('.pt')}"
                with suppress(ShardingError):  # of another name
                    ShardedObject.empty_from_unique_key(stored_key)
                    objects[stored_key] = ByteRange(f"{key}/{name}", 0, (at / name).stat().st_size)
    return Manifest(tensors, objects, needs_metadata_json=True, decoder=decoder)


def _array(folder: Path, key: str, names: set[str], decoder: _Decoder) -> StoredTensor:
    header_name = f"{key}/{HEADER_NAME}"
    header = parse_header(folder / header_name)
    count = prod(header.grid)
    if count > min(_MOST_CHUNKS, len(names)):
        raise CorruptError(f"{folder / header_name} names {count} chunks, and the folder has {len(names)} files")
    chunks = []
    for name, box in header.chunks():
        file = f"{key}/{name}"
        try:
            size = (folder / file).stat().st_size
        except FileNotFoundError:
            raise CorruptError(f"{folder / file} is missing; {header_name} names it") from None
        if header.coding.is_none and size != header.chunk_bytes:
            raise CorruptError(f"{folder / file} has {size} bytes; a chunk of {key} has {header.chunk_bytes}")
        frame = ByteRange(file, 0, size)
        if not header.coding.is_none or box.size != header.chunk:
            decoder.special[frame] = header
        chunks.append(StoredChunk(box, frame))
    return StoredTensor(header.dtype, header.shape, tuple(chunks))


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Makes tensors of the chunks whose files are not simply their values."""

    special: dict[ByteRange, Header]

    def is_plain(self, chunk: StoredChunk) -> bool:
        return chunk.frame not in self.special

    def decode(self, folder: Path, chunk: StoredChunk) -> torch.Tensor:
        header = self.special[chunk.frame]
        data = (folder / chunk.frame.file).read_bytes()
        if not header.coding.is_none:
            data = header.coding.decode(data, header.chunk_bytes)
        if len(data) != header.chunk_bytes:
            raise CorruptError(f"{chunk.frame} has {len(data)} bytes; a chunk has {header.chunk_bytes}")
        padded = torch.frombuffer(bytearray(data), dtype=header.dtype).view(header.chunk)
        return padded[tuple(slice(0, length) for length in chunk.box.size)].contiguous()
