"""What a store is: the place of one checkpoint's bytes, with one act by which all of them become visible.

    save: begin --> write_part of each rank --> prepare --> write --> commit      (this file says what each means)
    load: list_files --> read, read_ranges

Stores move bytes: no tensor, no plan, no rank is known here. local.py is a folder, url.py what fsspec opens, memory.py
this process. A store of one's own derives from ``ByPointer`` (by_pointer.py).
"""

from __future__ import annotations

import errno
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from sixfold.dist_ckpt.errors import StorageError
from sixfold.dist_ckpt.formats import compact_manifest
from sixfold.dist_ckpt.formats.integrity import FILE_NAME, Content, Contents, FileDigest, Integrity, digest_of
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.storage.frame_file import PartFile

POINTER = "metadata.json"
_OWN_FILES = frozenset([POINTER, "common.pt", ".metadata", ".metadata.tmp", compact_manifest.FILE_NAME, FILE_NAME])
_DATA_FILE, _ZIP = re.compile(r"__\d+_\d+\.distcp"), b"PK\x03\x04"
_HEAD_BYTES = 1 << 16
#: In a store without rename: the folder of a save, and that in which its ranks leave word for each other.
FOLDER = re.compile(r"(?:save|job)-(\d{8,})-([0-9a-f]{16})/")


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name may lie in a checkpoint of the torch_dist format, wherever that lies."""
    match = FOLDER.match(name)
    if match:
        return name.startswith("job-") or is_checkpoint_file(name[match.end() :])
    return name in _OWN_FILES or (name.endswith(".distcp") and "/" not in name)


def is_small_file(name: str) -> bool:
    """Whether a file is read when a checkpoint is opened."""
    if is_checkpoint_file(name):
        return not name.endswith(".distcp")
    return name.endswith((".zarray", ".pt", ".safetensors.index.json"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save on its way into a store: made by ``begin`` of the first rank, and sent to all ranks and workers.

    Attributes:
        save_id: 16 hexadecimal digits, drawn for this save.
        target: how errors call the checkpoint.
        staging: the local folder where the files lie until the commit; "" elsewhere.
        inside: what stands before the names of the files in a store without rename: a folder's name and a slash.
        if_exists: "replace" or "error".
        owns_file: whether another format's checkpoint may hold a file of this name; a function that can be pickled.
    """

    save_id: str
    target: str
    staging: str = ""
    inside: str = ""
    if_exists: str = "replace"
    owns_file: Callable[[str], bool] = is_checkpoint_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A file of frames that is to be written.

    Attributes:
        fill: adds the frames; called again from the start if the store has failed in a way that passes.
        nbytes: an upper bound of what will come; 0 if that is not known.
        threads: how many may write at once.
        moved: told of each part that is written, by its bytes, and with 0 while others are waited for.
    """

    name: str
    fill: Callable[[PartFile], None] = field(repr=False)
    nbytes: int = 0
    threads: int = 1
    moved: Callable[[int], None] | None = None


def part_name(rank: int, number: int) -> str:
    """The name of a rank's file of frames."""
    return f"__{rank}_{number}.distcp"


