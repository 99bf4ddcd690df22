"""What a store is: the place of one checkpoint's bytes, with one act by which all of them become visible.

    save: begin --> write_part of each rank --> prepare --> write --> commit      (this file says what each means)
    load: list_files --> read, read_ranges

Stores move bytes: no tensor, no plan, no rank is known here. local.py is a folder, url.py what fsspec opens, memory.py
this process. A store of one's own derives from ``ByPointer``.

[Note: visible by one act] Who has a rename writes a save apart from the target and moves it there (local.py). Who has
none, ``ByPointer``, gives the parts of each save names of their own, so that none of an older checkpoint is
overwritten; then the old ``metadata.json`` goes, the small files are written, and the new ``metadata.json``, written
last, commits. A kill between the two leaves what is refused as unfinished, never a mixture.

[Note: put back] An error between the two leaves the older checkpoint: ``prepare`` keeps the small files that will be
overwritten, small ones as bytes and large ones as copies in the store, and ``put_back`` writes them again,
``metadata.json`` last. Where that fails too, the error says so. Nothing is put back where another save has been.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from sixfold.dist_ckpt.errors import CheckpointError, StorageError
from sixfold.dist_ckpt.files import compact
from sixfold.dist_ckpt.files.frame import Frame
from sixfold.dist_ckpt.files.integrity import FILE_NAME, FileDigest, decode
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.stores.stream import Sink, StreamFile

POINTER = "metadata.json"
_OWN_FILES = frozenset([POINTER, "common.pt", ".metadata", ".metadata.tmp", compact.FILE_NAME, FILE_NAME])
_MOST_KEPT_BYTES, _PIECE_BYTES = 64 << 20, 8 << 20  # of a file that is kept in memory; of a larger one, at a time

#: The content of a file: its bytes, or what gives them piece by piece, each time that it is called.
Content = bytes | Callable[[], Iterable[bytes]]


def is_checkpoint_file(name: str) -> bool:
    """Whether a file of this name may lie in a checkpoint of the torch_dist format."""
    return name in _OWN_FILES or (name.endswith(".distcp") and "/" not in name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save on its way into a store: made by ``begin`` of the first rank, and sent to all ranks and workers.

    Attributes:
        save_id: 16 hexadecimal digits, drawn for this save.
        target: how errors call the checkpoint.
        staging: the folder where the files lie until the commit; "" if they have their final names from the start.
        if_exists: "replace" or "error".
        owns_file: whether another format's checkpoint may hold a file of this name; a function that can be pickled.
    """

    save_id: str
    target: str
    staging: str = ""
    if_exists: str = "replace"
    owns_file: Callable[[str], bool] = is_checkpoint_file

    def part_name(self, rank: int, number: int) -> str:
        """The name of a rank's file of frames."""
        return f"__{rank}_{number}.distcp" if self.staging else f"__{rank}_{number}.{self.save_id}.distcp"


class PartFile(Protocol):
    """A file of frames while it is filled, once from start to end."""

    @property
    def position(self) -> int:
        """Bytes so far."""
        ...

    def add(self, parts: Sequence[bytes], nbytes: int) -> None:
        """Add small parts of ``nbytes`` together."""
        ...

    def add_large(
        self,
        head_bytes: int,
        parts: Callable[[], Iterable[tuple[memoryview, object]]],
        frame: Callable[[int], Frame],
    ) -> None:
        """Add a frame around raw bytes that lie elsewhere.

        Args:
            parts: gives the bytes in their order, each with the owner of its memory; may be called twice. They do
                not change until the file is finished.
            frame: makes head, of ``head_bytes``, and tail from the CRC-32 of the raw bytes.
        """
        ...

    def append(self, data: bytes) -> None:
        """Add bytes."""
        ...


