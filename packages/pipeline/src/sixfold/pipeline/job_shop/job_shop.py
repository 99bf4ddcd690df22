"""A pipeline step as a job shop: ranks are machines, F, I and W are operations.

    Costs, placement --> JobShop, and a Run of it (this file) --> list_scheduling, plan/* --> Program

Torch-free. What runs operations on paper is here alone. ``JobShop.play`` takes each rank's list as it is. ``Run`` asks
for the next operation of a rank whenever one could begin. An operation is the number ``(kind * stages + stage) * m +
microbatch``, with kind 0, 1, 2 for F, I, W. With small integers a search looks at thousands of orders in a second of
plain Python. An order is one list of operations per rank; it is *right* if every stage takes its F's, I's and W's in
ascending microbatch order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.memory import with_rounding

__all__ = ["FORWARD", "INPUT", "ROUNDING", "WAIT", "WEIGHT", "JobShop", "Order", "Run", "Times"]

Order = list[list[int]]
FORWARD, INPUT, WEIGHT = 0, 1, 2
WAIT = -1  # instead of an operation
ROUNDING = 1e-9  # of sums of times
_OFTEN = 1024  # operations between two looks at the clock


class Times(NamedTuple):
    """When the operations of an order run, and one order of all of them in which inputs come first."""

    makespan: float
    start: list[float]
    end: list[float]
    sequence: list[int]


class JobShop:
    """Durations, inputs and memory of every operation of one step.

    Attributes, each a list over operations unless another length is given:
        duration, rank: of the operation.
        source: the operation whose tensor it takes, -1 for none; ``lag``: time of that message.
        user: the operation that takes its tensor, -1 for none.
        memory: what running it adds to its rank's activations; an I's is more than 0 where ``Costs.deferred`` is.
        work (per rank): sum of durations; ``whole``: the most that it holds of a microbatch that
            runs alone, so the least that it can hold at its fullest.
        costs: what all these were taken from.
        fused: whether I stands for the whole backward, B, and W for nothing; ``grows``: whether some I adds memory.
        stages_of (per rank), activation (per stage), placement (per stage).
    """

    def __init__(
        self, costs: Costs, placement: Sequence[int], microbatches: int, memory_cap: float, *, fused: bool = False
    ) -> None:
        stages = len(placement)
        self.costs, self.fused = costs, fused
        self.placement, self.stages, self.microbatches = tuple(placement), stages, microbatches
        self.ranks = max(placement) + 1
        self.memory_cap = with_rounding(memory_cap)
        self.stages_of = [[s for s in range(stages) if placement[s] == rank] for rank in range(self.ranks)]
        activation = costs.activation
        self.activation = (
            [float(size) for size in activation]
            if activation is not None
            else [1.0 / len(self.stages_of[rank]) for rank in placement]
        )
        durations = (costs.forward, costs.backward_input, costs.backward_weight)
        adds = _added(costs, self.activation)
        if fused:
            both = [i + w for i, w in zip(costs.backward_input, costs.backward_weight, strict=True)]
            durations = (costs.forward, both, [0.0] * stages)
            adds = (self.activation, [-size for size in self.activation], [0.0] * stages)
        self.grows = max(adds[INPUT]) > 0
        self.whole = [_whole(own, *adds) for own in self.stages_of]
        self.size = 3 * stages * microbatches
        self.duration = [float(row[s]) for row in durations for s in range(stages) for _ in range(microbatches)]
        self.rank = [placement[s] for _ in durations for s in range(stages) for _ in range(microbatches)]
        self.memory = [size for row in adds for size in row for _ in range(microbatches)]
        self.source, self.user, self.lag = [-1] * self.size, [-1] * self.size, [0.0] * self.size
        for operation in range(2 * stages * microbatches):
            kind, stage, microbatch = self.name(operation)
            if kind == FORWARD and stage > 0:
                source = operation - microbatches
            elif kind == INPUT:
                last = stage == stages - 1
                source = stage * microbatches + microbatch if last else operation + microbatches
            else:
                continue
            self.source[operation], self.user[source] = source, operation
            self.lag[operation] = costs.between(self.rank[source], self.rank[operation])
        self.work = [sum(row[s] for row in durations for s in own) * microbatches for own in self.stages_of]

    def name(self, operation: int) -> tuple[int, int, int]:
        """(kind, stage, microbatch) of an operation."""
        line, microbatch = divmod(operation, self.microbatches)
        kind, stage = divmod(line, self.stages)
        return kind, stage, microbatch

    def bound_together(self, first: int, second: int) -> bool:
        """Whether ``first``, which runs before ``second`` on the same rank, must stay before it."""
        line, microbatch = divmod(first, self.microbatches)
        other_line, other = divmod(second, self.microbatches)
        return (other_line - line) % self.stages == 0 and other_line >= line and other >= microbatch

    def fits(self, order: Order) -> bool:
        """Whether no rank holds more than the cap."""
        for row in order:
            held = 0.0
            for operation in row:
                held += self.memory[operation]
                if held > self.memory_cap:
                    return False
        return True

    def peak(self, order: Order) -> float:
        """The most that any rank holds."""
        return max(max(accumulate(map(self.memory.__getitem__, row)), default=0.0) for row in order)

    def play(self, order: Order) -> Times | None:
        """Run every rank's list in order; None if the lists wait for each other."""
        source, lag, duration = self.source, self.lag, self.duration
        start, end = [-1.0] * self.size, [-1.0] * self.size
        free, at = [0.0] * self.ranks, [0] * self.ranks
        sequence: list[int] = []
        sleeper: dict[int, int] = {}  # operation -> the rank that waits for its tensor
        ready = list(range(self.ranks))
        while ready:
            rank = ready.pop()
            row, now, position = order[rank], free[rank], at[rank]
            for operation in row[position:]:
                needed = source[operation]
                if needed >= 0:
                    arrival = end[needed]
                    if arrival < 0:
                        sleeper[needed] = rank
                        break
                    arrival += lag[operation]
                    if arrival > now:
                        now = arrival
                start[operation] = now
                now += duration[operation]
                end[operation] = now
                sequence.append(operation)
                position += 1
                if operation in sleeper:
                    ready.append(sleeper.pop(operation))
            free[rank], at[rank] = now, position
        return Times(max(free), start, end, sequence) if len(sequence) == self.size else None

    def program(self, order: Order, times: Times | None = None, name: str = "planned") -> Program:
        """``order`` as a program; with ``times``, I and W are written as B wherever that delays nobody."""
        ranks = []
        for row in order:
            actions: list[Action] = []
            for operation in row:
                kind, stage, microbatch = self.name(operation)
                if self.fused and kind != FORWARD:
                    if kind == INPUT:
                        actions.append(Action(stage, Kind.B, microbatch))
                    continue
                fused = Action(stage, Kind.I, microbatch)
                if (
                    times is not None
                    and kind == WEIGHT
                    and actions
                    and actions[-1] == fused
                    and self._nobody_waits(operation, times)
                ):
                    actions[-1] = Action(stage, Kind.B, microbatch)
                else:
                    actions.append(Action(stage, (Kind.F, Kind.I, Kind.W)[kind], microbatch))
            ranks.append(tuple(actions))
        return Program(tuple(ranks), self.microbatches, self.placement, name)

    def _nobody_waits(self, weight: int, times: Times) -> bool:
        """Whether the input gradient may leave only when ``weight``, which follows it, has run."""
        user = self.user[weight - self.stages * self.microbatches]
        return user < 0 or times.end[weight] + self.lag[user] <= times.start[user] + ROUNDING


