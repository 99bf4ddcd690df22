"""What ranks tell each other of a step: the order in which they use units, and which parameters got a gradient.

    engine.py --> OrderDigest, OrderCheck (this file) --> collectives/host_messages.py, faults/disagreement.py
    reduce.py --> UsedParameters (this file) --> OrderCheck, settle --> main.grad is None again

Do they use and reduce the same units? Compared before each collective, or once per step. Beside it travels, whatever
``checks`` is, which parameters got a gradient. Starts no data collective.

On several ranks a parameter without a gradient takes part in its unit's sum with zeros: another rank may have one. Had
no rank one, it is to have None, as in one process: zeros would be decayed, and would advance an optimizer's state.

[Note: who had a gradient] Each rank sets a bit for each parameter of which a reduction took a gradient. The bits go
beside the digest of the order, in one exchange for a backward. A rank may have sent zeros alone for a parameter that
has no gradient from before. It is then unsure of it until it has read all ranks' bits: at the end of the backward, or
in ``finish_grad_sync``. A rank that is unsure of none waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.buffers.reduction_sizes import State
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.collectives.comm import Ranks
from sixfold.fsdp.collectives.host_messages import Control, Rows, StoreControl, exchange, farewell
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.deadlines import Faults
from sixfold.fsdp.faults.disagreement import DRAWN_ALIKE, odd_ranks

_OPS = ("gather", "reduce")
_USE, _REDUCE, _EDIT = range(3)
_MASK = (1 << 63) - 1
_EMPTY = 7


class OrderDigest:
    """One integer for the order of uses and reductions in a step."""

    def __init__(self) -> None:
        self._value = _EMPTY

    def add(self, unit: int, op: int) -> None:
        """The next event."""
        self._value = (self._value * 1_000_003 + unit * 8 + op + 1) & _MASK

    @property
    def value(self) -> int:
        """The digest so far."""
        return self._value

    @property
    def empty(self) -> bool:
        """No event since the last ``take``."""
        return self._value == _EMPTY

    def take(self) -> int:
        """The digest so far; the next one begins."""
        value, self._value = self._value, _EMPTY
        return value


class UsedParameters:
    """The bits of this rank since they were taken last.

    Args:
        first: by flat buffer, the number of its first record's bit; the same on all ranks that share it.
        count: bits in all, the same on all ranks; 0: there is one rank.

    Attributes:
        round: how often bits were taken.
    """

    def __init__(self, first: Mapping[ParamAndGradBuffer, int], count: int) -> None:
        self.count = count
        self.round = 0
        self._first = dict(first)
        self._all = {one: ((1 << len(one.records)) - 1) << at for one, at in self._first.items()}
        self._bits = 0
        self._partly: dict[ParamAndGradBuffer, None] = {}  # flat buffers that may be unsure of something

    def took(self, flat_buffer: ParamAndGradBuffer, mine: tuple[bool, ...]) -> None:
        """A reduction took gradients of ``flat_buffer``'s records, of those that are ``mine``."""
        if not self.count:  # one process
            return
        if all(mine):
            self._bits |= self._all[flat_buffer]
            return
        first = self._first[flat_buffer]
        self._bits |= sum(1 << (first + at) for at, one in enumerate(mine) if one)
        self._partly[flat_buffer] = None

    def forget(self, records: Set[ParamRecord]) -> None:
        """What was taken of ``records`` is not wanted. The same on all ranks."""
        if not self._bits:
            return
        for flat_buffer, first in self._first.items():
            for at, record in enumerate(flat_buffer.records):
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
        return any(one.gradients.unsure for one in self._partly)

    def settle(self, union: int, of_round: int) -> None:
        """``union`` are the bits of all ranks: what nobody had up to ``of_round`` is None."""
        for flat_buffer in list(self._partly):
            flat_buffer.gradients.settle(union >> self._first[flat_buffer], of_round)
            if not flat_buffer.gradients.unsure and flat_buffer.gradients.state is State.IDLE:
                del self._partly[flat_buffer]


