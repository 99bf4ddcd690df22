"""Folders of Hugging Face: tensors in one safetensors file, or in several with an index.

    folder --> read_manifest (this file) --> Manifest --> the same engine that reads torch_dist

Each tensor is one chunk, whole and plain in its file; or several, where torch's ``HuggingFaceStorageWriter`` has let
each rank write its parts. All other files of such a folder are passed over. Only headers are read here; the format has
no checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sixfold.dist_ckpt.errors import CorruptError, MismatchError, at
from sixfold.dist_ckpt.formats import safetensors
from sixfold.dist_ckpt.formats.safetensors import Entry
from sixfold.dist_ckpt.geometry.box import Box, overlaps
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.storage import local as storage

BACKEND = "safetensors"
_SINGLE = f"model{safetensors.SUFFIX}"


def is_one(folder: Path) -> bool:
    """Whether a folder without a checkpoint's own files has safetensors; nothing is read."""
    if any((folder / name).exists() for name in (".metadata", "metadata.json", "integrity.json")):
        return False
    return next(folder.glob("[!.]*.safetensors*"), None) is not None and not any(folder.glob("*.distcp"))


def file_names(folder: Path) -> list[str]:
    """The files that belong to it, the index among them.

    Raises: as ``read_manifest``.
    """
    index = _index(folder)
    if index is None:
        return sorted(_together(folder))
    return sorted({*_places(index).values(), index.name})


def read_manifest(folder: Path, file: Path | None = None) -> Manifest:
    """What such a folder holds, or one file of it. No tensor is read.

    Raises:
        CorruptError: a damaged header or index, a file that is missing or of another size, a tensor that is not in
            the file that the index names, or in another too; parts that are not of one tensor. UnsafeError: an index
            that leaves the folder.
        MismatchError: several files of whole tensors and no index; a dtype that is not read.
    """
    index = _index(folder) if file is None else None
    if file is not None:
        found = {file.name: _entries(file)}
    elif index is None:
        found = _together(folder)
    else:
        places = _places(index)
        found = {name: _entries(folder / name) for name in sorted(set(places.values()))}
        for key, name in places.items():
            if key not in found[name]:
                raise CorruptError(f"{folder / name} has no tensor {key}, which {index.name} says it has")
    return _manifest(folder, found)


def _together(folder: Path) -> dict[str, dict[str, Entry]]:
    """The files of a folder without index: one, or those that torch's writer made of parts of tensors."""
    found = sorted(folder.glob(f"[!.]*{safetensors.SUFFIX}"))
    if len(found) > 1 and not (folder / _SINGLE).exists():
        entries = {path.name: _entries(path) for path in found}
        if all(file and all(entry.offset is not None for entry in file.values()) for file in entries.values()):
            return entries
    path = _single(folder)
    return {path.name: _entries(path)}


def _manifest(folder: Path, files: dict[str, dict[str, Entry]]) -> Manifest:
    """All tensors of all files. A tensor in an indexed file belongs to the model, whether the index has it or not."""
    parts: dict[str, list[tuple[str, Entry]]] = {}
    for file, entries in files.items():
        for key, entry in entries.items():
            parts.setdefault(key, []).append((file, entry))
    stored: dict[str, StoredTensor] = {}
    unaligned: dict[ByteRange, torch.dtype] = {}
    for key, found in parts.items():
        if len(found) > 1 and any(entry.offset is None for _, entry in found):
            raise CorruptError(f"{key} lies in {found[0][0]} and in {found[1][0]} of {folder}; which one holds?")
        stored[key] = _tensor(folder, key, found)
        for file, entry in found:
            if entry.start % entry.dtype.itemsize:
                unaligned[ByteRange(file, entry.start, entry.stop - entry.start)] = entry.dtype
    return Manifest(stored, {}, decoder=_Decoder(unaligned))


def _tensor(folder: Path, key: str, parts: Sequence[tuple[str, Entry]]) -> StoredTensor:
    """A tensor of all its parts. Its shape is where they end: torch's writer tells no other."""
    kinds = {(entry.dtype, len(entry.shape)) for _, entry in parts}
    if len(kinds) > 1:
        raise CorruptError(f"{key}: its parts in {folder} differ in dtype or in the number of dimensions")
    boxes = [Box(entry.offset or (0,) * len(entry.shape), entry.shape) for _, entry in parts]
    filled = [box for box in boxes if box.volume] or boxes  # an empty part may lie behind the end
    ends = [[start + size for start, size in zip(*box, strict=True)] for box in filled]
    chunks = [
        StoredChunk(box, ByteRange(file, entry.start, entry.stop - entry.start))
        for box, (file, entry) in zip(boxes, parts, strict=True)
        if box.volume
    ]
    if found := overlaps([chunk.box for chunk in chunks]):
        one, other = (chunks[at].frame.file for at in found[0])
        raise CorruptError(f"{key}: its parts in {one} and {other} of {folder} overlap; which one holds?")
    return StoredTensor(parts[0][1].dtype, tuple(map(max, zip(*ends, strict=True))), tuple(chunks))


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Makes tensors of those whose bytes begin where no number of their dtype may lie in memory."""

    unaligned: dict[ByteRange, torch.dtype]

    def is_plain(self, chunk: StoredChunk) -> bool:
        return chunk.frame not in self.unaligned

    def decode(self, folder: Path, chunk: StoredChunk) -> torch.Tensor:
        frame = chunk.frame
        with (folder / frame.file).open("rb") as file:
            file.seek(frame.offset)
            data = bytearray(file.read(frame.length))
        if len(data) != frame.length:
            raise CorruptError(f"{frame.file} ends while it is read")
        return torch.frombuffer(data, dtype=self.unaligned[frame]).view(chunk.box.size)


def _index(folder: Path) -> Path | None:
    """The index; None if there is none. MismatchError: there are several, and none has the usual name."""
    usual, found = safetensors.INDEX_NAME, sorted(folder.glob(f"[!.]*{safetensors.INDEX_SUFFIX}"))
    return _usual(folder, found, usual, "indices", f"none named {usual}") if found else None


def _single(folder: Path) -> Path:
    """The one file of a folder without index. MismatchError: there are several, and none has the usual name."""
    found = sorted(folder.glob(f"[!.]*{safetensors.SUFFIX}"))
    lacking = f"neither {_SINGLE} nor {safetensors.INDEX_NAME}, which would say what belongs together"
    return _usual(folder, found, _SINGLE, "safetensors files", lacking)


def _usual(folder: Path, found: list[Path], name: str, what: str, lacking: str) -> Path:
    for path in found:
        if path.name == name or len(found) == 1:
            return path
    listed = ", ".join(path.name for path in found[:3]) + (", ..." if len(found) > 3 else "")
    raise MismatchError(f"{folder} has {len(found)} {what} ({listed}) and {lacking}")


def _places(index: Path) -> dict[str, str]:
    return at(index, lambda: safetensors.parse_index(storage.read_small(index)))


def _entries(path: Path) -> dict[str, Entry]:
    try:
        storage.check_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            length = file.read(safetensors.LENGTH_BYTES)
            header = file.read(at(path, lambda: safetensors.header_bytes(length, size)))
    except FileNotFoundError:
        raise CorruptError(f"{path} is missing; the index names it") from None
    return at(path, lambda: safetensors.parse_header(header, size))
