"""Operations of the file system, counted where Python hands them to the system.

os.open, os.read, fcntl.lockf, ... --> counting, note_operations (this file) --> tests of what a wait costs
"""

import fcntl
import os
import time
from contextlib import contextmanager

NAMES = (
    *("open", "read", "write", "pread", "pwrite", "stat", "lstat", "utime", "access", "link", "symlink", "readlink"),
    *("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "listdir", "scandir", "fsync"),
)
LISTING = {"listdir", "scandir"}


@contextmanager
def counting(patch):
    """A list of the operations inside, by name; closing a handle is none."""
    seen = []
    with patch.context() as inside:
        for place, name in [*((os, name) for name in NAMES), (fcntl, "lockf")]:
            inside.setattr(place, name, _told(getattr(place, name), lambda name=name: seen.append(name)))
        yield seen


def note_operations(path):
    """From now on each operation of this process is a line of a file: when, and its name."""
    handle, write = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), os.write

    def note(name):
        write(handle, f"{time.monotonic()} {name}\n".encode())

    for place, name in [*((os, name) for name in NAMES), (fcntl, "lockf")]:
        setattr(place, name, _told(getattr(place, name), lambda name=name: note(name)))


def _told(plain, tell):
    def call(*arguments, **options):
        tell()
        return plain(*arguments, **options)

    return call
