"""An existing checkpoint, opened: found, told from what only looks like one, its files mapped.

    path --> opening.py (this file) --> Checkpoint(manifest, integrity, files) --> plan.py, reader.py

Opening reads the small files and the sizes of the others, no tensor.

[Note: a map outlives its descriptor] The kernel keeps a file mapped when its descriptor is closed. Python's ``mmap``
keeps the descriptor all the same, and a checkpoint may have more files than a process may open. So torch maps it. A
map lives as long as any view of it: it is undone when the last one goes, and never by whoever made it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from threading import Lock

import torch

from sixfold.dist_ckpt.checkpoint import safetensors_folder, zarr_folder
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError, StorageError, at, typed
from sixfold.dist_ckpt.formats import compact_manifest, metadata, zstd
from sixfold.dist_ckpt.formats import frame as frames
from sixfold.dist_ckpt.formats import integrity as checks
from sixfold.dist_ckpt.formats.integrity import Integrity
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.storage.by_pointer import TAIL_BYTES, check_finished, check_for_torch, visible
from sixfold.dist_ckpt.storage.frame_file import libc
from sixfold.dist_ckpt.storage.store import FOLDER, POINTER

LOOKS = 5  # at a folder that others write to meanwhile
SMALL_BYTES = 1 << 22  # of a file that is hashed when it is opened
_FORGET_LOOKS = 1 << 10  # of 64 KiB each
KEPT_MAPS = 256  # Linux allows 65,530 to a process by default
VERIFY_MODES = ("touched", "full", "off")
_MADV_POPULATE_READ = 22
_POPULATE_BYTES = 1 << 16  # less is not worth a system call
_MOST_OBJECT_BYTES = 1 << 30  # of a value that torch has compressed
Arrives = Callable[[int, int], None]


class Mapped:
    """A file, mapped privately. Nobody writes there: what is written may be gone at the next look.

    Attributes:
        data: its bytes; a view of them keeps them mapped.
    """

    __slots__ = ("_arrives", "_memory", "_path", "data")

    def __init__(self, path: Path, arrives: Arrives | None = None) -> None:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            try:  # not by its name, which may be no text, or that of another file now
                self._memory = torch.from_file(f"/proc/self/fd/{file.fileno()}", size=nbytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, str(error), str(path)) from error
        self._path, self._arrives = path, arrives
        self.data = tensor_bytes(self._memory)

    def at(self, start: int, stop: int) -> int:
        """Where bytes [start, stop) lie in memory, as long as the caller keeps this object.

        They have arrived, and are read here: a disk that fails is an error of the system now, and no SIGBUS when they
        are used.
        """
        if self._arrives is not None:
            self._arrives(start, stop)
        code = self._advise(start, stop, _MADV_POPULATE_READ) if stop - start >= _POPULATE_BYTES else 0
        if code not in (0, errno.EINVAL):  # which Linux before 5.14 says
            raise OSError(errno.EIO, f"the disk does not give these bytes ({os.strerror(code)})", str(self._path))
        return self._memory.data_ptr() + start

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) when they have arrived."""
        if self._arrives is not None:
            self._arrives(start, stop)
        return self.data[start:stop]

    def forget(self, start: int, stop: int) -> None:
        """Count the bytes [start, stop) no longer as memory of this process: the page cache keeps them."""
        if start < len(self.data):
            self._advise(start, min(stop, len(self.data)), mmap.MADV_DONTNEED)

    def _advise(self, start: int, stop: int, advice: int) -> int:
        """madvise(2) of the pages from byte ``start`` on; 0, or the number of its error."""
        first, advise = start - start % mmap.PAGESIZE, libc("madvise")
        assert advise is not None, "Linux"
        place = ctypes.c_void_p(self._memory.data_ptr() + first)
        return advise(place, ctypes.c_size_t(stop - first), advice) and ctypes.get_errno()


