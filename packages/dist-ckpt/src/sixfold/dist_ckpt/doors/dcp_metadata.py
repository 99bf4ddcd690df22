"""torch DCP's ``Metadata`` and this package's own tables, both ways.

    Metadata + where each chunk was written --> index_of (this file) --> dcp_pickle.py --> .metadata
    .metadata --> inert nodes --> metadata_of (this file) --> Metadata, which torch's planners look into

[Note: a Metadata is built, never unpickled] torch's own reader calls ``pickle.load`` on the file, which runs what it
names (pytorch#189308). Here torch's objects are made from the inert nodes of unpickle.py, after metadata.py has found
that types, boxes and byte ranges are what they must be. The planner's data is taken if it is of plain types alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from sixfold.dist_ckpt.errors import CorruptError, ShardingError
from sixfold.dist_ckpt.files import unpickle
from sixfold.dist_ckpt.files.dcp_pickle import Index, sort_key
from sixfold.dist_ckpt.files.unpickle import Node
from sixfold.dist_ckpt.geometry.box import Box, Ints
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest

_MOST_DEPTH = 64  # of a path of planner_data
_MOST_PLACES = 1 << 24  # of all lists that the paths of planner_data stand for, together

Places = Mapping[tuple[str, Ints | None], ByteRange]


class _Row(NamedTuple):
    """A chunk of a tensor: number of the tensor, its frame (number of the file, start, length) and its box."""

    tensor: int
    frame: tuple[int, int, int]
    box: Box


def index_of(metadata: Metadata, places: Places, save_id: str) -> Index:
    """What ``dcp_pickle.encode`` writes for a plan of DCP.

    Args:
        places: the frame of each chunk by key and offset; of bytes by key and None.
    Raises:
        ShardingError: the planner names a chunk or bytes that no rank has written.
    """
    tensors: list[tuple[str, torch.dtype, Ints]] = []
    objects: dict[str, ByteRange] = {}
    files: dict[str, int] = {}  # by their numbers
    rows: list[_Row] = []
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            objects[key] = _written(places, key, None)
            files.setdefault(objects[key].file, len(files))
            continue
        for chunk in entry.chunks:
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            file, start, length = _written(places, key, box.offset)
            rows.append(_Row(len(tensors), (files.setdefault(file, len(files)), start, length), box))
        tensors.append((key, entry.properties.dtype, tuple(entry.size)))
    dims = max((len(shape) for _, _, shape in tensors), default=0)
    frames_N3 = _array([row.frame for row in rows], 3)
    return Index(
        tensors=tensors,
        tensor_N=_array([row.tensor for row in rows]),
        offsets_ND=_array([_padded(row.box.offset, dims, 0) for row in rows], dims),
        sizes_ND=_array([_padded(row.box.size, dims, 1) for row in rows], dims),
        files=list(files),
        file_N=frames_N3[:, 0],
        start_N=frames_N3[:, 1],
        length_N=frames_N3[:, 2],
        objects=objects,
        save_id=save_id,
        planner_data=metadata.planner_data,
    )


def _written(places: Places, key: str, offset: Ints | None) -> ByteRange:
    try:
        return places[key, offset]
    except KeyError:
        what = f"its chunk at {offset}" if offset is not None else "it"
        raise ShardingError(f"{key}: the planner's metadata names {what}, and no rank has written that") from None


def _array(rows: list[Any], width: int | None = None) -> torch.Tensor:
    """int64, of rows of ``width`` if that is given."""
    values = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return values if width is None else values.view(len(rows), width)


def _padded(values: Ints, dims: int, more: int) -> Ints:
    return values + (more,) * (dims - len(values))


def by_place(index: Index) -> Index:
    """The same by key and by place, without chunks that hold nothing, as the compact manifest has it."""
    order = sorted(range(len(index.tensors)), key=lambda number: sort_key(index.tensors[number][0]))
    number_K = torch.empty(len(order), dtype=torch.int64, device="cpu")
    number_K[_array(order)] = torch.arange(len(order), device="cpu")
    tensor_N = number_K[index.tensor_N]
    row_M = torch.nonzero((index.sizes_ND != 0).all(1))[:, 0]
    for axis in range(index.dims - 1, -1, -1):
        row_M = row_M[torch.argsort(index.offsets_ND[row_M, axis], stable=True)]
    row_M = row_M[torch.argsort(tensor_N[row_M], stable=True)]
    return replace(
        index,
        tensors=[index.tensors[number] for number in order],
        tensor_N=tensor_N[row_M],
        offsets_ND=index.offsets_ND[row_M],
        sizes_ND=index.sizes_ND[row_M],
        file_N=index.file_N[row_M],
        start_N=index.start_N[row_M],
        length_N=index.length_N[row_M],
        planner_data=None,
    )


def metadata_of(manifest: Manifest, data: bytes | None, *, trusted_bytes: bool) -> Metadata:
    """torch's ``Metadata`` of a checkpoint.

    Args:
        manifest: the same, read and checked.
        data: the ``.metadata`` that it was read from; None for a format that has none. Then, and for tensors of
            megatron's flattened layout, chunks are those of the manifest, which have the true shape.
        trusted_bytes: as of ``unpickle.loads``.
    Raises:
        CorruptError: it is not what such a file is. UnsafeError: it names what no checkpoint needs.
    """
    if data is None:
        return _of_manifest(manifest)
    root = unpickle.loads(data, trusted_bytes=trusted_bytes)
    try:
        is_legacy = bool(root.get("mcore_data"))
        found = _of_manifest(manifest) if is_legacy else Metadata({}, None, {})
        for key, entry in root.get("state_dict_metadata").items():
            if unpickle.kind_of(entry) != "TensorStorageMetadata":
                found.state_dict_metadata[key] = BytesStorageMetadata()
            elif not is_legacy or tuple(entry.get("size")) == manifest.tensors[key].shape:
                found.state_dict_metadata[key] = _tensor(entry)
        if not is_legacy:
            for index, info in root.get("storage_data").items():
                place = MetadataIndex(index.get("fqn"), index.get("offset"), index.get("index"))
                at = _StorageInfo(info.get("relative_path"), info.get("offset"), info.get("length"))
                found.storage_data[place] = at
        found.planner_data = _planner_data(root.get("planner_data"), found.state_dict_metadata)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
        raise CorruptError(f"not a readable Metadata: {type(error).__name__}: {error}") from error
    found.version = root.get("version") if isinstance(root.get("version"), str) else None
    return found


def _of_manifest(manifest: Manifest) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for key, stored in manifest.tensors.items():
        boxes = [(chunk.box.offset, chunk.box.size) for chunk in stored.chunks]
        entries[key] = _entry(TensorProperties(dtype=stored.dtype), stored.shape, boxes)
        for number, chunk in enumerate(stored.chunks):
            places[MetadataIndex(key, chunk.box.offset, number)] = _StorageInfo(*chunk.frame)
    for key, frame in manifest.objects.items():
        entries[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(*frame)
    return Metadata(entries, None, places)


def _tensor(entry: Node) -> TensorStorageMetadata:
    """As it stands in the file, chunks without elements too, which the manifest leaves out."""
    state = entry.get("properties").get("state")
    properties = TensorProperties(dtype=state["dtype"] if isinstance(state, dict) else state[0])
    if not isinstance(properties.dtype, torch.dtype):
        raise TypeError(f"the dtype is {unpickle.shown(properties.dtype)}")
    if isinstance(state, tuple) and len(state) == 5:
        properties.requires_grad, properties.pin_memory = bool(state[2]), bool(state[4])
    boxes = [(chunk.get("offsets"), chunk.get("sizes")) for chunk in entry.get("chunks")]
    return _entry(properties, entry.get("size"), boxes)


def _entry(properties: TensorProperties, shape: Ints, boxes: Iterable[tuple[Ints, Ints]]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in boxes]
    return TensorStorageMetadata(properties, torch.Size(shape), chunks)


def _planner_data(value: Any, keys: Iterable[str]) -> Any:
    """What a planner kept, if it is of plain types; torch's own planners keep the path of each key."""
    odd = _first_object(value)
    if odd is not None:
        warnings.warn(f"planner_data of .metadata holds a {unpickle.kind_of(odd)} and is left out", stacklevel=4)
        return None
    named = [value[key] for key in keys if key in value] if isinstance(value, dict) else []
    _check_paths([path for path in named if isinstance(path, tuple | list)])
    return value


