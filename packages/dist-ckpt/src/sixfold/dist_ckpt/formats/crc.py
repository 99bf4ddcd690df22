"""CRC-32 of zlib and zip, by the fastest library at hand, and CRC-32s of pieces joined.

    bytes --> crc.py (this file) --> frame.py, integrity.py

zlib itself does 3 to 7 GB/s on one core, less than a disk or the page cache gives. Two system libraries
compute the same function with carry-less multiplication at 12 to 20: libdeflate, and liblzma from 5.6 on.
One of them is used where the loader finds it and it agrees with zlib on trial; nothing depends on it.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import NamedTuple

_POLYNOMIAL = 0xEDB88320
_WORTH_BYTES = 1 << 14  # below, the call by ctypes costs more than it saves
_LZMA_WITH_CLMUL = 50060000
_Function = Callable[[int, int, int], int]  # value so far, address, bytes --> value


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC-32 of ``data`` after bytes whose CRC-32 is ``value``; exactly ``zlib.crc32``."""
    nbytes = len(data)
    if nbytes < _WORTH_BYTES or _fastest() is None:
        return zlib.crc32(data, value)
    if isinstance(data, bytes):
        return crc32_at(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0, nbytes, value)
    view = memoryview(data)
    if view.readonly:
        return zlib.crc32(view, value)
    return crc32_at(ctypes.addressof(ctypes.c_char.from_buffer(view)), nbytes, value)


def crc32_at(address: int, nbytes: int, value: int = 0) -> int:
    """The same of ``nbytes`` bytes of memory, which the caller keeps alive. Releases the GIL."""
    fast = _fastest()
    if fast is None:
        return zlib.crc32((ctypes.c_char * nbytes).from_address(address), value)
    return fast[1](value, address, nbytes)


@cache
def _fastest() -> tuple[str, _Function] | None:
    """The first candidate that loads and computes what zlib does, with its name."""
    for name, load in _CANDIDATES.items():
        try:
            function = load(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
        if function is not None and _agrees(function):
            return name, function
    return None


def library() -> str:
    """Which library computes; for reports of benchmarks."""
    fast = _fastest()
    return "zlib" if fast is None else fast[0]


def _from_libdeflate(found: ctypes.CDLL) -> _Function | None:
    function = found.libdeflate_crc32
    function.restype, function.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    result: _Function = function
    return result


def _from_liblzma(found: ctypes.CDLL) -> _Function | None:
    if found.lzma_version_number() < _LZMA_WITH_CLMUL:
        return None
    function = found.lzma_crc32
    function.restype, function.argtypes = ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)
    return lambda value, address, nbytes: int(function(address, nbytes, value))


_CANDIDATES = {"libdeflate.so.0": _from_libdeflate, "liblzma.so.5": _from_liblzma}


def _agrees(function: _Function) -> bool:
    whole = bytes(range(256)) * 17
    sample = ctypes.create_string_buffer(whole)
    cases = ((0, 4099), (1, 4095), (3, 67), (5, 0))  # odd starts and lengths
    return all(function(9, ctypes.addressof(sample) + at, n) == zlib.crc32(whole[at : at + n], 9) for at, n in cases)


class Piece(NamedTuple):
    """A run of bytes: its CRC-32 and its length."""

    crc: int
    length: int


def join_pieces(pieces: Iterable[Piece]) -> int:
    """CRC-32 of the pieces end to end."""
    crc = 0
    for piece in pieces:
        crc = shift(crc, piece.length) ^ piece.crc
    return crc


def shift(crc: int, nbytes: int) -> int:
    """``crc`` times x to the ``8 * nbytes`` modulo the polynomial: what zlib's crc32_combine does."""
    return _multiply(_power(nbytes), crc) if crc else 0


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """x to the ``8 * nbytes``, bits reflected: 1 is 1 << 31."""
    result, exponent = 1 << 31, 0
    while nbytes >> exponent:
        if nbytes >> exponent & 1:
            result = _multiply(_square(exponent), result)
        exponent += 1
    return result


@lru_cache(maxsize=64)
def _square(times: int) -> int:
    """x to the 8, squared ``times`` times."""
    return 1 << 23 if times == 0 else _multiply(_square(times - 1), _square(times - 1))


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials over GF(2) modulo CRC-32's, bits reflected."""
    product = 0
    while a:
        if a >> 31:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product