class OrderCheck:
    """What ``checks`` asks for: ``"off"`` nothing, ``"order"`` one digest per step, ``"unit"`` an exchange before each
    collective. [Note: two channels]"""

    def __init__(
        self, checks: str, units: Sequence[Unit], ranks: Ranks, control: Control, faults: Faults, used: UsedParameters
    ) -> None:
        self._checks = checks if ranks.size > 1 else "off"
        # Of the main mesh: what lies on others may differ between them.
        self._bytes = [
            sum(one.weights.padded_bytes for one in unit.flat_buffers if one.ranks is ranks) for unit in units
        ]
        self._units = units
        self._control = control
        self._faults = faults
        self._digest = OrderDigest()
        self._alone = ranks.size == 1
        self._may_leave = isinstance(control, StoreControl)  # an answer that tells nothing new unread
        self._sent = False  # a digest of this step
        self._used = used
        self._reduced = False  # a unit, since the last message
        self._comparing: tuple[int, int, Callable[[], tuple[Rows, int]]] | None = None  # step, round, answer

    def use(self, unit: Unit) -> None:
        """``unit`` is about to be used."""
        if self._checks == "unit":
            self._exchange(unit, _USE)
        elif self._checks == "order":
            self._digest.add(unit.index, _USE)

    def edited(self) -> None:
        """Main weights were written to outside a step: what is gathered from here on differs where others saw none."""
        if self._checks == "order":
            self._digest.add(0, _EDIT)

    def reduce(self, unit: Unit, not_finite: Callable[[Unit], int]) -> None:
        """``unit`` is about to be reduced. ``not_finite``, the place of the first bad gradient among the unit's
        trainable ones or -1, reads the device, in ``"unit"`` only."""
        self._reduced = True
        if self._checks == "unit":
            self._exchange(unit, _REDUCE, not_finite=not_finite(unit))
        elif self._checks == "order":
            self._digest.add(unit.index, _REDUCE)

    def reduce_in_step(self, unit: Unit) -> None:
        """The same inside ``optimizer.step()``, where no exchange stands before a collective."""
        self._reduced = True
        if self._checks == "order":
            self._digest.add(unit.index, _REDUCE)

    def next_step(self) -> None:
        """A step begins. ``checks="order"``: send what was not, of a step that has ended without a reduction."""
        if self._checks == "order" and not self._sent:
            self._send(self._faults.step - 1)
        self._sent = False

    def gradients_done(self, *, inside_step: bool = False) -> None:
        """This rank has launched all reductions of a backward. The digest and the bits of what had a gradient travel
        while they do, and ``compare`` stands before the optimizer. ``inside_step``: not for uses alone."""
        if not self._alone and (self._reduced or not (inside_step or self._digest.empty)):
            self._send(self._faults.step)
            self._sent = True

    def _send(self, step: int) -> None:
        self.compare()
        self._reduced = False
        bits, of_round = self._used.take()
        wait = self._faults.for_control(None, "check")
        finish = self._control.start_with([self._digest.take()], bits, self._used.count, wait)
        self._comparing = step, of_round, finish

    def settle(self) -> None:
        """Main gradients of zeros that no rank had are None. Waits only where this rank has any."""
        if self._used.unsure:
            self.compare()

    def before_save(self) -> None:
        """All ranks are about to read whole tensors, and did the same until now: one exchange, whatever ``checks`` is.

        One that is elsewhere has a row of another width, or waits for a collective that the others have not launched.
        """
        if self._alone:
            return
        self.compare()
        step = self._faults.step
        rows = exchange(self._control, [step, self._digest.value, 0, 0], self._faults.for_control(None, "save"))
        _, odd = odd_ranks(rows)
        if odd:
            raise self._differ(step, "save", odd)

    def compare(self) -> None:
        """The answer to what was sent last, if it was not read: its error is of the step that it was of."""
        if self._comparing is None:
            return
        step, of_round, finish = self._comparing
        self._comparing = None
        if self._checks != "order" and self._may_leave and not self._used.unsure:
            return
        rows, union = finish()
        if rows.count(rows[0]) < len(rows):
            raise self._differ(step, "check", odd_ranks(rows)[1])
        self._used.settle(union, of_round)

    def _differ(self, step: int, op: str, odd: Sequence[int]) -> FsdpError:
        return self._all_know(
            f"ranks used units in different orders in step {step}; run with checks='unit' to see which. {DRAWN_ALIKE}",
            None,
            op,
            odd,
            step=step,
        )

    def _exchange(self, unit: Unit, op: int, *, not_finite: int = -1) -> None:
        """Are all ranks about to do the same?"""
        row = [self._faults.step, unit.index, op, self._bytes[unit.index], not_finite]
        rows = exchange(self._control, row, self._faults.for_control(unit.name, _OPS[op]))
        common, odd = odd_ranks([one[:4] for one in rows])
        if odd:
            does = "; ".join(f"rank {rank} is at {self._at(rows[rank])} in step {rows[rank][0]}" for rank in odd)
            raise self._all_know(
                f"ranks disagree: most are at {self._at(common)}, {does}. {DRAWN_ALIKE}",
                self._units[common[1]].name,
                _OPS[common[2]],
                odd,
            )
        bad = {rank: one[4] for rank, one in enumerate(rows) if one[4] >= 0}
        if bad:
            names = [record.name for flat_buffer in unit.trained for record in flat_buffer.records]
            names += [f"parameter {at}" for at in range(len(names), max(bad.values()) + 1)]  # of a peer's mesh
            where = "; ".join(f"of {names[at]} on rank {rank}" for rank, at in bad.items())
            raise self._all_know(
                f"gradient {where} is not finite; no main gradient was touched. Look at that rank's batch",
                unit.name,
                "reduce",
                tuple(bad),
            )

    def _all_know(
        self, message: str, unit: str | None, op: str, ranks: Sequence[int], *, step: int | None = None
    ) -> FsdpError:
        """The error that all ranks raise, once all have read why; ``step``: of what it tells, if not the one that
        runs."""
        error = self._faults.fail(message, unit, op, ranks, step=step)
        farewell(self._control, self._faults.for_control(unit, op))
        return error

    def _at(self, row: Sequence[int]) -> str:
        return f"{_OPS[row[2]]} of {self._units[row[1]].name or '(root)'}"
