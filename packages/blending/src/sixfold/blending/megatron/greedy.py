"""Which dataset gives which position of a blend: always the one that lags most.

    weights, size --> greedy; sizes --> exhaustive (this file) --> dataset/blended.py

Source: megatron-core 0.16.1 ``helpers.cpp``. The lag of dataset i at position n is ``w_i * max(n, 1) - c_i`` with two
roundings to float64 and no fused multiply-add: a fused one changes the order. Equal lags: the lower index. This is the
plain statement; cost is O(size * D). The compiled kernel looks only at datasets that can win soon.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.kernels import I64, kernels
from sixfold.blending.numbers.weights import Weights, refuse_weights

_LOOP_BELOW = 32  # datasets up to which a loop over floats beats three calls of numpy (measured)

_LARGEST_WEIGHT = 1e200  # of the kernel: no lag is infinite

BlendIndices = tuple[npt.NDArray[np.int16], I64]


def greedy(weights: Weights, size: int) -> BlendIndices:
    """The first ``size`` positions of an endless blend.

    Args:
        weights: D numbers > 0 as they are to be used: they are not normalised here.
        size: positions, >= 0.
    Returns:
        dataset (size,) int16 and its running sample (size,) int64 of each position.
    Raises:
        BlendingError: a weight that is not finite and > 0, or 32,767 datasets or more.
    """
    size = whole_number("size", size, 0)
    refuse_weights(weights)
    w_D = np.array([float(weight) for weight in weights], dtype=np.float64)
    return _indices(w_D, size)


def exhaustive(sizes: Sequence[int]) -> BlendIndices:
    """Every sample of every dataset once: ``greedy`` over the datasets that are not yet used up.

    Args:
        sizes: D whole numbers > 0, samples of each dataset.
    Returns:
        as ``greedy``, ``sum(sizes)`` positions.
    Raises:
        BlendingError: a size that is no whole number > 0, or 32,767 datasets or more.
    """
    left = [
        size if type(size) is int and size > 0 else whole_number(f"size {number}", size, 1)
        for number, size in enumerate(sizes)
    ]
    refuse_weights(left)
    w_D = np.array(left, dtype=np.float64) / float(sum(left))
    return _indices(w_D, sum(left), left)


def _indices(w_D: npt.NDArray[np.float64], size: int, left: list[int] | None = None) -> BlendIndices:
    """``size`` positions; of dataset i at most ``left[i]``, if there is a ``left``, which sums to ``size``."""
    native = kernels()
    if native is not None and w_D.max() < _LARGEST_WEIGHT:
        dataset_N, sample_N = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
        native.greedy(w_D, np.array(left or [], dtype=np.int64), dataset_N, sample_N)
        return dataset_N, sample_N
    dataset_N = _few(w_D, size) if left is None and w_D.size < _LOOP_BELOW else _many(w_D, size, left)
    return dataset_N, running(dataset_N, w_D.size)


def running(dataset_N: npt.NDArray[np.int16], datasets: int) -> I64:
    """How often the dataset of each position came before it."""
    by_dataset = np.argsort(dataset_N, kind="stable")
    counts_D = np.bincount(dataset_N, minlength=datasets)
    sample_N = np.empty(dataset_N.size, dtype=np.int64)
    sample_N[by_dataset] = np.arange(dataset_N.size) - np.repeat(np.cumsum(counts_D) - counts_D, counts_D)
    return sample_N


def _few(w_D: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.int16]:
    """A loop over Python floats, which are float64 and round after each operation."""
    weights, given = w_D.tolist(), [0.0] * w_D.size
    numbers = range(1, w_D.size)
    dataset_N = np.empty(size, dtype=np.int16)
    for position in range(size):
        n = float(position or 1)
        first, most = 0, weights[0] * n - given[0]
        for number in numbers:
            lag = weights[number] * n - given[number]
            if lag > most:
                first, most = number, lag
        given[first] += 1.0
        dataset_N[position] = first
    return dataset_N


def _many(w_D: npt.NDArray[np.float64], size: int, left: list[int] | None = None) -> npt.NDArray[np.int16]:
    """The largest lag by numpy: the product and the difference are two calls, so each is rounded."""
    given_D, lag_D = np.zeros_like(w_D), np.empty_like(w_D)
    dataset_N = np.empty(size, dtype=np.int16)
    for position in range(size):
        np.multiply(w_D, float(position or 1), out=lag_D)
        np.subtract(lag_D, given_D, out=lag_D)
        first = int(lag_D.argmax())
        dataset_N[position] = first
        given_D[first] += 1.0
        if left is not None:
            left[first] -= 1
            if left[first] == 0:
                given_D[first] = np.inf  # its lag is -inf from here on
    return dataset_N
