"""Where each sample begins, as (place in the document index, offset).

    document_index, lengths --> sample_index, sample_index_of (this file) --> index_order.py

Source: megatron-core 0.16.1 ``helpers.cpp``, ``build_sample_idx``, in closed form: its loop over documents is a
division of their running sum.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.megatron.document_index import EpochPlan
from sixfold.blending.numbers.kernels import I64, kernels

_LARGEST_INT32 = 2**31 - 1


def sample_index_of(
    document_index: npt.NDArray[np.int32], length_D: I64, low: int, plan: EpochPlan
) -> npt.NDArray[Any]:
    """``sample_index`` by the lengths of documents ``low``, ``low + 1``, ..., in one pass where the kernel is there."""
    native = kernels()
    if native is None or document_index.size == 0:
        return sample_index(document_index, length_D[document_index - np.int32(low)], plan)
    rows = np.empty((plan.samples + 1, 2), dtype=_dtype(document_index.size, length_D))
    done = native.sample_rows(document_index, length_D, low, plan.sequence_length, plan.extra, rows)
    assert done == document_index.size, (
        f"document {document_index[done]} is not one of {low}..{low + length_D.size - 1}"
    )
    return rows


def _dtype(places: int, lengths: I64) -> type[np.int32] | type[np.int64]:
    return np.int32 if max(places, int(lengths.max(initial=0))) <= _LARGEST_INT32 else np.int64


def sample_index(
    document_index: npt.NDArray[np.int32], length_K: npt.NDArray[np.int64], plan: EpochPlan
) -> npt.NDArray[Any]:
    """Row j is (place, offset) of token ``j * S`` of the documents end to end.

    Args:
        document_index: (K,) as ``documents.document_index`` makes it.
        length_K: (K,) tokens of the document in each place.
        plan: how many rows.
    Returns:
        (n + 1, 2) int32, or int64 if there are more places than int32 counts. A row behind the last
        token (the end of a partial sample) is (last place, its length - x).
    """
    dtype = _dtype(document_index.size, length_K)
    rows = np.zeros((plan.samples + 1, 2), dtype=dtype)
    if plan.samples == 0:
        return rows
    end_K = np.cumsum(length_K, dtype=np.int64)
    # Row j lies in the first place whose end is > jS with an extra token (the last label of a sample that ends with a
    # document is in the next one), >= jS without. So many rows from 1 on lie in the places up to each:
    upto_K = np.maximum(end_K - plan.extra, 0) // plan.sequence_length
    inside = min(int(upto_K[-1]), plan.samples)
    place_J = np.repeat(np.arange(end_K.size, dtype=dtype), np.diff(upto_K, prepend=0))[:inside]
    rows[1 : inside + 1, 0] = place_J
    begin_J = np.arange(1, inside + 1, dtype=np.int64) * plan.sequence_length
    rows[1 : inside + 1, 1] = begin_J - (end_K - length_K)[place_J]
    rows[inside + 1 :] = end_K.size - 1, length_K[-1] - plan.extra
    return rows
