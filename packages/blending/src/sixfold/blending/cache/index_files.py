"""Index files on disk: used if they fit, else built and written. No other file reads or writes them.

    description, build, fits --> load_or_build (this file) --> arrays, mapped from the files

Names are megatron-core's, ``{md5}-{class}-{split}-{what}``, so each package uses the folders of the other. The md5 does
not cover the data and some options, and a writer may have died between two files. So next to them lies
``...-sixfold.json``. It says what they were built from, and the size and time of every file. If it is missing or does
not match, the arrays are read and checked in full, and built again if they do not fit.

[Note: description last] megatron-core takes a cache for complete if all its files exist. So the description is removed
before anything is replaced. Every file is written under another name and renamed, the description last. A reader that
finds it finds all the others.

[Note: one record per blend] Only this package reads the apportioned order, and the names of its files cover all that
they are made of. Two writers of one name write the same bytes. So its datasets have no description and no side file:
one ``Record`` holds what the side files would. A file that it does not list is read and checked in full.

[Note: flushed before vouched for] After a power cut a file may have its name and not its bytes. A record lists only
arrays that were flushed to the disk before it was written. A record or a description that was cut does not match. The
arrays of a blend are flushed together at the end: one by one they would take most of the time of a start.
"""

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sixfold.blending.cache.file_mapping import map_bytes
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64

Arrays = dict[str, npt.NDArray[Any]]
Stamp = list[int]  # size and time of the last change of a file
Note = dict[str, Any]
_NOTE_VERSION = 1
_FLUSHES = 16  # files at a time, where there are so many: the disk flushes several as fast as one
# What numpy.save writes before integers; any other header is numpy's to read.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(<[iu][248])', 'fortran_order': False, "
    rb"'shape': \((\d+),(?: (\d+))?\), \} *\n",
    re.DOTALL,
)
_HEADER_BYTES = 128
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}-.+\.\d+-[0-9a-f]{8}")  # of _write_whole
_ABANDONED_NS = 3600 * 10**9


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """The files of one index.

    Attributes:
        folder: where they lie.
        stem: the beginning of their names.
        description: the text of ``description.txt``.
        names: of the arrays.
        facts: what the description does not say of what they depend on; JSON values.
        sources: ``stamps_of`` the files they depend on, best from before these were opened; None for data that is no
            file and can change unseen.
    """

    folder: str
    stem: str
    description: str
    names: tuple[str, ...]
    facts: Mapping[str, Any]
    sources: Sequence[Stamp] | None

    def path(self, what: str) -> str:
        """``what`` is the end of the file's name."""
        return f"{self.folder}/{self.stem}-{what}"

    @property
    def paths(self) -> dict[str, str]:
        """The file of each array."""
        return {name: self.path(f"{name}.npy") for name in self.names}

    def note(self, stamps: Mapping[str, Stamp]) -> Note:
        """What the arrays were built from, and the ``stamps`` of their files."""
        return {
            "version": _NOTE_VERSION,
            "facts": dict(self.facts),
            "sources": None if self.sources is None else list(self.sources),
            "arrays": dict(stamps),
        }


def stamps_of(paths: Iterable[str]) -> list[Stamp] | None:
    """Size and time of files; None if one cannot be looked at."""
    try:
        return [_stamp(os.stat(path)) for path in paths]
    except OSError:
        return None


