"""A whole file as an array (this file), mapped and not copied, without a descriptor that stays open --> index_files.py

A blend of 1,000 datasets maps 3,000 index files. Python before 3.13 keeps a descriptor per map, and a process
often has 1,024 of them; so mmap(2) is called by hand.
"""

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t,
]  # fmt: skip
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Map:
    """Owner of a mapped range: the arrays made of it have it as their base, and the last of them unmaps it."""

    def __init__(self, address: int, size: int) -> None:
        self._range = address, size
        read_only = True
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (address, read_only),
        }

    def __del__(self, unmap: Callable[[int, int], int] = _LIBC.munmap) -> None:  # at exit this module may be gone
        unmap(*self._range)


def map_bytes(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    """The first ``size`` bytes of an open file, read-only; they stay mapped when it is closed.

    Raises:
        OSError: it cannot be mapped.
        ValueError: ``size`` is 0.
    """
    if size == 0:
        raise ValueError("an empty file has nothing to map")
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return np.asarray(_Map(address, size))
