"""Pieces of remote objects as files of one folder, which holds at most so many bytes.

pieces --> PieceFiles (this file) --> FOLDER/KEY-BEGIN-END.piece

Several processes may use one folder. A file appears whole by a rename, and ends with the CRC-32 of its piece: one that
a disk has damaged is fetched anew. The least recently used go first; only names of this form are ever removed.

[Note: what a killed writer leaves] A piece is written under a name that says machine and process. Whoever opens the
folder removes such files of processes of this machine that are gone, and those that no one has written to for an hour.
A writer that loses its file by that keeps one piece less.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress

from sixfold.indexed_data.errors import IndexedDataError

_NAME = re.compile(r"([0-9a-f]{32})-(\d+)-(\d+)\.piece")
_UNFINISHED = re.compile(_NAME.pattern + r"\.(?:(?P<machine>[0-9a-f]{8})-)?(?P<process>\d+)-\d+")  # and a thread
_ABANDONED_S = 3600.0
CRC_BYTES = 4  # behind a piece
_KEPT = 0.9  # of the limit, after files were removed


class _Folder:
    """What a folder holds, of all objects, as this process knows.

    [Note: who else writes] Other processes write there too. So the folder is listed again whenever this one wrote a
    tenth of the limit: by so much each process may exceed it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held = self.written = 0  # bytes; of this process since the folder was listed


_FOLDERS: dict[tuple[int, str], _Folder] = {}  # by process, since a fork may copy a lock that is held, and path


class PieceFiles:
    """The files of one object."""

    def __init__(self, folder: str, url: str, size: int, tag: str, limit_bytes: int) -> None:
        import hashlib  # only here: reading local pairs should not load it

        self._folder, self._limit = folder, limit_bytes
        self._key = hashlib.sha256(f"{url}\n{size}\n{tag}".encode()).hexdigest()[:32]
        self._shared = _FOLDERS.setdefault((os.getpid(), os.path.realpath(folder)), _Folder())
        self._lock = self._shared.lock
        self._ends: dict[int, int] = {}
        try:
            os.makedirs(folder, exist_ok=True)
            _remove_unfinished(folder)
            with self._lock:
                for name, *_ in self._all():
                    if name[1] == self._key:
                        self._ends[int(name[2])] = max(int(name[3]), self._ends.get(int(name[2]), 0))
        except OSError as error:
            raise IndexedDataError(f"cache_folder is {folder}: {error.strerror}; give a folder to write to") from error
        self._begins = sorted(self._ends)

    def overlapping(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Pieces that share bytes with the range, in order."""
        with self._lock:
            first = max(0, bisect_right(self._begins, begin) - 1)
            pieces = [(at, self._ends[at]) for at in self._begins[first : bisect_left(self._begins, end)]]
        return [(at, last) for at, last in pieces if last > begin]

    def has(self, begin: int, end: int) -> bool:
        """Whether a file was written for the piece."""
        return self._ends.get(begin) == end

    def read(self, begin: int, end: int) -> bytes | None:
        """A whole piece; None if it is gone or damaged."""
        try:
            with open(self._path(begin, end), "rb") as file:
                data = file.read()
            os.utime(self._path(begin, end))
        except OSError:
            data = b""
        piece, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
        if len(piece) == end - begin and crc == _crc(piece):
            return piece
        with self._lock:
            if self._ends.pop(begin, None) is not None:
                self._begins.remove(begin)
        return None

    def write(self, begin: int, end: int, data: bytes) -> None:
        """Keep a piece; a full disk keeps none, and costs a request later."""
        path = self._path(begin, end)
        temporary = f"{path}.{_machine()}-{os.getpid()}-{threading.get_ident()}"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.write(_crc(data))
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            return
        with self._lock:
            if begin not in self._ends:
                self._begins.insert(bisect_left(self._begins, begin), begin)
            self._ends[begin] = end
            self._shared.held += end - begin + CRC_BYTES
            self._shared.written += end - begin + CRC_BYTES
            if self._shared.held > self._limit or self._shared.written > (1 - _KEPT) * self._limit:
                self._remove_oldest(path)

    def _remove_oldest(self, newest: str) -> None:
        """Keep to the limit. The lock is held."""
        listed = sorted(self._all(), key=lambda each: each[2])
        if self._shared.held <= self._limit:
            return
        for name, nbytes, _ in listed:
            path = os.path.join(self._folder, name[0])
            if self._shared.held <= _KEPT * self._limit:
                break
            if path != newest:
                with suppress(OSError):
                    os.unlink(path)
                self._shared.held -= nbytes

    def _all(self) -> list[tuple[re.Match[str], int, float]]:
        """What the folder holds now, of every object. The lock is held."""
        listed = list(self._listed())
        self._shared.held, self._shared.written = sum(nbytes for _, nbytes, _ in listed), 0
        return listed

    def _listed(self) -> Iterator[tuple[re.Match[str], int, float]]:
        """(name, bytes, last use) of each piece in the folder."""
        for entry in os.scandir(self._folder):
            name = _NAME.fullmatch(entry.name)
            with suppress(OSError):  # gone meanwhile
                if name:
                    status = entry.stat()
                    yield name, status.st_size, status.st_mtime

    def _path(self, begin: int, end: int) -> str:
        return os.path.join(self._folder, f"{self._key}-{begin}-{end}.piece")


def _remove_unfinished(folder: str) -> None:
    """See [Note: what a killed writer leaves]."""
    for entry in os.scandir(folder):
        name = _UNFINISHED.fullmatch(entry.name)
        if name is None or not entry.is_file(follow_symlinks=False):
            continue
        with suppress(OSError):  # gone meanwhile, or of somebody else
            is_old = time.time() - entry.stat().st_mtime > _ABANDONED_S
            if is_old or (name["machine"] == _machine() and not _is_running(int(name["process"]))):
                os.unlink(entry.path)


def _machine() -> str:
    """Of this machine's name, which may have any length and letters, eight that a file name can have."""
    import hashlib  # as above

    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # it is another user's, or the number is none of this machine's: not known to be gone
    return True


def _crc(piece: bytes) -> bytes:
    import zlib  # only here: reading local pairs should not load it

    return zlib.crc32(piece).to_bytes(CRC_BYTES, "little")