@dataclass(slots=True)
class Checkpoint:
    """A folder that holds a whole checkpoint; for threads.

    ``integrity`` is None for folders of other libraries. ``verify`` is one of ``VERIFY_MODES``. ``identity``
    tells the folder from one that takes its place later. Where bytes arrive while it is read, ``arrives`` gives for a
    path what waits for them, and ``takes`` hands out what did not go through a file.
    """

    folder: Path
    manifest: Manifest
    integrity: Integrity | None
    verify: str
    identity: tuple[int, ...]
    common: tuple[str, int] | None = None  # backend and version of common data; None: there is no metadata.json
    unread: tuple[ByteRange, ...] = ()  # large files that say what others say too: a load hashes them as it does data
    arrives: Callable[[Path], Arrives] | None = None
    takes: Callable[[Path, int, memoryview], bool] | None = None
    _maps: OrderedDict[str, Mapped] = field(default_factory=OrderedDict)  # the ``KEPT_MAPS`` used last
    _lock: Lock = field(default_factory=Lock)

    def map(self, name: str) -> Mapped:
        """A file mapped privately, as it was when it was mapped first. Its size was checked when all was opened."""
        with self._lock:
            if (found := self._maps.pop(name, None)) is None:
                path = self.folder / name
                found = Mapped(path, self.arrives and self.arrives(path))
            self._maps[name] = found
            if len(self._maps) > KEPT_MAPS:
                self._maps.popitem(last=False)
        return found

    @property
    def block_bytes(self) -> int:
        """The blocks in which a checkpoint is fetched are those that it has digests of."""
        return checks.BLOCK_BYTES if self.integrity is None else self.integrity.block_bytes

    @property
    def content(self) -> tuple[str | None, str]:
        """Equal for equal keys of one save. Cost: all keys, unless a save id names the checkpoint."""
        tensors, objects = self.manifest.tensors, self.manifest.objects
        if self.manifest.save_id is not None:
            return self.manifest.save_id, f"{len(tensors)} {len(objects)}"
        return None, sha256("\0".join(sorted([*tensors, *objects])).encode("utf-8", "surrogatepass")).hexdigest()

    def await_bytes(self, name: str, start: int, stop: int) -> None:
        """Until bytes [start, stop) of a file are there."""
        if self.arrives is not None:
            self.arrives(self.folder / name)(start, stop)

    def take(self, name: str, start: int, into: memoryview) -> bool:
        """Get bytes of a file that were held for this rank alone; False if they are, or will be, in the file."""
        return self.takes is not None and self.takes(self.folder / name, start, into)

    def forget(self, name: str, start: int, stop: int) -> None:
        """Bytes [start, stop) of a file will not be looked at soon."""
        if (found := self._maps.get(name)) is not None:
            found.forget(start, stop)

    def check_unchanged(self) -> None:
        """StorageError if another save has taken the folder's place since it was opened, or its files have changed.

        Files are opened by path, one after the other; only this shows that all were of one save.
        """
        _check_unchanged(self.folder, self.identity, self.integrity)

    def stored(self, frame: ByteRange) -> memoryview:
        """The bytes of a frame as they lie in its file, not copied."""
        if not frame.length:
            raise CorruptError(f"{self.folder}: {frame} is empty; a frame is not")
        return self.map(frame.file).view(frame.offset, frame.offset + frame.length)

    def frame(self, frame: ByteRange, raw_bytes: int = _MOST_OBJECT_BYTES) -> memoryview:
        """The same as ``torch.load`` reads it: decoded if its file is compressed, and holding ``raw_bytes`` at most."""
        data = self.stored(frame)
        return memoryview(zstd.decompress(data, raw_bytes)) if frame.file in self.manifest.compressed else data

    def damaged_keys(self, file: str, start: int, stop: int) -> list[str]:
        """Keys whose frame is damaged and has bytes in [start, stop) of a file.

        A block may hold many frames; the CRC-32s of each tell which. Objects have them too: torch.save writes them.
        Where all of [start, stop), which is damaged, is of one frame, nothing else needs to be looked at.
        """
        inside = [
            (key, frame)
            for key, frame in self.manifest.frames_by_key()
            if frame.file == file and frame.offset < stop and frame.offset + frame.length > start
        ]
        return sorted({key for key, frame in inside if _holds(frame, start, stop) or not self._is_whole(frame)})

    def _is_whole(self, frame: ByteRange) -> bool:
        try:
            frames.parse(self.frame(frame))
            frames.check_records(self.frame(frame))
        except CorruptError:
            return False
        return True

    def small_file(self, name: str) -> bytes | None:
        """A whole small file, its digest checked unless verify is "off"; None if there is none."""
        path = self.folder / name
        with _or_replaced(self.folder, self.identity, self.integrity):
            if self.arrives is not None and path.exists():
                self.await_bytes(name, 0, path.stat().st_size)
            data = _read(path)
            if data is not None and self.integrity is not None and self.verify != "off":
                self.integrity.check_file_bytes(path, data)
            elif data is not None and self.verify != "off":
                at(path, lambda: frames.check_records(memoryview(data)))
        return data


