"""Leases: folders of this host that live as long as one of the processes which use them.

    this_host, mirror_name --> mirror.py;  hold, is_held --> mirror.py;  remove_dead (this file) --> dead ones are gone

A process holds a lock in the folder, which the system takes back when the process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from sixfold.dist_ckpt.errors import StorageError

_BEGUN_S = 600.0  # a folder that is older and still without a lock: its process was killed before it held one


#: Ranks with equal ones share a mirror: one system, one folder for temporary files.
Host = tuple[str, str, str, int, int]


def this_host() -> Host:
    """The host of this process."""
    folder, boot = os.path.realpath(tempfile.gettempdir()), ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = os.stat(folder)
    return socket.gethostname(), boot, folder, status.st_dev, status.st_ino


def mirror_name(token: str) -> str:
    """The name of a mirror's folder; ``token``: 16 hexadecimal digits."""
    return f"sixfold-mirror-{sha256(socket.gethostname().encode()).hexdigest()[:8]}-{token}"


def hold(root: Path, rank: int) -> int:
    """Hold a rank's lock in a folder until the handle, which is returned, is closed."""
    path, hidden = lock_path(root, rank), root / f".alive-{rank}"
    handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    hidden.rename(path)  # who sees it sees it held
    return handle


def lock_path(root: Path, rank: int) -> Path:
    """The lock file of a rank."""
    return root / f"alive-{rank}"


def is_held(lock: Path) -> bool:
    """Whether a process of this host holds the lock of a rank; True also where that cannot be told."""
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def remove_dead(parent: Path) -> None:
    """Remove this user's mirrors of this host that no process holds. See [Note: a mirror's end] (mirror.py)."""
    for folder in list(parent.glob(mirror_name("[0-9a-f]" * 16))):
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            locks = [path for path in folder.iterdir() if path.name.startswith("alive-")]
            if not locks and time.time() - status.st_mtime < _BEGUN_S:
                continue  # its first lock is about to be held
            if not any(map(is_held, locks)):
                shutil.rmtree(folder, ignore_errors=True)


def no_room(name: str, place: str, needed_bytes: int, free_bytes: int) -> StorageError:
    """The error of a mirror that does not fit."""
    return StorageError(
        f"ENOSPC: {needed_bytes} bytes of {name} are fetched into {place} on host {socket.gethostname()}, where "
        f"{free_bytes} are free; TMPDIR names another place",
        errno.ENOSPC,
    )
