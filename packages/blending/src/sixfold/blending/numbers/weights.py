"""Weights of a blend: exactly what their bits say, or refused.

    config --> exact_weights, refuse_weights (this file) --> largest_remainder.py, megatron/greedy.py

Pure Python integers: a float is the rational number that its bits say, so no rounding takes part
and every machine finds the same proportions.
"""

from collections.abc import Sequence
from math import inf, isfinite, lcm
from numbers import Rational, Real
from typing import SupportsInt, cast

from sixfold.blending.errors import BlendingError

Weights = Sequence[float] | Sequence[int]
DATASETS_BELOW = 32_767  # the dataset index is int16, and megatron-core refuses its last value


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


def refuse_weights(weights: Weights) -> None:
    """BlendingError for weights of which an index cannot be built."""
    refuse_too_many_datasets(len(weights))
    if len(weights) and all(type(weight) in (float, int) and 0 < weight < inf for weight in weights):
        return  # the rest of this function would take as long as 10,000 positions of 1,000 datasets
    exact_weights(weights)
    for number, weight in enumerate(weights):
        if weight == 0:
            raise BlendingError(f"weight {number} is {weight!r}; this order has weights > 0: leave the dataset out")


def refuse_too_many_datasets(datasets: int) -> None:
    """BlendingError for more datasets than an index counts."""
    if datasets >= DATASETS_BELOW:
        raise BlendingError(
            f"there are {datasets} datasets; an index counts them in int16, fewer than {DATASETS_BELOW}: "
            'use order="stateless"'
        )
