"""From what a caller has (list, array, tensor) to an array that can be written.

    tensor --> checked_ids (this file) --> writer.py

Pure. numpy's own conversion wraps: ``np.array(a, np.uint16)`` makes 4464 of 70000 and 65535 of -1. It also cuts
floats. So every id is checked here, at the price of one reduction per call.
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
_NO_INTEGER = (error, TypeError, ValueError, RuntimeError)  # of struct, or of an object asked for its integer
_LISTS = (list, tuple, range)
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


class IdRange:
    """Which ids a dtype, and a vocabulary if there is one, can hold.

    ``checks`` has an entry for each native integer dtype that ids may come in: the largest id that is stored, and the
    unsigned dtype of the same size. The first is None if the range holds every id of the dtype.
    """

    def __init__(self, dtype: np.dtype[Any], vocab_size: int | None) -> None:
        """IndexedDataError if the vocabulary has ids that the dtype has not."""
        if vocab_size is not None:
            vocab_size = whole_number("vocab_size", vocab_size)
        self.dtype, self.vocab_size = dtype, vocab_size
        self.typecode = _TYPECODES.get(dtype.name)
        self.checks: dict[np.dtype[Any], tuple[int | None, np.dtype[Any]]] = {}
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
            for name in _INTEGERS:
                given = np.iinfo(name)
                within = self.low <= given.min and given.max <= self.high
                ceiling = None if within else min(self.high, int(given.max))
                self.checks[np.dtype(name)] = ceiling, np.dtype(f"u{given.bits // 8}")

    def __str__(self) -> str:
        if self.typecode is None:
            return f"{self.dtype} holds floats of its own precision"
        vocabulary = "" if self.vocab_size is None else f", vocabulary {self.vocab_size}"
        return f"{self.dtype}{vocabulary} holds integers from {self.low} to {self.high}"


def whole_number(what: str, value: Any) -> int:
    """``value`` as an int; IndexedDataError for what is none (``int`` would cut 1.5 to 1, and True is 1 to Python)."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise IndexedDataError(f"{what} is {value!r}; it is a whole number") from None


def as_row(tensor: Any) -> Row:
    """``tensor`` as something with a length, without a copy: what is too long is refused before it is converted.

    Args:
        tensor: a list, tuple or range of ints, a numpy array, or anything with ``.numpy()``.
    Raises:
        IndexedDataError: it is text, has masked values, does not become an array, or has more than one dimension.
    """
    row: Row
    if type(tensor) is np.ndarray or isinstance(tensor, _LISTS):
        row = tensor
    elif isinstance(tensor, str | bytes):
        raise IndexedDataError(f"ids are text: {tensor[:20]!r}; give the integers of a tokenizer")
    else:
        convert = getattr(tensor, "numpy", None)
        try:
            row = np.asanyarray(convert() if callable(convert) else tensor)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise IndexedDataError(
                f"ids of type {type(tensor).__name__} do not become an array: {problem}"
            ) from problem
        if type(row) is not np.ndarray:
            if np.any(getattr(row, "mask", False)):  # the data of a masked array would show what the mask hides
                raise IndexedDataError("ids with masked values; leave those out, or fill them with an id")
            row = np.asarray(row)
    if isinstance(row, np.ndarray) and row.ndim != 1:
        what = f"ids of shape {row.shape} from a {type(tensor).__name__}"
        raise IndexedDataError(f"{what}; the ids of one call are one row, flatten them first")
    return row


def checked_ids(row: Row, allowed: IdRange) -> npt.NDArray[Any]:
    """``row`` as a contiguous array of ``allowed.dtype``, shape (n,).

    Raises:
        IndexedDataError: an id is no integer or out of range (position, id, range).
    Cost: none for an array of the dtype itself without a vocabulary, one reduction for others.
    """
    if not isinstance(row, np.ndarray):
        return _from_list(row, allowed)
    check = allowed.checks.get(row.dtype)
    if check is not None:
        return _narrowed(row, check, allowed)
    if row.dtype.kind == "O":
        return _from_list(row.tolist(), allowed)
    if not row.dtype.isnative:
        return checked_ids(row.astype(row.dtype.newbyteorder("=")), allowed)
    if row.dtype.kind in "iuf" and allowed.typecode is None:
        return _as_floats(row, allowed)
    if row.size == 0:
        return np.empty(0, allowed.dtype)
    raise _no_integers(row, allowed)


def _from_list(ids: list[Any] | tuple[Any, ...] | range, allowed: IdRange) -> npt.NDArray[Any]:
    if allowed.typecode is None:
        return _floats_of_list(ids, allowed)
    try:
        packed = Struct(f"{len(ids)}{allowed.typecode}").pack(*ids)
    except _NO_INTEGER as problem:
        raise _first_bad(ids, allowed) from problem
    flat: npt.NDArray[Any] = np.frombuffer(packed, allowed.dtype) if packed else np.empty(0, allowed.dtype)
    # True is 1 to struct. The types of a list cost three times what packing it does: only 0 and 1 are looked at.
    unsigned = flat.view(f"u{flat.itemsize}")
    if packed and unsigned.item(unsigned.argmin()) <= 1:
        for position in np.flatnonzero(unsigned <= 1).tolist():
            if type(ids[position]) is bool:
                raise IndexedDataError(
                    f"position {position} is {ids[position]!r}: a bool, not an id; {allowed}. Convert them to "
                    "integers first"
                )
    return flat if allowed.vocab_size is None else _narrowed(flat, allowed.checks[flat.dtype], allowed)


