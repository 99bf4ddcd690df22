"""A blend of exact counts: so many samples of each dataset, then one shuffle of all.

    apportion --> counts, Shuffle --> ApportionedBlend (this file): position <--> (dataset, sample)

The running sums of the counts give sample i of the unshuffled blend ("repeat, plus running numbers"). Position p is its
sample ``shuffle(p)``, and the permutation runs backwards too. So a position and its inverse are computed alone. Only
the arrays wait for the table. D counts datasets, N positions.
"""

from functools import cached_property

import numpy as np

from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.errors import BlendingError
from sixfold.blending.megatron.greedy import BlendIndices
from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.kernels import I64

_STRETCH_BITS = 16  # 65,536 stretches at most
_CHUNK = 2**16  # positions at a time: temporaries that stay in the cache


class ApportionedBlend:
    """The blend of ``counts_D`` samples; see the module.

    Attributes:
        end: N, positions in all.
    """

    def __init__(self, counts_D: I64, shuffle: Shuffle, sequence_length: int) -> None:
        self.end = int(counts_D.sum())
        assert shuffle.size == self.end, f"a shuffle of {shuffle.size} for {self.end} samples"
        self._counts_D = counts_D
        self._ends_D = np.cumsum(counts_D)
        self._begins_D = self._ends_D - counts_D
        # The first dataset that ends behind the beginning of each stretch of 2^shift samples: nearly always the one of
        # the whole stretch, and found without a search.
        self._shift = max(self.end.bit_length() - _STRETCH_BITS, 0)
        begins = np.arange((self.end >> self._shift) + 1) << self._shift
        self._dataset_of_stretch = np.searchsorted(self._ends_D, begins, side="right")
        self._shuffle = shuffle
        self._sequence_length = sequence_length

    @property
    def only_length(self) -> int:
        """Tokens per sample at every position."""
        return self._sequence_length

    def sequence_lengths(self, positions: I64) -> I64:
        """Tokens per sample at each position."""
        return np.full(positions.size, self._sequence_length, dtype=np.int64)

    def _split(self, number_P: I64) -> tuple[I64, I64]:
        """(dataset, sample) of samples of the unshuffled blend."""
        dataset_P = self._dataset_of_stretch[number_P >> self._shift]
        later = np.flatnonzero(number_P >= self._ends_D[dataset_P])
        dataset_P[later] = np.searchsorted(self._ends_D, number_P[later], side="right")
        return dataset_P, number_P - self._begins_D[dataset_P]

    def locate(self, positions: I64) -> tuple[I64, I64]:
        """(dataset, sample) of each position, int64; never waits for the arrays."""
        dataset_P, sample_P = np.empty_like(positions), np.empty_like(positions)
        for begin in range(0, positions.size, _CHUNK):
            some = slice(begin, begin + _CHUNK)
            dataset_P[some], sample_P[some] = self._split(self._shuffle.at(positions[some]))
        return dataset_P, sample_P

    @cached_property
    def indices(self) -> BlendIndices:
        """Dataset (N,) int16 and sample (N,) int64 of each position; waits for the shuffle."""
        dataset_N, sample_N = np.empty(self.end, dtype=np.int16), np.empty(self.end, dtype=np.int64)
        table = self._shuffle.table
        for begin in range(0, self.end, _CHUNK):
            some = slice(begin, begin + _CHUNK)
            dataset_N[some], sample_N[some] = self._split(table[some].astype(np.int64))
        dataset_N.flags.writeable = sample_N.flags.writeable = False  # kept, and handed out
        return dataset_N, sample_N

    def find(self, dataset: int, sample: int) -> int:
        """The position of a dataset's sample.

        Raises:
            BlendingError: no whole number >= 0, or no position gives it.
        """
        sample = whole_number("sample", sample, 0)
        if sample >= self._counts_D[dataset]:
            raise BlendingError(f"sample {sample} of dataset {dataset} comes at no position of this blend")
        number = int(self._begins_D[dataset]) + sample
        return self._shuffle.back(number)

    def counts(self, n: int) -> I64:
        """Samples of each dataset among the first ``n`` positions, (D,) int64. Cost: O(n); O(D) for n = N."""
        if n == self.end:
            return self._counts_D.copy()
        counts_D = np.zeros_like(self._counts_D)
        for begin in range(0, n, _CHUNK):
            dataset_P, _ = self.locate(np.arange(begin, min(begin + _CHUNK, n)))
            counts_D += np.bincount(dataset_P, minlength=counts_D.size)
        return counts_D
