"""Files mapped into memory: no descriptor stays open.

    path --> Mapped (this file): bytes of the page cache --> opening.py; chunk_sources.py, reader.py, tools

[Note: a map outlives its descriptor] The kernel keeps a file mapped when its descriptor is closed; Python's ``mmap``
keeps one all the same, and a checkpoint may have more files than a process may open. So torch maps it. A map
lives as long as any view of it: it is undone when the last one goes, and never by whoever made it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch

from sixfold.dist_ckpt.formats.frame import tensor_bytes
from sixfold.dist_ckpt.storage.frame_file import libc

_MADV_POPULATE_READ = 22
_POPULATE_BYTES = 1 << 16  # less is not worth a system call
Arrives = Callable[[int, int], None]


class Mapped:
    """A file, mapped privately. Nobody writes there: what is written may be gone at the next look.

    Attributes:
        data: its bytes; a view of them keeps them mapped.
    """

    __slots__ = ("_arrives", "_memory", "_path", "data")

    def __init__(self, path: Path, arrives: Arrives | None = None) -> None:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            try:  # not by its name, which may be no text, or that of another file now
                self._memory = torch.from_file(f"/proc/self/fd/{file.fileno()}", size=nbytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise OSError(errno.ENOMEM, str(error), str(path)) from error
        self._path, self._arrives = path, arrives
        self.data = tensor_bytes(self._memory)

    def at(self, start: int, stop: int) -> int:
        """Where bytes [start, stop) lie in memory, as long as the caller keeps this object.

        They have arrived, and are read here: a disk that fails is an error of the system now, and no SIGBUS when they
        are used.
        """
        if self._arrives is not None:
            self._arrives(start, stop)
        code = self._advise(start, stop, _MADV_POPULATE_READ) if stop - start >= _POPULATE_BYTES else 0
        if code not in (0, errno.EINVAL):  # which Linux before 5.14 says
            raise OSError(errno.EIO, f"the disk does not give these bytes ({os.strerror(code)})", str(self._path))
        return self._memory.data_ptr() + start

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) when they have arrived."""
        if self._arrives is not None:
            self._arrives(start, stop)
        return self.data[start:stop]

    def forget(self, start: int, stop: int) -> None:
        """Count the bytes [start, stop) no longer as memory of this process: the page cache keeps them."""
        if start < len(self.data):
            self._advise(start, min(stop, len(self.data)), mmap.MADV_DONTNEED)

    def _advise(self, start: int, stop: int, advice: int) -> int:
        """madvise(2) of the pages from byte ``start`` on; 0, or the number of its error."""
        first, advise = start - start % mmap.PAGESIZE, libc("madvise")
        assert advise is not None, "Linux"
        place = ctypes.c_void_p(self._memory.data_ptr() + first)
        return advise(place, ctypes.c_size_t(stop - first), advice) and ctypes.get_errno()
