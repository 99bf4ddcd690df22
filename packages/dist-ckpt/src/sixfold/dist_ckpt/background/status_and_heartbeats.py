"""The shared status of a background save: where the ranks' trainers and workers leave word for each other.

    worker's share --> record -->  SaveStatus, FolderStatus (this file)  --> outcome --> every rank
    trainer --> heartbeat -->

Objects in a folder at the checkpoint (``SaveStatus``), or files in a hidden folder ``.<name>.job-<save_id>`` beside
it (``FolderStatus``). Every name is known: nobody lists them. They appear whole. Each is signed with a key that
travelled over the group. So nothing is unpickled that a rank of this save did not write.

[Note: who is dead] Each trainer holds a POSIX lock on its ``alive-<rank>``, and writes a counter there every few
seconds. The system frees the lock when the trainer dies. A rank whose lock is free is dead. Where locks do not work
between the hosts (tried before each save) its counter must stand still for ``STALE_S`` instead. At a store there is
no lock: a heartbeat is an object that its trainer writes anew. There a rank is dead when it has stood still for a
quarter of ``timeout_s``. A store that asks to slow down may keep a living rank from writing for a while.

[Note: first come] The verdict, and what is put first, are created only if they are not there. Local folders with
links, S3 and Google Cloud Storage do that in one act. Elsewhere it takes a look first, and the order of the waits has
to do, as in [Note: who gives up when].

[Note: not there yet] At a store the call sends one request for the status, by the first rank while tensors are
copied. Heartbeats come with the first beat, after it: one that was never seen is not there yet. A rank that leaves
says so in its heartbeat, which is removed with the status. Without that, a later look could not tell a heartbeat that
is gone from one that never was.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sixfold.dist_ckpt.background.folder_watch import FolderWatch
from sixfold.dist_ckpt.collectives.exchange import Outcome
from sixfold.dist_ckpt.errors import CheckpointError, StorageError
from sixfold.dist_ckpt.storage.by_pointer import ByPointer
from sixfold.dist_ckpt.storage.local import is_held, is_locked
from sixfold.dist_ckpt.storage.store import Save

STALE_S = 9.0
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS, errno.EINVAL, errno.EACCES}
BEATS_BYTES, _MOVES_BYTES = 12, 20  # of a heartbeat: its own count, and behind it what the worker has counted


_MARK = "board"  # there as long as the status is
_LEFT = b"left"  # the last heartbeat of a rank that has heard the outcome


class RankState(Enum):
    """How a rank's trainer is, as far as its heartbeat tells."""

    LIVES = "lives"
    UNSEEN = "was never seen"  # its heartbeat is not there yet; where it was there before the save it has left
    DEAD = "died"
    LEFT = "left"  # it has acknowledged the outcome; or the whole status is gone


class Liveness(NamedTuple):
    """One look at a rank. ``moves``: what its worker has counted; None if that was not looked at."""

    state: RankState
    moves: bytes | None = None


class StallTimer:
    """For how long a value has been what it is, as far as this process has looked."""

    def __init__(self) -> None:
        self._last: object = self
        self._since = 0.0

    def seconds(self, value: object) -> float:
        """Seconds; 0.0 if the value has changed since the last look."""
        if value != self._last:
            self._last, self._since = value, time.monotonic()
        return time.monotonic() - self._since


class Heartbeat:
    """A trainer's heartbeat, until ``close``: an object that is written anew."""

    def __init__(self, place: Any, name: str) -> None:
        self._place, self._name, self._beats = place, name, 0

    def beat(self, moves: int) -> None:
        """Count on, and show what the worker has counted."""
        self._beats += 1
        with suppress(StorageError, OSError):
            self._write(f"{self._beats:>{BEATS_BYTES}}{moves:>{_MOVES_BYTES}}".encode())

    def _write(self, data: bytes) -> None:
        self._place.replace(self._name, data)

    def close(self) -> None:
        """Acknowledge the outcome: the heartbeat goes, or says so."""
        with suppress(StorageError, OSError):
            self._write(_LEFT)
            try:
                self._place.read(_MARK)
            except FileNotFoundError:  # nobody else takes it away
                self._place.delete(self._name)


