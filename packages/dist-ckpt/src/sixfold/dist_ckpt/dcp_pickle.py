"""The pickle of ``.metadata``, written opcode by opcode.

    Manifest --> dcp_pickle.py (this file) --> bytes that torch DCP unpickles

Building torch's objects and pickling them costs some 25 us for each chunk, more than writing a small tensor. The bytes
have a fixed form, so they are put together here: the objects that torch 2.13 writes, state by state, without their
import. Class names and attribute names stand in the pickle's memo once; keys too, as the second use of each names it.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import torch

from sixfold.dist_ckpt.box import Ints
from sixfold.dist_ckpt.manifest import ByteRange, Manifest

_METADATA = "torch.distributed.checkpoint.metadata"
_GLOBALS = {
    "Metadata": _METADATA,
    "TensorStorageMetadata": _METADATA,
    "BytesStorageMetadata": _METADATA,
    "TensorProperties": _METADATA,
    "ChunkStorageMetadata": _METADATA,
    "MetadataIndex": _METADATA,
    "StorageMeta": _METADATA,
    "_MEM_FORMAT_ENCODING": _METADATA,
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_get_layout": "torch.serialization",
    "Size": "torch",
}


def encode(manifest: Manifest, dcp_version: str | None) -> bytes:
    """The bytes of ``.metadata``: a protocol 4 pickle of DCP's ``Metadata`` with our ``sixfold_save_id``."""
    return _Writer().metadata(manifest, dcp_version)


class _Writer:
    """Opcodes and the memo: what is used twice is named by a number from its second use on."""

    def __init__(self) -> None:
        self._memo: dict[object, bytes] = {}

    def metadata(self, manifest: Manifest, dcp_version: str | None) -> bytes:
        # Lists of parts first: the memo is filled in the order in which the bytes stand.
        parts = [b"\x80\x04", self._new("Metadata"), b"}(", self._text("state_dict_metadata"), b"}("]
        for key, tensor in manifest.tensors.items():
            parts += (self._text(key), self._new("TensorStorageMetadata"), b"}(", self._text("properties"))
            parts += (self._properties(tensor.dtype), self._text("size"), self._size(tensor.shape))
            parts += (self._text("chunks"), b"](")
            for box, _, _ in tensor.chunks:
                parts += (self._new("ChunkStorageMetadata"), b"}(", self._text("offsets"), self._size(box.offset))
                parts += (self._text("sizes"), self._size(box.size), b"ub")
            parts.append(b"eub")
        for key in manifest.objects:
            parts += (self._text(key), self._new("BytesStorageMetadata"))
        parts += (b"u", self._text("planner_data"), b"N", self._text("storage_data"), b"}(")
        for key, tensor in manifest.tensors.items():
            for box, frame, _ in tensor.chunks:
                parts += (*self._index(key, box.offset), *self._info(frame))
        for key, frame in manifest.objects.items():
            parts += (*self._index(key, None), *self._info(frame))
        parts += (b"u", self._text("storage_meta"), self._new("StorageMeta"), b"}(", self._text("checkpoint_id"), b"N")
        parts += (self._text("save_id"), self._optional(manifest.save_id), self._text("load_id"), b"N")
        parts += (self._text("modules"), b"]ub", self._text("version"), self._optional(dcp_version))
        if manifest.save_id is not None:
            parts += (self._text("sixfold_save_id"), self._text(manifest.save_id))
        return b"".join([*parts, b"ub."])

    def _index(self, key: str, offset: Ints | None) -> tuple[bytes, ...]:
        where = () if offset is None else (self._text("offset"), self._size(offset))
        return (
            self._new("MetadataIndex"),
            b"}(",
            self._text("fqn"),
            self._text(key),
            self._text("index"),
            b"N",
            *where,
            b"ub",
        )

    def _info(self, frame: ByteRange) -> tuple[bytes, ...]:
        file = (self._new("_StorageInfo"), b"}(", self._text("relative_path"), self._text(frame.file))
        place = (self._text("offset"), integer(frame.offset), self._text("length"), integer(frame.length))
        return (*file, *place, b"ub")

    def _properties(self, dtype: torch.dtype) -> bytes:
        """One object for all tensors of a dtype. State: dtype, layout, requires_grad, memory format, pin_memory."""
        if dtype in self._memo:
            return self._memo[dtype]
        number = self._number(dtype)
        name = str(dtype).removeprefix("torch.")
        parts = [self._new("TensorProperties"), b"(", self._text("torch"), self._text(name), b"\x93"]
        parts += [self._global("_get_layout"), self._text("torch.strided"), b"\x85R\x89"]
        parts += [self._global("_MEM_FORMAT_ENCODING"), b"K\x00\x85R\x89tb", number]
        return b"".join(parts)

    def _size(self, shape: Ints) -> bytes:
        return self._global("Size") + _tuple(shape) + b"\x85R"

    def _optional(self, text: str | None) -> bytes:
        return b"N" if text is None else self._text(text)

    def _new(self, name: str) -> bytes:
        """An object without state: BUILD adds it."""
        return self._global(name) + b")\x81"

    def _global(self, name: str) -> bytes:
        place = ("global", name)
        if place in self._memo:
            return self._memo[place]
        loaded = self._text(_GLOBALS[name]) + self._text(name) + b"\x93"
        return loaded + self._number(place)

    def _text(self, text: str) -> bytes:
        if text in self._memo:
            return self._memo[text]
        data = text.encode("utf-8", "surrogatepass")
        head = b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        return head + data + self._number(text)

    def _number(self, value: object) -> bytes:
        """The opcode that puts the top of the stack into the memo; from now on ``value`` is fetched from there."""
        number = len(self._memo)
        short = number < 256
        self._memo[value] = b"h" + bytes([number]) if short else b"j" + struct.pack("<I", number)
        return b"q" + bytes([number]) if short else b"r" + struct.pack("<I", number)


@lru_cache(maxsize=4096)
def _tuple(values: Ints) -> bytes:
    parts = b"".join(map(integer, values))
    if len(values) < 4:
        return parts + (b")", b"\x85", b"\x86", b"\x87")[len(values)]
    return b"(" + parts + b"t"


def integer(value: int) -> bytes:
    """The opcode of a count."""
    if value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    nbytes = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([nbytes]) + value.to_bytes(nbytes, "little")