def _holds(frame: ByteRange, start: int, stop: int) -> bool:
    return frame.offset <= start and stop <= frame.offset + frame.length


def open_checkpoint(path: str | Path, *, verify: str = "touched") -> Checkpoint:
    """Open a checkpoint of this package, of torch DCP or of megatron.

    Raises:
        MismatchError: no such folder, not a checkpoint, a backend that is not read.
        CorruptError: damaged, or a save that never finished.
        UnsafeError: a pickle or a path that leaves what a checkpoint may name.
        StorageError: the operating system refuses.
    """
    if verify not in VERIFY_MODES:
        raise CheckpointError(f"verify is {verify!r}; it is one of {VERIFY_MODES}")
    folder = storage.local_path(path, "this is opened by load and by the functions of the top level")
    return typed(lambda: _open(storage.resolved(folder), verify))


@dataclass(slots=True)
class _OneFile(Checkpoint):
    """A file of safetensors, whatever lies beside it; ``identity`` is the file's."""

    path: Path = Path()

    def check_unchanged(self) -> None:
        if not self.path.is_file() or _identity(self.path) != self.identity:
            raise StorageError(f"{self.path} was replaced while it was read; load it again", errno.ESTALE)


def open_safetensors(path: Path) -> Checkpoint:
    """One file of safetensors. Errors: as ``open_checkpoint``."""

    def opened() -> Checkpoint:
        identity = _identity(path)
        manifest = safetensors_folder.read_manifest(path.parent, path)
        return _OneFile(path.parent, manifest, None, "off", identity, path=path)

    return typed(opened)


def read_config(checkpoint_dir: str | Path) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Sharded and common (backend, version) of a folder's metadata.json; None if there is no readable one."""
    try:
        return metadata.read_config(storage.read_small(Path(checkpoint_dir) / POINTER))
    except (OSError, ValueError, CheckpointError):  # what is wrong with it, the engine says
        return None


def _open(folder: Path, verify: str) -> Checkpoint:
    if not folder.exists():
        folder = _fallback(folder)
    if not folder.is_dir():
        raise MismatchError(f"{folder} is a file; a checkpoint is a folder")
    folder = inner(folder)
    identity = _identity(folder)
    with _or_replaced(folder, identity):
        return _look_into(folder, verify, identity)


def inner(folder: Path) -> Path:
    """Where the files lie: the folder, or in a copy of a store without rename that of the save which is visible.

    Raises: CorruptError: as ``check_finished`` and ``check_for_torch``.
    """
    if not any(FOLDER.match(f"{path.name}/") for path in folder.iterdir()):
        return folder
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    check_finished(folder, names)
    if (found := visible(names)) and ".metadata" in names:
        check_for_torch(folder, names, _tail(folder / ".metadata"))
    return folder / found


def _tail(path: Path) -> bytes:
    storage.check_regular(path)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES)


def _look_into(folder: Path, verify: str, identity: tuple[int, ...]) -> Checkpoint:
    config, common = _read(folder / "metadata.json"), None
    integrity = _open_integrity(folder)
    if config is not None:
        # The digest first: a flipped digit of a version is damage and no unknown backend.
        if integrity is not None and verify != "off":
            integrity.check_file_bytes(folder / "metadata.json", config)
        backend, common = at(folder / "metadata.json", lambda: metadata.check_config(config))
        if backend == "zarr":
            _refuse_foreign_metadata(folder, "metadata.json", None)
            return Checkpoint(folder, zarr_folder.read_manifest(folder), None, verify, identity, common)
    elif safetensors_folder.is_one(folder):
        return Checkpoint(folder, safetensors_folder.read_manifest(folder), None, verify, identity)
    unread = tuple[ByteRange, ...]()
    if integrity is not None and compact_manifest.FILE_NAME in integrity.files:
        manifest = _open_compact(folder, integrity, verify)
        unread = _unread(folder, integrity, verify)
    else:
        manifest = _open_manifest(folder, integrity, verify, has_config=config is not None)
    if config is None and manifest.needs_metadata_json:
        raise CorruptError(f"{folder} has no metadata.json: the save that made it never finished")
    files = _files_of(manifest)
    _check_identity(folder, manifest, integrity, files)
    _check_ranges(folder, files)
    return Checkpoint(folder, manifest, integrity, verify, identity, common, unread)


@contextmanager
def _or_replaced(folder: Path, identity: tuple[int, ...], integrity: Integrity | None = None) -> Iterator[None]:
    """An error inside is no damage if another save has taken the folder's place meanwhile."""
    try:
        yield
    except (CheckpointError, OSError):
        _check_unchanged(folder, identity, integrity)
        raise