@runtime_checkable
class Store(Protocol):
    """The place of one checkpoint. Every method may raise StorageError, which names the place as ``name`` does.

    A store is pickled to reach the worker process of a background save.

    Attributes:
        name: how errors call it: the path or URL as the user wrote it.
        is_shared: whether other processes see what is written here.
        streams: how many files a rank writes at once.
    """

    @property
    def name(self) -> str: ...

    @property
    def is_shared(self) -> bool: ...

    @property
    def streams(self) -> int: ...

    def list_files(self) -> dict[str, int]:
        """Relative names (with ``/``) and sizes of all files; empty if nothing is there."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, all of it without the two. FileNotFoundError if there is none."""
        ...

    def read_ranges(self, ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
        """Many ranges, as many at once as the store bears, each given as soon as it is there, in any order."""
        ...

    def begin(
        self, save_id: str, nbytes: int, if_exists: str = "replace", owns_file: Callable[[str], bool] | None = None
    ) -> Save:
        """First rank: refuse a target that must not be touched; make room for ``nbytes``."""
        ...

    def join(self, save: Save) -> None:
        """Other ranks: StorageError unless this process sees what ``begin`` has made."""
        ...

    def write_part(
        self,
        save: Save,
        name: str,
        fill: Callable[[PartFile], None],
        nbytes: int = 0,
        threads: int = 1,
        moved: Callable[[int], None] | None = None,
    ) -> FileDigest:
        """Write a file of frames and hash it in the same pass; it is durable when this returns.

        Args:
            fill: adds the frames; called again from the start if the store has failed in a way that passes.
            nbytes: an upper bound of what will come; 0 if that is not known.
            threads: how many may write at once.
            moved: told of each part that is written, by its bytes, and with 0 while others are waited for.
        """
        ...

    def prepare(self, save: Save, parts: Mapping[str, FileDigest]) -> None:
        """First rank: all parts are there as their ranks wrote them; from here on small files may be written."""
        ...

    def write(self, save: Save, name: str, data: Content) -> FileDigest:
        """Write a file besides the parts, whole or as a stream of pieces, and hash it in the same pass."""
        ...

    def commit(self, save: Save, names: Collection[str], pointer: bytes) -> None:
        """Write ``metadata.json`` and make the save visible; what was there before, and what dead saves left, goes.

        Args:
            names: all files of the checkpoint. pointer: the content of ``metadata.json``.
        """
        ...

    def abandon(self, save: Save) -> None:
        """Remove what was written, unless it is committed, as far as that goes. Raises nothing."""
        ...

    def holds(self, save_id: str) -> bool:
        """Whether the checkpoint that is visible is of this save."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file; that others have done so is no error."""
        ...


@dataclass(frozen=True, slots=True)
class _Replaced:
    """What was there before a save: sizes by name, and content of the files that it overwrites."""

    save_id: str
    sizes: Mapping[str, int]
    content: Mapping[str, Content]


class ByPointer(ABC):
    """A store without rename, from five things that it can do; see [Note: visible by one act].

    A store of one's own defines ``name``, ``list_files``, ``read``, ``create`` and ``delete``; ``Store`` says what they
    do, memory.py is an example. Other processes can import its class. It raises FileNotFoundError for a file that is
    not there and StorageError for all else: another exception ends the call too, and does not name the store. For
    background saves of several ranks it has ``beside`` (``HasBeside``, ``Objects`` in background/store_board.py).
    """

    is_shared = True
    streams = 1
    _replaced: _Replaced | None = None  # set by vars(): a store may be a frozen dataclass

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def list_files(self) -> dict[str, int]: ...

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes: ...

    @abstractmethod
    def create(self, name: str, nbytes: int) -> Sink:
        """A file that appears, whole, when it is closed. ``nbytes``: at most so many will come; 0 if not known."""

    @abstractmethod
    def delete(self, name: str) -> None: ...

    def size(self, name: str) -> int | None:
        return self.list_files().get(name)

    def read_ranges(self, ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
        for part in ranges:
            yield part, self.read(part.file, part.offset, part.offset + part.length)

    def begin(
        self, save_id: str, nbytes: int, if_exists: str = "replace", owns_file: Callable[[str], bool] | None = None
    ) -> Save:
        save = Save(save_id=save_id, target=self.name, if_exists=if_exists, owns_file=owns_file or is_checkpoint_file)
        self._check_target(save, sorted(self.list_files()))
        return save

    def _check_target(self, save: Save, names: list[str]) -> None:
        if names and save.if_exists == "error":
            raise StorageError(f"{self.name} is not empty ({names[0]}, ...) and if_exists is 'error'", errno.EEXIST)
        foreign = [name for name in names if not (is_checkpoint_file(name) or save.owns_file(name))]
        if foreign:
            raise StorageError(
                f"{self.name} holds files that are no part of a checkpoint ({', '.join(foreign[:3])}); nothing was "
                "touched",
                errno.EEXIST,
            )

    def join(self, save: Save) -> None:  # noqa: B027
        """``begin`` makes nothing here that could be seen."""

    def write_part(
        self,
        save: Save,
        name: str,
        fill: Callable[[PartFile], None],
        nbytes: int = 0,
        threads: int = 1,
        moved: Callable[[int], None] | None = None,
    ) -> FileDigest:
        with StreamFile(self.create(name, nbytes), moved) as file:
            fill(file)
            return file.finish()

    def prepare(self, save: Save, parts: Mapping[str, FileDigest]) -> None:
        found = self.list_files()
        lost = [name for name, digest in parts.items() if found.get(name) != digest.size]
        if lost and lost[0] not in found:
            raise overtaken(self.name)
        if lost:
            raise StorageError(
                f"{self.name}/{lost[0]} has {found[lost[0]]} bytes; its rank wrote {parts[lost[0]].size}", errno.EIO
            )
        vars(self)["_replaced"] = self._keep(save, found, parts)
        if POINTER in found:
            self.delete(POINTER)

    def _keep(self, save: Save, found: Mapping[str, int], parts: Collection[str]) -> _Replaced:
        content = dict[str, Content]()
        for name in sorted(_OWN_FILES & found.keys()):
            with suppress(FileNotFoundError):  # of another save, which replaces it too
                if found[name] <= _MOST_KEPT_BYTES:
                    content[name] = self.read(name)
                else:
                    copy = f"kept.{name}.{save.save_id}.distcp"
                    self.write(save, copy, partial(self._pieces, name, found[name]))
                    content[name] = partial(self._pieces, copy, found[name])
        return _Replaced(save.save_id, {name: found[name] for name in found.keys() - parts}, content)

    def _pieces(self, name: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, _PIECE_BYTES):
            yield self.read(name, start, min(start + _PIECE_BYTES, size))

    def put_back(self, save: Save) -> None:
        """After an error of a save that this object prepared: what was there before. See [Note: put back]."""
        old = self._replaced
        if old is None or old.save_id != save.save_id:
            return
        found = self.list_files()
        is_whole = all(found.get(name) == size for name, size in old.sizes.items() if name not in _OWN_FILES)
        if POINTER not in found and is_whole:  # else it is committed, or nothing was overwritten, or another save was
            for name in sorted(found.keys() - old.sizes.keys()):
                if name in _OWN_FILES or (f".{save.save_id}." in name and not name.startswith("kept.")):
                    self.delete(name)  # first: it makes room
            for name in sorted(old.content, key=lambda name: name == POINTER):
                self.write(save, name, old.content[name])
        vars(self).pop("_replaced", None)

    def write(self, save: Save, name: str, data: Content) -> FileDigest:
        def fill(file: PartFile) -> None:
            for piece in pieces_of(data):
                file.append(piece)

        return self.write_part(save, name, fill, len(data) if isinstance(data, bytes) else 0)

    def commit(self, save: Save, names: Collection[str], pointer: bytes) -> None:
        if ".metadata" not in names:
            self.delete(".metadata")  # of an older save: beside this one's files a load refuses it
        self.write(save, POINTER, pointer)
        found = self.list_files()
        strange = found.keys() - set(names)
        # Another save may have written its small files between ours, and has parts here then: nothing is removed.
        if set(names) - found.keys() or (strange and not self.holds(save.save_id)):
            raise StorageError(
                f"another save to {self.name} was committed while this one was; if what is there is of both, a load "
                "refuses it. Two saves to one place at a time are one too many; save again",
                errno.ESTALE,
            )
        for name in sorted(strange):
            with suppress(CheckpointError):  # the next save removes it
                self.delete(name)
        vars(self).pop("_replaced", None)

    def abandon(self, save: Save) -> None:
        with suppress(CheckpointError, OSError):
            self.put_back(save)
        vars(self).pop("_replaced", None)
        with suppress(CheckpointError, OSError):
            if not self.holds(save.save_id):
                for name in sorted(self.list_files()):
                    if f".{save.save_id}." in name:
                        self.delete(name)

    def holds(self, save_id: str) -> bool:
        try:
            self.read(POINTER)
            return decode(Path(FILE_NAME), self.read(FILE_NAME)).save_id == save_id
        except (FileNotFoundError, CheckpointError) as error:
            if isinstance(error, StorageError):
                raise
            return False


@contextmanager
def put_back_on_error(store: Store, save: Save) -> Iterator[None]:
    """Around ``prepare`` to ``commit``: an error leaves what was there before. See [Note: put back].

    Raises:
        StorageError: that failed too.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(store, ByPointer):
            try:
                store.put_back(save)
            except Exception as second:
                raise StorageError(
                    f"{error}; and the older checkpoint at {store.name} could not be put back ({second}): a load "
                    "refuses what is there. Save again",
                    getattr(error, "errno", None),
                ) from error
        raise


def pieces_of(data: Content) -> Iterable[bytes]:
    """The bytes of a file, piece by piece."""
    return (data,) if isinstance(data, bytes) else data()


def overtaken(target: Path | str) -> StorageError:
    """The error of a save whose files others have removed."""
    return StorageError(
        f"the files of this save to {target} were removed while it went on: another save to the same folder has ended "
        "meanwhile (or a prune took this one for dead). Two saves to one folder at a time are one too many; "
        "this one is lost, the folder is whole",
        errno.ESTALE,
    )
