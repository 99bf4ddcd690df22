"""Which dataset gives which position: the quota tree.

    weights --> numbers/largest_remainder.py --> QuotaTree (this file): position <--> (dataset, sample) --> schedule.py

Pure: integers in, integers out. D is the number of datasets, P of positions. Every prefix of the
order is within 1.75 samples of the quotas; docs/design/blending/blend.md has the proof. Only the tree
is stored, so any position costs one walk from the root to a leaf.
"""

from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_number, whole_numbers
from sixfold.blending.numbers.kernels import I64, kernels
from sixfold.blending.numbers.largest_remainder import apportion
from sixfold.blending.numbers.weights import Weights

PERIOD = 2**31
_LARGEST_PERIOD = 2**62  # of the kernel


class QuotaTree:
    """A fixed interleaving of D datasets, periodic, exact in every period.

    The quotas are the leaves of a Huffman tree. A node has ``n`` items per period, and ``l`` of them
    belong to the left child. Of its first ``m`` items ``floor((2*m*l + n) / (2*n))`` go left: the
    rounded straight line. An item keeps its running number in the child it goes to.

    Attributes:
        quotas: (D,) int64, samples of each dataset in one period.
        period: their sum; 2^31 for weights.
    """

    def __init__(self, weights: Weights) -> None:
        """Plant the tree of ``weights``.

        Args:
            weights: D numbers, finite, >= 0, not all zero, any scale; 0 leaves a dataset out.
        Raises:
            BlendingError: a weight is unfit, or so small that its quota of 2^31 is 0.
        """
        quotas_D = apportion(weights, PERIOD)
        for number, weight in enumerate(weights):
            if weight > 0 and quotas_D[number] == 0:
                raise BlendingError(
                    f"weight {number} is {weight}: its share of 2^31 samples rounds to 0; "
                    f"give it more, or 0 to leave the dataset out"
                )
        self._set(quotas_D)

    @classmethod
    def from_counts(cls, counts: npt.ArrayLike) -> "QuotaTree":
        """The tree whose period is one pass: dataset i gives exactly ``counts[i]`` samples.

        Raises:
            BlendingError: a count is negative or no whole number, or all are 0.
        """
        counts_D = whole_numbers("counts", counts).flatten()  # a copy: the tree keeps them
        negative = np.flatnonzero(counts_D < 0)
        if negative.size:
            raise BlendingError(f"count {negative[0]} is {counts_D[negative[0]]}; counts are >= 0")
        if not counts_D.any():
            raise BlendingError(f"the {counts_D.size} counts are all 0; at least one is positive")
        tree = cls.__new__(cls)
        tree._set(counts_D)
        return tree

    def _set(self, quotas_D: I64) -> None:
        self.quotas = np.ascontiguousarray(quotas_D)
        self.period = int(quotas_D.sum())
        self._handle: object = None

    def __getstate__(self) -> dict[str, Any]:
        """The quotas, which are all of it."""
        return {"quotas": self.quotas, "period": self.period, "_handle": None}

    @cached_property
    def _nodes(self) -> "_Nodes":
        return _Nodes(self.quotas, self.period)

    def locate(self, positions: npt.ArrayLike | range) -> tuple[I64, I64]:
        """The dataset of each position and how many samples it gave before.

        Args:
            positions: (P,) numbers >= 0, in any order; consecutive ones take a third of the time.
        Returns:
            dataset (P,) int64, sample (P,) int64.
        Raises:
            BlendingError: a position is negative or no whole number.
        Cost: one walk from root to leaf per position, all positions together, level by level.
        """
        if isinstance(positions, range):
            positions = np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
        position_P = np.ascontiguousarray(whole_numbers("positions", positions).reshape(-1))
        native = kernels() if self.period <= _LARGEST_PERIOD else None
        if native is None:
            if position_P.size and position_P.min() < 0:
                raise BlendingError(f"position {position_P.min()} is negative; positions are >= 0")
            dataset_P, number_P = self._nodes.locate(position_P % self.period)
            return dataset_P, number_P + (position_P // self.period) * self.quotas[dataset_P]
        if self._handle is None:
            self._handle = native.tree(self.quotas)
        dataset_P, sample_P = np.empty_like(position_P), np.empty_like(position_P)
        if native.tree_locate(self._handle, position_P, dataset_P, sample_P) < position_P.size:
            raise BlendingError(f"position {position_P.min()} is negative; positions are >= 0")
        return dataset_P, sample_P

    def find(self, dataset: int, sample: int) -> int:
        """The position at which ``dataset`` gives its ``sample``: the inverse of ``locate``.

        Raises:
            BlendingError: there is no such dataset, it has no quota, or ``sample`` is negative.
        """
        # Python's integers from here on: the products below pass 2^63.
        node, sample = whole_number("dataset", dataset, 0), whole_number("sample", sample, 0)
        quota = int(self.quotas[node]) if node < self.quotas.size else 0
        if quota == 0:
            raise BlendingError(f"dataset {node} of {self.quotas.size} has quota {quota}, so no sample {sample}")
        turns, number = divmod(sample, quota)
        return self._nodes.find(node, number) + turns * self.period

    def counts(self, n: int) -> I64:
        """Samples of each dataset among the first ``n`` positions, (D,) int64. Cost: O(D)."""
        turns, rest = divmod(whole_number("n", n, 0), self.period)
        return self._nodes.counts(rest) + turns * self.quotas


class _Nodes:
    """The Huffman tree as arrays, stated plainly: what the compiled kernel does, and the way back.

    Nodes 0..D-1 are the leaves, D, D+1, ... the inner nodes in order of creation.
    """

    def __init__(self, quotas_D: I64, period: int) -> None:
        D = self.datasets = quotas_D.size
        heap = [(int(quota), leaf) for leaf, quota in enumerate(quotas_D) if quota > 0]
        heapify(heap)
        total = [int(quota) for quota in quotas_D]
        left, right, left_total, parent = ([0] * D for _ in range(4))
        while len(heap) > 1:
            (less, second), (more, first) = heappop(heap), heappop(heap)  # the larger of the two goes left
            node = len(total)
            parent[first] = parent[second] = node
            total.append(more + less)
            left.append(first)
            right.append(second)
            left_total.append(more)
            parent.append(node)  # the root is its own parent
            heappush(heap, (more + less, node))
        self.root = heap[0][1]
        # 2*m*l + n stays below 2^63 + 2^31 for a period of 2^31; beyond it Python's integers are needed.
        self.exact = np.dtype(np.uint64) if period <= PERIOD else np.dtype(object)
        self.total = np.array(total, dtype=self.exact)
        self.left_total = np.array(left_total, dtype=self.exact)
        self.left, self.right, self.parent = (np.array(list_, dtype=np.int64) for list_ in (left, right, parent))

    def locate(self, item_P: I64) -> tuple[I64, I64]:
        """(leaf, number there) of items of the root, below the period."""
        number_P = item_P.astype(self.exact)
        node_P = np.full(item_P.size, self.root, dtype=np.int64)
        walking = np.arange(item_P.size) if self.root >= self.datasets else np.empty(0, dtype=np.int64)
        while walking.size:
            node, number = node_P[walking], number_P[walking]
            twice_n, twice_l = 2 * self.total[node], 2 * self.left_total[node]
            line = number * twice_l + self.total[node]
            left_before = line // twice_n
            goes_left = (line - left_before * twice_n) + twice_l >= twice_n  # the line crosses an integer here
            number_P[walking] = np.where(goes_left, left_before, number - left_before)
            node = np.where(goes_left, self.left[node], self.right[node])
            node_P[walking] = node
            walking = walking[node >= self.datasets]
        return node_P, number_P.astype(np.int64)

    def find(self, node: int, number: int) -> int:
        """The item of the root that is ``number`` at leaf ``node``."""
        while node != self.root:
            above = int(self.parent[node])
            n, left = int(self.total[above]), int(self.left_total[above])
            if int(self.left[above]) == node:
                # The first m with floor(((m+1)*l)/n + 1/2) = number + 1.
                number = -(-n * (2 * number + 1) // (2 * left)) - 1
            else:
                number = n * (2 * number + 1) // (2 * (n - left))
            node = above
        return number

    def counts(self, items: int) -> I64:
        """Of the root's first ``items``, how many each leaf has, (D,)."""
        first = [0] * len(self.total)
        first[self.root] = items
        for node in range(len(first) - 1, self.datasets - 1, -1):  # children are older than their parents
            total = int(self.total[node])
            left = (2 * first[node] * int(self.left_total[node]) + total) // (2 * total)
            first[int(self.left[node])] = left
            first[int(self.right[node])] = first[node] - left
        return np.array(first[: self.datasets], dtype=np.int64)