class Run:
    """A step that is being run by choice: what has begun, what each rank holds.

    Attributes:
        now: the moment at which a choice is asked for.
        free, held, order (per rank): when its last operation ends, its activations, what it began so far.
        turn (per line, which is kind * stages + stage): the microbatch that comes next there.
    """

    def __init__(self, shop: JobShop) -> None:
        self.shop = shop
        self.now = 0.0
        self.free, self.held = [0.0] * shop.ranks, [0.0] * shop.ranks
        self.order: Order = [[] for _ in range(shop.ranks)]
        self.turn = [0] * (3 * shop.stages)
        self._end = [-1.0] * shop.size
        self._moments = [(0.0, rank) for rank in range(shop.ranks)]

    def to_the_end(self, choose: Callable[[Run, int], int], go_on: Callable[[], bool] | None = None) -> Order | None:
        """Ask ``choose(run, rank)`` for an operation at each moment at which that rank could begin one.

        That is when it ends one and when an input comes. The operation is the next of its
        line with its input there, or WAIT.

        Args:
            go_on: asked now and then; the run ends when it says no.
        Returns:
            the order; None if everybody waits, or the run was ended.
        Cost: O(operations log ranks) and as many choices and one more per message.
        """
        shop, moments, free = self.shop, self._moments, self.free
        heapify(moments)
        left = shop.size
        while moments and left:
            moment = heappop(moments)
            now, rank = moment
            if now < free[rank] or (moments and moments[0] == moment):
                continue
            self.now = now
            operation = choose(self, rank)
            if operation == WAIT:
                continue
            left -= 1
            if go_on is not None and not left % _OFTEN and not go_on():
                return None
            self._end[operation] = free[rank] = end = now + shop.duration[operation]
            self.held[rank] += shop.memory[operation]
            self.order[rank].append(operation)
            self.turn[operation // shop.microbatches] += 1
            heappush(moments, (end, rank))
            user = shop.user[operation]
            if user >= 0 and shop.rank[user] != rank:
                arrival = end + shop.lag[user]
                heappush(moments, (max(arrival, free[shop.rank[user]]), shop.rank[user]))
        return self.order if not left else None

    def arrival(self, line: int) -> float | None:
        """When the input of the next operation of ``line`` is there; None if there is no next or nobody knows."""
        shop = self.shop
        microbatch = self.turn[line]
        if microbatch == shop.microbatches or (line >= shop.stages and self.turn[line - shop.stages] <= microbatch):
            return None
        operation = line * shop.microbatches + microbatch
        source = shop.source[operation]
        if source < 0:
            return 0.0
        end = self._end[source]
        return None if end < 0 else end + shop.lag[operation]

    def safe(self, line: int) -> bool:
        """Whether, after the next operation of ``line``, its rank can still finish its microbatches, the oldest first.

        The banker's question: each in turn gets the activations it lacks for its F's, then for each I with its W
        behind it, and has then given back all that it holds. A run that begins what is safe alone never hangs.
        """
        shop = self.shop
        s, m, memory = shop.stages, shop.microbatches, shop.memory
        kind, stage = divmod(line, s)
        rank = shop.placement[stage]
        own = shop.stages_of[rank]
        room = shop.memory_cap - self.held[rank] - memory[line * m]
        if room >= shop.whole[rank]:
            return True
        if room < 0:
            return False
        forward, inputs = (
            {t: self.turn[row * s + t] + (row == kind and t == stage) for t in own} for row in (FORWARD, INPUT)
        )
        weight = {t: self.turn[WEIGHT * s + t] for t in own}
        for microbatch in range(min(weight.values()), max(forward.values())):
            lacks = sum(shop.activation[t] for t in own if forward[t] <= microbatch)
            if lacks > room:
                return False
            room -= lacks
            room -= sum(memory[(2 * s + t) * m] for t in own if weight[t] <= microbatch < inputs[t])
            for t in reversed(own):
                if inputs[t] <= microbatch:
                    room -= memory[(s + t) * m]
                    if room < 0:
                        return False
                    room -= memory[(2 * s + t) * m]
        return True


def _added(costs: Costs, activation: Sequence[float]) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Per stage what F, I and W add to the activations of their rank."""
    late = costs.deferred if costs.deferred is not None else [0.0] * len(activation)
    return (
        activation,
        [more - costs.input_share * size for size, more in zip(activation, late, strict=True)],
        [-more - (1.0 - costs.input_share) * size for size, more in zip(activation, late, strict=True)],
    )


def _whole(own: Sequence[int], forward: Sequence[float], inputs: Sequence[float], weight: Sequence[float]) -> float:
    """The most that a rank with the stages ``own`` holds of one microbatch whose W's run as soon as they can."""
    peak = held = sum(forward[s] for s in own)
    for s in reversed(own):
        held += inputs[s]
        peak = max(peak, held)
        held += weight[s]
    return peak
