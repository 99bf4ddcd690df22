"""Which units to gather, keep and free under a byte budget: the fewest gathered bytes.

    order of uses + bytes --> solve, plan (this file) --> address_assignment.py, engine/gather.py, model.use_plan

Pure: names, bytes and an order; no tensor, no rank, no clock, and the same answer on every rank.

[Note: keeping an interval] Between two uses of a unit it is kept, or freed and gathered again. At a use, the unit used
and all units that are kept over it lie within the budget. So the choice is which intervals to keep, and what is
saved is the bytes of their units.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sixfold.fsdp.errors import FsdpError

_KINDS = ("gather", "use", "free")
NEVER = 1 << 60  # later than any use
_WORK = 150_000  # states looked at by the search, over all uses; in proportion to its time
_STATES = 256  # states kept after a use, at most


@dataclass(frozen=True, slots=True)
class Action:
    """``gather``, ``use`` or ``free`` of a unit; ``str`` gives ``gather blocks.3``."""

    kind: str
    unit: str

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise FsdpError(f"an action's kind is {self.kind!r}; it is one of {', '.join(_KINDS)}", unit=self.unit)

    def __str__(self) -> str:
        return f"{self.kind} {self.unit or '(root)'}"


@dataclass(frozen=True, slots=True)
class Solution:
    """A plan and its cost. ``exact`` is True if it is proven that no plan gathers fewer bytes."""

    actions: list[Action]
    gathers: int
    gathered_bytes: int
    exact: bool


def plan(
    uses: Sequence[str], unit_bytes: Mapping[str, int], *, budget_bytes: int, keep: Collection[str] = ()
) -> list[Action]:
    """Gathers, uses and frees that follow ``uses`` within ``budget_bytes``: the ``actions`` of ``solve``."""
    return solve(uses, unit_bytes, budget_bytes=budget_bytes, keep=keep).actions


def solve(
    uses: Sequence[str], unit_bytes: Mapping[str, int], *, budget_bytes: int, keep: Collection[str] = ()
) -> Solution:
    """The order in which units are gathered, used and freed, from nothing gathered.

    It has one ``use`` for each entry of ``uses``, in order. A unit is gathered before its use. It is freed only to make
    room for a gather that follows at once. Gathered bytes never exceed ``budget_bytes``.

    If units have one size (those of ``keep`` aside), the plan has the fewest gathers: it frees the unit whose next use
    is farthest (Belady 1966). With several sizes the problem is NP-hard, and a search follows all ways to make room. It
    replaces a unit by another of its size by Belady's rule. It drops a state when another reaches its best end for no
    more bytes. If more states than a bound remain, it follows the best, and ``exact`` is False. Up to 8 units of any
    sizes and 40 uses are exact in practice. So are a hundred equal layers beside an embedding and a head.

    Args:
        uses: unit names; ``unit_bytes`` has each.
        keep: names that are never freed once they are gathered.
    Raises:
        FsdpError: a unit, with what is kept at its use, exceeds the budget; a use without bytes; negative bytes.
    Cost: O(N log U) for one size, N uses of U units; else at most a second for N = 10,000 and U = 200.
    """
    _check(uses, unit_bytes, budget_bytes, keep)
    kept = frozenset(keep)
    sizes = {unit_bytes[name] for name in uses if name not in kept}
    if len(sizes) <= 1:
        victims, exact = _farthest(uses, unit_bytes, budget_bytes, kept), True
    else:
        victims, exact = _Search(uses, unit_bytes, budget_bytes, kept).run()
    return _solution(uses, unit_bytes, budget_bytes, kept, victims, exact)


def _check(uses: Sequence[str], unit_bytes: Mapping[str, int], budget_bytes: int, keep: Collection[str]) -> None:
    kept = {name: unit_bytes[name] for name in keep if name in unit_bytes}
    held = 0  # of those kept that were used so far
    seen: set[str] = set()
    for name in uses:
        if name in seen and name in kept:
            continue
        nbytes = unit_bytes.get(name)
        if nbytes is None:
            raise FsdpError(f"{name!r} is used and unit_bytes has no such unit", unit=name, op="gather")
        if nbytes < 0:
            raise FsdpError(f"{name!r} has {nbytes} bytes; bytes are >= 0", unit=name, op="gather")
        if nbytes + held > budget_bytes:
            beside = f" beside {held} bytes that are kept" if held else ""
            raise FsdpError(
                f"{name!r} needs {nbytes} bytes{beside}, and budget_bytes is {budget_bytes}; "
                f"give at least {nbytes + held}",
                unit=name,
                op="gather",
            )
        if name in kept:
            held += nbytes
            seen.add(name)


def _next_uses(uses: Sequence[str]) -> list[int]:
    """For each use, the position of the unit's next one."""
    following: dict[str, int] = {}
    result = [NEVER] * len(uses)
    for at in range(len(uses) - 1, -1, -1):
        result[at] = following.get(uses[at], NEVER)
        following[uses[at]] = at
    return result


