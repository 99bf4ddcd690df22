"""The order in which units are used: of a step, recorded and followed; of evaluation; of a plan that was given.

    engine/engine.py's uses --> UseOrder, Successors, GivenPlan --> ExpectedUses (this file) --> engine/gather.py

Numbers of units and names only; knows no memory and starts nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.placement.residency import NEVER, Action

_MAX_RECORDED = 100_000  # uses in a step; a loop that never steps must not grow without bound
_AHEAD = 64  # uses that a prefetch looks at


class UseOrder:
    """The order of uses in the last step, and where this step is in it.

    A step that leaves the recorded order gets no more predictions; its own order is recorded for the next.
    """

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []
        self._at = 0
        self._positions: dict[int, list[int]] = {}
        self._positions_of: Sequence[int] = ()

    @property
    def recorded(self) -> Sequence[int]:
        """Uses of the last step."""
        return self._last

    @property
    def begun(self) -> bool:
        """This step has used something."""
        return bool(self._now)

    def use(self, unit: int) -> None:
        """Unit number ``unit`` is used."""
        if len(self._now) < _MAX_RECORDED:
            self._now.append(unit)
        if self._at < len(self._last):
            self._at = self._at + 1 if self._last[self._at] == unit else len(self._last)

    @property
    def followed(self) -> bool:
        """This step is in the recorded order, and not at its end."""
        return self._at < len(self._last)

    def next_use(self, unit: int) -> int:
        """When ``unit`` is used next in the recorded order; later than any use if it is not."""
        if self._positions_of is not self._last:
            self._positions_of, self._positions = self._last, {}
            for at, one in enumerate(self._last):
                self._positions.setdefault(one, []).append(at)
        positions = self._positions.get(unit, [])
        at = bisect_left(positions, self._at)
        return positions[at] if at < len(positions) else NEVER

    def coming(self) -> Sequence[int]:
        """Uses that are expected, the next one first; empty when unknown."""
        return self._last[self._at : self._at + _AHEAD]

    def next_step(self) -> None:
        """What was recorded is followed from now on."""
        if self._now:
            self._last, self._now, self._at = self._now, [], 0


class Successors:
    """Evaluation: which unit came after which, the last time. What it never saw it takes from the recorded step.

    Calls come in any number and mix with steps, so no order is followed. The order of training is read and never
    written.
    """

    def __init__(self, training: UseOrder) -> None:
        self._training = training
        self._after: dict[int, int] = {}
        self._before = -1
        self._seed: dict[int, int] = {}
        self._seed_of: Sequence[int] = ()

    def use(self, unit: int) -> None:
        """Unit number ``unit`` is used by a call without gradients."""
        if self._before not in (-1, unit):
            self._after[self._before] = unit
        self._before = unit

    def coming(self) -> Iterator[int]:
        """Uses that are expected in this call, the next one first: whether another one follows is not known."""
        if self._seed_of is not self._training.recorded:
            self._seed_of = self._training.recorded
            self._seed = self._forwards(self._seed_of)
        unit = self._before
        for _ in range(_AHEAD):
            unit = self._after.get(unit, self._seed.get(unit, 0))
            if unit == 0:  # the root unit: a call begins
                return
            yield unit

    def _forwards(self, order: Sequence[int]) -> dict[int, int]:
        """Successors in a step until a unit is used again: its forward."""
        found: dict[int, int] = {}
        for one, other in pairwise(order):
            if one in found and one:
                break
            if one != other:
                found.setdefault(one, other)
        return found


class GivenPlan:
    """Actions to follow step after step, and where this step is in them.

    The root unit always stays, so its actions say nothing. A use of the unit that was used last needs no action of its
    own (a backward that follows its forward, a recompute). Another use than the plan's next one ends the plan for this
    step. Units are then gathered at their uses. The next step begins with the plan again.

    Raises:
        FsdpError: an action that is illegal where it stands, an unknown unit, or more bytes than the budget.
    """

    def __init__(
        self, actions: Sequence[Action], unit_bytes: Mapping[str, int], *, budget_bytes: int, always: Collection[str]
    ) -> None:
        held = sum(unit_bytes[name] for name in always)
        self.actions = tuple(actions)
        self._moves = [action for action in self.actions if action.unit not in always]
        here: set[str] = set()
        for at, action in enumerate(self.actions):
            if action.unit not in unit_bytes:
                raise self._wrong(at, action, f"is no unit of this model; units are {sorted(unit_bytes)}")
            if action.unit in always:
                continue
            if action.kind == "gather":
                if action.unit in here:
                    raise self._wrong(at, action, "is gathered already")
                here.add(action.unit)
                held += unit_bytes[action.unit]
                if held > budget_bytes:
                    raise self._wrong(at, action, f"makes {held} bytes, and gathered_bytes is {budget_bytes}")
            elif action.unit not in here:
                raise self._wrong(at, action, "is not gathered there")
            elif action.kind == "free":
                here.remove(action.unit)
                held -= unit_bytes[action.unit]
        self.uses = [action.unit for action in self._moves if action.kind == "use"]
        self.gathers = sum(action.kind == "gather" for action in self._moves)
        self._at = 0  # the next move
        self._current = ""
        self.left = False  # this step left the plan
        self.steps_left = 0  # steps that did

    def _wrong(self, at: int, action: Action, why: str) -> FsdpError:
        return FsdpError(f"use_plan: action {at}, {action}: {action.unit!r} {why}", unit=action.unit, op="gather")

    @property
    def stays(self) -> list[bool]:
        """By use: the unit is kept until its next use."""
        result: list[bool] = []
        last: dict[str, int] = {}
        for action in self._moves:
            if action.kind == "use":
                last[action.unit] = len(result)
                result.append(True)
            elif action.kind == "free" and action.unit in last:
                result[last[action.unit]] = False
        return result

    def use(self, unit: str) -> tuple[list[Action], list[Action]]:
        """Moves to make now that ``unit`` is used: those that are due before, and those that may begin beside it."""
        if self.left or (unit == self._current and self._next_use() != unit):
            return [], []
        due: list[Action] = []
        beside: list[Action] = []
        while self._at < len(self._moves):
            move = self._moves[self._at]
            if move.kind == "use" and (move.unit != self._current or unit == self._current):
                break
            if move.kind != "use":
                due.append(move)
            self._at += 1
        if self._at == len(self._moves) or self._moves[self._at].unit != unit:
            self.left = True
            self.steps_left += 1
            return [], []
        self._at += 1
        self._current = unit
        while self._at < len(self._moves):
            move = self._moves[self._at]
            if move.kind == "use" or (move.kind == "free" and move.unit == unit):
                break  # its memory is in use
            beside.append(move)
            self._at += 1
        return due, beside

    def _next_use(self) -> str | None:
        return next((move.unit for move in self._moves[self._at :] if move.kind == "use"), None)

    def next_step(self) -> None:
        """From the first action again."""
        self._at, self._current, self.left = 0, "", False


class ExpectedUses:
    """Which units are used next, by the one rule that holds now.

    In a step a given plan, until the step leaves it; else the recorded order. In evaluation what came after what.

    Attributes:
        order: of steps.
        given: the plan that is followed, or None.
    """

    def __init__(self) -> None:
        self.order = UseOrder()
        self.given: GivenPlan | None = None
        self._evaluation = Successors(self.order)
        self._next_given: GivenPlan | None = None

    @property
    def _planned(self) -> bool:
        return self.given is not None and not self.given.left

    @property
    def known(self) -> bool:
        """What comes in this step is known."""
        return self._planned or self.order.followed

    def use(self, unit: int, name: str | None) -> tuple[Sequence[Action], Sequence[Action], Sequence[int] | None]:
        """A use in a step; ``name``: None outside the arena.

        Returns:
            (a given plan's moves before it, those beside it, uses that are expected, the next one first). With None for
            the uses the plan says what is gathered.
        """
        self.order.use(unit)
        before, beside = self.given.use(name) if self.given is not None and name is not None else ((), ())
        return before, beside, None if self._planned else self.order.coming()

    def use_in_evaluation(self, unit: int) -> Iterator[int]:
        """A use that leaves the recorded order and a given plan alone; uses that are expected, the next one first."""
        self._evaluation.use(unit)
        return self._evaluation.coming()

    def give(
        self, actions: Sequence[Action], unit_bytes: Mapping[str, int], *, budget_bytes: int, always: Collection[str]
    ) -> None:
        """Follow ``actions`` from the next step on (from this one, if nothing of it ran yet)."""
        if self.given is not None and tuple(actions) == self.given.actions:
            self._next_given = None
        else:
            self._next_given = GivenPlan(actions, unit_bytes, budget_bytes=budget_bytes, always=always)

    def begin_step(self, *, stepped: bool) -> bool:
        """A step begins; ``stepped``: after an optimizer's step. Returns whether another order may be followed now."""
        if stepped:
            self.order.next_step()
            if self.given is not None:
                self.given.next_step()
        elif self.order.begun or self._next_given is None:
            return False
        if self._next_given is not None:
            self.given, self._next_given = self._next_given, None
        return True
