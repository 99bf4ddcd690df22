"""Stores without rename: object stores, data bases, memory.

    frames --> StreamFile --> files of the save's own folder --> its metadata.json, written last (this file)

[Note: visible by one act] Each save writes into a folder of its own, ``save-<number>-<save_id>/``, as a local
checkpoint looks, ``metadata.json`` last and in one request. The visible save is the one of the highest number whose
folder has ``metadata.json`` and ``integrity.json`` (equal numbers: of the higher id). No name is ever written twice.
So a request that arrives late, or another job, changes nothing of a checkpoint that is there. A kill or an error at
any moment leaves the older one or the newer one, whole. Checkpoints without such a folder (of older versions, of
torch, safetensors) lie in the place itself; a save's folder goes before them.

[Note: what goes] A commit removes the saves below its own number, ``integrity.json`` of each first. One of them that
is visible was replaced. One that is not can never become visible any more: whoever writes it, if anybody does, finds
the higher one when it commits, and says so. Of higher numbers nothing is touched. Where nothing is visible, a place
is removed in another way. Each save there is marked first (``job-.../gone``), and what is visible after that stays. A
commit writes ``metadata.json`` first, and looks for its mark and for each of its files after that. So one of the two
sees the other.

[Note: for torch] torch's readers want ``.metadata`` in the place itself. A copy that names the files by their folder
is written there after the commit, before older files are removed. So a kill between the two leaves torch the older
checkpoint, whole. Loads here look only whether it was a save of this package that wrote it. One that torch wrote
later is refused, since it may be newer. One that was there when the save began is known by the mark
``job-.../over-<crc32>``.
"""

from __future__ import annotations

import errno
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import isfunction, isgenerator
from pathlib import Path
from typing import Any, Self, TypeVar

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, StorageError
from sixfold.dist_ckpt.formats.integrity import FILE_NAME, Content, FileDigest, crc32, digest_of, pieces_of
from sixfold.dist_ckpt.geometry.manifest import ByteRange
from sixfold.dist_ckpt.storage.frame_file import PartFile, Sink, StreamFile
from sixfold.dist_ckpt.storage.store import (
    FOLDER,
    POINTER,
    Part,
    Save,
    Store,
    check_names,
    is_checkpoint_file,
    overtaken,
)

LOOKS = "job-00000000-0000000000000000/"  # of no save: marks of those who looked at the place
TAIL_BYTES = 1 << 12  # of .metadata; a save's id stands among the last 300
_PIECE_BYTES = 8 << 20
_GONE = "gone"  # see [Note: what goes]
_Value = TypeVar("_Value")


def rank_of(folder: str) -> tuple[int, str]:
    """The order of the folders of saves; those without one come first."""
    match = FOLDER.match(folder)
    return (int(match.group(1)), match.group(2)) if match else (-1, "")


def folders(names: Iterable[str]) -> set[str]:
    """The folders of saves, and of their boards, among names of files."""
    return {match.group() for name in names if (match := FOLDER.match(name))}


def visible(names: Collection[str]) -> str:
    """The folder of the save that is visible; "" if there is none. See [Note: visible by one act]."""
    known = set(names)
    whole = [folder for folder in folders(names) if {folder + POINTER, folder + FILE_NAME} <= known]
    return max(whole, key=rank_of, default="")


def flat(names: Iterable[str]) -> list[str]:
    """Names of what lies in the place itself, in no save's folder."""
    return [name for name in names if not FOLDER.match(name)]


def check_finished(place: Path | str, names: Collection[str]) -> None:
    """CorruptError if nothing but saves that never finished is there."""
    if folders(names) and not visible(names) and {".metadata"}.issuperset(flat(names)):
        raise CorruptError(f"{place} has no {POINTER}: the save that made it never finished")


