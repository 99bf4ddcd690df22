"""Probing a folder for damage: all of it, without trusting any of it.

folder --> files, problems (this file) --> tools.verify
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError, UnsafeError, typed
from sixfold.dist_ckpt.files import compact, frame, integrity, metadata
from sixfold.dist_ckpt.files.integrity import Integrity
from sixfold.dist_ckpt.geometry.manifest import Manifest
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.road.request import read_config
from sixfold.dist_ckpt.stores import Store, safetensors_folder, store_at
from sixfold.dist_ckpt.stores import local as storage
from sixfold.dist_ckpt.stores.folder import inner, open_checkpoint
from sixfold.dist_ckpt.stores.store import is_checkpoint_file
from sixfold.dist_ckpt.stores.view import viewed

Problem = dict[str, Any]


@contextmanager
def opened(path: str | Path | Store, *, whole: bool = False) -> Iterator[Path]:
    """The local folder of a checkpoint, while the context lasts.

    The folder itself, resolved; where its checkpoint is if its replacement was cut short; for a URL or a store
    a mirror of its small files, with ``whole`` of all.

    Raises:
        MismatchError: there is no such folder.
    """
    store = store_at(path)
    if store.local_folder is None:
        with viewed(store, whole=whole) as folder:
            yield folder
        return
    folder = store.local_folder
    if folder.exists() and not folder.is_dir():
        raise MismatchError(f"{folder} is a file; a checkpoint is a folder")
    yield inner(folder) if folder.is_dir() else open_checkpoint(folder).folder


def name_of(path: str | Path | Store, folder: Path) -> str:
    """How results call a checkpoint: by its URL or by its resolved path."""
    store = store_at(path)
    return store.name if store.local_folder is None else str(folder)


def files(folder: Path) -> list[tuple[str, int]]:
    """Relative names and sizes of all files below; of a folder of safetensors those that belong to the tensors."""
    if safetensors_folder.is_one(folder):
        return [(name, (folder / name).stat().st_size) for name in safetensors_folder.file_names(folder)]
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted((str(path.relative_to(folder)), path.stat().st_size) for path in found)


def problems(folder: Path, *, quick: bool, progress: Progress | None) -> tuple[list[Problem], int]:
    """All problems of a folder, and the bytes whose checksums were compared."""
    config = read_config(folder)
    if safetensors_folder.is_one(folder) or (config is not None and config[0][0] != "torch_dist"):
        Meter(progress).finish()
        return _Probe(folder).listed(), 0
    probe = _Probe(folder)
    probe.look()
    if not quick:
        probe.hash(progress)
    probe.open()
    return probe.problems, probe.checked_bytes


class _Probe:
    """Damage of one folder, gathered step by step; each step goes on after what the last has found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.checked_bytes = 0
        self._integrity: Integrity | None = None
        self._manifest: Manifest | None = None

    def look(self) -> None:
        """Names, sizes, and what the small files say."""
        self._open_integrity()
        self._open_manifest()
        self._check_sizes()
        self._check_config()
        if self._manifest is not None:
            self._check_frames_lie_in_files(self._manifest)

    def open(self) -> None:
        """As a load does it: it finds what the other steps do not look for."""
        if not self.problems:
            self._attempt("unreadable", None, lambda: open_checkpoint(self.folder))
            self._attempt("unreadable", "common.pt", lambda: serialization.load_common_state_dict(self.folder))

    def listed(self) -> list[Problem]:
        """What the strategy of another backend raises when it lists the folder; such formats have no checksums."""
        for action in (serialization.load_sharded_metadata, serialization.load_common_state_dict):
            self._attempt("unreadable", None, partial(action, self.folder))
        return self.problems

    def hash(self, progress: Progress | None) -> None:
        """Every byte that has a checksum."""
        if self._integrity is not None:
            self._hash_blocks(self._integrity, progress)
        elif self._manifest is not None:
            self._check_foreign_frames(self._manifest, progress)

    def _add(self, kind: str, file: str | None, detail: str, key: str | None = None) -> None:
        self.problems.append({"kind": kind, "file": file, "key": key, "detail": detail})

    def _attempt(self, kind: str, file: str | None, action: Callable[[], Any]) -> Any:
        try:
            return typed(action)
        except CheckpointError as error:
            if not (isinstance(error, UnsafeError) and file == "common.pt"):  # a class of the user's: no damage
                self._add("unsafe" if isinstance(error, UnsafeError) else kind, file, str(error))
            return None

    def _open_integrity(self) -> None:
        path = self.folder / integrity.FILE_NAME
        if path.exists():
            self._integrity = self._attempt(
                "unreadable", path.name, lambda: integrity.decode(path, storage.read_small(path))
            )

    def _open_manifest(self) -> None:
        path = self.folder / ".metadata"
        if self._integrity is not None and compact.FILE_NAME in self._integrity.files:
            self._check_compact(self._integrity)
            if not path.exists() and path.name not in self._integrity.files:
                return
        if not path.exists():
            started = any(self.folder.glob("*.distcp")) or (self.folder / "metadata.json").exists()
            text = "a save never ended, or the file was lost" if started else "the folder is not a checkpoint"
            self._add("missing" if started else "unreadable", ".metadata", f"{path} is missing: {text}")
            return
        # Not trusted, whatever its digest says: the digests are compared later.
        self._manifest = self._attempt(
            "unreadable", ".metadata", lambda: metadata.decode(storage.read_small(path), trusted_bytes=False)
        )
        manifest, own = self._manifest, self.folder / integrity.FILE_NAME
        if manifest is None:
            return
        if manifest.save_id is not None and not own.exists():
            self._add("missing", own.name, f"{own} is missing; save {manifest.save_id} wrote one")
        if self._integrity is not None and self._integrity.save_id != manifest.save_id:
            self._add("mixed", ".metadata", f".metadata is of save {manifest.save_id}, {own.name} of another")

    def _check_compact(self, expected: Integrity) -> None:
        """Every entry of the compact manifest, of which a load checks those that it looks at."""
        path = self.folder / compact.FILE_NAME

        def size(name: str) -> int:
            if name not in expected.files:
                raise CorruptError(f"{path} names bytes of {name}, which {integrity.FILE_NAME} does not name")
            return expected.files[name].size

        def look() -> Manifest:
            manifest = compact.read(memoryview(storage.read_small(path)), size, lambda start, stop: None)
            for _ in manifest.frames_by_key():
                pass
            return manifest

        if path.exists():
            self._manifest = self._attempt("unreadable", path.name, look)

    def _check_sizes(self) -> None:
        if self._integrity is None:
            return
        found = dict(files(self.folder))
        for name, expected in sorted(self._integrity.files.items()):
            if name not in found:
                self._add("missing", name, f"{name} is missing; {expected.size} bytes were saved")
            elif found[name] != expected.size:
                self._add("size", name, f"{name} has {found[name]} bytes; {expected.size} were saved")
        for name in sorted(found.keys() - self._integrity.files.keys() - {integrity.FILE_NAME}):
            if is_checkpoint_file(name):
                self._add("extra", name, f"{name} is no part of save {self._integrity.save_id}")

    def _check_config(self) -> None:
        path = self.folder / "metadata.json"
        if path.exists():
            self._attempt("unreadable", path.name, lambda: metadata.check_config(storage.read_small(path)))
        elif self._manifest is not None and self._manifest.needs_metadata_json and not self._names(path.name):
            self._add("unfinished", path.name, f"{self.folder} has no metadata.json: its save never ended")

    def _names(self, file: str) -> bool:
        """Whether a problem of this file is known already."""
        return any(problem["file"] == file for problem in self.problems)

    def _check_frames_lie_in_files(self, manifest: Manifest) -> None:
        sizes = dict(files(self.folder))
        for key, place in manifest.frames_by_key():
            if place.file not in sizes:
                if not self._names(place.file):
                    self._add("missing", place.file, f"{place.file} is missing; .metadata names bytes of it", key)
            elif place.offset + place.length > sizes[place.file] and self._integrity is None:
                self._add("size", place.file, f"{place} lies behind the end of the file", key)

    def _hash_blocks(self, expected: Integrity, progress: Progress | None) -> None:
        sizes = dict(files(self.folder))
        meter = Meter(progress, lambda: sum(sizes.get(name, 0) for name in expected.files))
        for block in sorted(expected.all_blocks()):
            if block.file not in sizes:
                continue
            try:
                count = typed(partial(expected.check_blocks, self.folder, [block]))
            except CheckpointError as error:
                start = block.number * expected.block_bytes
                count = max(0, min(expected.block_bytes, sizes[block.file] - start))
                keys = self._keys_in(block.file, start, start + expected.block_bytes)
                for key in keys:
                    self._add("checksum", block.file, str(error), key)
            self.checked_bytes += count
            meter.add(count)
        meter.finish()

    def _keys_in(self, file: str, start: int, stop: int) -> Sequence[str | None]:
        """Keys whose frame is damaged and has bytes in [start, stop) of a file, or None alone."""
        try:
            return open_checkpoint(self.folder, verify="off").damaged_keys(file, start, stop) or [None]
        except CheckpointError:
            places = () if self._manifest is None else self._manifest.frames_by_key()
            inside = {k for k, p in places if p.file == file and p.offset < stop and p.offset + p.length > start}
            return sorted(inside) or [None]

    def _check_foreign_frames(self, manifest: Manifest, progress: Progress | None) -> None:
        """Frames of torch and megatron carry a CRC-32 that torch never looks at (pytorch#126952)."""
        try:
            checkpoint = open_checkpoint(self.folder, verify="off")
        except CheckpointError:
            return  # look() has said why
        frames = list(manifest.frames_by_key())
        meter = Meter(progress, lambda: sum(place.length for _, place in frames))
        for key, place in frames:
            try:
                frame.check_records(checkpoint.frame(place))
            except CorruptError as error:
                self._add("checksum", place.file, f"{place}: {error}", key)
            self.checked_bytes += place.length
            meter.add(place.length)
        meter.finish()
