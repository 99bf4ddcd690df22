"""A range of bytes in one arena for every unit, for life: the addresses of a plan.

    order of uses + bytes + arena --> assign_addresses (this file) --> placement.py --> Arena

Pure: names, bytes and an order; the same answer on every rank.

[Note: a range for life] A saved ``weight.t()`` points at an address. So a unit comes back to its range as long as a
graph may live. A unit stays in its range until one whose range overlaps is used; then it is gone. So what an order
costs depends only on who overlaps whom. Between two uses a unit is gathered again exactly if an overlapping unit was
used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sixfold.fsdp.errors import FsdpError

_TRIES = 30_000  # costs of a unit that the search looks at; in proportion to its time
_AGAINST_EXPOSED = 16  # one gather more is worth it where it lets 17 begin ahead of their use
_DESCENTS = 4  # starting points from which it goes down


@dataclass(frozen=True, slots=True)
class AddressAssignment:
    """Ranges, and what the order costs with them.

    ``offsets``: where each unit's range begins. ``arena_bytes``: where the last one ends. ``gathers`` and
    ``gathered_bytes``: of the order once, from nothing gathered. ``exposed``: gathers that cannot begin before
    the use before them is over, because the two overlap.
    """

    offsets: dict[str, int]
    arena_bytes: int
    gathers: int
    gathered_bytes: int
    exposed: int


def assign_addresses(
    uses: Sequence[str],
    unit_bytes: Mapping[str, int],
    *,
    arena_bytes: int,
    apart: Collection[tuple[str, str]] = (),
    ahead: bool = False,
    stays: Sequence[bool] | None = None,
) -> AddressAssignment:
    """Ranges in an arena for all units of ``unit_bytes`` that make ``uses`` cheap.

    Where all fit side by side, all do. Else it searches from several regular placements, by moves and swaps. That is
    no proof of the least. ``residency.solve``, which knows bytes only, says how far off it may be. Ends after a fixed
    number of tries, not by a clock: all ranks find the same.

    Args:
        apart: pairs of units that never overlap (one runs inside the other).
        ahead: overlap of neighbours in the order, which hinders prefetching, is avoided first and gathered bytes
            come second; else bytes come first, and a gather that cannot begin ahead costs a sixteenth more.
        stays: by use, whether a given plan keeps the unit until its next use; None: wherever its range allows.
    Raises:
        FsdpError: a unit, with those it is kept apart from, exceeds the arena; names it.
    """
    names = _by_first_use(uses, unit_bytes)
    if len(sizes := set(unit_bytes.values())) == 1 and (size := sizes.pop()):
        arena_bytes -= arena_bytes % size if arena_bytes >= size else 0  # ranges of one size side by side
    search = _Search(names, [unit_bytes[name] for name in names], arena_bytes, _pairs(names, apart))
    search.read(uses, ahead, stays)
    return search.run()


def _by_first_use(uses: Sequence[str], unit_bytes: Mapping[str, int]) -> list[str]:
    used = dict.fromkeys(uses)
    return [*used, *(name for name in unit_bytes if name not in used)]


def _pairs(names: Sequence[str], apart: Collection[tuple[str, str]]) -> list[int]:
    """By unit, the bits of those it is kept apart from."""
    index = {name: i for i, name in enumerate(names)}
    bits = [0] * len(names)
    for one, other in apart:
        bits[index[one]] |= 1 << index[other]
        bits[index[other]] |= 1 << index[one]
    return bits


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


class _Search:
    """Units by number, in the order of first use; sets of units are bits of an int."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], arena: int, apart: Sequence[int]) -> None:
        self._names = names
        self._sizes = sizes
        self._arena = arena
        self._apart = apart
        # Of each unit: (used since its last use, used just before) -> how often; the first use has all bits.
        self._gaps: list[Counter[tuple[int, int]]] = [Counter() for _ in names]
        self._gather_weight = self._exposed_weight = 1
        self._tries = 0

    def read(self, uses: Sequence[str], ahead: bool, stays: Sequence[bool] | None) -> None:
        """Look once at the order."""
        index = {name: i for i, name in enumerate(self._names)}
        everything = (1 << len(self._names)) - 1
        recent: list[int] = []  # the last one used at the end
        stay = dict.fromkeys(range(len(self._names)), False)  # nothing is there at first
        for at, name in enumerate(uses):
            unit = index[name]
            last = recent[-1] if recent else unit
            if last != unit or not stay[unit]:
                between = self._since(unit, recent) if stay[unit] else everything
                self._gaps[unit][between, 0 if last == unit else 1 << last] += 1
            if unit in recent:
                recent.remove(unit)
            recent.append(unit)
            stay[unit] = stays is None or stays[at]
        self._gather_weight, self._exposed_weight = (1, len(uses) + 1) if ahead else (_AGAINST_EXPOSED, 1)

    def _since(self, unit: int, recent: Sequence[int]) -> int:
        """Bits of those used since ``unit`` was."""
        bits = 0
        for other in reversed(recent):
            if other == unit:
                break
            bits |= 1 << other
        return bits

    def run(self) -> AddressAssignment:
        """The best placement found."""
        placements = [one for one in self._starts() if one is not None]
        if not placements:
            raise self._too_large()
        graded = sorted(
            (sum(self._costs(self._overlaps(one))), i, one) for i, one in enumerate(dict.fromkeys(placements))
        )
        best_cost, _, best = graded[0]
        if not self._beside_each_other(best):
            for _, _, start in graded[:_DESCENTS]:
                cost, placement = self._descend(list(start))
                if cost < best_cost:
                    best_cost, best = cost, tuple(placement)
        return self._result(best)

    def _beside_each_other(self, placement: Sequence[int]) -> bool:
        return not any(self._overlaps(placement))

    def _too_large(self) -> FsdpError:
        def chain(unit: int) -> int:
            return self._sizes[unit] + sum(self._sizes[other] for other in _members(self._apart[unit]))

        unit = max(range(len(self._names)), key=chain)
        return FsdpError(
            f"{self._names[unit]!r} and the units around or inside it have no place side by side in {self._arena} "
            f"bytes; together they are {chain(unit)}",
            unit=self._names[unit],
            op="gather",
        )

    # ---- what a placement costs

    def _overlaps(self, placement: Sequence[int]) -> list[int]:
        """By unit, the bits of those whose ranges overlap its own."""
        order = sorted((start, unit) for unit, start in enumerate(placement) if self._sizes[unit])
        found = [0] * len(placement)
        active: list[int] = []
        for start, unit in order:
            active = [other for other in active if placement[other] + self._sizes[other] > start]
            for other in active:
                found[unit] |= 1 << other
                found[other] |= 1 << unit
            active.append(unit)
        return found

    def _cost(self, unit: int, overlapping: int) -> int:
        self._tries += 1
        gathers = exposed = 0
        for (between, before), count in self._gaps[unit].items():
            if between & overlapping or between.bit_count() == len(self._names):
                gathers += count
                if before & overlapping:
                    exposed += count
        return self._sizes[unit] * (gathers * self._gather_weight + exposed * self._exposed_weight)

    def _costs(self, overlaps: Sequence[int]) -> list[int]:
        return [self._cost(unit, bits) for unit, bits in enumerate(overlaps)]

    def _result(self, placement: Sequence[int]) -> AddressAssignment:
        overlaps = self._overlaps(placement)
        gathers = nbytes = exposed = 0
        for unit, bits in enumerate(overlaps):
            for (between, before), count in self._gaps[unit].items():
                if between & bits or between.bit_count() == len(self._names):
                    gathers += count
                    nbytes += count * self._sizes[unit]
                    exposed += count if before & bits else 0
        end = max((start + self._sizes[unit] for unit, start in enumerate(placement)), default=0)
        return AddressAssignment(dict(zip(self._names, placement, strict=True)), end, gathers, nbytes, exposed)

    # ---- where to begin

    def _starts(self) -> Iterator[tuple[int, ...] | None]:
        """Regular placements: all in a ring; some side by side at the end of the arena and the others in a ring."""
        units = list(range(len(self._names)))
        yield self._pinned((), units, ring=False)  # each as far down as those it is kept apart from allow
        by_size = sorted(units, key=lambda unit: (self._sizes[unit], unit))
        for order in (units, units[::-1], by_size, by_size[::-1]):
            fits = self._pinnable(order)
            for count in sorted({0, fits // 2, fits - 2, fits - 1, fits}):
                if count >= 0:
                    yield self._pinned(order[:count], order[count:])

    def _pinnable(self, order: Sequence[int]) -> int:
        """How many of ``order`` leave room for the largest of the others."""
        left = self._arena
        for count, unit in enumerate(order):
            largest = max((self._sizes[other] for other in order[count:]), default=0)
            if left < largest:
                return max(count - 1, 0)
            left -= self._sizes[unit]
        return len(order) if left >= 0 else len(order) - 1

    def _pinned(self, pinned: Sequence[int], others: Sequence[int], *, ring: bool = True) -> tuple[int, ...] | None:
        placement = [-1] * len(self._names)
        end = self._arena
        for unit in pinned:
            end -= self._sizes[unit]
            placement[unit] = end
        if end < 0:
            return None
        cursor = 0
        for unit in sorted(others):
            start = self._fitting(unit, cursor, end, placement)
            if start is None:
                return None
            placement[unit] = start
            cursor = start + self._sizes[unit] if ring else 0
        return tuple(placement)

    def _fitting(self, unit: int, cursor: int, end: int, placement: Sequence[int]) -> int | None:
        """The first place from ``cursor`` on, then from 0, that touches none of those to keep apart."""
        placed = [other for other in _members(self._apart[unit]) if placement[other] >= 0]
        ends = sorted(placement[other] + self._sizes[other] for other in placed)
        for start in (cursor, *(one for one in ends if one > cursor), 0, *ends):
            if start + self._sizes[unit] <= end and all(
                not self._touch(unit, start, other, placement[other]) for other in placed
            ):
                return start
        return None

    def _touch(self, unit: int, start: int, other: int, begins: int) -> bool:
        return max(start, begins) < min(start + self._sizes[unit], begins + self._sizes[other])

    # ---- going down

    def _descend(self, placement: list[int]) -> tuple[int, list[int]]:
        self._tries = 0
        overlaps = self._overlaps(placement)
        costs = self._costs(overlaps)
        improved = True
        while improved and self._tries < _TRIES:
            improved = False
            for unit in range(len(placement)):
                if self._tries >= _TRIES:
                    break
                improved |= self._move(unit, placement, overlaps, costs)
            if not improved:
                improved = self._swap(placement, overlaps, costs)
        return sum(costs), placement

    def _move(self, unit: int, placement: list[int], overlaps: list[int], costs: list[int]) -> bool:
        """Take ``unit`` where it is cheapest; True if that is elsewhere."""
        if not overlaps[unit]:
            return False
        size = self._sizes[unit]
        places = {0, self._arena - size}
        for other, start in enumerate(placement):
            end = start + self._sizes[other]
            places.update((start, end, start - size, end - size))
        best, choice = 0, placement[unit]
        for start in sorted(places):
            if start != placement[unit] and 0 <= start <= self._arena - size:
                change = self._change(unit, start, placement, overlaps, costs)
                if change is not None and change < best:
                    best, choice = change, start
        if choice == placement[unit]:
            return False
        self._apply(unit, choice, placement, overlaps, costs)
        return True

    def _at(self, unit: int, start: int, placement: Sequence[int]) -> int:
        """Bits of those that ``unit`` would overlap at ``start``."""
        end, bits = start + self._sizes[unit], 0
        for other, begins in enumerate(placement):
            if max(start, begins) < min(end, begins + self._sizes[other]) and other != unit:
                bits |= 1 << other
        return bits

    def _change(
        self, unit: int, start: int, placement: Sequence[int], overlaps: Sequence[int], costs: Sequence[int]
    ) -> int | None:
        bits = self._at(unit, start, placement)
        if bits & self._apart[unit]:
            return None
        if bits == overlaps[unit]:
            return 0
        change = self._cost(unit, bits) - costs[unit]
        for other in _members(bits ^ overlaps[unit]):
            change += self._cost(other, overlaps[other] ^ (1 << unit)) - costs[other]
        return change

    def _apply(self, unit: int, start: int, placement: list[int], overlaps: list[int], costs: list[int]) -> None:
        bits = self._at(unit, start, placement)
        for other in _members(bits ^ overlaps[unit]):
            overlaps[other] ^= 1 << unit
            costs[other] = self._cost(other, overlaps[other])
        overlaps[unit] = bits
        costs[unit] = self._cost(unit, bits)
        placement[unit] = start

    def _swap(self, placement: list[int], overlaps: list[int], costs: list[int]) -> bool:
        """Exchange two units' places where that is cheaper; True at the first that is."""
        for one in range(len(placement)):
            for other in range(one + 1, len(placement)):
                if self._tries >= _TRIES:
                    return False
                mine, theirs = placement[one], placement[other]
                if mine == theirs or not (overlaps[one] or overlaps[other]):
                    continue
                if theirs + self._sizes[one] > self._arena or mine + self._sizes[other] > self._arena:
                    continue
                before = sum(costs)
                self._apply(one, theirs, placement, overlaps, costs)
                self._apply(other, mine, placement, overlaps, costs)
                legal = not (overlaps[one] & self._apart[one] or overlaps[other] & self._apart[other])
                if legal and sum(costs) < before:
                    return True
                self._apply(other, theirs, placement, overlaps, costs)
                self._apply(one, mine, placement, overlaps, costs)
        return False
