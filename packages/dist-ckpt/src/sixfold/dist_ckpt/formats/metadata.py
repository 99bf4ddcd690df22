"""The schema of ``.metadata`` and ``metadata.json``: torch DCP's classes <-> our manifest.

    Manifest (manifest.py) <--> metadata.py (this file) <--> bytes of .metadata

Neither direction imports torch's classes. dcp_pickle.py writes the pickle that names them. Reading (unpickle.py)
believes nothing: types, shapes, boxes and names are checked. The flattened layout of megatron before 0.15 becomes
ordinary boxes here, so that nothing else knows of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any, TypeGuard

import torch

from sixfold.dist_ckpt.errors import CorruptError, MismatchError, UnsafeError
from sixfold.dist_ckpt.formats.dcp_pickle import Index, Writer
from sixfold.dist_ckpt.formats.unpickle import Node, kind_of, loads, shown
from sixfold.dist_ckpt.formats.zstd import DESCRIPTOR
from sixfold.dist_ckpt.geometry.box import Box, range_boxes
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, Run, Stored, StoredChunk, StoredTensor
from sixfold.dist_ckpt.interpreter import collection_paused

#: metadata.json, to the letter: megatron-core refuses any further key.
CONFIG_JSON = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", '
    b'"common_backend_version": 1}'
)
# What torch writes as CURRENT_DCP_VERSION. A test compares; importing it here would take every first save, and each
# worker, a second or two: it brings DTensor and sympy along.
_DCP_VERSION = "1.0.0"


def read_config(data: bytes) -> tuple[tuple[str, int], tuple[str, int]]:
    """Sharded and common (backend, version) of a metadata.json.

    Raises:
        CorruptError: it is damaged.
    """
    try:
        config = json.loads(data)
        sharded, common = ((config[f"{k}_backend"], config[f"{k}_backend_version"]) for k in ("sharded", "common"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptError(f"metadata.json is damaged: {type(error).__name__}: {error}") from error
    for backend, version in (sharded, common):
        if type(backend) is not str or type(version) is not int:
            raise CorruptError("metadata.json is damaged: a backend is a name and its version a whole number")
    return sharded, common


def check_config(data: bytes) -> tuple[str, tuple[str, int]]:
    """The sharded backend of a metadata.json, "torch_dist" or "zarr", and the common (backend, version).

    Raises:
        CorruptError: it is damaged. MismatchError: it names a backend that the built-in engine does not read.
    """
    sharded, common = read_config(data)
    if sharded not in (("torch_dist", 1), ("zarr", 1)):
        raise MismatchError(
            f"unknown backend {sharded}; ('torch_dist', 1) and ('zarr', 1) are read here; strategies.register adds more"
        )
    return sharded[0], common


def encode_parts(index: Index) -> Iterator[bytes]:
    """The parts of ``.metadata``, each made when it is asked for: a protocol 4 pickle of torch DCP's ``Metadata``.

    One attribute is ours, ``sixfold_save_id``; other readers ignore it. No ``all_local_plans`` as
    megatron writes it: that nearly doubles the file and nobody needs it.
    """
    return Writer().metadata(index, _DCP_VERSION)


def decode(data: bytes, *, trusted_bytes: bool) -> Manifest:
    """Read ``.metadata`` of this package, of DCP or of megatron.

    Raises:
        CorruptError: it is not what such a file is, or contradicts itself.
        UnsafeError: a foreign global, or a file name that leaves the folder.
    """
    with collection_paused():
        return _decode(loads(data, trusted_bytes=trusted_bytes))


def _decode(root: Any) -> Manifest:
    if kind_of(root) not in ("Metadata", "MCoreMetadata"):
        raise CorruptError(f"the pickle holds {kind_of(root)}, not a Metadata")
    entries = _typed(root.get("state_dict_metadata"), dict, "state_dict_metadata")
    places, compressed = _places(_typed(root.get("storage_data"), dict, "storage_data"))
    legacy = root.get("mcore_data")
    tensors: dict[str, Stored] = {}
    objects: dict[str, ByteRange] = {}
    for key, entry in entries.items():
        kind = kind_of(entry)
        if not isinstance(key, str):
            raise CorruptError(f"entry {shown(key)} is {kind}")
        if kind == "TensorStorageMetadata":
            tensors[key] = _true_shape(key, _tensor(key, entry, places), legacy)
        elif kind == "BytesStorageMetadata":
            objects[key] = _place(places, key, None)
        else:
            raise CorruptError(f"entry {key!r} is a {kind}")
    save_id = root.get("sixfold_save_id")
    if save_id is not None and not isinstance(save_id, str):
        raise CorruptError(f"sixfold_save_id is {kind_of(save_id)}, not text")
    marked = any(name in root.__dict__ for name in ("sixfold_save_id", "all_local_plans", "mcore_data"))
    return Manifest(tensors, objects, save_id, needs_metadata_json=marked, compressed=compressed)


def _tensor(key: str, entry: Node, places: dict[tuple[str, Any], ByteRange]) -> StoredTensor:
    dtype, shape = _dtype(key, entry.get("properties")), _ints(entry.get("size"), f"size of {key}")
    chunks = []
    for chunk in _typed(entry.get("chunks"), list, f"chunks of {key}"):
        if not isinstance(chunk, Node):
            raise CorruptError(f"a chunk of {key} is {kind_of(chunk)}")
        offset = _ints(chunk.get("offsets"), f"offsets of {key}")
        box = Box(offset, _ints(chunk.get("sizes"), f"sizes of {key}"))
        if (box.size != shape or any(offset) or len(offset) != len(shape)) and not box.within(shape):
            raise CorruptError(f"{key}: chunk {box.offset} + {box.size} leaves the shape {shape}")
        if 0 not in box.size:
            chunks.append(StoredChunk(box, _place(places, key, offset)))
    return StoredTensor(dtype, shape, tuple(chunks))


def _places(storage_data: dict[Any, Any]) -> tuple[dict[tuple[str, Any], ByteRange], frozenset[str]]:
    """Where each part lies, and the files that are compressed."""
    places: dict[tuple[str, Any], ByteRange] = {}
    known: dict[str, Any] = {}  # by file, the transforms of what lies in it
    for index, info in storage_data.items():
        if not isinstance(index, Node) or not isinstance(info, Node):
            raise CorruptError(f"storage_data maps {kind_of(index)} to {kind_of(info)}")
        of, at = index.__dict__, info.__dict__
        key, offset = of.get("fqn"), of.get("offset")
        file, start, length = at.get("relative_path"), at.get("offset"), at.get("length")
        if not isinstance(key, str) or not isinstance(file, str):
            raise CorruptError(f"storage_data: key {shown(key)} lies in file {shown(file)}; both are text")
        if file not in known:
            if file in ("", ".", "..") or "/" in file or not file.isprintable():
                raise UnsafeError(f"{key}: relative_path {file!r} leaves the folder; it is a bare file name")
            known[file] = at.get("transform_descriptors") or []
            if known[file] not in ([], [DESCRIPTOR]):
                raise MismatchError(
                    f"{key}: stored with the transforms {shown(known[file])}; only {DESCRIPTOR} is read"
                )
        if not _is_count(start) or not _is_count(length):
            raise CorruptError(f"{key}: bytes {shown(start)} + {shown(length)} of {file}")
        if (at.get("transform_descriptors") or []) != known[file]:
            raise MismatchError(
                f"{key}: stored with the transforms {shown(at.get('transform_descriptors'))}, others of {file} with "
                f"{shown(known[file])}; a file is read whose parts are all alike"
            )
        places[key, None if offset is None else _ints(offset, f"offset of {key}")] = ByteRange(file, start, length)
    return places, frozenset(file for file, transforms in known.items() if transforms)


def _place(places: dict[tuple[str, Any], ByteRange], key: str, offset: tuple[int, ...] | None) -> ByteRange:
    try:
        return places[key, offset]
    except KeyError:
        raise CorruptError(f"{key}: no bytes are named for the part at {offset}") from None


def _dtype(key: str, properties: Any) -> torch.dtype:
    state = properties.get("state") if isinstance(properties, Node) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"{key}: its properties name no dtype")
    return dtype


def _true_shape(key: str, stored: StoredTensor, mcore_data: Any) -> StoredTensor:
    """Undo megatron's flattened layout of before 0.15, if ``key`` has it.

    A tensor cut over a grid, each part flattened, lies there with the shape ``grid + (elements of a
    part,)`` in chunks (1, .., 1, m) at (grid index.., start); ``mcore_data[key]`` names the true
    shape. Such a chunk is the range [start, start + m) of its part: several boxes in one frame.
    """
    entry = mcore_data.get(key) if isinstance(mcore_data, dict) else None
    if not entry:
        return stored
    if not isinstance(entry, dict):
        raise CorruptError(f"mcore_data of {key} is {kind_of(entry)}")
    shape = _ints(entry.get("nd_reformulated_orig_global_shape"), f"original shape of {key}")
    grid, elements = stored.shape[:-1], stored.shape[-1:]
    fits = len(grid) == len(shape) and all(n and length % n == 0 for n, length in zip(grid, shape, strict=True))
    part = tuple(length // n for n, length in zip(grid, shape, strict=True)) if fits else ()
    if not fits or elements != (prod(part),):
        raise CorruptError(f"{key}: the flattened layout {stored.shape} is no cut of the original shape {shape}")
    chunks: list[StoredChunk] = []
    for chunk in stored.chunks:
        if chunk.box.volume != chunk.box.size[-1]:
            raise CorruptError(f"{key}: the chunk {chunk.box} of the flattened layout {stored.shape} is no run")
        corner = [at * length for at, length in zip(chunk.box.offset[:-1], part, strict=True)]
        start, first = chunk.box.offset[-1], 0
        for box in range_boxes(part, start, start + chunk.box.volume):
            chunks.append(StoredChunk(box.shifted(corner), chunk.frame, Run(chunk.box.size, first)))
            first += box.volume
    return StoredTensor(stored.dtype, shape, tuple(chunks))


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise CorruptError(f"{name} is {kind_of(value)}, not a {kind.__name__}")
    return value


def _ints(value: Any, name: str) -> tuple[int, ...]:
    if isinstance(value, tuple | list):
        for part in value:
            if type(part) is not int or not 0 <= part < 2**63:
                break
        else:
            return value if type(value) is tuple else tuple(value)
    raise CorruptError(f"{name} is {shown(value)}; it is a tuple of counts")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63
