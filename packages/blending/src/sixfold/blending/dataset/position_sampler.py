"""Positions for a ``torch.utils.data.DataLoader``: which ones a rank reads, and where it goes on after a restart.

    position, rank --> PositionSampler (this file) --> DataLoader --> dataset[[positions]]

The only state is the position of the next step. After a restart, with any number of ranks or workers, the sampler
begins at the position of the checkpoint. The state of the data itself is ``checkpoint_state.py``. The only file here
that imports torch, an extra, when it is loaded: users import it as ``sixfold.blending.torch``.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

import numpy as np
from torch.utils.data import Dataset, Sampler

from sixfold.blending.blend.deal import deal as deal_positions
from sixfold.blending.dataset.stream import Samples
from sixfold.blending.errors import BlendingError
from sixfold.blending.numbers.checks import Positions, whole_number

IN_TURN, PERMUTED = "in_turn", "permuted"


class LoaderDataset(Dataset[dict[str, Any]]):
    """A dataset or blend without a ``state_dict``, for torchdata's ``StatefulDataLoader``.

    Such a loader asks each of its parts for a state. The state of a blend has a position, which only the sampler knows.
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

    In the step that begins at position p, rank r gets ``batch_size`` positions from ``p + r * batch_size`` on. The next
    step begins at ``p + ranks * batch_size``. With ``data`` the positions of a step are permuted before the ranks share
    them, so that no rank reads the same few datasets for ever (``sixfold.blending.order.deal``; in Megatron's order
    they are not).

    With an end, every rank has the same number of steps, and at least one sample in each. The ranks share evenly what
    is left before the end. If fewer samples than ranks would be left, the step before leaves one for each rank. If it
    cannot, the end is refused.

    ``DataLoader(dataset, sampler=PositionSampler(...), batch_size=None)`` makes each batch one ``get_batch``. Given as
    ``batch_sampler=``, the loader stacks the samples of a batch itself.

    ``state_dict`` of the sampler, and of its iterator, has the position of the next step. A loader with workers reads
    batches in advance, before they are trained on. torchdata's ``StatefulDataLoader`` over a ``LoaderDataset`` accounts
    for that. With a plain loader, count the positions that you have trained on.

    For accelerate's ``prepare``, pass it as ``batch_sampler=``, without rank, ranks and ramp. ``prepare`` shares the
    batches out itself, and it drops a ``sampler=`` of a loader without a batch size.
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
        data: "Samples | LoaderDataset | None" = None,
        deal: str | None = None,
    ) -> None:
        """Args: see the class; ``batch_size`` is samples per rank and step.

        Args:
            end: one more than the last position: ``len(dataset)`` for one epoch. None never ends.
            drop_last: leave out what does not fill a step of all ranks.
            ramp: (position, batch_size), ascending: the batch size of steps that begin at that position or later.
            data: the dataset or blend that is read. Every rank then refuses a change of its sequence length inside a
                step. Without ``data`` only the rank whose batch is cut raises, and the others wait for it.
            deal: "permuted" or "in_turn". None: permuted with ``data``, unless its order is Megatron's. A state goes on
                as the run that saved it.
        Raises:
            BlendingError: an argument is not a whole number or out of its range; the ramp is not ascending. Or the end
                comes before the begin, leaves a rank without samples, or is missing with ``drop_last``. Or a sequence
                length changes inside a step.
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
        stream = data.data if isinstance(data, LoaderDataset) else data
        if deal is None:
            deal = IN_TURN if stream is None or not stream.deals else PERMUTED
        if deal not in (IN_TURN, PERMUTED):
            raise BlendingError(f'deal is {deal!r}; it is "permuted", "in_turn" or None')
        self.deal = deal
        self._next_deal = deal
        self._length_changes = () if stream is None else stream.length_changes
        self._refuse_empty_batches(self.begin)
        self._refuse_changes_inside_a_step(self.begin)
        self._next: int | None = None  # where the next iterator begins, after load_state_dict
        self._latest: Steps | None = None

    def __iter__(self) -> "Steps":
        self._latest = Steps(self, self.begin if self._next is None else self._next, self._next_deal)
        self._next, self._next_deal = None, self.deal
        return self._latest

    def __len__(self) -> int:
        """Steps of the iterator that was made last, or of the one that is made next, to the end.

        Raises:
            TypeError: there is no end.
        """
        if self.end is None:
            raise TypeError("a PositionSampler without an end has no length")
        resumed = self._latest is not None and self._next is None and not self._latest.is_over
        begin = self._latest.begin if resumed and self._latest is not None else self._next
        return self._steps_from(self.begin if begin is None else begin)

    def _steps_from(self, position: int) -> int:
        """Steps from ``position`` to the end; all that are surely whole are counted at once."""
        assert self.end is not None, "the caller looks for an end"
        steps = 0
        while (samples := self.samples_at(position)) > 0:
            whole = self.batch_size_at(position) * self.ranks
            change = next((at for at, _ in self.ramp if at > position), self.end)
            surely = max(1, (min(change, self.end - whole - self.ranks) - position) // whole)
            steps += surely
            position += samples if surely == 1 else surely * whole
        return steps

    def samples_at(self, position: int) -> int:
        """Samples of all ranks in the step that begins at ``position``; 0 where there is none."""
        whole = self.batch_size_at(position) * self.ranks
        there = whole if self.end is None else self.end - position
        if there <= 0 or (there < whole and self.drop_last):
            return 0
        if 0 < there - whole < self.ranks and not self.drop_last:
            return there - self.ranks  # one for each rank is left to the last step
        return min(whole, there)

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
                f"end is {self.end}: the last step, from {begin} on, has {left} samples for {self.ranks} ranks, so a "
                f"rank would get an empty batch. Pass drop_last=True, or end={self.end - left}"
            )

    def _refuse_changes_inside_a_step(self, begin: int) -> None:
        for at in self._length_changes:
            if at <= begin or (self.end is not None and at >= self.end):
                continue
            position = begin
            for edge in [*(edge for edge, _ in self.ramp if begin < edge < at), at]:
                whole = self.batch_size_at(position) * self.ranks
                position += -(-(edge - position) // whole) * whole
            if position > at:
                raise BlendingError(
                    f"the sequence length changes at {at}, inside the step of positions {position - whole}.."
                    f"{position - 1}: one rank's batch would have two lengths. Change it at {position - whole} or at "
                    f"{position}, or begin elsewhere"
                )

    def batch_size_at(self, position: int) -> int:
        """Samples per rank of a step that begins at ``position``."""
        return next((size for at, size in reversed(self.ramp) if at <= position), self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The position of the next step, of the iterator that was made last."""
        if self._next is None and self._latest is not None:
            return self._latest.state_dict()
        return _state(self.begin if self._next is None else self._next, self._next_deal)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iterator begins at the position of a state. Later ones begin at ``begin`` again.

        Raises:
            BlendingError: the state has no position.
        """
        self._next, self._next_deal = _position_of(state), _deal_of(state)


class Steps(Iterator[list[int]]):
    """What a ``PositionSampler`` gives: its positions from one on."""

    def __init__(self, sampler: PositionSampler, position: int, deal: str) -> None:
        self._sampler, self._deal = sampler, deal
        self._begin_at(position)

    def _begin_at(self, position: int) -> None:
        self._sampler._refuse_empty_batches(position)
        self._sampler._refuse_changes_inside_a_step(position)
        self._position = self.begin = position
        self.is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[int]:
        sampler, first = self._sampler, self._position
        left = sampler.samples_at(first)
        if left == 0:
            self.is_over = True
            raise StopIteration
        self._position += left
        if self._deal == PERMUTED:
            dealt: list[int] = deal_positions(first, first + left, sampler.rank, sampler.ranks).tolist()
            return dealt
        begin, stop = (first + left * rank // sampler.ranks for rank in (sampler.rank, sampler.rank + 1))
        return list(range(begin, stop))

    def state_dict(self) -> dict[str, Any]:
        """The position of the next step."""
        return _state(self._position, self._deal)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of a state; BlendingError if it has none, or too few samples follow it."""
        self._begin_at(_position_of(state))
        self._deal = _deal_of(state)


def _state(position: int, deal: str) -> dict[str, Any]:
    """As before there were deals where positions are taken in turn."""
    return {"position": position} | ({} if deal == IN_TURN else {"deal": deal})


def _deal_of(state: Mapping[str, Any]) -> str:
    """How the run went on that saved a state; one without a word of it took positions in turn."""
    deal = state.get("deal", IN_TURN)
    if deal not in (IN_TURN, PERMUTED):
        raise BlendingError(
            f"the state was dealt by {deal!r}, which this release does not know; update sixfold-blending"
        )
    return str(deal)


def _position_of(state: Mapping[str, Any]) -> int:
    position = state.get("position") if isinstance(state, Mapping) else None
    if not isinstance(position, int | np.integer) or isinstance(position, bool) or position < 0:
        raise BlendingError("the state has no position; it is not what a PositionSampler's state_dict returned")
    return int(position)
