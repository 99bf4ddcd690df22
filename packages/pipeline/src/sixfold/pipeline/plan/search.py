"""Planning: the best schedule that a few seconds find for measured costs under a memory cap, and how far it can be off.

    Costs, ranks, m, cap --> placements --> many orders --> the best few improved (this file) --> Plan

Torch-free. [Note: search] Four makers of orders share the first part of the time: known schedules, random repeated
patterns, patterns found on few microbatches, random list scheduling. The best orders then run a knock-out of tabu
searches: half of the time for all, half of the rest for the better half, and so on. No single maker is good
everywhere: patterns win under tight caps, list scheduling with memory to spare, the known schedules when the search is
large.

[Note: deadline] The time that writing and simulating the result will take is kept back, measured by that of making the
shops. What is made is given up when the time for it is over. Nothing is left out because it might take too long: on a
busy machine such a guess is off by a factor. The shipped schedules come first, the quickest before those that are
themselves searched, of which those with split backwards are first: they are shorter.

[Note: deferred] Where an I adds memory (``Costs.deferred``) beyond what it frees, a program of B's alone fits caps that
no I does. So each placement is searched twice within a cap: with I's and W's, and with B's alone (``JobShop.fused``). A
shipped schedule that has both, I's and B's, is compared with the result at the end.

Where overlaps save time (``Costs.overlap`` < 1) the last third joins neighbours of the best orders into overlaps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Any, NamedTuple

from sixfold.pipeline import schedules
from sixfold.pipeline.errors import ScheduleError, number, whole
from sixfold.pipeline.job_shop.dispatch_rules import greedy_order, left_shifted
from sixfold.pipeline.job_shop.job_shop import JobShop, Order
from sixfold.pipeline.job_shop.list_scheduling import in_pattern
from sixfold.pipeline.job_shop.pattern_search import even_pattern, few_microbatches, repeated_orders
from sixfold.pipeline.job_shop.patterns import pattern_order
from sixfold.pipeline.job_shop.tabu_search import improved
from sixfold.pipeline.plan.bound import lower_bound, lower_bound_of_any
from sixfold.pipeline.plan.overlaps import overlapped
from sixfold.pipeline.plan.placements import placements_of
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.schedules.registry import Schedule
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.memory import with_rounding
from sixfold.pipeline.simulation.simulate import Timeline, simulate

__all__ = ["Plan", "plan", "plan_over"]

_PLACING = 0.1  # part of the time, at most, in which placements are looked for
_WRITING = 35.0  # times as long as making a shop takes to write the program and to simulate it
_LARGE = 6000  # operations of a step from which on orders of chance are patterns found on few microbatches alone
_MAKING = 0.4  # part of the time in which orders are made
_JOINING = 0.35  # part of it in which actions are joined into overlaps, where those save time
_PLAYERS = 6  # of the knock-out
_SEED = 20240515


@dataclass(frozen=True)
class Plan:
    """A schedule, its simulation, and what no other can beat.

    Attributes:
        program: placement and number of microbatches are in it.
        timeline: ``simulate(program, costs)``.
        lower_bound: no program has a smaller makespan under the same costs and cap, with RECOMPUTE and OVERLAP_F_B too.
            It holds on the placement that was given, or on any if none was.
        gap: makespan / lower_bound - 1. 0 proves that no program is shorter. More says how much shorter one could be at
            most, not that there is one.
    """

    program: Program
    timeline: Timeline
    lower_bound: float
    gap: float


def plan(
    costs: Costs,
    *,
    ranks: int,
    microbatches: int,
    memory_cap: float | None = None,
    placement: Sequence[int] | None = None,
    time_limit_s: float = 5.0,
) -> Plan:
    """Search a schedule for ``costs``: order, placement, and where weight gradients go.

    Args:
        costs: per stage; the number of stages is ranks times the chunks of a rank.
        memory_cap: most activations on any rank, in units of ``costs.activation``; None means no cap.
        placement: rank of each stage; None searches looped, wave, and any other map that could be better.
        time_limit_s: of wall time. The search looks first at the schedules of this package that have these ranks,
            microbatches and chunks and keep the cap. With time for them, the plan is never longer than any of them.
    Returns:
        the best schedule found; where ``costs.overlap`` is below one it may hold OVERLAP_F_Bs.
    Raises:
        ScheduleError: fewer stages than ranks, or a cap that no schedule can keep; it says the least
            that one can.
    """
    return plan_over(
        [(microbatches, costs)], ranks=ranks, memory_cap=memory_cap, placement=placement, time_limit_s=time_limit_s
    )


def plan_over(
    ways: Sequence[tuple[int, Costs]],
    *,
    ranks: int,
    memory_cap: float | None = None,
    placement: Sequence[int] | None = None,
    time_limit_s: float = 5.0,
) -> Plan:
    """Plan one batch that can be cut in several ways: into more or fewer microbatches, and stages.

    Args:
        ways: (microbatches, costs of one microbatch per stage) for each way; all are the same batch and model, so
            that their makespans compare. More stages than ranks are virtual stages.
        placement, memory_cap, time_limit_s: as in ``plan``; ``placement`` needs ways with as many stages as it has.
    Raises:
        ScheduleError: as ``plan``; a way that does not fit the cap is left out unless none fits.
    """
    if not ways:
        raise ScheduleError("ways is empty; give the microbatches and costs of one at least")
    ranks = whole("ranks", ranks, least=1)
    ways = [(whole("microbatches", microbatches, least=1), costs) for microbatches, costs in ways]
    time_limit_s = number("time_limit_s", time_limit_s)
    if not (math.isfinite(time_limit_s) and time_limit_s > 0):
        raise ScheduleError(f"time_limit_s is {time_limit_s}; it is finite and > 0")
    cap = math.inf if memory_cap is None else number("memory_cap", memory_cap)
    if math.isnan(cap):
        raise ScheduleError("memory_cap is nan; it is a number, or None for no cap")
    unit = _unit(ways, ranks)
    random = Random(_SEED)
    began = time.perf_counter()
    shops = _shops(ways, unit, ranks, cap, placement, random, _until(began + _PLACING * time_limit_s))
    # [Note: deadline]
    per_operation = min(entry.made_in_s / entry.shop.size for entry in shops)  # the least: it was not interrupted
    writing = _WRITING * per_operation * max(entry.shop.size for entry in shops)
    deadline = began + time_limit_s - min(0.5 * time_limit_s, writing)
    left = max(1e-9, deadline - time.perf_counter())
    joining = _JOINING * left if any(entry.costs.overlap < 1.0 for entry in shops) else 0.0
    players = _best(shops, deadline - joining, left - joining, random)
    program, costs = _joined(shops, players, deadline, random) if joining else _program(players[0])
    timeline = simulate(program, costs)
    if any(entry.shop.grows for entry in shops):
        program, costs, timeline = _with_mixed(shops, cap, program, costs, timeline, deadline)
    if placement is None:
        counted = ((m, _in_units(costs, unit, ranks)) for m, costs in ways)
        bound = min(lower_bound_of_any(costs, ranks, m, cap) for m, costs in counted) * unit
    else:
        bound = min(entry.bound for entry in shops) * unit
    assert bound <= timeline.makespan * (1 + 1e-9), f"{timeline.makespan} is below the bound {bound}"
    bound = min(bound, timeline.makespan)  # both are sums of the same times; in another order their last bits differ
    return Plan(program, timeline, bound, timeline.makespan / bound - 1.0 if bound else 0.0)


# ---- what is searched


class _Entry(NamedTuple):
    shop: JobShop
    costs: Costs
    bound: float
    made_in_s: float


class _Player(NamedTuple):
    makespan: float
    entry: _Entry
    order: Order


class _Joined(NamedTuple):
    makespan: float
    program: Program
    entry: _Entry


def _unit(ways: Sequence[tuple[int, Costs]], ranks: int) -> float:
    """About the longest time in the costs, in which the search counts: costs may be in nanoseconds or in hours.

    A power of two, so that a time in units is exact.
    """
    longest = max(max((*c.forward, *c.backward_input, *c.backward_weight, *chain(*c.hops(ranks)))) for _, c in ways)
    return math.ldexp(1.0, math.frexp(longest)[1] - 1)


def _in_units(costs: Costs, unit: float, ranks: int) -> Costs:
    names = ("forward", "backward_input", "backward_weight", "step", "unshard", "reduce")
    rows = {name: row for name in names if (row := getattr(costs, name)) is not None}
    counted: dict[str, Any] = {name: [time / unit for time in row] for name, row in rows.items()}
    return replace(costs, hop=[[time / unit for time in row] for row in costs.hops(ranks)], **counted)


def _shops(
    ways: Sequence[tuple[int, Costs]],
    unit: float,
    ranks: int,
    cap: float,
    placement: Sequence[int] | None,
    random: Random,
    go_on: Callable[[], bool],
) -> list[_Entry]:
    """Every way with every placement that fits the cap, the most promising first; times in units."""
    fitting, least = [], math.inf
    for microbatches, costs in ways:
        counted = _in_units(costs, unit, ranks)
        if placement is not None:
            places = [_given(placement, len(costs.forward), ranks)]
        else:
            places = placements_of(counted, ranks, microbatches, cap, random, go_on)
        for place in places:
            bound = lower_bound(counted, place, microbatches, cap)
            for fused in (False, True):
                began = time.perf_counter()
                shop = JobShop(counted, place, microbatches, cap, fused=fused)
                least = min(least, max(shop.whole))
                if max(shop.whole) <= shop.memory_cap:
                    fitting.append(_Entry(shop, costs, bound, time.perf_counter() - began))
                if not shop.grows or cap == math.inf:
                    break  # [Note: deferred]
    if not fitting:
        raise ScheduleError(
            f"memory_cap is {cap:.12g}; the least that any schedule needs is {least:.12g} of activations "
            "(plans recompute nothing)"
        )
    return sorted(fitting, key=lambda entry: entry.bound)


def _given(placement: Sequence[int], stages: int, ranks: int) -> tuple[int, ...]:
    placement = [whole(f"placement[{stage}]", rank) for stage, rank in enumerate(placement)]
    if len(placement) != stages or set(placement) != set(range(ranks)):
        raise ScheduleError(
            f"placement has {len(placement)} stages on ranks {sorted(set(placement))}; "
            f"the costs have {stages} stages and ranks are 0..{ranks - 1}, each with one at least"
        )
    return tuple(placement)


# ---- the search


def _best(entries: list[_Entry], deadline: float, time_limit_s: float, random: Random) -> list[_Player]:
    """The players of the knock-out's last turns, the best first; overlaps are not looked at."""
    players = _made(entries, deadline - (1.0 - _MAKING) * time_limit_s, deadline, random)
    enough = min(entry.bound for entry in entries)
    while players[0].makespan > enough * (1 + 1e-12):
        # A start whose placement provably ends later than the best so far is out.
        players = [p for p in players if p is players[0] or p.entry.bound < players[0].makespan * (1 - 1e-12)]
        share = (deadline - time.perf_counter()) / (2 if len(players) > 1 else 1) / len(players)
        if share <= 0:
            break
        better = []
        for player in players:
            entry = player.entry
            go_on = _until(time.perf_counter() + share)
            makespan, order = improved(entry.shop, player.order, entry.bound, random, go_on)
            better.append(_Player(makespan, entry, order))
        alone = len(players) == 1
        players = sorted(better, key=lambda player: player.makespan)[: max(1, len(players) // 2)]
        if alone:
            break
    return players


def _program(player: _Player) -> tuple[Program, Costs]:
    shop = player.entry.shop
    times = shop.play(player.order)
    assert times is not None, "the best order runs"
    return shop.program(player.order, times), player.entry.costs


def _joined(entries: list[_Entry], players: list[_Player], deadline: float, random: Random) -> tuple[Program, Costs]:
    """The shortest program with overlaps that is found from the players' orders and the known schedules."""
    enough = min(entry.bound for entry in entries)
    starts = [_timed(_program(player)[0], player.entry) for player in players]
    best = min(starts, key=_makespan)
    for entry in entries:
        for program in chain(*(_known(entry.shop, searched, _until(deadline)) for searched in (False, True))):
            if entry.bound >= best.makespan or time.perf_counter() > deadline:
                break
            if program is not None and entry.shop.fits(_order_of(program, entry.shop)):
                starts.append(_timed(program, entry))
                best = min(best, starts[-1], key=_makespan)
    for left, start in zip(range(len(starts), 0, -1), sorted(starts, key=_makespan), strict=True):
        now = time.perf_counter()
        if now >= deadline:
            break
        go_on = _until(now + (deadline - now) / left)
        makespan, program = overlapped(start.program, start.entry.shop.costs, enough, random, go_on)
        best = min(best, _Joined(makespan, program, start.entry), key=_makespan)
    return best.program, best.entry.costs


def _timed(program: Program, entry: _Entry) -> _Joined:
    return _Joined(simulate(program, entry.shop.costs).makespan, program, entry)


def _makespan(joined: _Joined) -> float:
    return joined.makespan


def _until(stop: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() < stop


def _made(entries: list[_Entry], deadline: float, last: float, random: Random) -> list[_Player]:
    """The best starts with different makespans, ascending.

    Args:
        deadline: for orders of chance; known schedules are looked at until ``last``, and one order in any case.
    """
    found: dict[tuple[int, float], _Player] = {}
    best = math.inf
    makers = deque((at, entry, _orders(entry, random, deadline, last)) for at, entry in enumerate(entries))
    enough = min(entry.bound for entry in entries)
    turns = [2 + len(_known_schedules(entry.shop)) for entry in entries]  # that each has until all known were looked at
    while makers and best > enough * (1 + 1e-12):
        if found and time.perf_counter() >= (last if max(turns) > 0 else deadline):
            break
        at, entry, orders = maker = makers.popleft()
        turns[at] -= 1
        if entry.bound >= best:
            turns[at] = 0
            continue
        makers.append(maker)  # they take turns
        order = next(orders)
        if order is None or not entry.shop.fits(order) or (times := entry.shop.play(order)) is None:
            continue
        best = min(best, times.makespan)
        # The latest of equally long ones: random orders leave more room to improve than known schedules.
        found[at, round(times.makespan, 9)] = _Player(times.makespan, entry, order)
        if len(found) > _PLAYERS:
            del found[max(found, key=lambda key: found[key].makespan)]
    return sorted(found.values(), key=lambda player: player.makespan)


def _orders(entry: _Entry, random: Random, deadline: float, last: float) -> Iterator[Order | None]:
    """Orders without end: the known schedules, one that fits every cap, then patterns and list schedules in turn.

    None where a maker failed, so that the caller can look at its clock. What takes little time comes first: the
    first orders are all that a large step has time for.
    """
    shop, go_on = entry.shop, _until(deadline)
    known: list[Order] = []
    for searched in (False, True):
        for program in _known(shop, searched, _until(last)):
            order = None if program is None else _order_of(program, shop)
            known += [] if order is None else [order]
            yield order
        if not searched:
            yield in_pattern(shop, even_pattern(shop), _until(last))
    yield _one_microbatch_at_a_time(shop)
    few = few_microbatches(shop.ranks, shop.microbatches)
    small = shop
    if few < shop.microbatches:
        small = JobShop(shop.costs, shop.placement, few, shop.memory_cap, fused=shop.fused)
    repeated = repeated_orders(shop, small, random, go_on)
    if shop.size >= _LARGE:
        yield from repeated
    for order in known:
        yield left_shifted(shop, order, go_on)
    while True:
        for maker in (pattern_order, pattern_order, greedy_order):
            made = maker(shop, random) if maker is pattern_order else greedy_order(shop, random, go_on)
            yield made
            if made is not None and maker is pattern_order:
                yield left_shifted(shop, made, go_on)
        yield next(repeated)


def _one_microbatch_at_a_time(shop: JobShop) -> Order:
    rows: Order = [[] for _ in range(shop.ranks)]
    for microbatch in range(shop.microbatches):
        for line in (
            *range(shop.stages),
            *(line for s in reversed(range(shop.stages)) for line in (shop.stages + s, 2 * shop.stages + s)),
        ):
            rows[shop.placement[line % shop.stages]].append(line * shop.microbatches + microbatch)
    return rows


def _known(shop: JobShop, searched: bool, go_on: Callable[[], bool]) -> Iterator[Program | None]:
    """The schedules of this package that have the shop's placement and are themselves searched, or are not.

    None for one that was not done when ``go_on()`` said no.
    """
    ranks, chunks = shop.ranks, shop.stages // shop.ranks
    for entry in _known_schedules(shop):
        if entry.search is None and not searched:
            yield entry.with_chunks(ranks, shop.microbatches, chunks)
        elif entry.search is not None and searched:
            yield entry.search(ranks, shop.microbatches, **(entry.arguments_for(chunks) or {}), go_on=go_on)


def _known_schedules(shop: JobShop) -> list[Schedule]:
    ranks, chunks = shop.ranks, shop.stages // shop.ranks
    known = [entry for entry in schedules.registered() if entry.flushed and entry.arguments_for(chunks) is not None]
    known = [entry for entry in known if entry.placement(ranks, chunks) == shop.placement]
    known = [entry for entry in known if not (shop.fused and entry.split)]
    return sorted(known, key=lambda entry: not entry.split)


def _with_mixed(
    entries: list[_Entry], cap: float, program: Program, costs: Costs, timeline: Timeline, deadline: float
) -> tuple[Program, Costs, Timeline]:
    """The given program, or a shorter shipped one that keeps the cap with both I's and B's: [Note: deferred]."""
    for entry in entries:
        shop = entry.shop
        for known in () if shop.fused else _known_schedules(shop):
            if not known.split or known.search is not None or time.perf_counter() > deadline:
                continue
            other = known.with_chunks(shop.ranks, shop.microbatches, shop.stages // shop.ranks)
            found = simulate(other, entry.costs)
            if found.makespan < timeline.makespan and max(found.peak_activations) <= with_rounding(cap):
                program, costs, timeline = other, entry.costs, found
    return program, costs, timeline


def _order_of(program: Program, shop: JobShop) -> Order:
    """A compute-only program as an order; B becomes I and W."""

    def operations(action: Action) -> Iterator[int]:
        assert action.microbatch is not None, "compute actions have a microbatch"
        kinds = {Kind.F: (0,), Kind.I: (1,), Kind.W: (2,), Kind.B: (1, 2)}[action.kind]
        for kind in kinds:
            yield (kind * shop.stages + action.stage) * shop.microbatches + action.microbatch

    return [[o for entry in row for action in entry.each() for o in operations(action)] for row in program.ranks]