class Record:
    """Notes of the entries of one blend, or of one entry: the metadata file beside the arrays.

    Attributes:
        notes: of each entry by its stem: from the file, from this process, and from other ranks.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            read = json.loads(Path(path).read_bytes())
        except (OSError, ValueError):
            read = None
        self.notes: dict[str, Note] = read if isinstance(read, dict) else {}
        self._kept = dict(self.notes)
        self._unflushed: list[str] = []

    def vouches(self, entry: CacheEntry, stamps: Mapping[str, Stamp]) -> bool:
        """Whether files of these ``stamps`` were built from what ``entry`` is built from."""
        return entry.sources is not None and self.notes.get(entry.stem) == entry.note(stamps)

    def add(self, entry: CacheEntry, stamps: Mapping[str, Stamp]) -> None:
        """Vouch for the files of ``entry``, which were built or read in full."""
        self.notes[entry.stem] = entry.note(stamps)

    def written(self, paths: Iterable[str]) -> None:
        """Flush these files before anything vouches for them elsewhere; see ``flush``."""
        self._unflushed += paths

    def flush(self) -> None:
        """Wait until all files that were written are on the disk. Raises OSError where they do not get there."""
        paths, self._unflushed = self._unflushed, []
        if len(paths) < _FLUSHES:
            list(map(_flush, paths))
            return
        with ThreadPoolExecutor(_FLUSHES) as pool:
            list(pool.map(_flush, paths))

    def write(self) -> None:
        """Spare the next start the full check. Raises OSError where nothing can be written."""
        self.flush()
        if self.notes != self._kept:
            _write_whole(self._path, json.dumps(self.notes, sort_keys=True).encode())
            self._kept = dict(self.notes)


@dataclass(frozen=True)
class KnownFiles:
    """What a builder knows of the files of a dataset that it makes.

    Attributes:
        record: of the blend that the dataset is part of, if that keeps one.
        stamps: of its pair, from before it was opened. None: those of now count.
        rows: of each window of packed documents, which ranks have counted together.
        keeps: this process writes files of packed documents.
    """

    record: Record | None = None
    stamps: Sequence[Stamp] | None = None
    rows: I64 | None = None
    keeps: bool = True


_known: ContextVar[KnownFiles] = ContextVar("sixfold.blending.known_files", default=KnownFiles())  # noqa: B039 - frozen


def known_files() -> KnownFiles:
    """Of the dataset that is being made on this thread."""
    return _known.get()


@contextmanager
def making_with(known: KnownFiles) -> Iterator[None]:
    """A dataset that is made in this block knows these files.

    Indices are built in its ``__init__``, whose arguments are megatron-core's, in the classes of users too.
    """
    before = _known.set(known)
    try:
        yield
    finally:
        _known.reset(before)


class MappedArrays(Arrays):
    """Arrays mapped from whole files; pickled as their names, so that a worker maps them again and copies nothing.

    Attributes:
        stamps: of the files that were mapped.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        super().__init__()
        self.stamps: dict[str, Stamp] = {}
        paths = {name: os.path.abspath(path) for name, path in paths.items()}  # a worker's folder may be another
        for name, path in paths.items():
            with open(path, "rb") as file:
                self.stamps[name] = _stamp(os.fstat(file.fileno()))
                self[name] = _mapped(file, self.stamps[name][0])
        self._paths = paths

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped_again, (self._paths, self.stamps)


def _mapped(file: BinaryIO, size: int) -> npt.NDArray[Any]:
    """One .npy, mapped. Nothing is ever unpickled: a file of objects is a ValueError."""
    raw = map_bytes(file.fileno(), size)
    found = _HEADER.fullmatch(raw[:_HEADER_BYTES].tobytes())
    if found is None:
        try:
            return np.lib.format.open_memmap(file.name, mode="r")
        except (OSError, ValueError):
            raise
        except Exception as error:  # numpy parses a damaged header as Python, whose tokenizer has errors of its own
            raise ValueError(f"{file.name} has a damaged header: {error}") from error
    dtype = np.dtype(found[1].decode())
    shape = tuple(int(number) for number in found.groups()[1:] if number is not None)
    end = _HEADER_BYTES + dtype.itemsize * prod(shape)
    if end > size:
        raise ValueError(f"{file.name} is cut")
    return raw[_HEADER_BYTES:end].view(dtype).reshape(shape)


def _mapped_again(paths: Mapping[str, str], stamps: dict[str, Stamp]) -> MappedArrays:
    """Raises BlendingError if a file is not the one that was mapped before."""
    try:
        arrays = MappedArrays(paths)
    except (OSError, ValueError) as error:
        raise BlendingError(f"an index was mapped here and cannot be mapped again: {error}") from error
    if arrays.stamps != stamps:
        raise BlendingError(f"the index {next(iter(paths.values()))} has changed since it was mapped; build it again")
    return arrays


