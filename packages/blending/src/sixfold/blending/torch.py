"""Positions for a ``torch.utils.data.DataLoader``.

    position, rank --> PositionSampler (this file) --> DataLoader --> dataset[[positions]]

Its whole state is the position of the next step: after a restart with any number of ranks or workers the sampler
begins at the position that the checkpoint holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

from torch.utils.data import Dataset, Sampler

from sixfold.blending.checks import whole_number
from sixfold.blending.dataset import Positions, Samples
from sixfold.blending.errors import BlendingError


class LoaderDataset(Dataset[dict[str, Any]]):
    """A dataset or blend for a loader that keeps states (torchdata's ``StatefulDataLoader``), without a ``state_dict``.

    Such a loader asks everything it holds for a state of its own. The one of a stream has a position, which only the
    sampler knows.
    """

    def __init__(self, data: Samples) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int | Positions) -> dict[str, Any]:
        """``data[index]``: a sample, or a batch of a list of positions."""
        return self.data[index]


class PositionSampler(Sampler[list[int]]):
    """Batches of positions for one rank, up to an end or without one.

    The step that begins at position p gives rank r ``p + r * batch_size`` and the next ``batch_size - 1`` positions;
    the next step begins at ``p + ranks * batch_size``. What is left before the end is shared evenly among the ranks:
    all have as many steps, and none an empty batch, whose mean is NaN and which a loader cannot stack. Where fewer
    samples than ranks would be left, the step before leaves one for each; if it cannot, the end is refused. With
    ``DataLoader(dataset, sampler=PositionSampler(...), batch_size=None)`` each batch is one ``get_batch``; as
    ``batch_sampler=`` the loader stacks the samples of one batch itself.

    ``state_dict`` of the sampler, and of its iterator, has the position of the next step. A loader with workers asks
    for batches ahead of those that were trained on: torchdata's ``StatefulDataLoader`` (over a ``LoaderDataset``) takes
    that into account, with a plain one a trainer counts the positions it has trained on itself.
    """

    def __init__(
        self,
        begin: int,
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        *,
        end: int | None = None,
        drop_last: bool = False,
        ramp: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Args: see the class; ``batch_size`` is samples per rank and step.

        Args:
            end: behind the last position: ``len(dataset)`` for one epoch. None goes on for ever.
            drop_last: leave out what does not fill a step of all ranks.
            ramp: (position, batch_size), ascending: steps that begin there or behind have that batch size.
        Raises:
            BlendingError: no whole numbers, begin < 0, batch_size < 1, rank not in 0..ranks-1, an end before the
                begin or none to drop the last of or with too few samples before it, a ramp out of order.
        """
        self.begin, self.batch_size = whole_number("begin", begin, 0), whole_number("batch_size", batch_size, 1)
        self.rank, self.ranks = whole_number("rank", rank, 0), whole_number("ranks", ranks, 1)
        if rank >= ranks:
            raise BlendingError(f"rank is {rank} of {ranks} ranks; it is 0..{ranks - 1}")
        self.end = None if end is None else whole_number("end", end, 0)
        if self.end is not None and self.end < self.begin:
            raise BlendingError(f"end is {end}; the sampler begins at {begin}, and ends there or behind")
        if drop_last and end is None:
            raise BlendingError("drop_last is given without an end; only what ends has a last batch")
        self.drop_last = bool(drop_last)
        self.ramp = tuple(
            (whole_number(f"ramp[{number}] position", at, 0), whole_number(f"ramp[{number}] batch_size", size, 1))
            for number, (at, size) in enumerate(ramp)
        )
        for number, ((earlier, _), (later, _)) in enumerate(pairwise(self.ramp), 1):
            if later <= earlier:
                raise BlendingError(f"ramp[{number}] at {later} is not behind the one at {earlier}; positions ascend")
        self._refuse_empty_batches(self.begin)
        self._next: int | None = None  # where the next iterator begins, after load_state_dict
        self._latest: Steps | None = None

    def __iter__(self) -> "Steps":
        self._latest = Steps(self, self.begin if self._next is None else self._next)
        self._next = None
        return self._latest

    def __len__(self) -> int:
        """Steps from ``begin`` to the end.

        Raises:
            TypeError: there is no end.
        """
        if self.end is None:
            raise TypeError("a PositionSampler without an end has no length")
        return sum(steps for _, steps, _ in self._runs(self.begin, self.end))

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(Position, steps, samples per step) of the steps of one batch size each; the last may be filled in part."""
        position = begin
        for stop in [*(at for at, _ in self.ramp if begin < at < end), end]:
            whole = self.batch_size_at(position) * self.ranks
            there = max(0, stop - position)
            steps = there // whole if stop == end and self.drop_last else -(-there // whole)
            if steps:
                yield position, steps, whole
            position += steps * whole

    def _refuse_empty_batches(self, begin: int) -> None:
        """Refuse a last step that would leave ranks without a sample; see the class."""
        if self.end is None or self.drop_last:
            return
        wholes = [
            (position + step * whole, whole)
            for position, steps, whole in self._runs(begin, self.end)
            for step in range(max(0, steps - 2), steps)
        ]
        if not wholes:
            return
        left = self.end - wholes[-1][0]
        if left < self.ranks and (len(wholes) == 1 or wholes[-2][1] == self.ranks):
            raise BlendingError(
                f"end is {self.end}: the last step from {begin} on has {left} samples for {self.ranks} ranks, and one "
                f"without any would have no batch; drop_last=True leaves them out, and so does end={self.end - left}"
            )

    def batch_size_at(self, position: int) -> int:
        """Samples per rank of a step that begins at ``position``."""
        return next((size for at, size in reversed(self.ramp) if at <= position), self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next step, of the iterator that was made last."""
        if self._next is None and self._latest is not None:
            return self._latest.state_dict()
        return {"position": self.begin if self._next is None else self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator begins at the position of a state; those behind it at ``begin`` again.

        Raises:
            BlendingError: the state has no position.
        """
        self._next = _position_of(state)


class Steps(Iterator[list[int]]):
    """What a ``PositionSampler`` gives: its positions from one on."""

    def __init__(self, sampler: PositionSampler, position: int) -> None:
        self._sampler = sampler
        self._begin_at(position)

    def _begin_at(self, position: int) -> None:
        self._sampler._refuse_empty_batches(position)
        self._position = position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        sampler, first = self._sampler, self._position
        share = sampler.batch_size_at(first)
        whole = share * sampler.ranks
        there = whole if sampler.end is None else sampler.end - first
        left = min(whole, there)
        if left <= 0 or (left < whole and sampler.drop_last):
            raise StopIteration
        if 0 < there - whole < sampler.ranks and not sampler.drop_last:
            left = there - sampler.ranks  # one for each rank is left to the last step
        self._position += left
        begin, stop = (first + left * rank // sampler.ranks for rank in (sampler.rank, sampler.rank + 1))
        return list(range(begin, stop))

    def state_dict(self) -> dict[str, Any]:
        """The position of the next step."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of a state; BlendingError if it has none, or too few samples behind it."""
        self._begin_at(_position_of(state))


def _position_of(state: Mapping[str, Any]) -> int:
    position = state.get("position") if isinstance(state, Mapping) else None
    if not isinstance(position, int) or position < 0:
        raise BlendingError("the state has no position; it is not what a PositionSampler's state_dict returned")
    return position
