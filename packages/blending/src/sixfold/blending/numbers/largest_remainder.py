"""Whole shares of a total in proportion to weights, exactly.

    weights, total --> apportion (this file) --> blend/quota_tree.py

Pure Python integers: a float is the rational number that its bits say, so no rounding takes part
and every machine finds the same shares.
"""

from collections.abc import Sequence
from math import isfinite, lcm
from numbers import Rational, Real
from typing import SupportsInt, cast

import numpy as np

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.permutation import I64

Weights = Sequence[float] | Sequence[int]


def exact_weights(weights: Weights) -> list[int]:
    """The weights as integers in the same proportions.

    Raises:
        BlendingError: none, all zero, or one that is negative, NaN or infinite (its index and value).
    """
    ratios = [_ratio(number, weight) for number, weight in enumerate(weights)]
    if not ratios:
        raise BlendingError("there are no weights; a blend has at least one dataset")
    if not any(numerator for numerator, _ in ratios):
        raise BlendingError(f"all {len(ratios)} weights are 0; at least one is positive")
    scale = lcm(*{denominator for _, denominator in ratios})
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _ratio(number: int, weight: object) -> tuple[int, int]:
    """Numerator and denominator of one weight: a Fraction of each would be a fifth of the time of a start."""
    if not isinstance(weight, float | Real) or isinstance(weight, bool) or not isfinite(weight) or weight < 0:
        raise BlendingError(f"weight {number} is {weight!r}; weights are finite numbers >= 0")
    if isinstance(weight, float | int):
        return weight.as_integer_ratio()
    if isinstance(weight, Rational):
        return int(cast(SupportsInt, weight.numerator)), int(cast(SupportsInt, weight.denominator))
    return float(weight).as_integer_ratio()


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
