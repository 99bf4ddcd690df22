"""How many samples of each dataset a weighted blend uses and builds.

    weights, samples asked --> normalized, targets, with_surplus (this file) --> builder/builder.py

Source: megatron-core 0.16.1 ``blended_megatron_dataset_builder.py``; every rounding is part of the result.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np


def normalized(weights: Sequence[float]) -> list[float]:
    """``weights`` over their sum, in float64."""
    w_D = np.array(weights, dtype=np.float64)
    shares: list[float] = (w_D / np.sum(w_D)).tolist()
    return shares


def targets(shares: Sequence[float], size: int) -> list[int]:
    """Samples that each dataset is to give; their sum, a little over ``size``, is the length of the blend."""
    return [ceil(size * share) for share in shares]


def with_surplus(target_D: Sequence[int], surplus: float) -> list[int]:
    """Samples that each dataset is built with, so that the greedy order does not run out."""
    return [ceil(target * (1 + surplus)) for target in target_D]
