"""torch DCP's ``Metadata`` and this package's own tables, both ways.

    Metadata + where each chunk was written --> index_of (this file) --> dcp_pickle.py --> .metadata
    .metadata --> inert nodes --> metadata_of (this file) --> Metadata, which torch's planners look into

[Note: a Metadata is built, never unpickled] torch's own reader calls ``pickle.load`` on the file, which runs what it
names (pytorch#189308). Here torch's objects are made from the inert nodes of unpickle.py, after metadata.py has found
that types, boxes and byte ranges are what they must be. The planner's data is taken if it is of plain types alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Size
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from sixfold.dist_ckpt.errors import CorruptError, ShardingError
from sixfold.dist_ckpt.formats import unpickle
from sixfold.dist_ckpt.formats.dcp_pickle import Index
from sixfold.dist_ckpt.formats.unpickle import Node
from sixfold.dist_ckpt.formats.zstd import DESCRIPTOR
from sixfold.dist_ckpt.geometry.box import Box, Ints
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, Stored, StoredChunk, StoredTensor

_MOST_DEPTH = 64  # of a path of planner_data
_MOST_PLACES = 1 << 24  # of all lists that the paths of planner_data stand for, together

Places = Mapping[tuple[str, Ints | None], ByteRange]


def index_of(metadata: Metadata, places: Places, save_id: str, compressed: frozenset[str] = frozenset()) -> Index:
    """What the index files say of a plan of DCP; a chunk without elements needs no place.

    Args:
        places: the frame of each chunk by key and offset; of bytes by key and None.
        compressed: files in which each frame is one zstd frame.
    Raises:
        ShardingError: the planner names a chunk or bytes that no rank has written.
    """
    tensors: dict[str, Stored] = {}
    objects: dict[str, ByteRange] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, torchs.TensorStorageMetadata):
            objects[key] = _written(places, key, None)
            continue
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        chunks = [StoredChunk(box, _written(places, key, box.offset)) for box in boxes if box.volume]
        tensors[key] = StoredTensor(entry.properties.dtype, tuple(entry.size), tuple(chunks))
    return replace(
        Index.of(Manifest(tensors, objects, save_id, compressed=compressed)), planner_data=metadata.planner_data
    )


def _written(places: Places, key: str, offset: Ints | None) -> ByteRange:
    try:
        return places[key, offset]
    except KeyError:
        what = f"its chunk at {offset}" if offset is not None else "it"
        raise ShardingError(f"{key}: the planner's metadata names {what}, and no rank has written that") from None


def metadata_of(manifest: Manifest, data: bytes | None, *, trusted_bytes: bool) -> Metadata:
    """torch's ``Metadata`` of a checkpoint; megatron's flattened layout has its true shapes.

    Args:
        manifest: the same, read and checked.
        data: the ``.metadata`` beside it, which alone holds the planner's data; None for a format that has none.
        trusted_bytes: as of ``unpickle.loads``.
    Raises:
        CorruptError: it is not what such a file is. UnsafeError: it names what no checkpoint needs.
    """
    entries, properties = dict[str, Any](), dict[Any, torchs.TensorProperties]()
    for key, stored in manifest.tensors.items():
        kind = properties.setdefault(stored.dtype, torchs.TensorProperties(dtype=stored.dtype))
        chunks = [torchs.ChunkStorageMetadata(Size(box.offset), Size(box.size)) for box, *_ in stored.chunks]
        entries[key] = torchs.TensorStorageMetadata(kind, Size(stored.shape), chunks)
    for key in manifest.objects:
        entries[key] = torchs.BytesStorageMetadata()
    found = _Metadata(entries, None, _Places(manifest), torchs.StorageMeta(save_id=manifest.save_id))
    if data is None:
        return found
    if trusted_bytes and manifest.save_id is not None:  # ours, which says no more of its save
        found.decoded_later = data
        del found.planner_data
        return found
    root = unpickle.loads(data, trusted_bytes=trusted_bytes)
    try:
        found.storage_meta = _storage_meta(root.get("storage_meta"), manifest.save_id)
        found.planner_data = _planner_data(root.get("planner_data"), [*entries])
    except (AttributeError, TypeError, RecursionError) as error:
        raise CorruptError(f"not a readable Metadata: {type(error).__name__}: {error}") from error
    return found


class _Metadata(Metadata):
    """Metadata whose planner's data is decoded when it is asked for: torch's usual load does not ask."""

    decoded_later = b""

    @cached_property
    def planner_data(self) -> Any:
        root = unpickle.loads(self.decoded_later, trusted_bytes=True)
        return _planner_data(root.get("planner_data"), [*self.state_dict_metadata])


class _Places(Mapping[torchs.MetadataIndex, _StorageInfo]):
    """``storage_data``, each entry made when it is asked for; pickled as the dict that it stands for."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __getitem__(self, index: torchs.MetadataIndex) -> _StorageInfo:
        frame = frame_of(self._manifest, index)
        if frame is None:
            raise KeyError(index)
        return _StorageInfo(*frame, [DESCRIPTOR] if frame.file in self._manifest.compressed else None)

    def __iter__(self) -> Iterator[torchs.MetadataIndex]:
        for key, stored in self._manifest.tensors.items():
            for number, chunk in enumerate(stored.chunks):
                yield torchs.MetadataIndex(key, chunk.box.offset, number)
        yield from map(torchs.MetadataIndex, self._manifest.objects)

    def __len__(self) -> int:
        return sum(stored.chunk_count for stored in self._manifest.tensors.values()) + len(self._manifest.objects)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def frame_of(manifest: Manifest, index: torchs.MetadataIndex) -> ByteRange | None:
    """The frame of the chunk, or of the object, that an index names; None if there is none."""
    if index.offset is None:
        return manifest.objects.get(index.fqn)
    stored, start = manifest.tensors.get(index.fqn), tuple(index.offset)
    if stored is None or len(start) != len(stored.shape):
        return None
    near = stored.near(Box(start, (1,) * len(start)))
    return next((chunk.frame for chunk in near if chunk.box.offset == start), None)


def _storage_meta(stored: Any, save_id: str | None) -> torchs.StorageMeta:
    """What the file says of its save, as far as it is text or a path; ``save_id`` where it says nothing."""
    found = torchs.StorageMeta(save_id=save_id)
    if isinstance(stored, Node):
        place, named = stored.get("checkpoint_id"), stored.get("save_id")
        parts = place.get("parts") if unpickle.kind_of(place) == "PosixPath" else None
        if isinstance(parts, tuple) and all(isinstance(part, str) for part in parts):
            place = Path(*parts)
        found.checkpoint_id = place if isinstance(place, str | Path) else None
        found.save_id = named if isinstance(named, str) else save_id
    return found


def _planner_data(value: Any, keys: Sequence[str]) -> Any:
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
