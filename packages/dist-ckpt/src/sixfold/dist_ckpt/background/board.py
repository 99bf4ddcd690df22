"""The board of a background save: where the ranks' trainers and workers leave word for each other.

    worker's share --> record -->  Board, FolderBoard (this file)  --> outcome --> every rank
    trainer --> sign of life -->

A hidden folder ``.<name>.job-<save_id>`` beside the checkpoint. Every name in it is known: nobody lists it. Files
appear by rename or link, whole. Each is signed with a key that travelled over the group, so that nothing is unpickled
that a rank of this very save did not write.

[Note: who is dead] Each trainer holds a POSIX lock on its ``alive-<rank>``, which the system frees when it dies, and
writes a counter there every few seconds. A rank whose lock is free is dead. Where locks do not work between the hosts
(tried before each save) its counter must stand still for ``STALE_S`` instead.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import shutil
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

from sixfold.dist_ckpt.background.bell import Bell
from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.ranks.exchange import Outcome

STALE_S = 9.0
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS, errno.EINVAL, errno.EACCES}
BEATS_BYTES = 12  # of a sign of life; what the worker has counted stands behind


class State(Enum):
    """How a rank's trainer is, as far as its sign of life tells."""

    LIVES = "lives"
    UNSEEN = "was never seen"  # its sign is not there yet; where it was there before the save it has left
    DEAD = "died"
    LEFT = "left"  # it has acknowledged the outcome; or the whole board is gone


class Life(NamedTuple):
    """One look at a rank. ``moves``: what its worker has counted; None if that was not looked at."""

    state: State
    moves: bytes | None = None


class Stillness:
    """For how long a value has been what it is, as far as this process has looked."""

    def __init__(self) -> None:
        self._last: object = self
        self._since = 0.0

    def of(self, value: object) -> float:
        """Seconds; 0.0 if the value has changed since the last look."""
        if value != self._last:
            self._last, self._since = value, time.monotonic()
        return time.monotonic() - self._since


class Sign(Protocol):
    """A trainer's sign of life, until ``close``."""

    def beat(self, moves: int) -> None:
        """Count on, and show what the worker has counted."""
        ...

    def close(self) -> None:
        """Acknowledge the outcome: the sign goes."""
        ...


class Board(Protocol):
    """What the ranks of one save have in common while it goes on."""

    def is_there(self) -> bool:
        """Whether the board is still there; what other hosts have put is seen by what is asked for next."""
        ...

    def put(self, name: str, outcome: Outcome) -> None:
        """Make ``name`` appear, whole and signed, unless it is there already."""
        ...

    def get(self, name: str) -> Outcome | None:
        """What was put under ``name``; None if nothing was.

        Raises:
            CheckpointError: somebody else wrote it.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether something was put under ``name``."""
        ...

    def verdict(self, wanted: str) -> str:
        """The one that holds for this save: ``wanted``, or what was made before. See [Note: one verdict].

        Raises:
            FileNotFoundError: the board is gone.
        """
        ...

    def life(self, rank: int, with_moves: bool = True) -> Life:
        """How a rank is. See [Note: who is dead]."""
        ...

    def sign(self, rank: int) -> Sign:
        """This trainer's sign of life."""
        ...

    def leave(self, rank: int) -> None:
        """A rank has heard the outcome: what it has put goes."""
        ...

    def bell(self) -> Bell:
        """Rings when a name appears or goes, as far as this host can know."""
        ...

    def remove(self) -> None:
        """Take the board away."""
        ...


class FolderBoard:
    """A ``Board`` in a folder that all ranks see.

    Args:
        target: the checkpoint folder. save_id: of the save. key: signs each file.
        locks_work: whether a lock that another host holds is seen here.
        stale_s: for how long a sign stands still before its rank counts as dead, where locks do not work.
    """

    def __init__(
        self, target: Path, save_id: str, key: bytes, *, locks_work: bool = True, stale_s: float = STALE_S
    ) -> None:
        self.path = target.with_name(f".{target.name}.job-{save_id}")
        self._key, self._locks_work, self._stale_s = key, locks_work, stale_s
        self._still: dict[int, Stillness] = {}

    def make(self) -> None:
        """The first rank's, before any other asks."""
        os.mkdir(self.path)

    def is_there(self) -> bool:
        # Opening the folder asks the server (NFS), which a look-up of a name that was missing a moment ago does not.
        try:
            os.close(os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def put(self, name: str, outcome: Outcome) -> None:
        data, hidden = outcome.encode(), self.path / f"{name}.part-{os.getpid()}"
        handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with os.fdopen(handle, "wb") as file:
            file.write(hmac.digest(self._key, data, "sha256") + data)
        try:
            os.link(hidden, self.path / name)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.rename(hidden, self.path / name)
            return
        os.unlink(hidden)

    def get(self, name: str) -> Outcome | None:
        try:
            handle = os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(handle, "rb") as file:
            data = file.read()
        if not hmac.compare_digest(hmac.digest(self._key, data[32:], "sha256"), data[:32]):
            raise CheckpointError(f"{self.path / name} was not written by this save; nothing of it was read")
        return Outcome.decode(data[32:])

    def has(self, name: str) -> bool:
        try:
            os.stat(self.path / name)
        except OSError:
            return False
        return True

    def verdict(self, wanted: str) -> str:
        link = self.path / "verdict"
        with suppress(FileExistsError):
            try:
                os.symlink(wanted, link)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return wanted  # no links on this file system: the order of the waits has to do
        return os.readlink(link)

    def life(self, rank: int, with_moves: bool = True) -> Life:
        try:
            handle = os.open(self.path / f"alive-{rank}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Life(State.LEFT)
        except OSError:
            return Life(State.LIVES)
        try:
            is_lost = self._locks_work and not is_locked(handle)
            data = os.read(handle, 64) if with_moves or not self._locks_work else None
        except OSError:
            return Life(State.LIVES)
        finally:
            os.close(handle)
        if not self._locks_work:
            is_lost = self._still.setdefault(rank, Stillness()).of(data) > self._stale_s
        if is_lost:  # or it has left between the look at its name and that at its lock
            return Life(State.DEAD if self.has(f"alive-{rank}") else State.LEFT)
        return Life(State.LIVES, None if data is None else data[BEATS_BYTES:])

    def sign(self, rank: int) -> FileSign:
        return FileSign(self.path / f"alive-{rank}")

    def leave(self, rank: int) -> None:
        with suppress(OSError):
            os.unlink(self.path / f"rank-{rank}")

    def bell(self) -> Bell:
        return Bell(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class FileSign:
    """A ``Sign``: a lock and a counter in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with suppress(OSError):  # no locks on this file system: the counter will do
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._beats = 0

    def beat(self, moves: int) -> None:
        """The file is never opened a second time by this process: that would free the lock."""
        self._beats += 1
        with suppress(OSError):
            os.pwrite(self._handle, f"{self._beats:>{BEATS_BYTES}}{moves:>20}".encode(), 0)
            os.utime(self._handle)  # sent at once, also where data waits in a client's cache

    def close(self) -> None:
        with suppress(OSError):
            os.unlink(self._path)
        os.close(self._handle)


def is_locked(handle: int) -> bool:
    """Whether another process holds the lock of a file that is open for reading, as far as this host can tell."""
    try:
        fcntl.lockf(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        return error.errno == errno.EACCES  # what some systems say of a lock that is held
    return False
