"""Where each sample begins, as (place in the document index, offset).

    document_index, lengths --> sample_index (this file) --> index.py

Source: megatron-core 0.16.1 ``helpers.cpp``, ``build_sample_idx``, in closed form: its loop over documents is a
division of their running sum.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.megatron.documents import EpochPlan

_LARGEST_INT32 = 2**31 - 1


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
    dtype = np.int32 if max(document_index.size, int(length_K.max(initial=0))) <= _LARGEST_INT32 else np.int64
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