def load_or_build(
    entry: CacheEntry,
    build: Callable[[], Arrays],
    *,
    quick: Callable[[Arrays], bool],
    full: Callable[[Arrays], bool],
    record: Record | None = None,
) -> Arrays:
    """The arrays of ``entry``, mapped read-only.

    Args:
        build: makes them.
        quick: whether arrays with a matching note fit; does not read them.
        full: whether arrays of unknown origin fit.
        record: of the blend; the caller writes it in the end. None: the entry has a description and a side file
            of its own, as megatron-core reads it.
    Raises:
        BlendingError: the folder cannot be written to.
    """
    own = Record(entry.path("sixfold.json")) if record is None else None
    notes = record or own
    assert notes is not None, "there is the blend's record or one of its own"
    arrays = _read(entry, described=own is not None)
    if arrays is not None:
        if notes.vouches(entry, arrays.stamps) and quick(arrays):
            notes.add(entry, arrays.stamps)
            return arrays
        if full(arrays):
            notes.add(entry, arrays.stamps)
            if own is not None:
                try_to_write(own)
            return arrays
    del arrays
    built = build()
    try:
        written = _write(entry, built, notes, own)
    except OSError as error:
        raise BlendingError(
            f"cannot write the index {entry.path('...')}: {_why_not(error, entry.folder, built)}; set path_to_cache to "
            "a folder that can be written"
        ) from error
    notes.add(entry, written)
    arrays = _read(entry, described=own is not None)
    # Another process may have put its files in their place since: the peer's names are the same for other options.
    return arrays if arrays is not None and (arrays.stamps == written or full(arrays)) else built


def vouched(entry: CacheEntry, quick: Callable[[Arrays], bool]) -> Arrays | None:
    """The arrays of ``entry`` if a note vouches for them; nothing is built."""
    arrays = _read(entry, described=True)
    if arrays is None or not Record(entry.path("sixfold.json")).vouches(entry, arrays.stamps) or not quick(arrays):
        return None
    return arrays


def _why_not(error: OSError, folder: str, arrays: Arrays) -> str:
    """numpy tells of a full disk as of two numbers of items."""
    need = sum(array.nbytes for array in arrays.values())
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if error.errno == errno.ENOSPC or (error.errno is None and free < need):
            return f"the disk is full, {need} bytes are needed and {free} are free"
    return str(error) if error.errno is not None else f"not all of {need} bytes could be written: {error}"


def try_to_write(record: Record) -> None:
    """Write it if that is possible: without it the next start reads the arrays in full."""
    try:
        record.write()
    except OSError:
        return


def remove_abandoned(folder: str) -> None:
    """Remove what writers that were killed left: temporary files an hour older than the last change of the folder.

    Both times are of the clock of the disk. A file that is being written is younger.
    """
    with suppress(OSError), os.scandir(folder) as found:
        newest = os.stat(folder).st_mtime_ns
        for entry in found:
            if _TEMPORARY.fullmatch(entry.name) and newest - entry.stat().st_mtime_ns > _ABANDONED_NS:
                os.unlink(entry.path)


def _read(entry: CacheEntry, *, described: bool) -> MappedArrays | None:
    """Mapped arrays if every file is there, whole and an array of numbers."""
    try:
        if described and Path(entry.path("description.txt")).read_bytes() != entry.description.encode():
            return None
        return MappedArrays(entry.paths)
    except (OSError, ValueError, EOFError, SyntaxError):
        return None


def _stamp(status: os.stat_result) -> Stamp:
    return [status.st_size, status.st_mtime_ns]


def _write(entry: CacheEntry, arrays: Arrays, record: Record, own: Record | None) -> dict[str, Stamp]:
    """Stamps of the files written. With a record of their own see [Note: description last]."""
    Path(entry.folder).mkdir(parents=True, exist_ok=True)
    description = Path(entry.path("description.txt"))
    if own is not None:
        description.unlink(missing_ok=True)
    stamps = {name: _write_whole(path, arrays[name]) for name, path in entry.paths.items()}
    record.written(entry.paths.values())
    if own is not None:
        own.add(entry, stamps)
        own.write()
        _write_whole(str(description), entry.description.encode())
    return stamps


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_whole(path: str, content: npt.NDArray[Any] | bytes) -> Stamp:
    """Write a file whole or not at all; its stamp is of what was written, whoever else writes there."""
    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/.{name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with open(temporary, "xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                np.save(file, content, allow_pickle=False)
            file.flush()
            stamp = _stamp(os.fstat(file.fileno()))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return stamp
