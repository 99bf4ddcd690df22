"""A wait that ends early when a name appears or goes in a folder of this host: no look at the folder is needed.

    another process of this host --> inotify --> FolderWatch.wait (this file) --> the turns of lost_ranks.py

The kernel tells of what its own processes do, and of nothing that other hosts do to a shared folder: those are found by
looking, seldom. Where no instance of inotify is left, the wait is a pause.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Set as AbstractSet
from pathlib import Path

_EVENT = struct.Struct("iIII")  # of inotify(7): watch, mask, cookie, length of the name
_CLOSE_WRITE, _MOVED_TO, _CREATE, _DELETE = 0x8, 0x80, 0x100, 0x200
_GONE, _OVERFLOW = 0x400 | 0x800, 0x4000  # of the folder itself
# The end of a process closes its heartbeat, which tells of a death at once. Writes are not asked for.
_MASK = _CLOSE_WRITE | _MOVED_TO | _CREATE | _DELETE | _GONE


class FolderWatch:
    """Tells of changes in a folder since it was made. Close it: a user has 128 of these.

    Args:
        folder: None for a place that the kernel knows nothing of.
    """

    def __init__(self, folder: Path | None) -> None:
        self._handle = None if folder is None else _watch(folder)
        self._poll = select.poll()
        if self._handle is not None:
            self._poll.register(self._handle, select.POLLIN)

    def wait(self, seconds: float, names: AbstractSet[str]) -> set[str]:
        """Those of ``names`` that have appeared or gone; empty if none has in ``seconds``. All if the folder has."""
        until = time.monotonic() + seconds
        while (rest_s := until - time.monotonic()) > 0:
            if self._poll.poll(rest_s * 1000) and (changed := self._changed(names)):
                return changed
        return set()

    def close(self) -> None:
        """Give the instance back."""
        if self._handle is not None:
            os.close(self._handle)

    def _changed(self, names: AbstractSet[str]) -> set[str]:
        assert self._handle is not None, "there is something to read"
        data, at, found = os.read(self._handle, 1 << 16), 0, set[str]()
        while at < len(data):
            _, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size + length
            found.add(data[at - length : at].rstrip(b"\0").decode(errors="replace"))
            if mask & (_GONE | _OVERFLOW):
                found |= names
        return found & names


def _watch(folder: Path) -> int | None:
    """A handle that becomes readable when something changes in ``folder``; None if this system gives none."""
    library = ctypes.CDLL(None)
    handle: int = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if handle >= 0 and library.inotify_add_watch(handle, os.fsencode(folder), ctypes.c_uint32(_MASK)) >= 0:
        return handle
    if handle >= 0:
        os.close(handle)
    return None