def _farthest(
    uses: Sequence[str], unit_bytes: Mapping[str, int], budget: int, kept: frozenset[str]
) -> list[list[str] | None]:
    """By use: None where the unit is here, else who is freed for it: the farthest next use first."""
    following = _next_uses(uses)
    here: dict[str, int] = {}  # resident -> its next use
    heap: list[tuple[int, int, str]] = []  # (-next use, order of arrival, unit); stale entries are passed over
    held = 0
    victims: list[list[str] | None] = []
    for at, name in enumerate(uses):
        freed: list[str] | None = None
        if name not in here:
            freed = []
            held += unit_bytes[name]
            while held > budget:
                negative, _, victim = heapq.heappop(heap)
                if here.get(victim) == -negative:
                    del here[victim]
                    held -= unit_bytes[victim]
                    freed.append(victim)
        here[name] = following[at]
        if name not in kept:
            heapq.heappush(heap, (-following[at], at, name))
        victims.append(freed)
    return victims


class _Search:
    """States (what is gathered) after each use, with the least bytes that reach them. Sets are bits of an int."""

    def __init__(self, uses: Sequence[str], unit_bytes: Mapping[str, int], budget: int, kept: frozenset[str]) -> None:
        self._names = sorted(set(uses), key=lambda name: (unit_bytes[name], name))
        index = {name: i for i, name in enumerate(self._names)}
        self._uses = [index[name] for name in uses]
        self._following = _next_uses(uses)
        self._size = [unit_bytes[name] for name in self._names]
        self._budget = budget
        self._kept = [name in kept for name in self._names]
        self._next = [NEVER] * len(self._names)  # of each unit, after the use that is looked at
        self._exact = True
        self._width = max(1, min(_STATES, _WORK // (len(uses) * max(1, len(self._names) // 8))))
        self._choices = 24 if self._width >= 16 else 6  # ways to make room that are tried from one state, at most

    def run(self) -> tuple[list[list[str] | None], bool]:
        """Who is freed at each use, and whether nothing was left out."""
        # state -> (bytes gathered so far, bytes held); and, by use, state -> (state before, units freed or None)
        states: dict[int, tuple[int, int]] = {0: (0, 0)}
        steps: list[dict[int, tuple[int, int | None]]] = []
        for at, unit in enumerate(self._uses):
            bit, size = 1 << unit, self._size[unit]
            self._next[unit] = self._following[at]
            dead = bit if self._following[at] == NEVER and not self._kept[unit] else 0
            after: dict[int, tuple[int, int]] = {}
            step: dict[int, tuple[int, int | None]] = {}
            for state, (cost, held) in states.items():
                if state & bit:
                    ways = [(0, 0)]
                    now, here, came = cost, held, False
                else:
                    ways = self._ways(state, held + size - self._budget)
                    now, here, came = cost + size, held + size, True
                for freed, nbytes in ways:
                    then = ((state & ~freed) | bit) & ~dead
                    if then not in after or after[then][0] > now:
                        after[then] = now, here - nbytes - (size if dead else 0)
                        step[then] = state, freed if came else None
            states = self._fewer(after) if len(after) > 1 else after
            steps.append(step)
        return self._trace(states, steps), self._exact

    def _ways(self, state: int, needed: int) -> list[tuple[int, int]]:
        """(units to free, their bytes) that make ``needed`` bytes of room; none frees more than it must."""
        if needed <= 0:
            return [(0, 0)]
        groups: dict[int, list[tuple[int, int]]] = {}
        while state:
            low = state & -state
            state ^= low
            unit = low.bit_length() - 1
            if not self._kept[unit]:
                groups.setdefault(self._size[unit], []).append((self._next[unit], low))
        classes: list[tuple[int, list[int], int]] = []  # size, bits of the farthest 0, 1, 2 ..., their number
        for size, members in groups.items():
            if size:
                members.sort(reverse=True)
                prefix = [0]
                for _, low in members[: -(-needed // size)]:
                    prefix.append(prefix[-1] | low)
                classes.append((size, prefix, len(prefix) - 1))
        classes.sort(reverse=True)  # large ones first: the last class fills up with the finest grain
        room = [0] * (len(classes) + 1)
        for i in range(len(classes) - 1, -1, -1):
            room[i] = room[i + 1] + classes[i][0] * classes[i][2]
        found: list[tuple[int, int]] = []
        self._choose(classes, room, 0, needed, 0, 0, NEVER, found)
        if len(found) > self._choices:
            self._exact = False
            found = self._likely(found)
        return found

    def _choose(
        self,
        classes: list[tuple[int, list[int], int]],
        room: list[int],
        at: int,
        needed: int,
        freed: int,
        nbytes: int,
        smallest: int,
        found: list[tuple[int, int]],
    ) -> None:
        if needed <= 0:
            if -needed < smallest:  # nothing could stay
                found.append((freed, nbytes))
            return
        if room[at] < needed or len(found) > 2 * self._choices:
            if len(found) > 2 * self._choices:
                self._exact = False
            return
        size, prefix, most = classes[at]
        for count in range(min(most, -(-needed // size)) + 1):
            least = min(smallest, size) if count else smallest
            self._choose(
                classes, room, at + 1, needed - count * size, freed | prefix[count], nbytes + count * size, least, found
            )

    def _likely(self, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ways whose units are needed latest, by bytes over distance."""

        def loss(way: tuple[int, int]) -> float:
            bits, total = way[0], 0.0
            while bits:
                unit = (bits & -bits).bit_length() - 1
                bits &= bits - 1
                total += self._size[unit] / self._next[unit]
            return total

        return sorted(found, key=loss)[: self._choices]

    def _fewer(self, states: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Without those that another state makes superfluous: it gathers what it lacks, and has the rest for less."""
        order = sorted(states.items(), key=lambda item: (item[1][0] - item[1][1], item[1][0], item[0]))
        best = order[:8]
        rest = [item for i, item in enumerate(order) if not any(self._beats(one, item) for one in best[:i])]
        if len(rest) > self._width:
            self._exact = False
            rest = rest[: self._width]
        return dict(rest)

    def _beats(self, one: tuple[int, tuple[int, int]], other: tuple[int, tuple[int, int]]) -> bool:
        spare = other[1][0] - one[1][0]
        missing = other[0] & ~one[0]
        while missing and spare >= 0:
            spare -= self._size[(missing & -missing).bit_length() - 1]
            missing &= missing - 1
        return spare >= 0

    def _trace(
        self, states: dict[int, tuple[int, int]], steps: list[dict[int, tuple[int, int | None]]]
    ) -> list[list[str] | None]:
        state = min(states, key=lambda one: (states[one][0], one))
        victims: list[list[str] | None] = []
        for step in reversed(steps):
            state, freed = step[state]
            victims.append(None if freed is None else [n for i, n in enumerate(self._names) if freed >> i & 1])
        return victims[::-1]


def _solution(
    uses: Sequence[str],
    unit_bytes: Mapping[str, int],
    budget: int,
    kept: frozenset[str],
    victims: Sequence[Sequence[str] | None],
    exact: bool,
) -> Solution:
    """Actions; a unit that has no more use stays until its room is needed, and is then the first to go."""
    actions: list[Action] = []
    done: list[str] = []
    following = _next_uses(uses)
    held = gathers = nbytes = 0
    for name, freed, later in zip(uses, victims, following, strict=True):
        if freed is not None:
            held += unit_bytes[name] - sum(unit_bytes[victim] for victim in freed)
            spare = [*freed]
            while held > budget:
                held -= unit_bytes[done[0]]
                spare.append(done.pop(0))
            actions += [Action("free", victim) for victim in spare]
            actions.append(Action("gather", name))
            gathers, nbytes = gathers + 1, nbytes + unit_bytes[name]
            done = [one for one in done if one not in spare]
        actions.append(Action("use", name))
        if later == NEVER and name not in kept:
            done.append(name)
    return Solution(actions, gathers, nbytes, exact)