def check_for_torch(
    place: Path | str, names: Collection[str], tail: bytes, again: Callable[[], Collection[str]] | None = None
) -> None:
    """CorruptError if ``tail``, the end of the place's ``.metadata``, is torch's own. See [Note: for torch].

    FileNotFoundError if ``again`` lists other ``names``: a save has replaced it, and its end lies elsewhere now.
    """
    mark = f"job{visible(names).removeprefix('save')}over-{crc32(tail):08x}"
    if b"sixfold_save_id" not in tail and mark not in names:
        if again is not None and again() != names:
            raise FileNotFoundError(".metadata")
        raise CorruptError(
            f"{place}/.metadata is of another save than {place}/{visible(names)}{POINTER}: files of two saves are "
            f"mixed. Move the folder {visible(names)[:-1]} away to load what .metadata names; save into a place of its "
            "own"
        )


def is_of_others(store: Store) -> bool:
    """Whether the place's ``.metadata`` is no save's of this package: torch's, which writes it last."""
    with suppress(FileNotFoundError):
        if (size := store.list_files().get(".metadata")) is not None:
            return b"sixfold_save_id" not in store.read(".metadata", max(0, size - TAIL_BYTES), size)
    return False


@contextmanager
def store_errors(store: Store, name: str = "") -> Iterator[None]:
    """Whatever a client raises is a StorageError that names the store and the file; FileNotFoundError stays."""
    try:
        yield
    except (CheckpointError, FileNotFoundError):
        raise
    except Exception as error:
        text = f"{store.name}{'/' if name else ''}{name}: {type(error).__name__}: {error}"
        raise StorageError(text, getattr(error, "errno", None)) from error


class _NamingSink:
    """A sink whose errors name the store."""

    def __init__(self, sink: Sink, store: Store, name: str) -> None:
        for method in ("write", "close", "discard"):
            if not callable(getattr(sink, method, None)):
                raise StorageError(
                    f"{store.name}: create({name!r}) gives a {type(sink).__name__} without {method}(); a file that is "
                    "written has write, close and discard (stores.Sink)"
                )
        self._sink, self._place, self.discard = sink, (store, name), sink.discard

    def write(self, data: bytes | memoryview) -> None:
        with store_errors(*self._place):
            self._sink.write(data)

    def close(self) -> None:
        with store_errors(*self._place):
            self._sink.close()


def _naming_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Store, *args: Any, **kwargs: Any) -> Any:
        name = args[0] if args and isinstance(args[0], str) else ""
        with store_errors(self, name):
            found = method(self, *args, **kwargs)
        if isgenerator(found):  # whose work is still to be done
            return _each(found, self)
        return _NamingSink(found, self, name) if method.__name__ == "create" else found

    return call


def _each(found: Iterator[Any], store: Store) -> Iterator[Any]:
    with store_errors(store):
        yield from found


