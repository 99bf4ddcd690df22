"""From what a caller has (list, array, tensor) to an array that can be written.

    tensor --> checked_ids (this file) --> writer.py

Pure. numpy's own conversion wraps (``np.array(a, np.uint16)`` makes 4464 of 70000 and 65535 of -1) and cuts floats,
so every id is checked here, at the price of one reduction per call.
"""

from __future__ import annotations

import operator
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError

# array.array refuses floats, strings and ids out of range by itself, in one pass and faster than numpy infers a dtype.
_TYPECODES = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint16": "H"}
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class IdRange:
    """Which ids a dtype, and a vocabulary if there is one, can hold."""

    def __init__(self, dtype: np.dtype[Any], vocab_size: int | None) -> None:
        """IndexedDataError if the vocabulary has ids that the dtype has not."""
        if vocab_size is not None:
            vocab_size = whole_number("vocab_size", vocab_size)
        self.dtype, self.vocab_size = dtype, vocab_size
        self.typecode = _TYPECODES.get(dtype.name)
        if self.typecode is None:  # float32 and float64: no bounds, values must survive the round trip
            self.low, self.high = 0, 0
            if vocab_size is not None:
                raise IndexedDataError(
                    f"vocab_size is {vocab_size} and dtype {dtype}; only integer ids have a vocabulary"
                )
        else:
            info = np.iinfo(dtype)
            self.low, self.high = (int(info.min), int(info.max)) if vocab_size is None else (0, vocab_size - 1)
            if vocab_size is not None and not 0 < vocab_size <= int(info.max) + 1:
                raise IndexedDataError(
                    f"vocab_size is {vocab_size}; {dtype} holds vocabularies from 1 to {int(info.max) + 1}. "
                    "DType.optimal_dtype(vocab_size) names one that fits"
                )

    def __str__(self) -> str:
        if self.typecode is None:
            return f"{self.dtype} holds floats of its own precision"
        vocabulary = "" if self.vocab_size is None else f", vocabulary {self.vocab_size}"
        return f"{self.dtype}{vocabulary} holds integers from {self.low} to {self.high}"


def whole_number(what: str, value: Any) -> int:
    """``value`` as an int; IndexedDataError for what is none (``int`` would cut 1.5 to 1)."""
    try:
        return operator.index(value)
    except TypeError:
        raise IndexedDataError(f"{what} is {value!r}; it is a whole number") from None


def checked_ids(tensor: Any, allowed: IdRange) -> npt.NDArray[Any]:
    """``tensor`` as a contiguous array of ``allowed.dtype``, shape (n,).

    Args:
        tensor: a list, tuple or range of ints, a numpy array of any integer type, or anything with ``.numpy()``.
    Raises:
        IndexedDataError: an id is no integer or out of range (position, id, range); more than one dimension.
    Cost: none for an array of the dtype itself without a vocabulary, one reduction for others.
    """
    if isinstance(tensor, list | tuple | range) and allowed.typecode is not None:
        return _from_list(tensor, allowed)
    ids = tensor if isinstance(tensor, np.ndarray) else _as_array(tensor)
    if ids.ndim != 1:
        raise IndexedDataError(f"ids of shape {ids.shape}; the ids of one call are one row, flatten them first")
    if not ids.dtype.isnative:
        ids = ids.astype(ids.dtype.newbyteorder("="))
    if ids.dtype != allowed.dtype or allowed.vocab_size is not None:
        ids = _narrowed(ids, allowed)
    return np.ascontiguousarray(ids)


def _as_array(tensor: Any) -> npt.NDArray[Any]:
    convert = getattr(tensor, "numpy", None)
    try:
        return np.asarray(convert() if callable(convert) else tensor)
    except (TypeError, ValueError, RuntimeError) as error:
        raise IndexedDataError(f"ids of type {type(tensor).__name__} do not become an array: {error}") from error


def _from_list(ids: list[Any] | tuple[Any, ...] | range, allowed: IdRange) -> npt.NDArray[Any]:
    assert allowed.typecode is not None, f"{allowed.dtype} is no integer type"
    try:
        packed = array(allowed.typecode, ids)
    except (TypeError, OverflowError) as error:
        raise _first_bad(ids, allowed) from error
    if not packed:
        return np.empty(0, allowed.dtype)
    flat: npt.NDArray[Any] = np.frombuffer(packed, allowed.dtype)
    return flat if allowed.vocab_size is None else _narrowed(flat, allowed)


def _narrowed(ids: npt.NDArray[Any], allowed: IdRange) -> npt.NDArray[Any]:
    """``ids`` in the dtype, after the check that they fit."""
    if ids.size == 0:
        return ids.astype(allowed.dtype)
    if allowed.typecode is None:
        if ids.dtype.kind not in "iuf":
            raise IndexedDataError(f"values of dtype {ids.dtype}, position 0 is {ids[0]!r}; {allowed}")
        narrow: npt.NDArray[Any] = ids.astype(allowed.dtype)
        if not np.array_equal(narrow, ids, equal_nan=ids.dtype.kind == "f"):
            raise IndexedDataError(f"values of {ids.dtype} that change when stored; {allowed}")
        return narrow
    if ids.dtype.kind not in "iu":
        raise IndexedDataError(f"ids of dtype {ids.dtype}, position 0 is {ids[0]!r}; {allowed}. Round them yourself")
    # Seen as unsigned, a negative id is a large one: one maximum tells both ends.
    top = int(ids.view(_UNSIGNED[ids.dtype.itemsize]).max())
    if top > allowed.high and (allowed.low == 0 or int(ids.max()) > allowed.high or int(ids.min()) < allowed.low):
        raise _first_bad(ids, allowed)
    return ids.astype(allowed.dtype, copy=False)


def _first_bad(ids: Any, allowed: IdRange) -> IndexedDataError:
    """The error for the first id that cannot be stored. Slow, and only on the way to an error."""
    if isinstance(ids, np.ndarray):
        position = int(np.flatnonzero((ids < allowed.low) | (ids > allowed.high))[0])
        return IndexedDataError(f"position {position}: id {ids[position]}; {allowed}")
    for position, value in enumerate(ids):
        try:
            array(allowed.typecode or "q", [value])
        except (TypeError, OverflowError):
            return IndexedDataError(f"position {position}: id {value!r}; {allowed}")
    return IndexedDataError(f"ids that cannot be stored; {allowed}")
