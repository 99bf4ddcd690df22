"""Folders of Hugging Face: tensors in one safetensors file, or in several with an index.

    folder --> read_manifest (this file) --> Manifest --> the same engine that reads torch_dist

Each tensor is one chunk, whole and plain in its file. All other files of such a folder are passed over. Only headers
are read here; the format has no checksums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from sixfold.dist_ckpt.errors import CorruptError, MismatchError, at
from sixfold.dist_ckpt.formats import safetensors
from sixfold.dist_ckpt.formats.safetensors import Entry
from sixfold.dist_ckpt.geometry.box import whole
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.storage import local as storage

BACKEND = "safetensors"


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
    files = set(_places(index).values()) if index is not None else {_single(folder).name}
    return sorted(files | ({index.name} if index is not None else set()))


def read_manifest(folder: Path) -> Manifest:
    """What such a folder holds. No tensor is read.

    Raises:
        CorruptError: a damaged header or index, a file that is missing or of another size, a tensor that is not in
            the file that the index names. UnsafeError: an index that leaves the folder.
        MismatchError: several files and no index; a dtype that is not read.
    """
    index = _index(folder)
    if index is None:
        path = _single(folder)
        return _manifest((key, path.name, entry) for key, entry in _entries(path).items())
    places = _places(index)
    found = {file: _entries(folder / file) for file in sorted(set(places.values()))}
    for key, file in places.items():
        if key not in found[file]:
            raise CorruptError(f"{folder / file} has no tensor {key}, which {index.name} says it has")
    return _manifest((key, file, found[file][key]) for key, file in places.items())


def _manifest(tensors: Iterable[tuple[str, str, Entry]]) -> Manifest:
    stored: dict[str, StoredTensor] = {}
    unaligned: dict[ByteRange, torch.dtype] = {}
    for key, file, entry in tensors:
        frame, box = ByteRange(file, entry.start, entry.stop - entry.start), whole(entry.shape)
        stored[key] = StoredTensor(entry.dtype, entry.shape, (StoredChunk(box, frame),) if frame.length else ())
        if entry.start % entry.dtype.itemsize:
            unaligned[frame] = entry.dtype
    return Manifest(stored, {}, decoder=_Decoder(unaligned))


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
    usual, found = f"model{safetensors.SUFFIX}", sorted(folder.glob(f"[!.]*{safetensors.SUFFIX}"))
    lacking = f"neither {usual} nor {safetensors.INDEX_NAME}, which would say what belongs together"
    return _usual(folder, found, usual, "safetensors files", lacking)


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