def _check_unchanged(folder: Path, identity: tuple[int, ...], integrity: Integrity | None) -> None:
    """The time is compared too, since inodes are used again; a file that others add changes it, and nothing of ours."""
    if not folder.is_dir():
        raise StorageError(f"{folder} was replaced or removed while it was read; load it again", errno.ESTALE)
    now = _identity(folder)
    if now == identity or (integrity is not None and _is_still(folder, integrity)):
        return
    if now[:2] == identity[:2] and (integrity is None or not (folder / checks.FILE_NAME).exists()):
        raise StorageError(
            f"files were added to {folder}, or removed from it, while it was read; what was read may be of two saves. "
            "Load it again when nobody writes there",
            errno.ESTALE,
        )
    raise StorageError(f"{folder} was replaced while it was read; load it again", errno.ESTALE)


def _is_still(folder: Path, integrity: Integrity) -> bool:
    """Whether the folder holds this save: no name of it is ever written again, and each is there with its size."""
    try:
        data = _read(folder / checks.FILE_NAME)
        if data is None:
            return False
        found = checks.decode(folder / checks.FILE_NAME, data)
        # A .metadata that was made later is one file more.
        if found.save_id != integrity.save_id or not integrity.files.items() <= found.files.items():
            return False
        integrity.check_sizes(folder)
    except (CheckpointError, OSError):
        return False
    return True


def _identity(folder: Path) -> tuple[int, ...]:
    """Differs for a folder, or a file, that was moved into this one's place."""
    status = folder.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def is_complete(path: str | Path) -> bool:
    """Whether a folder opens as a whole checkpoint: its small files and the sizes of the others, no digest.

    Raises:
        StorageError: the system does not let us see, which is not taken for a "no".
    """
    return opens(lambda: open_checkpoint(path, verify="off"))


def opens(look: Callable[[], object]) -> bool:
    """Whether ``look`` opens a checkpoint, looked at again where it was replaced a moment ago."""
    for _ in range(LOOKS):
        try:
            look()
        except StorageError as error:
            if error.errno != errno.ESTALE:
                raise
        except CheckpointError:
            return False
        else:
            return True
    return False


