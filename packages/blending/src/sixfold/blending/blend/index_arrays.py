"""A blend whose order is two arrays: the dataset of each position, and its sample.

    megatron/greedy.py --> BlendIndex (this file): position <--> (dataset, sample) --> dataset/blended.py

It takes the place of ``schedule.Schedule``. D counts datasets, N positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError
from sixfold.blending.megatron.greedy import BlendIndices, exhaustive, greedy, running
from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.kernels import I64

Arrays = dict[str, npt.NDArray[Any]]
BLEND_INDICES = ("dataset_index", "dataset_sample_index")


def build_blend(weights: Sequence[float], size: int | None) -> BlendIndices:
    """``greedy``, or ``exhaustive`` of datasets as long as their weights if ``size`` is None."""
    return exhaustive([int(weight) for weight in weights]) if size is None else greedy(weights, size)


def blend_fits(arrays: Arrays, weights: Sequence[float], size: int | None, *, full: bool) -> bool:
    """Whether arrays of unknown origin can be those of ``build_blend``.

    ``full`` also reads them: datasets that exist, each with its samples in order; without a size all of them.
    """
    dataset_N, sample_N = (arrays[name] for name in BLEND_INDICES)
    positions = int(sum(weights)) if size is None else size
    if dataset_N.dtype != np.int16 or sample_N.dtype != np.int64:
        return False
    if dataset_N.shape != (positions,) or sample_N.shape != (positions,):
        return False
    if not full or not positions:
        return True
    if not 0 <= int(dataset_N.min()) <= int(dataset_N.max()) < len(weights):
        return False
    if size is None and np.bincount(dataset_N, minlength=len(weights)).tolist() != [int(w) for w in weights]:
        return False
    return np.array_equal(running(dataset_N, len(weights)), sample_N)


@dataclass(frozen=True)
class BlendIndex:
    """See the module.

    Attributes:
        arrays: ``BLEND_INDICES`` by name: dataset (N,) int16 and sample (N,) int64 of each position.
        datasets: D.
        sequence_length: tokens per sample.
    """

    arrays: Arrays
    datasets: int
    sequence_length: int

    def __post_init__(self) -> None:
        for array in self.arrays.values():
            array.flags.writeable = False  # they are handed out, and samples are looked up in them

    @property
    def indices(self) -> BlendIndices:
        """The two arrays."""
        return self.arrays["dataset_index"], self.arrays["dataset_sample_index"]

    @property
    def end(self) -> int:
        """Positions in all."""
        return self.indices[0].size

    @property
    def only_length(self) -> int:
        """Tokens per sample at every position."""
        return self.sequence_length

    def sequence_lengths(self, positions: I64) -> I64:
        """Tokens per sample at each position."""
        return np.full(positions.size, self.sequence_length, dtype=np.int64)

    def locate(self, positions: I64) -> tuple[I64, I64]:
        """(dataset, sample) of each position, int64."""
        return self.indices[0][positions].astype(np.int64), self.indices[1][positions].astype(np.int64)

    def find(self, dataset: int, sample: int) -> int:
        """The position of a dataset's sample; reads the index up to it.

        Raises:
            BlendingError: no whole number >= 0, or no position gives it.
        """
        sample = whole_number("sample", sample, 0)
        found = np.flatnonzero((self.indices[1] == sample) & (self.indices[0] == dataset))
        if not found.size:
            raise BlendingError(f"sample {sample} of dataset {dataset} comes at no position of this blend")
        return int(found[0])

    def counts(self, n: int) -> I64:
        """Samples of each dataset among the first ``n`` positions, (D,) int64."""
        return np.bincount(self.indices[0][:n], minlength=self.datasets).astype(np.int64)
