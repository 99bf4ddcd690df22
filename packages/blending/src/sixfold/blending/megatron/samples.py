"""Where each sample begins, as (place in the document index, offset).

    document_index, lengths --> sample_index (this file) --> index.py

Source: megatron-core 0.16.1 ``helpers.cpp``, ``build_sample_idx``, in closed form: its loop over documents is a search
among their running sum.
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
    begin_J = np.arange(1, plan.samples + 1, dtype=np.int64) * plan.sequence_length
    inside = int(np.searchsorted(begin_J, plan.total_tokens - plan.extra, side="right"))
    end_K = np.cumsum(length_K)
    # With an extra token a sample that ends with a document has its last label in the next one.
    place_J = np.searchsorted(end_K, begin_J[:inside], side="right" if plan.extra else "left")
    rows[1 : inside + 1, 0] = place_J
    rows[1 : inside + 1, 1] = begin_J[:inside] - (end_K[place_J] - length_K[place_J])
    rows[inside + 1 :] = length_K.size - 1, length_K[-1] - plan.extra
    return rows
