"""Which sequences of a dataset are for training, validation and test.

    "98,2,0" --> parse_split --> split_matrix --> part_range (this file) --> builder/builder.py

Pure; restates ``megatron/core/datasets/blended_megatron_dataset_config.py`` bit for bit, except
that a string it would misread is refused here.
"""

import re
from enum import Enum
from itertools import pairwise

import numpy as np

from sixfold.blending.errors import BlendingError

_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")
Bookends = tuple[float, float]


class Split(Enum):
    """The parts of a dataset, in the order of every list of three in this package."""

    train = 0
    valid = 1
    test = 2


def parse_split(split: str) -> list[float]:
    """Three shares with the sum 1 from one to three numbers, comma-separated.

    Raises:
        BlendingError: signs, words, more than three numbers, or all zero.
    """
    rule = 'it is one to three numbers >= 0 with a comma between, not all 0, such as "98,2,0"'
    parts = [part.strip() for part in split.split(",")] if isinstance(split, str) else []
    if not 1 <= len(parts) <= len(Split) or not all(_NUMBER.fullmatch(part) for part in parts):
        raise BlendingError(f"split is {split!r}; {rule}")
    weights = np.array([float(part) for part in parts] + [0.0] * (len(Split) - len(parts)))
    if not np.isfinite(weights.sum()) or weights.sum() == 0:
        raise BlendingError(f"split is {split!r}; {rule}")
    shares: list[float] = (weights / np.sum(weights)).tolist()
    return shares


def split_matrix(shares: list[float]) -> list[Bookends | None]:
    """(begin, end) of each part as fractions of the dataset; None where a part is empty."""
    bookends = [0.0]
    for share in shares:
        bookends.append(bookends[-1] + share)  # plain addition, as the peer: the rounding is part of the split
    return [(low, high) if high > low else None for low, high in pairwise(bookends)]


def part_range(bookends: Bookends, sequences: int) -> range:
    """The sequences of one part of a dataset of ``sequences``."""
    return range(round(bookends[0] * sequences), round(bookends[1] * sequences))
