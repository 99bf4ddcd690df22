"""Files that appear whole: temporary names, flushes, renames, copies inside the kernel.

    writer.py, text/ --> Temporary, publish (this file) --> PREFIX.bin, PREFIX.idx

Knows names and descriptors, not the format. ``publish`` is the only place that gives a pair its names.

[Note: whole or absent] Everything is written under temporary names in the folder of the final ones. ``publish``
removes an old .idx and old companions, renames .bin and the new companions, then .idx. So an old .idx never lies next
to a new file. A crash leaves the old pair or no pair, never a mixed one.

[Note: a killed writer] A writer holds the lock of its temporary files while it lives. One that was killed holds none,
so the next writer of the same name removes what it left. Temporary names are numbered from 0, so that they are looked
up and no folder is listed. A file system without locks keeps what is left: ``rm PREFIX.*.tmp-*``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import IO

LOCK_TIMEOUT_S = 30.0
BUFFER_BYTES = 1 << 18  # stays in the second cache: 2.6 us per document of 2 kB in all, 4 MiB 3.4, 64 KiB 2.6
COPY_BYTES = 1 << 22
_SLOTS = 3  # temporary names that are looked at beyond the first free one; a look costs 1 us


class Temporary:
    """A new file in the folder of ``path``, under a name that nobody else uses, locked while it is open.

    What killed writers of the same ``path`` have left is removed first.

    Raises:
        OSError: the folder is not there or may not be written.
    """

    def __init__(self, path: str) -> None:
        made: tuple[str, IO[bytes]] | None = None
        slot = 0
        while made is None or slot < _SLOTS or os.path.lexists(f"{path}.tmp-sixfold-{slot}"):
            name = f"{path}.tmp-sixfold-{slot}"
            _remove_abandoned(name)
            if made is None:
                made = _make_locked(name)
            slot += 1
        self.name, self.file = made

    def sync(self) -> None:
        """All that was written is on the disk when this returns. The file stays open, and so locked."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def remove(self) -> None:
        """Close it and remove it, if it still has its temporary name."""
        with suppress(OSError, ValueError):  # published, closed, or in a folder that may not be written any more
            if _is_named(self.file.fileno(), self.name):  # a published one's name may be another writer's by now
                os.unlink(self.name)
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self.file.close()


def _make_locked(name: str) -> tuple[str, IO[bytes]] | None:
    """A new file of that name with its lock; None if the name is taken."""
    try:
        file = open(name, "xb", buffering=BUFFER_BYTES)  # noqa: SIM115 - it lives as long as its writer
    except FileExistsError:
        return None
    # Before it was locked, another writer may have taken it for abandoned.
    if _try_lock(file.fileno()) is not False and _is_named(file.fileno(), name):
        return name, file
    file.close()
    return None


def _remove_abandoned(name: str) -> None:
    """Remove the temporary file ``name`` if its writer is dead, as its lock tells."""
    if not os.path.lexists(name):
        return
    with suppress(OSError):  # gone meanwhile, or somebody else's
        descriptor = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            ours = stat.S_ISREG(os.fstat(descriptor).st_mode)
            if ours and _try_lock(descriptor) and _is_named(descriptor, name):
                os.unlink(name)
        finally:
            os.close(descriptor)


def _is_named(descriptor: int, name: str) -> bool:
    """Whether ``name`` is still the name of the open file. While its lock is held, nobody else changes that."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(name))
    except FileNotFoundError:
        return False


def files_of(prefix: str) -> list[str]:
    """Those of the two files of a pair that are there, in whatever state."""
    return [path for path in (prefix + ".bin", prefix + ".idx") if os.path.lexists(path)]


def publish(
    new_bin: str, bin_path: str, new_idx: str, idx_path: str, beside: Sequence[tuple[str | None, str]] = ()
) -> None:
    """Give a finished pair its names, in the order of the note above; all files are already on the disk.

    ``beside`` has (new file, its name) of each companion, which lies in the folder of the .idx; None for one that goes.
    """
    folders = sorted((os.path.dirname(path) or os.curdir for path in (bin_path, idx_path)), key=os.path.realpath)
    if os.path.samefile(*folders):
        folders.pop()
    with ExitStack() as held:
        descriptors = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in folders]
        for descriptor in descriptors:
            held.callback(os.close, descriptor)
            _lock(descriptor)  # two writers of one pair take turns here, so that their files do not mix
        for path in (bin_path, idx_path):
            if os.path.isdir(path):
                raise IsADirectoryError(errno.EISDIR, f"a folder is named {path}", path)
        if os.path.lexists(idx_path):
            os.unlink(idx_path)
            _sync(descriptors)
        for _, name in beside:
            with suppress(FileNotFoundError):
                os.unlink(name)
        os.replace(new_bin, bin_path)
        for new, name in beside:
            if new is not None:
                os.replace(new, name)
        os.replace(new_idx, idx_path)
        _sync(descriptors)


def copy(source: int, target: int, nbytes: int) -> int:
    """Append up to ``nbytes`` bytes from one descriptor to another at their positions; gives the number copied."""
    copied, step = 0, _copy_in_kernel
    while copied < nbytes:
        try:
            got = step(source, target, min(nbytes - copied, 1 << 30))
        except OSError:
            if step is _copy_by_read:
                raise
            step = _copy_by_read  # two file systems, or one that cannot
            continue
        if got == 0:
            break
        copied += got
    return copied


def _copy_in_kernel(source: int, target: int, nbytes: int) -> int:
    return os.copy_file_range(source, target, nbytes)


def _copy_by_read(source: int, target: int, nbytes: int) -> int:
    data = memoryview(os.read(source, min(nbytes, COPY_BYTES)))
    got = len(data)
    while data:
        data = data[os.write(target, data) :]
    return got


def _try_lock(descriptor: int) -> bool | None:
    """Take the lock of an open file: whether it was free; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None  # two writers of one pair at once are then the caller's to avoid
    return True


def _lock(descriptor: int) -> None:
    """Take the folder's lock, which writers hold for the length of two renames; OSError at the deadline."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while _try_lock(descriptor) is False:
        if time.monotonic() > deadline:
            message = f"another process has held the lock of its folder for {LOCK_TIMEOUT_S:g} s"
            raise TimeoutError(errno.ETIMEDOUT, message)
        time.sleep(0.01)


def _sync(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.fsync(descriptor)
