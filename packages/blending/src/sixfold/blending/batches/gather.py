"""Token ids of ranges of documents into the rows of a batch.

    reader.py --> ranges of D sources --> gather (this file) --> TokenRows --> gpt_arrays.py

Reads the flat memory maps where there are some, and else asks the source range by range. Every range is checked before
an id is read: a damaged dataset raises an error, and never gives other tokens. The compiled kernel reads all maps in
one call with the GIL released. ``_by_numpy`` reads what it leaves out.

``samples/range_table.py`` says what a range is. R counts ranges, I ids.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.batches.gpt_arrays import TokenRows
from sixfold.blending.documents.part import Part
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import I64, Kernels, kernels
from sixfold.blending.samples.range_table import (
    BEGIN,
    COLUMN,
    FIELDS,
    LABELS,
    LENGTH,
    OFFSET,
    ROW,
    SEQUENCE,
    SHOWN,
    SOURCE,
)

_LONG_RANGE = 512  # ids from which a copy per range beats one indexed read of all (measured: about 400)


def open_map(native: Kernels, part: Part) -> object | None:
    """The flat data of a part's source for the kernel; None if it has none, or of a type that int64 does not hold."""
    tokens = getattr(part.source, "tokens", None)
    if tokens is None or part.first_token(np.zeros(0, dtype=np.int64)) is None:
        return None
    try:
        return native.open_map(tokens)
    except (TypeError, ValueError, BufferError):
        return None


def gather(
    parts: Sequence[Part],
    maps: tuple[object | None, ...],
    ranges: I64,
    rows: TokenRows,
    without: frozenset[int] = frozenset(),
) -> None:
    """Fill ``rows`` with the ids of ``ranges``: padding where no range is, and mark where ranges begin.

    Args:
        parts: (D,) by source.
        maps: (D,) of ``open_map``, False where it is None; () for numpy alone.
        ranges: (R, len(FIELDS)) C-contiguous.
        without: sources that have no map although the kernel read others.
    Raises:
        The source's own error (``IndexedDataError``), or BlendingError: a range that the data does not hold,
        or ids that the rows' type does not hold.
    """
    native = kernels()
    if native is None or not maps or rows.tokens.dtype != np.int64:
        _check(parts, ranges)
        _prepare(rows, ranges)
        _by_numpy(parts, ranges, rows)
        return
    done = native.gather(maps, len(ranges), rows.pad, len(rows.tokens), ranges, rows.tokens, rows.labels, rows.begins)
    if done < len(ranges):
        _check(parts, ranges)
        raise AssertionError(f"range {ranges[done].tolist()} of {FIELDS} lies outside of its row or map")
    if without:
        left = ranges[np.isin(ranges[:, SOURCE], sorted(without))]
        _check(parts, left)
        _by_numpy(parts, left, rows)


def _check(parts: Sequence[Part], ranges: I64) -> None:
    """Each range against the flat data of its source, where there is some."""
    for source in np.unique(ranges[:, SOURCE]).tolist():
        tokens = getattr(parts[source].source, "tokens", None)
        if tokens is None:
            continue
        some = ranges[ranges[:, SOURCE] == source]
        begin_R, length_R = some[:, BEGIN], some[:, LENGTH]
        known = parts[source].first_token(some[:0, SEQUENCE]) is not None
        wrong = np.flatnonzero(known & ((begin_R < 0) | (length_R > tokens.size - begin_R)))
        if wrong.size:
            at = wrong[0]
            problem = f"tokens {begin_R[at]}..{begin_R[at] + length_R[at]} are asked of the {tokens.size} there are"
            raise parts[source].damage(int(some[at, SEQUENCE]), problem)


def _prepare(rows: TokenRows, ranges: I64) -> None:
    if min(int(ranges[:, SHOWN].sum()), int(ranges[:, LABELS].sum())) < rows.tokens.size:
        rows.tokens.fill(rows.pad)
        rows.labels.fill(rows.pad)
    rows.begins.fill(False)
    rows.begins[:, 0] = True
    seen = ranges[ranges[:, SHOWN] > 0]
    rows.begins[seen[:, ROW], seen[:, COLUMN]] = True


def _by_numpy(parts: Sequence[Part], ranges: I64, rows: TokenRows) -> None:
    for source in np.unique(ranges[:, SOURCE]).tolist():
        some = ranges[ranges[:, SOURCE] == source]
        ids = _ids(parts[source], some)
        _refuse_ids_beyond(rows.tokens.dtype, ids, parts[source].label)
        _place(ids, some, rows)


