"""How often a blend reads its data, and the warning about a dataset that is read too often.

    samples given, tokens --> tokens_given, samples_within --> EpochLimit (this file) --> base.py, blended.py

A small dataset with a large weight repeats, and an order without an end does not show it.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.kernels import F64, I64

Lengths = Sequence[tuple[int, int]]  # (first sample, sequence length), ascending
_MOST_LISTED = 8  # datasets that a message lists
ENDLESS = 2**62  # samples


def tokens_given(samples: int, lengths: Lengths) -> int:
    """Tokens of the first ``samples`` samples of a dataset."""
    ends = [*(begin for begin, _ in lengths[1:]), ENDLESS]
    return sum(max(0, min(samples, end) - begin) * length for (begin, length), end in zip(lengths, ends, strict=True))


def samples_within(tokens: int, lengths: Lengths) -> int:
    """How many samples of a dataset lie in its first ``tokens`` tokens: the number of the first that does not."""
    for (begin, length), (end, _) in pairwise([*lengths, (ENDLESS, 0)]):
        fit = begin + tokens // length
        if fit < end:
            return fit
        tokens -= (end - begin) * length
    return ENDLESS


@dataclass
class EpochLimit:
    """Warns once of each dataset that is read more often than ``max_epochs``.

    Attributes:
        names: (D,) of the datasets.
        within: (D,) samples of each that lie within ``max_epochs``.
        error: raise it instead, whenever it is asked for.
        next: the first position that may cause a warning.
    """

    names: Sequence[str]
    within: Sequence[int]
    max_epochs: float
    error: bool
    next: int = 0
    _warned: set[int] = field(default_factory=set)

    def check(
        self,
        end: int,
        counts: Callable[[int], I64],
        epochs: Callable[[int], F64],
        find: Callable[[int, int], int] | None,
    ) -> None:
        """Look at the positions below ``end``.

        Args:
            counts, epochs: of the first n positions, (D,).
            find: the position of a dataset's sample; None where samples come in any order.
        Raises:
            BlendingError: one is read too often, and ``error`` says so.
        """
        given = counts(end).tolist()
        more = [i for i in range(len(given)) if given[i] > self.within[i] and i not in self._warned]
        if not more:
            self.next = max(self.next, end)
            return
        read = epochs(end)
        told = [
            f"{self.names[number]!r} "
            + ("over all positions" if find is None else f"from position {find(number, self.within[number])} on")
            + f" ({read[number]:.4g} epochs in {end} positions)"
            for number in more[:_MOST_LISTED]
        ]
        message = (
            f"datasets are read more often than {self.max_epochs} times: {', '.join(told)}"
            + (f" and {len(more) - _MOST_LISTED} more" if len(more) > _MOST_LISTED else "")
            + f"; max_epochs is {self.max_epochs}: give such a dataset less weight, or raise max_epochs"
        )
        if self.error:  # each time: who goes on after one would read what was refused
            raise BlendingError(message)
        self._warned.update(more)
        self.next = max(self.next, end)
        warnings.warn(message, stacklevel=2)

    def skip_to_limit(self, find: Callable[[int, int], int]) -> None:
        """Set ``next`` to the first position at which a dataset without a warning yet passes the limit."""
        ahead = [ENDLESS]
        for number, within in enumerate(self.within):
            if number not in self._warned and within < ENDLESS:
                try:
                    ahead.append(find(number, within))
                except BlendingError:  # this dataset never gives that sample
                    continue
        self.next = max(self.next, min(ahead))