class SaveStatus:
    """What the ranks of one save have in common while it goes on.

    Args:
        place: a store (``ByPointer``), of which five methods are used, or ``_Folder``. heartbeats: the same, for
            heartbeats: what is asked of it ends before the next beat.
        key: signs what is put.
        stale_s: for how long a heartbeat stands still before its rank counts as dead, where nothing else tells.
    """

    path: Path | None = None  # of a folder of this host

    def __init__(self, place: Any, heartbeats: Any, key: bytes, stale_s: float) -> None:
        self._place, self._heartbeats, self._key, self._stale_s = place, heartbeats, key, stale_s
        self._stalls, self._seen = defaultdict[int, StallTimer](StallTimer), set[int]()

    @classmethod
    def at(cls, store: ByPointer, save: Save, key: bytes, *, timeout_s: float, beat_s: float = 1.0) -> SaveStatus:
        """The status of a save to a store, which is asked again for a quarter of ``timeout_s``."""
        place, heartbeats = (store.patient(limit_s).board(save) for limit_s in (timeout_s / 4, beat_s))
        return cls(place, heartbeats, key, timeout_s / 4)

    def make(self) -> None:
        """The first rank's, before any other asks."""
        self._place.replace(_MARK, b"")

    def is_there(self) -> bool:
        """Whether the status is still there; what other hosts have put is seen by what is asked for next."""
        try:
            self._look()
        except FileNotFoundError:
            return False
        except (StorageError, OSError):
            return True
        return True

    def _look(self) -> None:
        self._place.read(_MARK)

    def put(self, name: str, outcome: Outcome) -> None:
        """Make ``name`` appear, whole and signed, unless it is there already. OSError: it cannot be."""
        data = outcome.encode()
        with _as_of_the_system():
            self._place.create_new(name, hmac.digest(self._key, data, "sha256") + data)

    def get(self, name: str) -> Outcome | None:
        """What was put under ``name``; None if nothing was.

        Raises:
            CheckpointError: somebody else wrote it.
        """
        try:
            data = self._place.read(name)
        except (FileNotFoundError, StorageError):
            return None
        if not hmac.compare_digest(hmac.digest(self._key, data[32:], "sha256"), data[:32]):
            raise CheckpointError(f"{self.path or ''}/{name} was not written by this save; nothing of it was read")
        return Outcome.decode(data[32:], f"{self.path or ''}/{name}")

    def has(self, name: str) -> bool:
        """Whether something was put under ``name``."""
        with suppress(StorageError, OSError):
            self._place.read(name, 0, 1)
            return True
        return False

    def verdict(self, wanted: str) -> str:
        """The one that holds for this save: ``wanted``, or what was made before. See [Note: one verdict].

        Raises:
            FileNotFoundError: the status is gone.
        """
        if not self.is_there():
            raise FileNotFoundError(_MARK)
        with _as_of_the_system():
            self._place.create_new("verdict", wanted.encode())
            return str(self._place.read("verdict"), errors="replace")

    def liveness(self, rank: int, with_moves: bool = True) -> Liveness:
        """How a rank is. See [Note: who is dead]."""
        try:
            data = self._heartbeats.read(f"alive-{rank}")
        except FileNotFoundError:
            return Liveness(RankState.LEFT if rank in self._seen else RankState.UNSEEN)
        except StorageError:
            return Liveness(RankState.LIVES)
        self._seen.add(rank)
        if data == _LEFT:
            return Liveness(RankState.LEFT)
        is_dead = self._stalls[rank].seconds(data) > self._stale_s
        return Liveness(RankState.DEAD if is_dead else RankState.LIVES, data[BEATS_BYTES:])

    def heartbeat(self, rank: int) -> Heartbeat:
        """This trainer's heartbeat."""
        return Heartbeat(self._heartbeats, f"alive-{rank}")

    def leave(self, rank: int) -> None:
        """A rank has heard the outcome: what it has put goes."""
        with suppress(StorageError, OSError):
            self._place.delete(f"rank-{rank}")

    def watch(self) -> FolderWatch:
        """Ends a wait when a name appears or goes, as far as this host can know."""
        return FolderWatch(self.path)

    def remove(self) -> None:
        """Take the status away."""
        with suppress(StorageError, OSError):
            for name in (_MARK, *self._place.list_files()):
                self._place.delete(name)