class ByPointer(Store, ABC):
    """A store without rename, from five things that it can do; see [Note: visible by one act].

    A store of one's own defines ``name``, ``list_files``, ``read``, ``create`` and ``delete``; ``Store`` says what they
    do, memory.py is an example. Other processes can import its class: its module is installed or on PYTHONPATH, since
    the worker of a background save does not know the script's folder. It raises FileNotFoundError for a file that is
    not there; all else that these raise becomes a StorageError that names the store and the file. Where it can create
    a file only if there is none, in one act, it defines ``create_new`` too.
    """

    local_folder: Path | None = None
    is_shared = True
    streams = 1

    def __init_subclass__(cls, tells: bool = False, **kwargs: Any) -> None:
        """``tells``: its errors name the store already."""
        super().__init_subclass__(**kwargs)
        for name, method in () if tells else list(vars(cls).items()):
            if isfunction(method) and hasattr(ByPointer, name) and not name.startswith("_"):
                setattr(cls, name, _naming_errors(method))

    @abstractmethod
    def create(self, name: str, nbytes: int) -> Sink:
        """A file that appears, whole, when it is closed. ``nbytes``: at most so many will come; 0 if not known."""

    def child(self, folder: str) -> ByPointer:
        """The files below a folder, as a store."""
        return ChildStore(self, folder)

    def replace(self, name: str, data: bytes) -> None:
        """Write a small file whole, whatever was there."""
        sink = self.create(name, len(data))
        sink.write(data)
        sink.close()

    def create_new(self, name: str, data: bytes) -> bool:
        """Write a small file unless there is one; False if there was, which may be this one, asked for twice."""
        if name in self.list_files():
            return False
        self.replace(name, data)
        return True

    def begin(
        self, save_id: str, nbytes: int, if_exists: str = "replace", owns_file: Callable[[str], bool] | None = None
    ) -> Save:
        found = self.list_files()
        names = sorted(name for name in found if not name.startswith(LOOKS))
        owns = owns_file or is_checkpoint_file
        check_names(self.name, names, if_exists, owns, functools.partial(self._head, found))
        number = 1 + max((rank_of(folder)[0] for folder in folders(names)), default=0)
        inside = f"save-{number:08d}-{save_id}/"
        return Save(save_id=save_id, target=self.name, inside=inside, if_exists=if_exists, owns_file=owns)

    def join(self, save: Save) -> None:
        """``begin`` makes nothing here that could be seen."""

    def write_part(self, save: Save, part: Part) -> FileDigest:
        return self._streamed(save.inside + part.name, part.fill, part.nbytes, part.moved)

    def _streamed(
        self, name: str, fill: Callable[[PartFile], None], nbytes: int, moved: Callable[[int], None] | None = None
    ) -> FileDigest:
        with StreamFile(self.create(name, nbytes), moved) as file:
            fill(file)
            return file.finish()

    def take_over(self, other: Save, save: Save, name: str) -> None:
        try:
            self._copy(other.inside + name, save.inside + name)
        except FileNotFoundError as error:
            raise overtaken(self.name) from error

    def _copy(self, there: str, here: str) -> None:
        if (size := self.list_files().get(there)) is None:
            raise FileNotFoundError(there)
        cuts = range(0, size, _PIECE_BYTES)
        self._write(here, lambda: (self.read(there, at, at + _PIECE_BYTES) for at in cuts))

    def prepare(self, save: Save, parts: Mapping[str, FileDigest]) -> None:
        found = self.list_files()
        # Again: data took a while to write, and nothing foreign may go.
        others = sorted(name for name in found if not name.startswith((save.inside, _board(save))))
        if save.if_exists == "error":  # of another save that goes on too, nothing is there yet
            others = [name for name in others if not FOLDER.match(name) or name.startswith(visible(found) or "\0")]
        check_names(self.name, others, save.if_exists, save.owns_file, functools.partial(self._head, found))
        self._check_there(save, parts, found)
        if ".metadata" in found:
            tail = self.read(".metadata", max(0, found[".metadata"] - TAIL_BYTES), found[".metadata"])
            if b"sixfold_save_id" not in tail:
                self._write(f"{_board(save)}over-{crc32(tail):08x}", b"")

    def _head(self, sizes: Mapping[str, int], name: str, most: int) -> bytes:
        """The first bytes of a file; a store may refuse a range of an empty one."""
        return self.read(name, 0, min(most, sizes[name])) if sizes[name] else b""

    def _check_there(self, save: Save, files: Mapping[str, FileDigest], found: Mapping[str, int]) -> None:
        """StorageError unless the files of a save are among those ``found``, and whole."""
        lost = [name for name, digest in files.items() if found.get(save.inside + name) != digest.size]
        if _board(save) + _GONE in found or any(save.inside + name not in found for name in lost):
            raise overtaken(self.name)
        if lost:
            size = found[save.inside + lost[0]]
            raise StorageError(
                f"{self.name}/{save.inside}{lost[0]} has {size} bytes; its rank wrote {files[lost[0]].size}", errno.EIO
            )

    def write(self, save: Save, name: str, data: Content) -> FileDigest:
        return self._write(save.inside + name, data)

    def _write(self, name: str, data: Content) -> FileDigest:
        if isinstance(data, bytes):
            self.replace(name, data)
            return digest_of(data)

        def fill(file: PartFile) -> None:
            for piece in pieces_of(data):
                file.append(piece)

        return self._streamed(name, fill, 0)

    def commit(
        self,
        save: Save,
        pointer: bytes,
        for_torch: Content | None = None,
        files: Mapping[str, FileDigest] | None = None,
    ) -> None:
        self._write(save.inside + POINTER, pointer)
        found = self.list_files()
        if visible(found) != save.inside:
            raise overtaken(self.name)
        try:
            self._check_there(save, files or {}, found)
        except StorageError:
            self._remove([save.inside + FILE_NAME, save.inside + POINTER])  # the one before it is visible again
            raise
        if for_torch is not None:
            try:
                self._write(".metadata", for_torch)
            except CheckpointError as error:
                raise StorageError(
                    f"{error}; the checkpoint is saved, but torch's own readers find the one before it. Save again",
                    getattr(error, "errno", None),
                ) from error
        old = {name for name in found if rank_of(name) < rank_of(save.inside)} - {".metadata" if for_torch else ""}
        old = {name for name in old if is_checkpoint_file(name) or save.owns_file(name)}  # others' came a moment ago
        with suppress(CheckpointError):  # the next save removes it
            self._remove([*old, *(name for name in found if name.startswith(f"{_board(save)}over-"))])

    def _remove(self, names: Iterable[str]) -> None:
        """Delete files: lower saves first, and of each first what makes it one, so that nothing half is visible."""
        ends = {FILE_NAME: 0, POINTER: 1, ".metadata": 2, _GONE: 4}
        for name in sorted(names, key=lambda name: (rank_of(name), ends.get(name.rpartition("/")[2], 3))):
            with suppress(FileNotFoundError):  # others were faster
                self.delete(name)

    def clear(self) -> None:
        """Delete what is visible and all below; a kill leaves nothing that is visible and not whole."""
        found = self.list_files()
        top = rank_of(visible(found))
        self._remove(name for name in found if rank_of(name) <= top)

    def clear_unfinished(self) -> None:
        """Delete all where nothing is visible; a save that goes on there is told. See [Note: what goes]."""
        marks = {f"job-{folder.partition('-')[2]}{_GONE}" for folder in folders(self.list_files())}
        for mark in marks:
            self._write(mark, b"")
        found = self.list_files()
        self._remove(marks if visible(found) else found)

    def abandon(self, save: Save) -> None:
        with suppress(CheckpointError, OSError):
            found = self.list_files()
            if visible(found) != save.inside:
                self._remove(name for name in found if name.startswith((save.inside, f"{_board(save)}over-")))

    def board(self, save: Save) -> ByPointer:
        """Where the ranks of a background save leave word for each other."""
        return self.child(_board(save)[:-1])

    def holds(self, save_id: str) -> bool:
        return rank_of(visible(self.list_files()))[1] == save_id


