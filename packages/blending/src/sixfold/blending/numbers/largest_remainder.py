"""Whole shares of a total in proportion to weights, exactly.

    weights, total --> apportion (this file) --> blend/quota_tree.py

Python's integers: no rounding takes part, and every machine finds the same shares.
"""

import numpy as np

from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.numbers.weights import Weights, exact_weights


def apportion(weights: Weights, total: int) -> I64:
    """Share ``total`` things in proportion to ``weights`` by largest remainder.

    Each gets ``floor(w * total / sum(w))``; what is left goes one by one to the largest
    remainders, the lower index first on ties. All in exact arithmetic.

    Args:
        weights: D numbers, finite, >= 0, not all zero, any scale.
        total: things to share, >= 0.
    Returns:
        (D,) int64 with the sum ``total``.
    Raises:
        BlendingError: a weight is unfit, or ``total`` is negative.
    Source: largest-remainder (Hamilton's) method.
    """
    total = whole_number("total", total, 0)
    whole = exact_weights(weights)
    divisor = sum(whole)
    shares, remainders = zip(*(divmod(weight * total, divisor) for weight in whole), strict=True)
    counts_D = np.array(shares, dtype=np.int64)
    by_remainder = sorted(range(len(whole)), key=lambda number: -remainders[number])  # stable: lower index first
    counts_D[by_remainder[: total - sum(shares)]] += 1
    return counts_D
