"""Positions for a ``torch.utils.data.DataLoader``.

    position, rank --> PositionSampler (this file) --> DataLoader --> dataset[[positions]]

A data loader needs no state of its own: after a restart with any number of ranks or workers the
sampler begins at the position that the checkpoint holds.
"""

from collections.abc import Iterator

from torch.utils.data import Sampler

from sixfold.blending.checks import whole_number
from sixfold.blending.errors import BlendingError


class PositionSampler(Sampler[list[int]]):
    """Batches of positions for one rank, without end.

    Step i gives rank r the positions ``begin + (i * ranks + r) * batch_size`` and the next
    ``batch_size - 1``. With ``DataLoader(dataset, sampler=PositionSampler(...), batch_size=None)``
    each batch is one ``get_batch``; as ``batch_sampler=`` the loader stacks the samples of one
    batch itself.
    """

    def __init__(self, begin: int, batch_size: int, rank: int = 0, ranks: int = 1) -> None:
        """Args: see the class; ``batch_size`` is samples per rank and step.

        Raises:
            BlendingError: no whole numbers, begin < 0, batch_size < 1, or rank not in 0..ranks-1.
        """
        self.begin, self.batch_size = whole_number("begin", begin, 0), whole_number("batch_size", batch_size, 1)
        self.rank, self.ranks = whole_number("rank", rank, 0), whole_number("ranks", ranks, 1)
        if rank >= ranks:
            raise BlendingError(f"rank is {rank} of {ranks} ranks; it is 0..{ranks - 1}")

    def __iter__(self) -> Iterator[list[int]]:
        first = self.begin + self.rank * self.batch_size
        while True:
            yield list(range(first, first + self.batch_size))
            first += self.ranks * self.batch_size
