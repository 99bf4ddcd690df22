"""Which parameters got a gradient: on this rank, and on any rank.

    reduce.py --> UsedParameters (this file) --> rank_agreement.py --> settle --> main.grad is None again

On several ranks a parameter without a gradient takes part in its unit's sum with zeros: another rank may have one. Had
no rank one, it is to have None, as in one process: zeros would be decayed, and would advance an optimizer's state.

[Note: who had a gradient] Each rank sets a bit for each parameter of which a reduction took a gradient. The bits go
beside the digest of the order, in one exchange for a backward. A rank that sent zeros alone for a parameter, and finds
it without a gradient from before, is unsure of it until it has read all ranks' bits: at the end of the backward, or in
``finish_grad_sync``. A rank that is unsure of none waits for nothing. Knows no collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from sixfold.fsdp.buffers.flat_buffer import ParamRecord
from sixfold.fsdp.buffers.reduction_sizes import State
from sixfold.fsdp.buffers.unit_buffer import ParamAndGradBuffer


class UsedParameters:
    """The bits of this rank since they were taken last.

    Args:
        first: by stream, the number of its first record's bit; the same on all ranks that share the stream.
        count: bits in all, the same on all ranks; 0: there is one rank.

    Attributes:
        round: how often bits were taken.
    """

    def __init__(self, first: Mapping[ParamAndGradBuffer, int], count: int) -> None:
        self.count = count
        self.round = 0
        self._first = dict(first)
        self._all = {stream: ((1 << len(stream.records)) - 1) << at for stream, at in self._first.items()}
        self._bits = 0
        self._partly: dict[ParamAndGradBuffer, None] = {}  # streams that may be unsure of something

    def took(self, stream: ParamAndGradBuffer, mine: tuple[bool, ...]) -> None:
        """A reduction took gradients of ``stream``'s records, of those that are ``mine``."""
        if not self.count:  # one process
            return
        if all(mine):
            self._bits |= self._all[stream]
            return
        first = self._first[stream]
        self._bits |= sum(1 << (first + at) for at, one in enumerate(mine) if one)
        self._partly[stream] = None

    def forget(self, records: Set[ParamRecord]) -> None:
        """What was taken of ``records`` is not wanted. The same on all ranks."""
        if not self._bits:
            return
        for stream, first in self._first.items():
            for at, record in enumerate(stream.records):
                if record in records:
                    self._bits &= ~(1 << (first + at))

    def take(self) -> tuple[int, int]:
        """The bits, and the round in which they were set; the next one begins."""
        bits, self._bits = self._bits, 0
        self.round += 1
        return bits, self.round - 1

    @property
    def unsure(self) -> bool:
        """Main gradients of zeros may have to be None again."""
        return any(stream.gradients.unsure for stream in self._partly)

    def settle(self, union: int, of_round: int) -> None:
        """``union`` are the bits of all ranks: what nobody had up to ``of_round`` is None."""
        for stream in list(self._partly):
            stream.gradients.settle(union >> self._first[stream], of_round)
            if not stream.gradients.unsure and stream.gradients.state is State.IDLE:
                del self._partly[stream]
