"""Bytes of a file: mapped, read by position, or from an object store.

    path --> map_file --------------------> MappedIds --+
    path --> FileBytes, ObjectBytes ------> RangedIds --+--> IdSource (this file) --> reader.py

Nothing here knows the format of an index. No call leaves a descriptor open per file: a map needs none once it is made,
and FileBytes shares a bounded pool.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError, Problem
from sixfold.indexed_data.paths import anchored

Bytes = npt.NDArray[np.uint8]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Readable(Protocol):
    """What ``open_bytes(path)`` returns: a whole object that can be read in ranges."""

    def size(self) -> int: ...
    def read(self, offset: int, nbytes: int) -> bytes: ...


class IdSource(Protocol):
    """Where the ids of a .bin come from. The reader knows no other difference between a map and positioned reads."""

    def ids(self, start: int, count: int) -> npt.NDArray[Any]:
        """(count,) ids from id ``start`` on, read-only. Both lie in the file: the index was asked."""
        ...

    def prefetch(self, begin_R: npt.NDArray[np.int64], end_R: npt.NDArray[np.int64]) -> None:
        """Begin to bring the ids ``begin_R`` to ``end_R`` here, and return at once."""
        ...


class MappedIds:
    """Views of a mapped .bin."""

    def __init__(self, data: Bytes, dtype: np.dtype[Any]) -> None:
        self.all: npt.NDArray[Any] = data.view(dtype)

    def ids(self, start: int, count: int) -> npt.NDArray[Any]:
        return self.all[start : start + count]

    def prefetch(self, begin_R: npt.NDArray[np.int64], end_R: npt.NDArray[np.int64]) -> None:
        """Tell the kernel, which reads pages behind this call. Where it will not hear, reads wait as without it."""
        if not self.all.size:
            return
        base, itemsize = self.all.ctypes.data, self.all.itemsize
        for begin, end in zip((begin_R * itemsize).tolist(), (end_R * itemsize).tolist(), strict=True):
            first = (base + begin) // mmap.PAGESIZE * mmap.PAGESIZE
            _LIBC.madvise(first, base + end - first, mmap.MADV_WILLNEED)


class RangedIds:
    """One complete read per request, from a file or an object store."""

    def __init__(self, source: FileBytes | ObjectBytes, dtype: np.dtype[Any]) -> None:
        self._source, self._dtype = source, dtype

    def ids(self, start: int, count: int) -> npt.NDArray[Any]:
        if count == 0:
            return _read_only(np.empty(0, self._dtype))
        itemsize = self._dtype.itemsize
        return _read_only(np.frombuffer(self._source.read(start * itemsize, count * itemsize), self._dtype))

    def prefetch(self, begin_R: npt.NDArray[np.int64], end_R: npt.NDArray[np.int64]) -> None:
        self._source.prefetch(begin_R * self._dtype.itemsize, end_R * self._dtype.itemsize)


def missing(path: str, error: OSError) -> IndexedDataError:
    """The error for a file that cannot be opened."""
    problem = Problem("both files of a pair are there and can be read", path, error.strerror or str(error), "a file")
    return IndexedDataError.broken(problem, "A path prefix has no extension: PREFIX.bin and PREFIX.idx are read")


def map_file(path: str) -> Bytes:
    """The whole file, read-only, mapped and not copied.

    [Note: views keep the map alive] The array's base owns the map. The map ends with the last view of it, never when
    a dataset is closed or collected. megatron-core closes the map in ``__del__``, so ``IndexedDataset(p)[0].tolist()``
    is a segmentation fault there. mmap(2) is called by hand. Python before 3.13 keeps a duplicate descriptor per map,
    and 1,000 pairs would need 2,000.
    """
    descriptor = _open(path)
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return _read_only(np.empty(0, np.uint8))
        address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise missing(path, OSError(code, os.strerror(code)))
    finally:
        os.close(descriptor)
    return np.asarray(_Map(address, size))


class _Map:
    """Owner of one mapped range. Arrays made from it hold it as their base, and the last of them takes it along."""

    __slots__ = ("__array_interface__", "_range")

    def __init__(self, address: int, size: int) -> None:
        read_only = True
        self._range = address, size
        self.__array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, read_only),
            "version": 3,
        }

    def __del__(
        self, unmap: Callable[[int, int], int] = _LIBC.munmap
    ) -> None:  # at exit the module's names may be gone
        unmap(*self._range)


class _DescriptorPool:
    """Open descriptors for positioned reads, at most ``limit``, the least recently used closed first.

    A reader takes the descriptor out, uses it alone and puts it back (pread moves no shared offset). No lock, which a
    fork could copy while it is held: each method is right between any two operations of the OrderedDict, and one
    operation on keys that are tuples of ints is atomic.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: OrderedDict[object, int] = OrderedDict()

    def take(self, key: object) -> int | None:
        return self._idle.pop(key, None)

    def put(self, key: object, descriptor: int) -> None:
        if self._idle.setdefault(key, descriptor) != descriptor:
            os.close(descriptor)  # another reader of the same file was here first
        while len(self._idle) > self._limit:
            with suppress(KeyError):  # others have emptied it meanwhile
                os.close(self._idle.popitem(last=False)[1])