def _ids(part: Part, ranges: I64) -> npt.NDArray[Any]:
    """The ids of R ranges of one source end to end, (I,) in its type."""
    tokens = getattr(part.source, "tokens", None)
    if tokens is None or part.first_token(ranges[:0, SEQUENCE]) is None:
        return _ask(part, ranges)
    begin_R, length_R = ranges[:, BEGIN], ranges[:, LENGTH]
    total = int(length_R.sum())
    if total < _LONG_RANGE * len(ranges):
        return np.asarray(tokens[np.repeat(begin_R - np.cumsum(length_R) + length_R, length_R) + np.arange(total)])
    pairs = zip(begin_R.tolist(), length_R.tolist(), strict=True)
    return np.concatenate([tokens[begin : begin + length] for begin, length in pairs])


def announce(part: Part, ranges: I64) -> None:
    """Have the source begin to fetch what is read soon, if it can."""
    if fetches(part):
        prefetch: Callable[[I64, I64], None] = part.source.prefetch  # type: ignore[attr-defined]
        prefetch(ranges[:, BEGIN], ranges[:, LENGTH])


def fetches(part: Part) -> bool:
    """Whether ids come from afar: the source has no map of them, and fetches what it is told."""
    source = part.source
    if getattr(source, "prefetch", None) is None or getattr(source, "tokens", None) is not None:
        return False
    return part.first_token(np.zeros(0, dtype=np.int64)) is not None


def _ask(part: Part, ranges: I64) -> npt.NDArray[Any]:
    """The same through ``get``, one range at a time, all of which the source may fetch at once."""
    announce(part, ranges)
    ids = np.empty(int(ranges[:, LENGTH].sum()), dtype=part.source.dtype)
    end = 0
    for sequence, offset, length in ranges[:, [SEQUENCE, OFFSET, LENGTH]].tolist():
        read = part.source.get(sequence, offset, length)
        if len(read) != length:
            raise part.damage(sequence, f"sequence {sequence} gave {len(read)} tokens of {length} asked at {offset}")
        ids[end : end + length] = read
        end += length
    return ids


def _place(ids: npt.NDArray[Any], ranges: I64, rows: TokenRows) -> None:
    """The ids of one source to their tokens and labels."""
    width, length_R = rows.tokens.shape[1], ranges[:, LENGTH]
    first_R = np.cumsum(length_R) - length_R
    start_R = ranges[:, ROW] * width + ranges[:, COLUMN]
    tokens, labels = rows.tokens.reshape(-1), rows.labels.reshape(-1)
    if ids.size >= _LONG_RANGE * len(ranges):
        unlabelled_R = length_R - ranges[:, LABELS]
        columns = (first_R, start_R, length_R, ranges[:, SHOWN], unlabelled_R)
        for first, start, length, shown, without in zip(*(column.tolist() for column in columns), strict=True):
            tokens[start : start + shown] = ids[first : first + shown]
            labels[start + without - 1 : start + length - 1] = ids[first + without : first + length]
        return
    inner_I = np.arange(ids.size) - np.repeat(first_R, length_R)
    to_I = np.repeat(start_R, length_R) + inner_I
    shown_I = inner_I < np.repeat(ranges[:, SHOWN], length_R)
    tokens[to_I[shown_I]] = ids[shown_I]
    labelled_I = inner_I >= np.repeat(length_R - ranges[:, LABELS], length_R)
    labels[to_I[labelled_I] - 1] = ids[labelled_I]


def _refuse_ids_beyond(dtype: np.dtype[Any], ids: npt.NDArray[Any], label: str) -> None:
    """BlendingError for ids that ``dtype`` does not hold: numpy would cut them without a word."""
    if np.can_cast(ids.dtype, dtype, "safe") or not ids.size:
        return
    if ids.dtype.kind not in "iufb":
        raise BlendingError(
            f"{label}: its ids are text or objects ({ids.dtype}), such as {ids[0]!r}; tokenize them to whole numbers"
        )
    limits = np.iinfo(dtype)
    whole = ids.dtype.kind in "iu"
    outside = np.flatnonzero((ids < limits.min) | (ids > limits.max)) if whole else np.array([0])
    if outside.size:
        remedy = "set token_dtype" if whole else "ids are whole numbers, write them as such"
        raise BlendingError(f"{label} has the id {ids[outside[0]]} of {ids.dtype}; {dtype} does not hold it: {remedy}")


def counted_labels(
    parts: Sequence[Part], masked: Sequence[int], ranges: I64, shape: tuple[int, int]
) -> npt.NDArray[np.bool_]:
    """``shape`` bools: whether a label counts in the loss, by the masks of the sources ``masked``."""
    counted = np.ones(shape, dtype=np.bool_)
    flat = counted.reshape(-1)
    wanted = ranges[np.isin(ranges[:, SOURCE], masked) & (ranges[:, LABELS] > 0)]
    columns = (SOURCE, SEQUENCE, OFFSET, LENGTH, ROW, COLUMN, LABELS)
    for source, sequence, offset, length, row, column, labels in wanted[:, columns].tolist():
        mask = parts[source].source.loss_mask(sequence, offset, length)
        begin = row * shape[1] + column + length - labels - 1
        flat[begin : begin + labels] = mask[length - labels :]
    return counted