def _fallback(folder: Path) -> Path:
    """The newest complete sibling of a missing folder whose replacement was cut short; see ``commit`` in local.py."""
    if storage.siblings(folder, "old"):
        inner = [path / storage.INNER for path in storage.siblings(folder, "tmp")]
        staged = [path if path.is_dir() else path.parent for path in inner]  # 0.1.0 had no folder inside
        candidates = [*staged, *storage.siblings(folder, "old")]
        for sibling in sorted(candidates, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            if is_complete(sibling):
                return sibling
    raise MismatchError(f"Checkpoint directory {folder} does not exist")


def _open_integrity(folder: Path) -> Integrity | None:
    data = _read(folder / checks.FILE_NAME)
    if data is None:
        return None
    integrity = checks.decode(folder / checks.FILE_NAME, data)
    integrity.check_sizes(folder)
    return integrity


def _open_manifest(folder: Path, integrity: Integrity | None, verify: str, *, has_config: bool) -> Manifest:
    path = folder / ".metadata"
    data = _read(path)
    if data is None:
        if has_config or any(folder.glob("*.distcp")):
            raise CorruptError(f"{path} is missing: a save never finished, or the file was lost")
        inside = checkpoints_in(folder)
        raise MismatchError(
            f"{folder} is not a distributed checkpoint: it has neither metadata.json nor .metadata{inside}"
        )
    trusted = integrity is not None
    if integrity is not None:
        try:
            integrity.check_file_bytes(path, data)
        except CorruptError:
            if verify != "off":
                raise
            trusted = False  # damaged bytes are decoded slowly and warily, as those without a digest
    return at(path, lambda: metadata.decode(data, trusted_bytes=trusted))


def checkpoints_in(folder: Path) -> str:
    """The remedy for the folder of a run, which holds one checkpoint per step."""
    found = sorted(path.parent.name for path in folder.glob("[!.]*/metadata.json"))
    return f"; it holds checkpoints: name one, such as {folder / found[-1]}" if found else ""


def _open_compact(folder: Path, integrity: Integrity, verify: str) -> Manifest:
    """The compact manifest, mapped; its blocks are hashed when something in them is looked at.

    A look brings 64 KiB of it into this process, which are given back to the page cache after some looks.
    """
    path, done, looks = folder / compact_manifest.FILE_NAME, set[int](), count(1)

    def size(name: str) -> int:
        if name not in integrity.files:
            raise CorruptError(f"{folder / name} is not in {checks.FILE_NAME}, and {path.name} names bytes of it")
        return integrity.files[name].size

    def check(start: int, stop: int) -> None:
        if next(looks) % _FORGET_LOOKS == 0:
            mapped.forget(0, len(mapped.data))
        for number in range(start // integrity.block_bytes, -(-stop // integrity.block_bytes)):
            if number not in done and verify != "off":
                integrity.check_blocks(folder, [checks.Block(path.name, number)])
                done.add(number)

    storage.check_regular(path)
    if not integrity.files[path.name].size:
        raise CorruptError(f"{path} is empty")
    mapped = Mapped(path)
    manifest = at(path, lambda: compact_manifest.read(mapped.data, size, check))
    if not compact_manifest.is_alone(mapped.data) and ".metadata" not in integrity.files:
        raise CorruptError(f"{folder / '.metadata'} is not in {checks.FILE_NAME}: the save did not write it")
    return manifest


def _unread(folder: Path, integrity: Integrity, verify: str) -> tuple[ByteRange, ...]:
    """``.metadata``, which is not decoded here, if it is too large to be hashed at once."""
    path, expected = folder / ".metadata", integrity.files.get(".metadata")
    if expected is None or verify == "off":
        return ()
    if expected.size > SMALL_BYTES:
        return (ByteRange(path.name, 0, expected.size),)
    integrity.check_file_bytes(path, _read(path) or b"")
    return ()


def _check_identity(folder: Path, manifest: Manifest, integrity: Integrity | None, files: dict[str, ByteRange]) -> None:
    if manifest.save_id is not None and integrity is None:
        raise CorruptError(f"{folder / checks.FILE_NAME} is missing; save {manifest.save_id} wrote one")
    name = ".metadata" if manifest.files is None else compact_manifest.FILE_NAME
    if integrity is not None and integrity.save_id != manifest.save_id:
        raise CorruptError(
            f"{folder / name} is of save {manifest.save_id}, {checks.FILE_NAME} of save {integrity.save_id}: "
            "files of two saves are mixed"
        )
    if integrity is not None:
        needed = {name, "common.pt", "metadata.json", *files}
        if unknown := sorted(name for name in needed - integrity.files.keys() if (folder / name).exists()):
            raise CorruptError(f"{folder / unknown[0]} is not in {checks.FILE_NAME}: the save did not write it")
        if ".metadata" not in integrity.files:
            _refuse_foreign_metadata(folder, checks.FILE_NAME, integrity.save_id)


def _refuse_foreign_metadata(folder: Path, by: str, save_id: str | None) -> None:
    """CorruptError for a ``.metadata`` that the save of ``by`` did not write, as torch's saves into this place do.

    One of ``save_id`` was made later and is not in integrity.json yet; see [Note: one file more] in
    tools/added_metadata.py.
    """
    path = folder / ".metadata"
    try:
        tail = _tail(path)
    except FileNotFoundError:
        return
    if save_id is None or not (b"sixfold_save_id" in tail and save_id.encode() in tail):
        raise CorruptError(
            f"{path} is of another save than {by}, which does not know it: files of two saves are mixed. Move "
            "metadata.json, integrity.json, common.pt and shard_manifest.pt away to load what .metadata names; "
            "save into a place of its own"
        )


def _files_of(manifest: Manifest) -> dict[str, ByteRange]:
    """The files that hold frames, and what ends last of each; nothing where each frame is checked when it is read."""
    if manifest.files is not None:
        return {name: ByteRange(name, 0, 0) for name in manifest.files}
    ends: dict[str, ByteRange] = {}
    for _, frame in manifest.frames_by_key():
        last = ends.setdefault(frame.file, frame)
        if frame.offset + frame.length > last.offset + last.length:
            ends[frame.file] = frame
    return ends


def _check_ranges(folder: Path, files: dict[str, ByteRange]) -> None:
    for name, frame in sorted(files.items()):
        try:
            storage.check_regular(folder / name)
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CorruptError(f"{folder / name} is missing; .metadata names bytes of it") from None
        if frame.offset + frame.length > size:
            raise CorruptError(f"{folder / name} has {size} bytes; .metadata names {frame}")


def _read(path: Path) -> bytes | None:
    try:
        return storage.read_small(path)
    except FileNotFoundError:
        return None