class ChildStore(ByPointer, tells=True):
    """The files of ``parent`` whose names begin with ``folder`` and a slash."""

    def __init__(self, parent: ByPointer, folder: str) -> None:
        self.parent, self._start = parent, f"{folder}/"
        self.is_shared, self.streams = parent.is_shared, parent.streams

    @property
    def name(self) -> str:
        return f"{self.parent.name}/{self._start[:-1]}"

    def list_files(self) -> dict[str, int]:
        return self._own(self.parent.list_files())

    def marks(self) -> Mapping[str, object]:
        return self._own(self.parent.marks())

    def _own(self, files: Mapping[str, _Value]) -> dict[str, _Value]:
        return {name.removeprefix(self._start): value for name, value in files.items() if name.startswith(self._start)}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.parent.read(self._start + name, start, stop)

    def read_ranges(self, ranges: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, bytes]]:
        for part, data in self.parent.read_ranges([part._replace(file=self._start + part.file) for part in ranges]):
            yield part._replace(file=part.file.removeprefix(self._start)), data

    def create(self, name: str, nbytes: int) -> Sink:
        return self.parent.create(self._start + name, nbytes)

    def create_new(self, name: str, data: bytes) -> bool:
        return self.parent.create_new(self._start + name, data)

    def delete(self, name: str) -> None:
        self.parent.delete(self._start + name)

    def patient(self, timeout_s: float) -> Self:
        return type(self)(self.parent.patient(timeout_s), self._start[:-1])


def _board(save: Save) -> str:
    return f"job{save.inside.removeprefix('save')}"
