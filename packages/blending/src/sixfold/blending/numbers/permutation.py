"""Keyed permutations of 0..n-1 that are computed one element at a time.

    names and numbers --> order_key --> permute (this file) --> samples/token_line.py, samples/chunk_grid.py

Pure: no state, no random generator. The order of every dataset rests on these few lines, so they
are fixed for version 1 of the order: the numbers in tests/golden/order-1.json never change. The compiled kernel does
what ``_by_numpy`` does.
"""

from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_numbers
from sixfold.blending.numbers.kernels import I64, U64, Kernels, kernels

ORDER_VERSION = "sixfold-order-1"
ROUNDS = 6
LARGEST = 2**53  # every n - 1 below it is a float64
_CHUNK = 2**18  # numbers permuted at a time by numpy: a few MiB of temporaries
_FEW = 12  # elements from which a pass over arrays is faster than one by one (measured: 10 to 15)
_GOLDEN_RATIO = 0x9E3779B97F4A7C15  # splitmix64's increment: 2^64 divided by the golden ratio

_ONE = np.uint64(1)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def order_key(*parts: str | int) -> int:
    """64-bit key of a sequence of names and numbers, the same on every machine.

    BLAKE2b-64, read as little-endian, of the order's version and the parts, in decimal or UTF-8,
    joined by the unit separator 0x1f. Source: RFC 7693.
    """
    return int.from_bytes(blake2b(key_text(*parts), digest_size=8).digest(), "little")


def key_text(*parts: str | int) -> bytes:
    """What ``order_key`` hashes."""
    # A path that is no UTF-8 has its bytes in a str as surrogates: they go in as they are.
    return "\x1f".join((ORDER_VERSION, *map(str, parts))).encode("utf-8", "surrogateescape")


def mix(x: U64) -> U64:
    """The splitmix64 finaliser, a bijection of 64-bit numbers. Source: Steele, Lea, Flood 2014."""
    y = x ^ (x >> _SHIFT_1)
    y *= _FACTOR_1
    y ^= y >> _SHIFT_2
    y *= _FACTOR_2
    y ^= y >> _SHIFT_3
    return y


def _feistel(round_keys: U64, half: U64, x: U64) -> U64:
    """One pass over the numbers of 2 x half bits: x is left * 2^half + right."""
    mask = (_ONE << half) - _ONE
    left, right = x >> half, x & mask
    for round_key in round_keys:
        scrambled = mix(right ^ round_key)
        scrambled &= mask
        scrambled ^= left
        left, right = right, scrambled
    return (left << half) | right


def _mix_one(y: int) -> int:
    """``mix`` of one Python integer below 2^64."""
    word = 2**64 - 1
    y = ((y ^ (y >> 30)) * 0xBF58476D1CE4E5B9) & word
    y = ((y ^ (y >> 27)) * 0x94D049BB133111EB) & word
    return y ^ (y >> 31)


def _walk_one(round_keys: list[int], half: int, n: int, x: int) -> int:
    """``_feistel`` for one Python integer, until it lies in 0..n-1.

    A pass over numpy arrays costs the same for one element as for fifty, so the last few are
    walked here.
    """
    mask = (1 << half) - 1
    while True:
        left, right = x >> half, x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix_one(right ^ round_key) & mask)
        x = (left << half) | right
        if x < n:
            return x


def permute(key: npt.ArrayLike, n: npt.ArrayLike, index: npt.ArrayLike) -> I64:
    """Where the keyed permutation of 0..n-1 sends ``index``.

    A balanced Feistel network of six rounds over the smallest even number of bits that holds
    n - 1 (at least two). It is applied again while the result lies outside 0..n-1: at most four
    passes on average.

    Args:
        key: 64-bit keys, one or one for each index.
        n: sizes, 1 <= n <= 2^53, one or one for each index.
        index: numbers in 0..n-1, any shape.
    Returns:
        int64 of the shape of ``index``.
    Raises:
        BlendingError: an index outside 0..n-1 or no whole number, or n beyond 2^53.
    """
    shape = np.shape(index)
    index_I = np.ascontiguousarray(whole_numbers("indices", index).reshape(-1))
    sizes = np.ascontiguousarray(whole_numbers("sizes", n).reshape(-1))
    keys = np.ascontiguousarray(np.asarray(key, dtype=np.uint64).reshape(-1))
    native = kernels()
    result_I = _by_numpy(keys, sizes, index_I) if native is None else _by_kernel(native, keys, sizes, index_I)
    return result_I.reshape(shape)