_POOL = _DescriptorPool(limit=16)  # of the process: the limit that matters, RLIMIT_NOFILE, is the process's too


class FileBytes:
    """A file read by position, for file systems where a map is slow or unwanted."""

    def __init__(self, path: str) -> None:
        self.path = anchored(path)  # it may be opened again, when the current folder is another
        descriptor = _open(path)
        self._identity = _identity(os.fstat(descriptor))
        self.size = os.fstat(descriptor).st_size
        _POOL.put(self._identity, descriptor)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset``; IndexedDataError if the file has fewer or was replaced."""
        descriptor = _POOL.take(self._identity)
        if descriptor is None:
            descriptor = self._reopen()
        try:
            pieces, got = [], 0
            while got < nbytes:  # one pread gives at most 2 GiB
                try:
                    piece = os.pread(descriptor, nbytes - got, offset + got)
                except OSError as error:
                    problem = Problem(
                        "a read is complete", f"{self.path}: byte {offset}", str(error), f"{nbytes} bytes"
                    )
                    raise IndexedDataError.broken(problem, "The disk or the file server refuses; read again") from error
                if not piece:
                    raise short_read(self.path, offset, nbytes, got)
                pieces.append(piece)
                got += len(piece)
        finally:
            _POOL.put(self._identity, descriptor)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def prefetch(self, begin_R: npt.NDArray[np.int64], end_R: npt.NDArray[np.int64]) -> None:
        """Tell the kernel which bytes are read soon."""
        descriptor = _POOL.take(self._identity)
        if descriptor is None:
            descriptor = self._reopen()
        try:
            for begin, end in zip(begin_R.tolist(), end_R.tolist(), strict=True):
                os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)
        finally:
            _POOL.put(self._identity, descriptor)

    def _reopen(self) -> int:
        descriptor = _open(self.path)
        if _identity(os.fstat(descriptor)) != self._identity:
            os.close(descriptor)
            raise IndexedDataError(
                f"{self.path}: this is another file than the one that was opened; a pair read without mmap must not "
                "be replaced while it is in use. Open the dataset again"
            )
        return descriptor


class ObjectBytes:
    """An object of a store, read in ranges."""

    def __init__(self, path: str, open_bytes: Callable[[str], Readable]) -> None:
        self.path = path
        self._object = open_bytes(path)
        self.size = self._object.size()

    def read(self, offset: int, nbytes: int) -> bytes:
        data = self._object.read(offset, nbytes)
        if len(data) != nbytes:
            raise short_read(self.path, offset, nbytes, len(data))
        return data

    def prefetch(self, begin_R: npt.NDArray[np.int64], end_R: npt.NDArray[np.int64]) -> None:
        """Tell the object, if it can be told: ``prefetch`` is not part of ``Readable``."""
        tell = getattr(self._object, "prefetch", None)
        if tell is not None:
            tell(begin_R, end_R)

    def read_all(self) -> Bytes:
        """The whole object as a read-only array."""
        data = self.read(0, self.size)
        return _read_only(np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8))


def short_read(path: str, offset: int, wanted: int, got: int) -> IndexedDataError:
    """The error for a source that gives another number of bytes than it was asked for."""
    problem = Problem("a read is complete", f"{path}: byte {offset}", f"{got} bytes", f"{wanted} bytes")
    return IndexedDataError.broken(problem, "The file or object was cut while it was open")


def _open(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
    except OSError as error:
        raise missing(path, error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise missing(path, OSError(errno.EINVAL, "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"))
    return descriptor


def file_identity(path: str) -> tuple[int, int, int, int]:
    """Device, inode, size and mtime. They differ if another file has the name now."""
    try:
        return _identity(os.stat(path))
    except OSError as error:
        raise missing(path, error) from error


def identity_of(descriptor: int) -> tuple[int, int, int, int]:
    """The same of an open file."""
    return _identity(os.fstat(descriptor))


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array
