"""Which positions of a step each rank reads (this file) --> dataset/position_sampler.py, and loops of users.

The order repeats with the period of its weights: with eight equal datasets every eighth position is of one dataset.
Ranks that take a step's positions in turn then read the same few datasets for ever. So a step's positions are permuted
before they are dealt out. The step has the same positions, and what is summed over ranks is the same.
"""

import numpy as np

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import whole_number
from sixfold.blending.numbers.kernels import I64
from sixfold.blending.numbers.permutation import order_key, permute


def deal(begin: int, end: int, rank: int, ranks: int) -> I64:
    """The positions of ``rank`` in the step that reads ``begin`` to ``end``; together the ranks have each once.

    Every rank computes it alone, from the step's first position. Shares differ by one position at most.

    Raises:
        BlendingError: no step, or no such rank.
    """
    begin, ranks = whole_number("begin", begin, 0), whole_number("ranks", ranks, 1)
    size = whole_number("end", end, begin) - begin
    if whole_number("rank", rank, 0) >= ranks:
        raise BlendingError(f"rank is {rank} of {ranks} ranks; it is 0..{ranks - 1}")
    places = np.arange(size * rank // ranks, size * (rank + 1) // ranks)
    return begin + permute(order_key("deal", begin), max(size, 1), places)
