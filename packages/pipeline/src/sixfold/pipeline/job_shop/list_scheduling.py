"""List scheduling: whenever a rank is free it begins the operation whose turn in a pattern comes first.

    JobShop, Pattern --> order of each rank, the best of several (this file) --> hanayo, v_half, v_min, plan

Torch-free. A pattern says when microbatch 0 would begin each F and I if nothing stood in the way, and after which
period the next microbatch follows ("building block" in Qi et al., arXiv 2405.15362). Here its times are turns only:
what can run runs, the earliest turn first, so that warm-up and drain fill up by themselves and the steady
state falls into the pattern. Microbatches pass each stage in ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sixfold.pipeline.errors import ScheduleError, number
from sixfold.pipeline.job_shop.job_shop import ROUNDING, WAIT, JobShop, Order, Run
from sixfold.pipeline.program.placement import vee
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.simulation.costs import Costs

__all__ = ["Pattern", "Try", "best_v", "in_pattern", "pattern_of_chain", "room_for_one"]

# What an order is judged by: times of F, I and W of a rank's whole share, and of a message.
_EQUAL, _UNEQUAL = (1.0, 1.0, 1.0, 0.0), (1.0, 1.6, 0.6, 0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """Turns of the operations of one microbatch, and of the next ones a ``period`` later each.

    Attributes:
        begin: of each F and I by line (kind * stages + stage), in the shop's unit of time.
        period: 0 means that turns say what is preferred, whatever the microbatch.
        weight_after: from the turn of an I to that of its W; infinite: W's run where nothing else can, or where a
            forward has no room until one has run; minus infinite: at once.
        entry, burst: while a rank holds something, the k-th microbatch enters it at ``entry * k - burst`` at the
            earliest, if the rank comes free then.
    """

    begin: Sequence[float]
    period: float
    weight_after: float = math.inf
    entry: float = 0.0
    burst: float = 0.0


def pattern_of_chain(
    shop: JobShop, steps: Sequence[float], gaps: Sequence[float], *, period: float, **more: float
) -> Pattern:
    """The pattern in which each stage of a row (stages 0..p-1, p..2p-1, ...) begins a step after the one before it.

    Args:
        steps: of each row of F's, then of each row of I's in their order, last row first.
        gaps: from one row's last turn to the next one's first, beside the duration: one fewer than steps.
        more: as the attributes of Pattern.
    """
    ranks, stages = shop.ranks, shop.stages
    begin = [0.0] * (2 * stages)
    now = 0.0
    chain = (*range(stages), *reversed(range(stages, 2 * stages)))
    for at, line in enumerate(chain):
        row, place = divmod(at, ranks)
        if at and place:
            now += steps[row]
        elif at:
            now += shop.duration[chain[at - 1] * shop.microbatches] + gaps[row - 1]
        begin[line] = now
    return Pattern(begin=begin, period=period, **more)


Try = tuple[tuple[float, float, float, float], tuple[float, float, float], float]  # steps, gaps, entry in periods


def best_v(
    ranks: int,
    microbatches: int,
    tries: Sequence[Try],
    cap: float,
    memory_cap: float | None,
    name: str,
    go_on: Callable[[], bool] | None = None,
) -> Program | None:
    """Of several patterns of a V the order that is shortest at F = I = W; of equally short ones at 1 : 1.6 : 0.6.

    Args:
        tries: steps and gaps of the rows (first chunk's F, second's F, second's I, first's I) in durations, and the
            pace at which microbatches enter after the first burst.
        cap: microbatches that a rank may hold; ``memory_cap`` is the caller's, which goes before.
        go_on: asked now and then.
    Returns:
        None only if ``go_on()`` said no.
    Raises:
        ScheduleError: ``memory_cap`` is less than one microbatch.
    Cost: every pattern for at most 3 p microbatches, and the best again for all.
    """
    if memory_cap is not None:
        cap = room_for_one(memory_cap)

    def made(shop: JobShop, one: Try) -> Order | None:
        steps, gaps, entry = one
        unit = 0.5  # of any operation here
        pattern = pattern_of_chain(
            shop,
            [unit * step for step in steps],
            [unit * gap for gap in gaps],
            period=6 * unit,
            entry=6 * unit * entry,
            burst=ranks * unit,
        )
        return in_pattern(shop, pattern, go_on)

    few = min(microbatches, 3 * ranks)
    shop, unequal = (_shop(ranks, few, cap, times) for times in (_EQUAL, _UNEQUAL))
    found: list[tuple[list[float], int, Order]] = []
    for at, one in enumerate(tries):
        if (order := made(shop, one)) is None:
            return None
        lengths = [times.makespan for judge in (shop, unequal) if (times := judge.play(order)) is not None]
        found.append((lengths, at, order))
    _, at, best = min(found)
    if few == microbatches:
        return shop.program(best, name=name)
    shop = _shop(ranks, microbatches, cap, _EQUAL)
    order = made(shop, tries[at])
    return None if order is None else shop.program(order, name=name)


def room_for_one(memory_cap: float) -> float:
    """``memory_cap`` as a number of microbatches.

    Raises:
        ScheduleError: it is no number, or less than one.
    """
    cap = number("memory_cap", memory_cap)
    if not cap >= 1.0:
        raise ScheduleError(f"memory_cap is {cap:.12g} microbatches; it is >= 1, since a rank holds one whole")
    return cap


def _shop(ranks: int, microbatches: int, cap: float, times: Sequence[float]) -> JobShop:
    """The job shop of a V whose ranks are all alike."""
    share = [0.5] * (2 * ranks)
    forward, backward_input, backward_weight, hop = times
    costs = Costs(
        [forward * s for s in share],
        [backward_input * s for s in share],
        [backward_weight * s for s in share],
        hop,
        activation=share,
    )
    return JobShop(costs, vee(ranks), microbatches, cap)


def in_pattern(shop: JobShop, pattern: Pattern, go_on: Callable[[], bool] | None = None) -> Order | None:
    """The order of every rank that takes turns as ``pattern`` says, within the cap.

    Args:
        go_on: asked now and then; nothing more is done when it says no.
    Returns:
        None only then, or if one microbatch alone does not fit the cap.
    Cost: O(operations * log ranks * stages of a rank): about 12 us per operation.

    [Note: room] A forward starts only if its microbatch's later stages on the rank would still fit, so that no choice
    ends in a deadlock. The last stage but one may take the last place if the rank holds something of its last stage:
    that comes back by itself, since each rank lets microbatches pass in order and backwards need no room. And it
    leaves room for every forward of a later stage whose turn came before its own: a microbatch that enters early
    must not stop one that is on its way. Where I's add memory (``JobShop.grows``) F and I start if that is safe
    (``Run.safe``).
    """
    return Run(shop).to_the_end(_Turns(shop, pattern), go_on)


class _Turns:
    """What each rank does next; called as ``choose`` of a Run."""

    def __init__(self, shop: JobShop, pattern: Pattern) -> None:
        self.shop, self.pattern = shop, pattern
        s = shop.stages
        lines = [[kind + stage for kind in (0, s) for stage in own] for own in shop.stages_of]
        self.rows = [sorted(own, key=pattern.begin.__getitem__) for own in lines]
        # later[stage]: stages of its rank behind it
        self.later = [[t for t in shop.stages_of[rank] if t > stage] for stage, rank in enumerate(shop.placement)]
        self.behind = [sum(shop.activation[t] for t in later) for later in self.later]

    def __call__(self, run: Run, rank: int) -> int:
        shop, pattern = self.shop, self.pattern
        m, stages, period = shop.microbatches, shop.stages, pattern.period
        limit = run.now + ROUNDING
        best, chosen, blocked = math.inf, WAIT, math.inf
        for line in self.rows[rank]:
            k = run.turn[line]
            turn = pattern.begin[line] + period * k
            if turn >= best:
                continue
            arrival = run.arrival(line)
            if arrival is None or arrival > limit:
                continue
            if line < stages:
                if line == 0 and run.held[rank] and pattern.entry * k - pattern.burst > limit:
                    continue
                if not (run.safe(line) if shop.grows else self._has_room(run, rank, line, turn)):
                    blocked = min(blocked, turn)
                    continue
            elif shop.grows and shop.memory[line * m] > 0 and not run.safe(line):
                blocked = min(blocked, turn)
                continue
            best, chosen = turn, line * m + k
        first, weight = math.inf, WAIT
        for stage in shop.stages_of[rank]:
            line = 2 * stages + stage
            k = run.turn[line]
            if run.turn[line - stages] > k:
                turn = pattern.begin[stages + stage] + period * k
                if turn < first:
                    first, weight = turn, line * m + k
        if weight != WAIT and (chosen == WAIT or min(blocked, first + pattern.weight_after) < best):
            return weight
        return chosen

    def _has_room(self, run: Run, rank: int, stage: int, turn: float) -> bool:
        """[Note: room]"""
        shop, pattern = self.shop, self.pattern
        room = shop.memory_cap - run.held[rank] - shop.activation[stage]
        later = self.later[stage]
        if not later:
            return room >= 0
        last = later[-1]
        deep = len(later) == 1 and run.turn[last] > run.turn[2 * shop.stages + last]
        if room < (0.0 if deep else self.behind[stage]):
            return False
        if pattern.period:
            for other in later:
                due = min(shop.microbatches, math.ceil((turn - pattern.begin[other]) / pattern.period - ROUNDING))
                if due > run.turn[other]:
                    room -= (due - run.turn[other]) * shop.activation[other]
            return room >= 0
        return True