def permute_back(key: int, n: int, image: int) -> int:
    """The one ``index`` that ``permute(key, n, index)`` sends to ``image``.

    The rounds from the last to the first, again while the result lies outside 0..n-1. These are the passes of
    ``permute``, backwards.
    """
    if not 0 <= image < n <= LARGEST:
        _refuse(n, image)
    half = max(((n - 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    steps = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN_RATIO)
    round_keys: list[int] = mix(np.uint64(key) + steps).tolist()
    while True:
        left, right = image >> half, image & mask
        for round_key in reversed(round_keys):
            left, right = right ^ (_mix_one(left ^ round_key) & mask), left
        image = (left << half) | right
        if image < n:
            return image


def permute_range(key: int, n: int, begin: int, out: npt.NDArray[Any]) -> None:
    """``permute(key, n, i)`` of ``i = begin, begin + 1, ...`` into ``out``, C-contiguous uint32 or int64.

    Raises:
        BlendingError: the numbers are not all in 0..n-1, or n is beyond 2^53 or what ``out`` holds.
    """
    largest = min(LARGEST, 2**32) if out.dtype == np.uint32 else LARGEST
    if not 0 <= begin <= begin + out.size <= n <= largest:
        raise BlendingError(
            f"numbers {begin} to {begin + out.size - 1} of a permutation of {n} are asked in {out.dtype}; "
            f"they lie in 0..{n - 1}, and n is at most {largest}"
        )
    native = kernels()
    if native is not None:
        native.permute_range(key, n, begin, out)
        return
    for at in range(0, out.size, _CHUNK):
        some = out[at : at + _CHUNK]
        some[...] = permute(key, n, np.arange(begin + at, begin + at + some.size))


def _by_kernel(native: Kernels, keys: U64, sizes: I64, index_I: I64) -> I64:
    result_I = np.empty_like(index_I)
    wrong = native.permute(keys, sizes, index_I, result_I)
    if wrong < index_I.size:
        _refuse(int(sizes[wrong if sizes.size > 1 else 0]), int(index_I[wrong]))
    return result_I


def _refuse(n: int, index: int) -> NoReturn:
    if n > LARGEST:
        raise BlendingError(f"n is {n}; a permutation has at most 2^53 elements")
    raise BlendingError(f"index {index} is not one of 0..{n - 1}, the numbers permuted")


def _by_numpy(keys: U64, sizes: I64, index_I: I64) -> I64:
    count = index_I.size
    n_I = np.broadcast_to(sizes, count)
    wrong = np.flatnonzero((n_I > LARGEST) | (index_I < 0) | (index_I >= n_I))
    if wrong.size:
        _refuse(int(n_I[wrong[0]]), int(index_I[wrong[0]]))
    bits_I = np.frexp((n_I - 1).astype(np.float64))[1]  # bit length: exact up to LARGEST
    half_I = np.maximum((bits_I + 1) // 2, 1).astype(np.uint64)
    steps_R = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN_RATIO)
    round_keys = np.broadcast_to(mix(keys[None, :] + steps_R[:, None]), (ROUNDS, count))

    limit_I = n_I.astype(np.uint64)
    result_I = index_I.astype(np.uint64)
    walking = np.arange(count)
    while walking.size > _FEW:
        moved = _feistel(round_keys[:, walking], half_I[walking], result_I[walking])
        result_I[walking] = moved
        walking = walking[moved >= limit_I[walking]]
    for at in walking.tolist():
        result_I[at] = _walk_one(round_keys[:, at].tolist(), int(half_I[at]), int(n_I[at]), int(result_I[at]))
    return result_I.astype(np.int64)
