"""Lists of operations made by running the clock: each rank takes the first operation that can run.

    Shop, an order as priorities --> order (this file) --> tabu

Torch-free.
"""

from __future__ import annotations

from random import Random

from sixfold.pipeline.plan.shop import FORWARD, ROUNDING, Order, Shop

__all__ = ["greedy_order", "left_shifted"]

_WINDOW = 14  # operations of a rank that may overtake one that waits


def left_shifted(shop: Shop, order: Order) -> Order | None:
    """``order`` with its gaps filled by operations from further down each list, within the cap.

    A rank runs the first operation of its list whose input is there; if none is there, the one that comes
    first. An F overtakes only if the F's it overtakes still find room. None if the lists hang.
    """
    rows = [list(row) for row in order]
    clock = _Clock(shop)
    while (rank := clock.next_rank(rows)) is not None:
        now, row = clock.free[rank], rows[rank]
        best: tuple[float, int, int] | None = None
        overtaken = most = 0.0  # activations that the overtaken operations add, in all and at their worst
        for position, operation in enumerate(row[:_WINDOW]):
            memory = shop.memory[operation]
            arrival = clock.arrival(operation)
            fits = memory <= 0 or clock.held[rank] + memory + most <= shop.memory_cap
            overtaken += memory
            most = max(most, overtaken)
            if arrival is None or not fits:
                continue
            start = max(arrival, now)
            if best is None or start < best[0] - ROUNDING:
                best = (start, position, operation)
            if start <= now:
                break
        if best is None or clock.someone_may_come(rank, best[0], rows):
            clock.blocked[rank] = True
            continue
        clock.run(best[2], rank, best[0])
        del row[best[1]]
    return clock.order if not any(rows) else None


def greedy_order(shop: Shop, random: Random) -> Order | None:
    """List scheduling under random rules: what comes first among F, I and W, and how long a gap W may not fill.

    A rank never starts an F after which it could not finish the microbatches it has begun, so that this
    order exists under every cap that any order fits.
    """
    priority = (random.uniform(0.0, 2.0), random.uniform(0.5, 2.5), random.uniform(-1.5, 0.5))
    slope = (random.uniform(-1.0, 2.0), random.uniform(-1.0, 1.0), 0.0)
    patience = random.choice((0.0, 0.25, 0.5, 1.0, 10.0))  # waiting, in durations of what is waited for
    noise = random.choice((0.0, 0.0, 0.2, 0.6))
    eager_to_free = random.choice((0.0, 1.0, 2.0))

    def worth(operation: int, rank: int, wait: float) -> float:
        kind, stage, _ = shop.name(operation)
        if wait > patience * shop.duration[operation]:
            return -50.0 - wait
        full = kind == 2 and clock.held[rank] + shop.activation[stage] / 2 >= shop.memory_cap
        return (
            priority[kind]
            + slope[kind] * stage / shop.stages
            + noise * random.random()
            + (eager_to_free if full else 0.0)
        )

    clock = _Clock(shop)
    left = [[0] * (3 * shop.microbatches * len(own)) for own in shop.stages_of]  # only their lengths matter
    while (rank := clock.next_rank(left)) is not None:
        choices = clock.choices(rank)
        if choices:
            # What starts after another choice could have ended would leave a gap that the other one fills.
            done = min(start + shop.duration[operation] for start, operation in choices)
            now, earliest = clock.free[rank], min(start for start, _ in choices)
            start, operation = max(
                ((start, operation) for start, operation in choices if start < done or start <= earliest),
                key=lambda choice: worth(choice[1], rank, choice[0] - now),
            )
        if not choices or clock.someone_may_come(rank, start, left):
            clock.blocked[rank] = True
            continue
        clock.run(operation, rank, start)
        left[rank].pop()
    return clock.order if not any(left) else None


class _Clock:
    """The state of a step that is being run: what has ended, what each rank holds, who waits."""

    def __init__(self, shop: Shop) -> None:
        self.shop = shop
        self.free, self.held = [0.0] * shop.ranks, [0.0] * shop.ranks
        self.blocked = [False] * shop.ranks
        self.forced = False
        self.order: Order = [[] for _ in range(shop.ranks)]
        self._end: list[float | None] = [None] * shop.size
        self._next = [0] * (3 * shop.stages)  # microbatch that each line (kind * stages + stage) runs next

    def next_rank(self, left: list[list[int]]) -> int | None:
        """The rank that is free first; None when all are done, or none can go on."""
        while True:
            ranks = [rank for rank, row in enumerate(left) if row and not self.blocked[rank]]
            if ranks:
                return min(ranks, key=self.free.__getitem__)
            if self.forced or not any(left):
                return None
            # All wait to see what the others do: now each takes the best it has.
            self.forced = True
            self.blocked = [False] * self.shop.ranks

    def someone_may_come(self, rank: int, start: float, left: list[list[int]]) -> bool:
        """Whether ``rank`` would idle until ``start`` while another rank may still make something for it."""
        if start <= self.free[rank] or self.forced:
            return False
        others = (r for r, row in enumerate(left) if row and r != rank and not self.blocked[r])
        return any(self.free[other] < start for other in others)

    def arrival(self, operation: int) -> float | None:
        """When its input is there; None while nobody knows, or its turn in its stage has not come."""
        shop = self.shop
        line, microbatch = divmod(operation, shop.microbatches)
        if self._next[line] != microbatch:
            return None
        if line >= shop.stages and self._next[line - shop.stages] <= microbatch:
            return None
        source = shop.source[operation]
        if source < 0:
            return 0.0
        end = self._end[source]
        return None if end is None else end + shop.lag[operation]

    def choices(self, rank: int) -> list[tuple[float, int]]:
        """(start, operation) of everything that ``rank`` could run next without endangering its oldest microbatch."""
        shop, now = self.shop, self.free[rank]
        found = []
        for stage in shop.stages_of[rank]:
            for kind in range(3):
                line = kind * shop.stages + stage
                if self._next[line] == shop.microbatches:
                    continue
                operation = line * shop.microbatches + self._next[line]
                arrival = self.arrival(operation)
                if arrival is None:
                    continue
                if kind == FORWARD and not self._safe(rank, stage):
                    continue
                found.append((max(arrival, now), operation))
        return found

    def _safe(self, rank: int, stage: int) -> bool:
        """Whether, after the next F of ``stage``, the rank can still finish its microbatches, the oldest first.

        The banker's question: each in turn gets the activations it lacks and then gives back all that it holds.
        """
        shop, lines = self.shop, self.shop.stages
        own = shop.stages_of[rank]
        room = shop.memory_cap - self.held[rank] - shop.activation[stage]
        if room >= sum(shop.activation[s] for s in own):
            return True
        if room < 0:
            return False
        begun = {s: self._next[s] + (s == stage) for s in own}
        for microbatch in range(min(self._next[2 * lines + s] for s in own), max(begun.values())):
            lacks = sum(shop.activation[s] for s in own if begun[s] <= microbatch)
            if lacks > room:
                return False
            for s in own:
                if self._next[2 * lines + s] <= microbatch < begun[s]:
                    freed = shop.memory[(lines + s) * shop.microbatches] if self._next[lines + s] > microbatch else 0.0
                    room += shop.activation[s] + freed
        return True

    def run(self, operation: int, rank: int, start: float) -> None:
        self.free[rank] = end = start + self.shop.duration[operation]
        self._end[operation] = end
        self.held[rank] += self.shop.memory[operation]
        self.order[rank].append(operation)
        self._next[operation // self.shop.microbatches] += 1
        self.blocked = [False] * self.shop.ranks
        self.forced = False