@runtime_checkable
class Store(Protocol):
    """The place of one checkpoint. Every method may raise StorageError, which names the place as ``name`` does.

    A store is pickled to reach the worker process of a background save.

    Attributes:
        name: how errors call it: the path or URL as the user wrote it.
        local_folder: the path of a folder; None for what is none.
        is_shared: whether other processes see what is written here.
        streams: how many files a rank writes at once.
    """

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def local_folder(self) -> Path | None:
        return None

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def streams(self) -> int:
        return 1

    @abstractmethod
    def list_files(self) -> dict[str, int]:
        """Relative names (with ``/``) and sizes of all files; empty if nothing is there."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, all of it without the two. FileNotFoundError if there is none."""

    def read_ranges(self, ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
        """Many ranges, as many at once as the store bears, each given as soon as it is there, in any order."""
        for part in ranges:
            yield part, self.read(part.file, part.offset, part.offset + part.length)

    def marks(self) -> Mapping[str, object]:
        """For each file what changes when it is written anew, as far as the store tells: sizes at least."""
        return self.list_files()

    def patient(self, timeout_s: float) -> Self:
        """The same with another deadline for what is asked of it, if it has one."""
        return self

    def begin(
        self, save_id: str, nbytes: int, if_exists: str = "replace", owns_file: Callable[[str], bool] | None = None
    ) -> Save:
        """First rank: refuse a target that must not be touched; make room for ``nbytes``."""
        return Save(save_id=save_id, target=self.name)

    def join(self, save: Save) -> None:
        """Other ranks: StorageError unless this process sees what ``begin`` has made."""
        return

    def write_part(self, save: Save, part: Part) -> FileDigest:
        """Write a file of frames and hash it in the same pass; it is durable when this returns."""
        raise OSError(errno.EROFS, f"{self.name} takes no files")

    def take_over(self, other: Save, save: Save, name: str) -> None:
        """Have a part of another save in this one; the other is to be abandoned when all of them are here."""
        return

    def prepare(self, save: Save, parts: Mapping[str, FileDigest]) -> None:
        """First rank: all parts are there as their ranks wrote them; from here on small files may be written."""
        return

    def write(self, save: Save, name: str, data: Content) -> FileDigest:
        """Write a file besides the parts, whole or as a stream of pieces, and hash it in the same pass."""
        raise OSError(errno.EROFS, f"{self.name} takes no files")

    def commit(
        self,
        save: Save,
        pointer: bytes,
        for_torch: Content | None = None,
        files: Mapping[str, FileDigest] | None = None,
    ) -> None:
        """Write ``metadata.json`` and make the save visible; what was there before, and what dead saves left, goes.

        Args:
            pointer: the content of ``metadata.json``.
            for_torch: where files do not lie beside ``metadata.json``: a ``.metadata`` that names them by ``inside``.
            files: what was written besides the pointer; it is an error if one of them is gone.
        """
        return

    def abandon(self, save: Save) -> None:
        """Remove what was written, unless it is committed, as far as that goes. Raises nothing."""
        return

    def holds(self, save_id: str) -> bool:
        """Whether the checkpoint that is visible is of this save."""
        return False

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file; that others have done so is no error."""


class PartlyLocal(Store):
    """A store of which each host has some files already; a load links those and fetches the others.

    Attributes:
        host: of this process. Ranks whose stores give the same one share a mirror.
        mirrors: the folder in which the mirror of this host is made, where the files can be linked.
        local_files: those that are here, by name.
    """

    host: str
    mirrors: Path
    local_files: Mapping[str, Path]


def check_names(
    place: Path | str,
    names: Sequence[str],
    if_exists: str,
    owns_file: Callable[[str], bool],
    head: Callable[[str, int], bytes],
) -> None:
    """StorageError for a target that a save must not touch.

    Args:
        names: of what is there, sorted. head: reads the first bytes of one of them.
    """
    if names and if_exists == "error":
        raise StorageError(
            f"{place} is not empty ({_first(names)}) and if_exists is 'error'; name a new folder. An export writes "
            "into none that has files",
            errno.EEXIST,
        )
    foreign = [name for name in names if not (is_checkpoint_file(name) or owns_file(name))]
    is_own = any(map(FOLDER.match, names)) or any(
        _is_sign(name, head) for name in sorted(names, key=lambda name: name != POINTER)
    )
    if foreign and is_own:
        raise StorageError(
            f"{place} is a checkpoint with other files in it ({_first(foreign)}), which a save in its place would "
            "delete; nothing was touched. Move them to another folder, or save to another folder",
            errno.EEXIST,
        )
    if foreign or (names and not is_own):
        foreign = foreign or list(names)
        raise StorageError(
            f"{place} holds files that are no part of a checkpoint ({_first(foreign)}); nothing was touched. "
            "Save into a folder of its own",
            errno.EEXIST,
        )


def _is_sign(name: str, head: Callable[[str, int], bytes]) -> bool:
    """Whether a file is one that a save of this package, of torch or of megatron-core has made.

    Data sets have a metadata.json, a shard_0.pt, a cats/0 too, and anybody may have a .metadata: of a name that says
    little the content is looked at.
    """
    if name == POINTER:
        return b"sharded_backend" in head(name, _HEAD_BYTES)
    if name in (".metadata", ".metadata.tmp"):
        return b"torch.distributed.checkpoint" in head(name, _HEAD_BYTES)
    if name == FILE_NAME:
        return head(name, _HEAD_BYTES).startswith(b'{"algorithm":"')
    if name == compact_manifest.FILE_NAME:
        return head(name, len(compact_manifest.MAGIC)).startswith(compact_manifest.MAGIC[:-1])
    # Of a save by torch that was cut short nothing but such files may be there.
    return _DATA_FILE.fullmatch(name) is not None and head(name, 4) in (b"", _ZIP)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def complete(
    store: Store,
    save: Save,
    parts: Mapping[str, FileDigest],
    small: Mapping[str, Content],
    pointer: bytes,
    for_torch: Content | None = None,
    in_common: Sequence[str] = (),
    contents: Contents | None = None,
) -> None:
    """What the first rank does when all parts are written: the small files, ``integrity.json``, the commit."""
    store.prepare(save, parts)
    files = write_small(store, save, {**parts, POINTER: digest_of(pointer)}, small, in_common, contents)
    store.commit(save, pointer, for_torch, files)


def write_small(
    store: Store,
    save: Save,
    files: Mapping[str, FileDigest],
    small: Mapping[str, Content],
    in_common: Sequence[str] = (),
    contents: Contents | None = None,
) -> dict[str, FileDigest]:
    """Write ``small`` files, and ``integrity.json`` over them and the other ``files``. Returns all of these."""
    known = {**files, **{name: store.write(save, name, data) for name, data in small.items()}}
    integrity = Integrity(save_id=save.save_id, files=known, in_common=tuple(in_common), contents=contents or {})
    return {**known, FILE_NAME: store.write(save, FILE_NAME, integrity.encode())}


def overtaken(target: Path | str) -> StorageError:
    """The error of a save whose files others have removed."""
    place, gone = Path(target), f"the files of this save to {target} were removed while it went on"
    if place.is_absolute() and not place.exists():  # a folder, and no store
        last = place if place.parent.exists() else place.parent
        return StorageError(
            f"{gone}: {last} is not there. Something has deleted it; this save is lost, save again", errno.ESTALE
        )
    return StorageError(
        f"{gone}: another save to the same folder has ended meanwhile (or a prune took this one for dead). Let one job "
        "save to a folder at a time; this one is lost, the folder is whole",
        errno.ESTALE,
    )
