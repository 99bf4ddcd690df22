"""Probing a folder for damage: all of it, without trusting any of it.

folder --> files, problems (this file) --> tools.verify
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.checkpoint import safetensors_folder
from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, checkpoints_in, inner, open_checkpoint, read_config
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, StorageError, UnsafeError, at, typed
from sixfold.dist_ckpt.formats import compact_manifest, frame, integrity, metadata
from sixfold.dist_ckpt.formats.integrity import Integrity
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest
from sixfold.dist_ckpt.mirror.local_view import viewed
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.storage.local import store_at
from sixfold.dist_ckpt.storage.store import FOLDER, POINTER, Store, is_checkpoint_file
from sixfold.dist_ckpt.tools import stored_values

Problem = dict[str, Any]


@contextmanager
def opened(path: str | Path | Store, *, whole: bool = False) -> Iterator[Path]:
    """The local folder of a checkpoint, while the context lasts.

    It is the folder itself, resolved. If its replacement was cut short, it is the folder where the checkpoint is.
    For a URL or a store it is a mirror of the small files, with ``whole`` of all files.

    Raises:
        MismatchError: there is no such folder.
    """
    store = store_at(path)
    if store.local_folder is None:
        with viewed(store, whole=whole) as folder:
            yield folder
    else:
        folder = store.local_folder
        yield inner(folder) if typed(folder.is_dir) else open_checkpoint(folder).folder


def name_of(path: str | Path | Store, folder: Path) -> str:
    """How results call a checkpoint: by its URL or by its resolved path."""
    store = store_at(path)
    return store.name if store.local_folder is None else str(folder)


def files(folder: Path) -> list[tuple[str, int]]:
    """Relative names and sizes of all files below; of a folder of safetensors those that belong to the tensors."""
    paths = typed(lambda: [path for path in storage.below(folder) if path.is_file()])
    found = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    if safetensors_folder.is_one(folder):
        with suppress(CheckpointError):  # what is wrong with the index, a listing tells
            names = typed(lambda: safetensors_folder.file_names(folder))
            found = {name: found[name] for name in names if name in found}
    return sorted(found.items())


def problems(folder: Path, *, quick: bool, progress: Progress | None) -> tuple[list[Problem], int]:
    """All problems of a folder, and the bytes whose checksums were compared."""
    config, probe = read_config(folder), _Probe(folder)
    of_others = safetensors_folder.is_one(folder) or (config is not None and config[0][0] != "torch_dist")
    probe.list() if of_others else probe.look()
    if quick or of_others:
        Meter(progress).finish()
    else:
        probe.hash(progress)
    if not of_others:
        probe.open()
    return probe.problems, probe.checked_bytes


class _Check(NamedTuple):
    """Bytes of a file that have a checksum, and the keys that are damaged if they are not what they were."""

    file: str
    nbytes: int
    run: Callable[[], Any]
    damaged: Callable[[], Sequence[str | None]]


class _Probe:
    """Damage of one folder, gathered step by step; each step goes on after what the last has found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.checked_bytes = 0
        self._sizes = dict(files(folder))
        self._integrity: Integrity | None = None
        self._manifest: Manifest | None = None

    def look(self) -> None:
        """Names, sizes, and what the small files say."""
        own = integrity.FILE_NAME
        self._integrity = self._decoded(own, lambda data: integrity.decode(self.folder / own, data))
        self._open_manifest()
        self._check_sizes()
        if (self.folder / POINTER).exists():
            self._decoded(POINTER, metadata.check_config)
        elif self._manifest is not None and self._manifest.needs_metadata_json and not self._names(POINTER):
            self._add("unfinished", POINTER, f"{self.folder} has no metadata.json: its save never ended")
        for key, place in () if self._manifest is None else self._manifest.frames_by_key():
            size = self._sizes.get(place.file)
            if size is None and not self._names(place.file):
                self._add("missing", place.file, f"{place.file} is missing; .metadata names bytes of it", key)
            elif size is not None and place.offset + place.length > size and self._integrity is None:
                self._add("size", place.file, f"{place} lies behind the end of the file", key)

    def open(self) -> None:
        """As a load does it: it finds what the other steps do not look for."""
        if not self.problems:
            self._attempt("unreadable", None, lambda: open_checkpoint(self.folder))
            self._attempt("unreadable", "common.pt", self._read_common)

    def list(self) -> None:
        """What the strategy of another backend raises when it lists the folder; such formats have no checksums."""
        self._attempt("unreadable", None, lambda: serialization.load_sharded_metadata(self.folder))
        known = list(self.problems)
        self._attempt("unreadable", None, self._read_common)
        self.problems = known + [problem for problem in self.problems[len(known) :] if problem not in known]

    def _read_common(self) -> None:
        try:
            serialization.load_common_state_dict(self.folder)
        except UnsafeError:  # a class of the user's is no damage; a function that no class stands in for is told
            with suppress(CorruptError):
                stored_values.common_data(self.folder)

    def hash(self, progress: Progress | None) -> None:
        """Every byte that has a checksum."""
        checks = self._frames if self._integrity is None else partial(self._blocks, self._integrity)
        meter = Meter(progress, lambda: sum(check.nbytes for check in checks()))
        for check in checks():
            try:
                typed(check.run)
                self.checked_bytes += check.nbytes
            except StorageError as error:  # what cannot be read is told once
                if not self._names(check.file):
                    self._add("unreadable", check.file, str(error))
            except CheckpointError as error:
                self.checked_bytes += check.nbytes
                for key in check.damaged():
                    self._add("checksum", check.file, str(error), key)
            meter.add(check.nbytes)
        meter.finish()

    def _add(self, kind: str, file: str | None, detail: str, key: str | None = None) -> None:
        self.problems.append({"kind": kind, "file": file, "key": key, "detail": detail})

    def _attempt(self, kind: str, file: str | None, action: Callable[[], Any]) -> Any:
        try:
            return typed(action)
        except CheckpointError as error:
            self._add("unsafe" if isinstance(error, UnsafeError) else kind, file, str(error))
            return None

    def _decoded(self, name: str, decode: Callable[[bytes], Any]) -> Any:
        """What a small file says, if it is there and can be read."""
        path = self.folder / name
        return self._attempt("unreadable", name, lambda: decode(storage.read_small(path))) if path.exists() else None

    def _names(self, file: str) -> bool:
        """Whether a problem of this file is known already."""
        return any(problem["file"] == file for problem in self.problems)

    def _open_manifest(self) -> None:
        path, own = self.folder / ".metadata", self.folder / integrity.FILE_NAME
        known = {} if self._integrity is None else self._integrity.files
        if compact_manifest.FILE_NAME in known:
            self._manifest = self._decoded(compact_manifest.FILE_NAME, self._all_of_compact)
        if not path.exists():
            if compact_manifest.FILE_NAME not in known or path.name in known:
                started = (self.folder / POINTER).exists() or any(self.folder.glob("*.distcp"))
                text = (
                    "a save never ended, or the file was lost"
                    if started
                    else f"the folder is not a checkpoint{checkpoints_in(self.folder)}"
                )
                self._add("missing" if started else "unreadable", path.name, f"{path} is missing: {text}")
            return
        # Not trusted, whatever its digest says: the digests are compared later.
        manifest = self._decoded(path.name, partial(metadata.decode, trusted_bytes=False))
        self._manifest = manifest
        if manifest is not None and manifest.save_id is not None and not own.exists():
            self._add("missing", own.name, f"{own} is missing; save {manifest.save_id} wrote one")
        if manifest is not None and self._integrity is not None and self._integrity.save_id != manifest.save_id:
            self._add("mixed", path.name, f".metadata is of save {manifest.save_id}, {own.name} of another")

    def _all_of_compact(self, data: bytes) -> Manifest:
        """The compact manifest, every entry of it looked at; a load checks those that it needs."""
        assert self._integrity is not None, "it names the manifest"
        known = self._integrity.files

        def size(name: str) -> int:
            if name not in known:
                raise CorruptError(
                    f"{compact_manifest.FILE_NAME} names bytes of {name}, which integrity.json does not name"
                )
            return known[name].size

        manifest = compact_manifest.read(memoryview(data), size, lambda start, stop: None)
        for _ in manifest.frames_by_key():
            pass
        return manifest

    def _check_sizes(self) -> None:
        if self._integrity is None:
            return
        for name, expected in sorted(self._integrity.files.items()):
            if name not in self._sizes:
                self._add("missing", name, f"{name} is missing; {expected.size} bytes were saved")
            elif self._sizes[name] != expected.size:
                self._add("size", name, f"{name} has {self._sizes[name]} bytes; {expected.size} were saved")
        for name in sorted(self._sizes.keys() - self._integrity.files.keys() - {integrity.FILE_NAME}):
            if is_checkpoint_file(name) and not FOLDER.match(name):
                self._add("extra", name, f"{name} is no part of save {self._integrity.save_id}")

    def _blocks(self, expected: Integrity) -> Iterator[_Check]:
        for block in sorted(expected.all_blocks()):
            start = block.number * expected.block_bytes
            stop = min(start + expected.block_bytes, self._sizes.get(block.file, 0))
            if block.file in self._sizes:
                run = partial(expected.check_blocks, self.folder, [block])
                keys = partial(self._keys_in, block.file, start, start + expected.block_bytes)
                yield _Check(block.file, max(0, stop - start), run, keys)

    def _keys_in(self, file: str, start: int, stop: int) -> Sequence[str | None]:
        """Keys whose frame is damaged and has bytes in [start, stop) of a file, or None alone."""
        try:
            return open_checkpoint(self.folder, verify="off").damaged_keys(file, start, stop) or [None]
        except CheckpointError:
            places = () if self._manifest is None else self._manifest.frames_by_key()
            inside = {k for k, p in places if p.file == file and p.offset < stop and p.offset + p.length > start}
            return sorted(inside) or [None]

    def _frames(self) -> Iterator[_Check]:
        """Frames of torch and megatron carry a CRC-32 that torch never looks at (pytorch#126952)."""
        with suppress(CheckpointError):  # look() has said why
            checkpoint = open_checkpoint(self.folder, verify="off")
            tensors = checkpoint.manifest.tensors
            for key, place in checkpoint.manifest.frames_by_key():
                most = (prod(tensors[key].shape) * tensors[key].dtype.itemsize,) if key in tensors else ()
                run = partial(_check_frame, checkpoint, place, *most)
                yield _Check(place.file, place.length, run, partial(list, [key]))


def _check_frame(checkpoint: Checkpoint, place: ByteRange, *most: int) -> None:
    at(place, lambda: frame.check_records(checkpoint.frame(place, *most)))
