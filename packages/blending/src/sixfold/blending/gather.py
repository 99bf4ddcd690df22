"""Token ids of ranges of documents.

    line.py --> ranges --> gather (this file) --> sample.py

Reads the flat memory map when there is one, else asks the source range by range. Every range is
checked against what it is read from: a damaged dataset raises, it never gives other tokens.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.permute import I64
from sixfold.blending.source import Part

_LONG_RANGE = 512  # tokens from which a copy per range beats one indexed read of all (measured: about 400)


def gather(part: Part, sequence_R: I64, offset_R: I64, length_R: I64) -> npt.NDArray[Any]:
    """The ids of R ranges end to end, in the source's dtype.

    Raises:
        The source's own error (``IndexedDataError``), or BlendingError: a range that the data does not hold.
    """
    tokens = getattr(part.source, "tokens", None)
    first = part.first_token(sequence_R)
    if tokens is None or first is None:
        return _ask(part, sequence_R, offset_R, length_R)
    begin_R = first + offset_R
    wrong = np.flatnonzero((begin_R < 0) | (begin_R + length_R > tokens.size))
    if wrong.size:
        at = wrong[0]
        problem = f"tokens {begin_R[at]}..{begin_R[at] + length_R[at]} are asked of the {tokens.size} there are"
        raise part.damage(int(sequence_R[at]), problem)
    ends_R = np.cumsum(length_R)
    total = int(ends_R[-1]) if ends_R.size else 0
    if total >= _LONG_RANGE * begin_R.size:
        ids = np.empty(total, dtype=tokens.dtype)
        for begin, end, length in zip(begin_R.tolist(), ends_R.tolist(), length_R.tolist(), strict=True):
            ids[end - length : end] = tokens[begin : begin + length]
        return ids
    return np.asarray(tokens[np.repeat(begin_R - ends_R + length_R, length_R) + np.arange(total)])


def _ask(part: Part, sequence_R: I64, offset_R: I64, length_R: I64) -> npt.NDArray[Any]:
    """The same through ``get``, one range at a time."""
    ids = np.empty(int(length_R.sum()), dtype=part.source.dtype)
    end = 0
    for sequence, offset, length in zip(sequence_R.tolist(), offset_R.tolist(), length_R.tolist(), strict=True):
        read = part.source.get(sequence, offset, length)
        if len(read) != length:
            raise part.damage(sequence, f"sequence {sequence} gave {len(read)} tokens of {length} asked at {offset}")
        ids[end : end + length] = read
        end += length
    return ids
