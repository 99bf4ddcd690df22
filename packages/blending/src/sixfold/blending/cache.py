"""Index files on disk (this file: the only one that touches it): used if they fit, else built and written.

    description, build, fits --> load_or_build (this file) --> arrays, mapped from the files

Names are megatron-core's, ``{md5}-{class}-{split}-{what}``, so its folders are used here and ours by it. Its key says
nothing of the data or of some options, and it may have died between two files. So beside them lies
``...-sixfold.json``, which tells what they were built from and the size and time of every file. Where that
is missing or does not match, the arrays are read and checked in full; what does not fit is built anew.

[Note: description last] megatron-core takes a cache whose files are all there for whole. So the description is
removed before anything is replaced, every file is written under another name and renamed, the description
last. A reader that finds it finds all the others.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError

Arrays = dict[str, npt.NDArray[Any]]
_NOTE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CacheEntry:
    """The files of one index.

    Attributes:
        folder: where they lie.
        stem: the beginning of their names.
        description: the text of ``description.txt``.
        names: of the arrays.
        facts: what the description does not say of what they depend on; JSON values.
        sources: files whose size and time they depend on; None for data that is no file and can change unseen.
    """

    folder: str
    stem: str
    description: str
    names: tuple[str, ...]
    facts: Mapping[str, Any]
    sources: Sequence[str] | None

    def path(self, what: str) -> Path:
        """``what`` is the end of the file's name."""
        return Path(self.folder, f"{self.stem}-{what}")

    def arrays(self) -> list[Path]:
        """The files of ``names``."""
        return [self.path(f"{name}.npy") for name in self.names]


class MappedArrays(Arrays):
    """Arrays mapped from whole files; pickled as their names, so that a worker maps them again and copies nothing."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        # open_memmap reads .npy alone and no objects: nothing is ever unpickled.
        super().__init__({name: np.lib.format.open_memmap(path, mode="r") for name, path in paths.items()})
        self._paths = dict(paths)
        self._stamps = _stamps(list(paths.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped_again, (self._paths, self._stamps)


def _mapped_again(paths: Mapping[str, Path], stamps: list[list[int]]) -> MappedArrays:
    """Raises BlendingError if a file is not the one that was mapped before."""
    try:
        arrays = MappedArrays(paths)
    except (OSError, ValueError) as error:
        raise BlendingError(f"an index was mapped here and cannot be mapped again: {error}") from error
    if arrays._stamps != stamps:
        raise BlendingError(f"the index {next(iter(paths.values()))} has changed since it was mapped; build it again")
    return arrays


def load_or_build(
    entry: CacheEntry,
    build: Callable[[], Arrays],
    *,
    quick: Callable[[Arrays], bool],
    full: Callable[[Arrays], bool],
) -> Arrays:
    """The arrays of ``entry``, mapped read-only.

    Args:
        build: makes them.
        quick: whether arrays with a matching side file fit; does not read them.
        full: whether arrays of unknown origin fit.
    Raises:
        BlendingError: the folder cannot be written to.
    """
    arrays = _read(entry)
    if arrays is not None:
        if _same_note(entry) and quick(arrays):
            return arrays
        if full(arrays):
            _try_note(entry)
            return arrays
    del arrays
    built = build()
    try:
        _write(entry, built)
    except OSError as error:
        raise BlendingError(
            f"cannot write the index {entry.path('...')}: {error}; set path_to_cache to a folder that can be written"
        ) from error
    written = _read(entry)
    return built if written is None else written


def _read(entry: CacheEntry) -> Arrays | None:
    """Mapped arrays if every file is there, whole and an array of numbers."""
    try:
        if entry.path("description.txt").read_bytes() != entry.description.encode():
            return None
        return MappedArrays(dict(zip(entry.names, entry.arrays(), strict=True)))
    except (OSError, ValueError, EOFError, SyntaxError):
        return None


def _stamps(paths: Sequence[Path | str]) -> list[list[int]]:
    """[size, time of the last change] of each file."""
    return [[status.st_size, status.st_mtime_ns] for status in map(os.stat, paths)]


def _note(entry: CacheEntry) -> str:
    """What the side file says."""
    note = {
        "version": _NOTE_VERSION,
        "facts": dict(entry.facts),
        "sources": _source_stamps(entry),
        "arrays": dict(zip(entry.names, _stamps(entry.arrays()), strict=True)),
    }
    return json.dumps(note, indent=1, sort_keys=True)


def _source_stamps(entry: CacheEntry) -> list[list[int]] | None:
    """None if the data is no file, or cannot be looked at as one."""
    try:
        return None if entry.sources is None else _stamps(entry.sources)
    except OSError:
        return None


def _same_note(entry: CacheEntry) -> bool:
    if _source_stamps(entry) is None:
        return False
    try:
        return entry.path("sixfold.json").read_text() == _note(entry)
    except (OSError, ValueError):
        return False


def _try_note(entry: CacheEntry) -> None:
    """Spare the next start the full check; a folder that cannot be written to stays as it is."""
    try:
        _put(entry.path("sixfold.json"), _note(entry).encode())
    except OSError:
        return


def _write(entry: CacheEntry, arrays: Arrays) -> None:
    """See [Note: description last]."""
    Path(entry.folder).mkdir(parents=True, exist_ok=True)
    entry.path("description.txt").unlink(missing_ok=True)
    for name, path in zip(entry.names, entry.arrays(), strict=True):
        _put(path, arrays[name])
    _put(entry.path("sixfold.json"), _note(entry).encode())
    _put(entry.path("description.txt"), entry.description.encode())


def _put(path: Path, content: npt.NDArray[Any] | bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                np.save(file, content, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