@contextmanager
def _as_of_the_system() -> Iterator[None]:
    """A store that fails is told as a file system that does."""
    try:
        yield
    except StorageError as error:
        raise OSError(error.errno or errno.EIO, str(error)) from error


class _Folder:
    """What a status needs of a store, in a folder that all ranks see."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create_new(self, name: str, data: bytes) -> None:
        hidden = self._path / f"{name}.part-{secrets.token_hex(4)}"
        with os.fdopen(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(data)
        try:
            os.link(hidden, self._path / name)
        except OSError as error:
            if error.errno in _NO_LINKS and not (self._path / name).exists():  # see [Note: first come]
                os.rename(hidden, self._path / name)
                return
            if error.errno not in {*_NO_LINKS, errno.EEXIST}:
                raise
        os.unlink(hidden)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with os.fdopen(os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
            return file.read(stop)

    def delete(self, name: str) -> None:
        os.unlink(self._path / name)


class FolderStatus(SaveStatus):
    """A ``SaveStatus`` in a folder that all ranks see.

    Args:
        target: the checkpoint folder. save_id: of the save.
        locks_work: whether a lock that another host holds is seen here; else ``stale_s`` counts.
    """

    path: Path

    def __init__(
        self, target: Path, save_id: str, key: bytes, *, locks_work: bool = True, stale_s: float = STALE_S
    ) -> None:
        self.path, self._locks_work = target.with_name(f".{target.name}.job-{save_id}"), locks_work
        super().__init__(_Folder(self.path), _Folder(self.path), key, stale_s)

    def make(self) -> None:
        os.mkdir(self.path)

    def _look(self) -> None:
        # Opening the folder asks the server (NFS), which a look-up of a name that was missing a moment ago does not.
        os.close(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def liveness(self, rank: int, with_moves: bool = True) -> Liveness:
        try:
            handle = os.open(self.path / f"alive-{rank}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Liveness(RankState.LEFT)
        except OSError:
            return Liveness(RankState.LIVES)
        try:
            is_lost = self._locks_work and not is_locked(handle)
            data = os.read(handle, 64) if with_moves or not self._locks_work else None
        except OSError:
            return Liveness(RankState.LIVES)
        finally:
            os.close(handle)
        if not self._locks_work:
            is_lost = self._stalls[rank].seconds(data) > self._stale_s
        if is_lost:  # or it has left between the look at its name and that at its lock
            return Liveness(RankState.DEAD if self.has(f"alive-{rank}") else RankState.LEFT)
        return Liveness(RankState.LIVES, None if data is None else data[BEATS_BYTES:])

    def heartbeat(self, rank: int) -> Heartbeat:
        return FileHeartbeat(self.path / f"alive-{rank}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class FileHeartbeat(Heartbeat):
    """A lock and a counter in a file, which this process never opens a second time: that would free the lock."""

    def __init__(self, path: Path) -> None:
        self._path, self._beats = path, 0
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # no locks on this file system: the counter will do
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._handle, _kernel(), BEATS_BYTES + _MOVES_BYTES)  # which sees this lock, wherever it lies

    def _write(self, data: bytes) -> None:
        os.pwrite(self._handle, data, 0)
        os.utime(self._handle)  # sent at once, also where data waits in a client's cache

    def close(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
        os.close(self._handle)


@cache
def _kernel() -> bytes:
    """What this system is called until it is started anew, in any container; empty if it has no such name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip().replace(b"-", b"")
    return b""


def liveness_at(folder: Path) -> RankState:
    """How the trainers of a status are that another process has left or lives by; UNSEEN if nothing tells.

    Not for a status of this process: it would lose its locks. Nor for one that was made a moment ago: a lock that is
    looked at is held for that long.
    """
    if any(map(is_held, folder.glob("alive-*"))):
        return RankState.LIVES
    with suppress(OSError):
        kernel = (folder / "alive-0").read_bytes()[BEATS_BYTES + _MOVES_BYTES :]
        if kernel and kernel == _kernel():
            return RankState.DEAD
    return RankState.UNSEEN
