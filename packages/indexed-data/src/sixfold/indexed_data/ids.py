"""From what a caller has (list, array, tensor) to an array that can be written.

    tensor --> checked_ids (this file) --> writer.py

Pure. numpy's own conversion wraps (``np.array(a, np.uint16)`` makes 4464 of 70000 and 65535 of -1) and cuts floats,
so every id is checked here, at the price of one reduction per call.
"""

from __future__ import annotations

import operator
from struct import Struct, error
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.indexed_data.errors import IndexedDataError

# struct refuses floats, strings and ids out of range by itself, in one pass of 7 ns per id; array.array needs 16, and
# numpy, which has to infer a dtype first, 21.
_TYPECODES = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint16": "H"}
Row = npt.NDArray[Any] | list[Any] | tuple[Any, ...] | range
_ROWS = (np.ndarray, list, tuple, range)
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


def as_row(tensor: Any) -> Row:
    """``tensor`` as something with a length, without a copy: what is too long is refused before it is converted.

    Args:
        tensor: a list, tuple or range of ints, a numpy array, or anything with ``.numpy()``.
    Raises:
        IndexedDataError: it does not become an array, or has more than one dimension.
    """
    row: Row
    if isinstance(tensor, _ROWS):
        row = tensor
    else:
        convert = getattr(tensor, "numpy", None)
        try:
            row = np.asarray(convert() if callable(convert) else tensor)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise IndexedDataError(
                f"ids of type {type(tensor).__name__} do not become an array: {problem}"
            ) from problem
    if isinstance(row, np.ndarray) and row.ndim != 1:
        raise IndexedDataError(f"ids of shape {row.shape}; the ids of one call are one row, flatten them first")
    return row


def checked_ids(row: Row, allowed: IdRange) -> npt.NDArray[Any]:
    """``row`` as a contiguous array of ``allowed.dtype``, shape (n,).

    Raises:
        IndexedDataError: an id is no integer or out of range (position, id, range).
    Cost: none for an array of the dtype itself without a vocabulary, one reduction for others.
    """
    ids: npt.NDArray[Any]
    if isinstance(row, np.ndarray):
        ids = row
        if ids.dtype == allowed.dtype and allowed.vocab_size is None:
            return np.ascontiguousarray(ids)
    elif allowed.typecode is not None:
        return _from_list(row, allowed)
    else:
        ids = np.asarray(as_row(np.array(row)))
    if not ids.dtype.isnative:
        ids = ids.astype(ids.dtype.newbyteorder("="))
    if ids.dtype != allowed.dtype or allowed.vocab_size is not None:
        ids = _narrowed(ids, allowed)
    return np.ascontiguousarray(ids)


def _from_list(ids: list[Any] | tuple[Any, ...] | range, allowed: IdRange) -> npt.NDArray[Any]:
    try:
        packed = Struct(f"{len(ids)}{allowed.typecode}").pack(*ids)
    except (error, TypeError) as problem:
        raise _first_bad(ids, allowed) from problem
    flat: npt.NDArray[Any] = np.frombuffer(packed, allowed.dtype) if packed else np.empty(0, allowed.dtype)
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
    # Seen as unsigned, a negative id is a large one: one maximum tells both ends. For 1,000 ids argmax needs 0.2 us and
    # max 1.1, most of it spent on finding a loop to run.
    unsigned = ids.view(_UNSIGNED[ids.dtype.itemsize])
    top = unsigned.item(unsigned.argmax())
    if top > allowed.high and (allowed.low == 0 or int(ids.max()) > allowed.high or int(ids.min()) < allowed.low):
        raise _first_bad(ids, allowed)
    return ids if ids.dtype == allowed.dtype else ids.astype(allowed.dtype)


def _first_bad(ids: Any, allowed: IdRange) -> IndexedDataError:
    """The error for the first id that cannot be stored. Slow, and only on the way to an error."""
    if isinstance(ids, np.ndarray):
        position = int(np.flatnonzero((ids < allowed.low) | (ids > allowed.high))[0])
        return IndexedDataError(f"position {position}: id {ids[position]}; {allowed}")
    one = Struct(allowed.typecode or "q")
    for position, value in enumerate(ids):
        try:
            one.pack(value)
        except (error, TypeError):
            return IndexedDataError(f"position {position}: id {value!r}; {allowed}")
    return IndexedDataError(f"ids that cannot be stored; {allowed}")