def _narrowed(ids: npt.NDArray[Any], check: tuple[int | None, np.dtype[Any]], allowed: IdRange) -> npt.NDArray[Any]:
    """``ids``, whose dtype has that check, in the stored dtype, after the check that they fit."""
    ceiling, unsigned_dtype = check
    if ceiling is not None and ids.size:
        # [Note: one maximum for both ends] Seen as unsigned, a negative id lies above every id that its own dtype can
        # hold, and ``ceiling`` is one of these; so one maximum tells both ends. The dtype is that of the input: int16
        # holds no id above 32,767, whatever the vocabulary. For 1,000 ids argmax needs 0.2 us and max 1.1, most of it
        # spent on finding a loop to run.
        unsigned = ids.view(unsigned_dtype)
        top = unsigned.item(unsigned.argmax())
        if top > ceiling and (allowed.low == 0 or int(ids.max()) > allowed.high or int(ids.min()) < allowed.low):
            raise _first_bad(ids, allowed)
    if ids.dtype is not allowed.dtype:
        return ids.astype(allowed.dtype)
    return ids if ids.flags.c_contiguous else np.ascontiguousarray(ids)


def _as_floats(values: npt.NDArray[Any], allowed: IdRange) -> npt.NDArray[Any]:
    """Numbers in a float dtype, exactly. Integers are compared as integers: as floats, 2^53 + 1 equals 2^53."""
    with np.errstate(all="ignore"):  # what overflows is told below
        narrow: npt.NDArray[Any] = values.astype(allowed.dtype)
        if values.dtype.kind == "f":
            same = (narrow == values) | (np.isnan(narrow) & np.isnan(values))
        else:
            beyond = 2.0 ** (8 * values.dtype.itemsize - (values.dtype.kind == "i"))  # what rounding up can reach
            same = (narrow < beyond) & (np.where(narrow < beyond, narrow, 0).astype(values.dtype) == values)
    if not same.all():
        position = int(np.flatnonzero(~same)[0])
        raise IndexedDataError(f"position {position}: {values[position]} would change when stored; {allowed}")
    return narrow


def _floats_of_list(values: list[Any] | tuple[Any, ...] | range, allowed: IdRange) -> npt.NDArray[Any]:
    """As ``_as_floats``, value by value: a list may mix kinds, and Python compares an int and a float exactly."""
    stored: list[float] = []
    for position, value in enumerate(values):
        given = value.item() if isinstance(value, np.generic) else value
        if isinstance(given, str | bytes):
            raise IndexedDataError(f"position {position} is the text {given!r}; {allowed}")
        if isinstance(given, bool):
            raise IndexedDataError(f"position {position} is {given!r}; {allowed}")
        try:
            with np.errstate(all="ignore"):
                number = allowed.dtype.type(given).item()
            exact = bool(number == given or (number != number and given != given))
        except (TypeError, ValueError, OverflowError) as problem:
            raise IndexedDataError(f"position {position} is {given!r}; {allowed}") from problem
        if not exact:
            raise IndexedDataError(f"position {position}: {given!r} would change when stored; {allowed}")
        stored.append(number)
    return np.array(stored, allowed.dtype)


def _no_integers(ids: npt.NDArray[Any], allowed: IdRange) -> IndexedDataError:
    """The error for an array of something else, with what to do about it."""
    what = f"ids of dtype {ids.dtype}, position 0 is {ids[0]!r}; {allowed}"
    if ids.dtype.kind in "USTa":
        return IndexedDataError(f"{what}. They are text: convert them to integers first")
    if ids.dtype.kind == "f":
        return IndexedDataError(f"{what}. Round them yourself")
    return IndexedDataError(f"{what}. Convert them to integers first")


def _first_bad(ids: Any, allowed: IdRange) -> IndexedDataError:
    """The error for the first id that cannot be stored. Slow, and only on the way to an error."""
    if isinstance(ids, np.ndarray):
        position = int(np.flatnonzero((ids < allowed.low) | (ids > allowed.high))[0])
        return IndexedDataError(f"position {position}: id {ids[position]}; {allowed}")
    one = Struct(allowed.typecode or "q")
    for position, value in enumerate(ids):
        try:
            one.pack(value)
        except _NO_INTEGER:
            text = " is text" if isinstance(value, str | bytes) else ""
            return IndexedDataError(f"position {position}: id {value!r}{text}; {allowed}")
    return IndexedDataError(f"ids that cannot be stored; {allowed}")
