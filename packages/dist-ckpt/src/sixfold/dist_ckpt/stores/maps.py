"""Files mapped into memory: no descriptor stays open, and few maps are kept.

    path --> Maps.get (this file) --> Mapped: bytes of the page cache, where sources.py, reader.py and tools look

[Note: a map outlives its descriptor] The kernel keeps a file mapped when its descriptor is closed; Python's ``mmap``
keeps one all the same, and a checkpoint may have more files than a process may open. So the call is made here. A map
lives as long as any view of it: it is undone when the last one goes, and never by whoever made it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

_MADV_POPULATE_READ = 22
_POPULATE_BYTES = 1 << 16  # less is not worth a system call
_FAILED = ctypes.c_void_p(-1).value
Arrives = Callable[[int, int], None]
KEPT_MAPS = 256  # Linux allows 65,530 to a process by default


class Mapped:
    """A file, mapped privately. Nobody writes there: what is written may be gone at the next look.

    Attributes:
        data: its bytes; a view of them keeps them mapped.
    """

    __slots__ = ("_arrives", "_memory", "_path", "data")

    def __init__(self, path: Path, arrives: Arrives | None = None) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            nbytes = os.fstat(handle).st_size
            address = _map(handle, nbytes, path)
        finally:
            os.close(handle)
        self._path, self._arrives = path, arrives
        self._memory = (ctypes.c_char * nbytes).from_address(address)
        # At the end of the process the kernel does it: a tensor may still be looked at then.
        weakref.finalize(self._memory, _unmap, address, nbytes).atexit = False
        self.data = memoryview(self._memory).cast("B")

    def at(self, start: int, stop: int) -> int:
        """Where bytes [start, stop) lie in memory, as long as the caller keeps this object.

        They have arrived, and are read here: a disk that fails is an error of the system now, and no SIGBUS when they
        are used.
        """
        if self._arrives is not None:
            self._arrives(start, stop)
        address = ctypes.addressof(self._memory)
        if stop - start >= _POPULATE_BYTES:
            first = start - start % mmap.PAGESIZE
            if _call("madvise")(address + first, stop - first, _MADV_POPULATE_READ):
                code = ctypes.get_errno()
                if code != errno.EINVAL:  # Linux before 5.14 does not know it
                    raise OSError(
                        errno.EIO, f"the disk does not give these bytes ({os.strerror(code)})", str(self._path)
                    )
        return address + start

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) when they have arrived."""
        if self._arrives is not None:
            self._arrives(start, stop)
        return self.data[start:stop]

    def forget(self, start: int, stop: int) -> None:
        """Count the bytes [start, stop) no longer as memory of this process: the page cache keeps them."""
        first, size = start - start % mmap.PAGESIZE, len(self.data)
        if first < size:
            _call("madvise")(ctypes.addressof(self._memory) + first, min(stop, size) - first, mmap.MADV_DONTNEED)


class Maps:
    """Maps of one folder's files by name, the ``KEPT_MAPS`` used last; for threads.

    Attributes:
        arrives: gives for a path what waits until bytes [start, stop) of the file are there; None: all are there.
    """

    def __init__(self) -> None:
        self.arrives: Callable[[Path], Arrives] | None = None
        self._kept: OrderedDict[str, Mapped] = OrderedDict()
        self._lock = Lock()

    def get(self, folder: Path, name: str) -> Mapped:
        """A file mapped, as it was when it was mapped first."""
        with self._lock:
            found = self._kept.get(name)
            if found is None:
                path = folder / name
                found = self._kept[name] = Mapped(path, self.arrives and self.arrives(path))
                if len(self._kept) > KEPT_MAPS:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(name)
        return found

    def await_bytes(self, folder: Path, name: str, start: int, stop: int) -> None:
        """Until bytes [start, stop) of a file are there."""
        if self.arrives is not None:
            self.arrives(folder / name)(start, stop)

    def forget(self, name: str, start: int, stop: int) -> None:
        """See ``Mapped.forget``; nothing if the file is not mapped."""
        with self._lock:
            found = self._kept.get(name)
        if found is not None:
            found.forget(start, stop)


def _map(handle: int, nbytes: int, path: Path) -> int:
    if not nbytes:
        raise OSError(errno.EINVAL, "an empty file cannot be mapped", str(path))
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _call("mmap")(None, nbytes, protection, mmap.MAP_PRIVATE, handle, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return int(address)


def _unmap(address: int, nbytes: int) -> None:
    _call("munmap")(address, nbytes)


@cache
def _call(name: str) -> Any:
    """A system call of the C library."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    function.argtypes = {
        "mmap": (pointer, size, number, number, number, ctypes.c_longlong),
        "munmap": (pointer, size),
        "madvise": (pointer, size, number),
    }[name]
    function.restype = pointer if name == "mmap" else number
    return function