def _check_paths(paths: list[Sequence[Any]]) -> None:
    """CorruptError for paths that would make torch's planner, or this check, fill memory: few bytes name long lists."""
    deepest = max(map(len, paths), default=0)
    if deepest > _MOST_DEPTH:
        raise CorruptError(f"planner_data has a path of {deepest} parts; {_MOST_DEPTH} are read")
    kept = sum(depth for path in paths for depth, part in enumerate(path) if type(part) is int)
    if kept > _MOST_PLACES:
        raise CorruptError(f"planner_data has {len(paths)} paths whose lists stand {kept} parts deep, added up")
    longest: dict[Any, int] = {}
    for path in map(tuple, paths):
        for depth, part in enumerate(path):
            if type(part) is int:
                longest[path[:depth]] = max(part, longest.get(path[:depth], 0))
    if sum(longest.values()) > _MOST_PLACES:
        raise CorruptError(f"planner_data places values in lists of {sum(longest.values())} places")


def _first_object(value: Any) -> Node | None:
    """An object in nested containers. Each is looked into once: those of a file may hold themselves."""
    left, seen = [value], set[int]()
    while left:
        part = left.pop()
        if isinstance(part, Node):
            return part
        if isinstance(part, dict | list | tuple | set | frozenset) and id(part) not in seen:
            seen.add(id(part))
            left += [*part, *part.values()] if isinstance(part, dict) else part
    return None
