"""The planner: its schedules are right, its bound holds, and small searches find what exhaustive search proves."""

import itertools
import math
import random
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sixfold.pipeline import Action, Costs, Program, ScheduleError, schedules, simulate, verify
from sixfold.pipeline.job_shop.dispatch_rules import greedy_order, left_shifted
from sixfold.pipeline.job_shop.job_shop import JobShop
from sixfold.pipeline.job_shop.list_scheduling import in_pattern
from sixfold.pipeline.job_shop.pattern_search import even_pattern
from sixfold.pipeline.job_shop.patterns import pattern_order
from sixfold.pipeline.job_shop.tabu_search import improved
from sixfold.pipeline.plan import search
from sixfold.pipeline.plan.bound import least_memory, lower_bound, lower_bound_of_any
from sixfold.pipeline.plan.search import plan, plan_over
from sixfold.pipeline.program.placement import looped, wave


def random_costs(rng, stages):
    row = lambda: [rng.choice((0.5, 1.0, 1.0, 1.6, 2.0)) for _ in range(stages)]  # noqa: E731
    return Costs(
        row(), row(), row(), hop=rng.choice((0.0, 0.1, 0.5)), activation=[rng.choice((0.5, 1.0)) for _ in range(stages)]
    )


def exhaustive(costs, placement, microbatches, cap):
    """The shortest makespan over every order, by depth-first search with the rank's remaining work as bound.

    Actions of a rank start as early as they can; that loses no optimum, since only makespan counts.
    """
    stages, ranks = len(placement), max(placement) + 1
    duration = (costs.forward, costs.backward_input, costs.backward_weight)
    best = [math.inf]
    seen: dict[tuple, list[tuple[float, ...]]] = {}

    def search(done, free, held, ends):
        left = [
            sum(
                duration[k][s] * (microbatches - done[k][s])
                for k in range(3)
                for s in range(stages)
                if placement[s] == r
            )
            for r in range(ranks)
        ]
        if max(f + w for f, w in zip(free, left, strict=True)) >= best[0] - 1e-12:
            return
        if not any(left) and all(row == (microbatches,) * stages for row in done):
            best[0] = max(free)
            return
        pending = tuple(sorted(ends.items()))
        others = seen.setdefault(done, [])
        point = (*free, *(end for _, end in pending))
        if any(all(a <= b for a, b in zip(other, point, strict=True)) for other in others):
            return
        others.append(point)
        for kind in range(3):
            for stage in range(stages):
                number, rank = done[kind][stage], placement[stage]
                if number == microbatches or (kind and done[kind - 1][stage] <= number):
                    continue
                if kind == 0:
                    if held[rank] + costs.activation[stage] > cap + 1e-9:
                        continue
                    source = (0, stage - 1, number) if stage else None
                elif kind == 1:
                    source = (1, stage + 1, number) if stage < stages - 1 else None
                else:
                    source = None
                if source is not None and source not in ends:
                    continue
                start = free[rank]
                if source is not None:
                    start = max(start, ends[source] + (costs.hop if placement[source[1]] != rank else 0.0))
                end = start + duration[kind][stage]
                rows = [list(row) for row in done]
                rows[kind][stage] += 1
                change = (costs.activation[stage], 0.0, -costs.activation[stage])[kind]
                search(
                    tuple(map(tuple, rows)),
                    tuple(end if r == rank else f for r, f in enumerate(free)),
                    tuple(h + change if r == rank else h for r, h in enumerate(held)),
                    {**ends, (kind, stage, number): end} if kind < 2 else ends,
                )

    search(((0,) * stages,) * 3, (0.0,) * ranks, (0.0,) * ranks, {})
    return best[0]


SMALL = [(wave(2, 1), 2), (wave(2, 1), 3), (wave(3, 1), 2), (wave(2, 2), 1), (looped(2, 2), 1), (wave(2, 2), 2)]


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("placement", "microbatches"), SMALL)
def test_no_schedule_beats_the_bound_and_the_plan_is_the_exhaustive_optimum(placement, microbatches, seed):
    rng = random.Random(seed)
    costs = random_costs(rng, len(placement))
    least = least_memory(costs.activation, placement)
    cap = rng.choice((least, least + 0.5, least + 1.0, 100.0))
    optimum = exhaustive(costs, placement, microbatches, cap)
    assert lower_bound(costs, placement, microbatches, cap) <= optimum + 1e-9
    assert lower_bound_of_any(costs, max(placement) + 1, microbatches, cap) <= optimum + 1e-9

    # Moves are counted, not seconds: the result does not depend on the machine.
    shop, numbers = JobShop(costs, placement, microbatches, cap), random.Random(7)
    orders = [order for _ in range(20) for make in (greedy_order, pattern_order) if (order := make(shop, numbers))]
    starts = sorted((shop.play(order).makespan, order) for order in orders if shop.fits(order) and shop.play(order))
    found = math.inf
    for _, start in starts[:3]:
        moves = iter(range(300))
        found = min(
            found, improved(shop, start, optimum, numbers, lambda moves=moves: next(moves, None) is not None)[0]
        )
    assert found == pytest.approx(optimum)


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_a_valid_program_within_the_cap_with_microbatches_in_order(seed):
    rng = random.Random(seed)
    ranks, microbatches = rng.randint(1, 4), rng.randint(1, 6)
    costs = random_costs(rng, ranks * rng.choice((1, 2)))
    cap = rng.choice((2.0, 3.0, None)) or None
    found = plan(costs, ranks=ranks, microbatches=microbatches, memory_cap=cap, time_limit_s=0.05)
    report = verify(found.program, memory_cap=cap, costs=costs)
    assert max(report.peak_activations) <= (cap or math.inf) + 1e-9
    timeline = simulate(found.program, costs)
    assert timeline.makespan == found.timeline.makespan >= found.lower_bound - 1e-9
    assert found.gap == pytest.approx(found.timeline.makespan / found.lower_bound - 1)
    for row in found.program.ranks:
        for stage in found.program.stages_of(found.program.ranks.index(row)):
            for kinds in ("F", "IB", "WB"):
                numbers = [a.microbatch for a in row if a.stage == stage and a.kind.value in kinds]
                assert numbers == list(range(microbatches)), (stage, kinds)


@pytest.mark.parametrize("seed", range(10))
def test_the_search_plays_orders_as_simulate_does(seed):
    rng = random.Random(seed)
    placement = rng.choice((wave(3, 2), looped(3, 2), looped(3, 1), (0, 1, 1, 0, 2)))
    costs = random_costs(rng, len(placement))
    shop = JobShop(costs, placement, 4, 6.0)
    for make in (greedy_order, pattern_order, lambda shop, rng: left_shifted(shop, greedy_order(shop, rng))):
        order = make(shop, rng)
        if order is None:
            continue
        times = shop.play(order)
        assert simulate(shop.program(order, times), costs).makespan == pytest.approx(times.makespan)


@pytest.mark.parametrize("seed", range(10))
def test_greedy_orders_exist_under_the_least_cap(seed):
    rng = random.Random(seed)
    costs = random_costs(rng, 8)
    placement = rng.choice((wave(4, 2), looped(4, 2)))
    shop = JobShop(costs, placement, 5, least_memory(costs.activation, placement))
    order = greedy_order(shop, rng)
    assert order is not None and shop.fits(order)
    with pytest.raises(ScheduleError, match=r"memory_cap is .*; the least that any schedule needs is "):
        plan(
            costs,
            ranks=4,
            microbatches=5,
            memory_cap=least_memory(costs.activation, placement) - 0.01,
            placement=placement,
        )


@pytest.mark.parametrize("seed", range(12))
def test_stages_and_parts_that_take_no_time_can_be_planned(seed):
    rng = random.Random(seed)
    row = lambda: [rng.choice((0.0, 0.0, 1.0, 0.3)) for _ in range(4)]  # noqa: E731
    costs = Costs(row(), row(), row(), hop=rng.choice((0.0, 0.4)), activation=row(), input_share=rng.choice((0.0, 0.5)))
    found = plan(costs, ranks=2, microbatches=3, time_limit_s=0.03)
    assert found.timeline.makespan == pytest.approx(simulate(found.program, costs).makespan)
    assert found.lower_bound <= found.timeline.makespan + 1e-9
    shop, numbers = JobShop(costs, found.program.placement, 3, math.inf), random.Random(seed)
    assert all(greedy_order(shop, numbers) is not None for _ in range(10))


@pytest.mark.parametrize("seed", range(12))
def test_no_schedule_beats_the_bound_with_any_placement_and_zero_costs(seed):
    rng = random.Random(seed)
    placement = rng.choice(((0, 1, 1, 0), (0, 0, 1), (1, 0, 0), (0, 2, 1), (1, 0, 1), (0, 1, 0, 1)))
    row = lambda: [rng.choice((0.0, 0.5, 1.0, 2.0)) for _ in placement]  # noqa: E731
    costs = Costs(row(), row(), row(), hop=rng.choice((0.0, 0.3, 2.0)), activation=[1.0] * len(placement))
    microbatches = rng.choice((1, 2))
    optimum = exhaustive(costs, placement, microbatches, math.inf)
    assert lower_bound(costs, placement, microbatches) <= optimum + 1e-9


def test_a_cap_in_bytes_is_kept_to_the_byte():
    each = 1e10 / 3 + 1  # three of them are three bytes over
    costs = Costs([1.0] * 4, [1.0] * 4, [1.0] * 4, activation=[each] * 4)
    found = plan(costs, ranks=2, microbatches=6, memory_cap=1e10, time_limit_s=0.1)
    assert max(verify(found.program, memory_cap=1e10, costs=costs).peak_activations) == 2 * each
    with pytest.raises(
        ScheduleError, match=r"memory_cap is 6666666667.67; the least that any schedule needs is 6666666668.67"
    ):
        plan(costs, ranks=2, microbatches=6, memory_cap=2 * each - 1)
    tenths = Costs([1.0] * 4, [1.0] * 4, [1.0] * 4, activation=[0.1e10] * 4)
    found = plan(tenths, ranks=1, microbatches=2, memory_cap=sum([0.1e10] * 3) + 0.1e10, time_limit_s=0.1)
    verify(found.program, memory_cap=0.4e10, costs=tenths)


def test_the_first_order_of_a_large_step_is_a_known_schedule():
    costs = Costs([1.0] * 8, [1.0] * 8, [1.0] * 8)
    found = plan(costs, ranks=8, microbatches=32, time_limit_s=1e-9)
    one = simulate(schedules.one_f_one_b(8, 32), costs)
    assert found.timeline.makespan <= one.makespan


def test_equal_costs_and_1f1bs_memory_reach_the_proven_optimum_on_a_v():
    costs = Costs([0.5] * 8, [0.5] * 8, [0.5] * 8, activation=[0.5] * 8)
    # Given: without hops a looped order may be as short, and which of two equally short ones is found first is chance.
    found = plan(costs, ranks=4, microbatches=8, memory_cap=4.0, placement=wave(4, 2))
    assert found.timeline.bubble_over_ideal == pytest.approx(0.0625)
    assert found.gap == pytest.approx(0.0)


def test_an_expensive_head_makes_v_the_placement_that_is_searched_out():
    head = [0.5] * 7 + [0.8]
    costs = Costs(head, head, head, activation=[0.5] * 8)
    found = plan(costs, ranks=4, microbatches=8, memory_cap=6.0, time_limit_s=3.0)
    assert found.program.placement == wave(4, 2)
    on_loops = plan(costs, ranks=4, microbatches=8, memory_cap=6.0, placement=looped(4, 2), time_limit_s=0.3)
    assert on_loops.lower_bound > found.timeline.makespan


def test_the_number_of_microbatches_and_of_virtual_stages_are_searched_too():
    # One batch of 8 units of work per rank. Each microbatch costs 0.25 more whatever its size, so that
    # neither the fewest nor the most microbatches are best; two chunks halve the bubble of linear stages.
    def way(microbatches, chunks):
        share = (8.0 / microbatches + 0.25) / chunks / 3
        return microbatches, Costs([share] * 2 * chunks, [share] * 2 * chunks, [share] * 2 * chunks)

    ways = [way(m, v) for m in (1, 2, 4, 32) for v in (1, 2)]
    together = plan_over(ways, ranks=2, time_limit_s=0.5)
    alone = {}
    for m, costs in ways:
        one = plan(costs, ranks=2, microbatches=m, time_limit_s=0.1)
        alone[m, len(costs.forward)] = one.timeline.makespan
    assert together.timeline.makespan <= min(alone.values()) + 1e-9
    assert together.program.microbatches == min(alone, key=alone.get)[0]
    assert together.program.microbatches not in (1, 32)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"ranks": 5, "microbatches": 2}, "4 stages on 5 ranks: give costs for one stage per rank at least"),
        ({"ranks": 0, "microbatches": 2}, "ranks is 0; it is >= 1"),
        ({"ranks": 2, "microbatches": 0}, "microbatches is 0; it is >= 1"),
        ({"ranks": 2, "microbatches": 2, "memory_cap": 0.0}, "memory_cap is 0; the least that any schedule needs is 1"),
        ({"ranks": 2, "microbatches": 2, "memory_cap": math.nan}, "memory_cap is nan; it is a number"),
        (
            {"ranks": 2, "microbatches": 2, "memory_cap": 0.5},
            "memory_cap is 0.5; the least that any schedule needs is 1",
        ),
        ({"ranks": 2, "microbatches": 2, "time_limit_s": 0.0}, "time_limit_s is 0.0; it is finite and > 0"),
        ({"ranks": 2, "microbatches": 2, "placement": (0, 1)}, "placement has 2 stages"),
        (
            {"ranks": 2, "microbatches": 2, "placement": [0.0, 1.0, 1.0, 0.0]},
            "placement[0] is 0.0; it is a whole number",
        ),
        ({"ranks": 2, "microbatches": 2, "placement": (0, 0, 0, 0)}, "each with one at least"),
    ],
)
def test_impossible_questions_are_refused(arguments, says):
    costs = Costs([1.0] * 4, [1.0] * 4, [1.0] * 4)
    with pytest.raises(ScheduleError) as error:
        plan(costs, **arguments)
    assert says in str(error.value)


def test_no_way_at_all_is_refused():
    with pytest.raises(ScheduleError, match="ways is empty"):
        plan_over([], ranks=2)


@pytest.mark.parametrize("unit", [2.0**-40, 2.0**30, 1e-12, 1e9, 1e300])
def test_a_plan_does_not_depend_on_the_unit_of_time(unit, monkeypatch):
    # Orders are counted, not seconds, so that both searches see the same ones.
    def found(unit):
        ticks = itertools.count()
        monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
        row = [0.5 * unit] * 6
        costs = Costs(row, [1.5 * time for time in row], [0.75 * time for time in row], hop=0.1 * unit)
        return plan(costs, ranks=3, microbatches=4, memory_cap=2.0, time_limit_s=200.0)

    ours, plain = found(unit), found(1.0)
    # A power of two changes no bit of the search; other units round the costs, and ties may fall otherwise.
    exact = math.frexp(unit)[0] == 0.5
    assert ours.timeline.makespan == pytest.approx(plain.timeline.makespan * unit, rel=1e-9 if exact else 0.02)
    assert ours.lower_bound == pytest.approx(plain.lower_bound * unit)
    assert ours.gap == pytest.approx(plain.gap, abs=1e-9 if exact else 0.02)


def test_a_tight_cap_raises_the_bound():
    costs = Costs([0.5] * 32, [0.8] * 32, [0.3] * 32, 0.1, activation=[0.5] * 32)
    placement = wave(16, 2)
    tight, loose = lower_bound(costs, placement, 64, 4.0), lower_bound(costs, placement, 64)
    assert tight > 1.1 * loose
    assert lower_bound_of_any(costs, 16, 64, 4.0) > 1.05 * lower_bound_of_any(costs, 16, 64)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_the_bound_of_any_placement_is_not_above_the_best_of_all_placements(seed):
    rng = random.Random(seed)
    costs = random_costs(rng, 4)
    cap = rng.choice((2.0, 4.0, 100.0))
    best = math.inf
    for placement in itertools.product(range(2), repeat=4):
        if set(placement) == {0, 1} and least_memory(costs.activation, placement) <= cap:
            bound = lower_bound(costs, placement, 2, cap)
            best = min(best, exhaustive(costs, placement, 2, cap))
            assert lower_bound_of_any(costs, 2, 2, cap) <= bound + 1e-9
    assert lower_bound_of_any(costs, 2, 2, cap) <= best + 1e-9


def test_any_map_of_stages_to_ranks_is_searched_where_costs_differ():
    # Stage 1 is as much work as all others together: alone on its rank it bounds nobody else.
    row = [0.2, 1.2, 0.2, 0.2, 0.2, 0.2]
    costs = Costs(row, row, row, activation=[0.5] * 6)
    found = plan(costs, ranks=2, microbatches=6, time_limit_s=1.0)
    assert sorted(found.program.placement.count(rank) for rank in (0, 1)) == [1, 5]
    for place in (wave(2, 3), looped(2, 3)):
        assert lower_bound(costs, place, 6) > found.timeline.makespan
    verify(found.program)


def test_slow_links_between_nodes_are_crossed_once_each_way():
    # Ranks 0 and 2 are on one node, 1 and 3 on the other: a microbatch goes through the first, then the second.
    hop = [[0.0 if a % 2 == b % 2 else 1.0 for b in range(4)] for a in range(4)]
    costs = Costs([1.0] * 4, [1.0] * 4, [1.0] * 4, hop)
    found = plan(costs, ranks=4, microbatches=4, time_limit_s=0.5)
    crossings = sum(a % 2 != b % 2 for a, b in itertools.pairwise(found.program.placement))
    assert crossings == 1
    assert found.gap >= -1e-9


def test_stages_that_the_ranks_do_not_divide_are_placed():
    costs = Costs([1.0] * 5, [1.0] * 5, [1.0] * 5)
    found = plan(costs, ranks=2, microbatches=4, time_limit_s=0.2)
    assert verify(found.program).messages > 0
    assert found.lower_bound <= found.timeline.makespan


@pytest.mark.slow
def test_a_large_plan_keeps_its_time(monkeypatch):
    # The clock is the work: of this thread's calls and returns 5 million are a second, about what a machine makes.
    counted = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 0.2e-6 * next(counted))
    monkeypatch.setattr(search, "time", clock)
    costs = Costs([0.5] * 64, [0.8] * 64, [0.3] * 64, 0.1, activation=[0.5] * 64)
    before = sys.getprofile()
    sys.setprofile(lambda *_: next(counted))
    try:
        plan(costs, ranks=32, microbatches=32, memory_cap=20.0, time_limit_s=0.25)
    finally:
        sys.setprofile(before)
    assert clock.perf_counter() <= 0.5


def deferring_costs(rng, stages):
    costs = random_costs(rng, stages)
    deferred = [rng.choice((0.0, 0.25, 0.5, 1.0)) for _ in range(stages)]
    return replace(costs, deferred=deferred, input_share=rng.choice((0.0, 0.0, 0.25)))


@pytest.mark.sampled
@pytest.mark.parametrize("room", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(4))
def test_what_input_gradients_keep_for_weight_gradients_stays_within_the_cap(seed, room):
    rng = random.Random(seed)
    placement = rng.choice((wave(3, 2), looped(3, 2), looped(3, 1), (0, 1, 1, 0, 2)))
    costs = deferring_costs(rng, len(placement))
    # The least is that of whole backwards, one microbatch after another: these defer nothing.
    cap = least_memory(costs.activation, placement) + room
    found = plan(costs, ranks=3, microbatches=6, memory_cap=cap, placement=placement, time_limit_s=0.05)
    verify(found.program, memory_cap=cap, costs=costs)
    assert found.lower_bound <= simulate(found.program, costs).makespan == found.timeline.makespan


@pytest.mark.slow
def test_deferred_gradients_cost_nothing_where_backwards_are_whole():
    # Each I would add as much as F: within 1F1B's own memory the plan is 1F1B or better, though no I fits behind p F's.
    costs = Costs([1.0] * 4, [1.0] * 4, [1.0] * 4, activation=[1.0] * 4, deferred=[1.0] * 4)
    for name in ("one_f_one_b", "zb_h1", "zb_h2"):
        program = schedules.by_name(name).make(4, 8)
        shipped = simulate(program, costs)
        found = plan(costs, ranks=4, microbatches=8, memory_cap=max(shipped.peak_activations), time_limit_s=0.3)
        assert found.timeline.makespan <= shipped.makespan + 1e-9
        verify(found.program, memory_cap=max(shipped.peak_activations), costs=costs)


@pytest.mark.parametrize("seed", range(10))
def test_greedy_and_periodic_orders_never_hang_at_the_least_cap_of_deferring_stages(seed):
    rng = random.Random(seed)
    placement = rng.choice((wave(4, 2), looped(4, 2), (0, 1, 1, 0, 2, 3)))
    costs = deferring_costs(rng, len(placement))
    # One microbatch alone, its W's at once: what a program of I's and W's needs at least.
    rows = [[] for _ in range(4)]
    for kind, order in (("F", range(len(placement))), ("IW", reversed(range(len(placement))))):
        for stage in order:
            rows[placement[stage]] += [Action(stage, each, 0) for each in kind]
    alone = simulate(Program(tuple(map(tuple, rows)), 1, placement), costs)
    shop = JobShop(costs, placement, 5, max(alone.peak_activations))
    for order in (greedy_order(shop, rng), in_pattern(shop, even_pattern(shop))):
        assert order is not None and shop.fits(order)
        verify(shop.program(order), memory_cap=max(alone.peak_activations), costs=costs)


@pytest.mark.slow
def test_a_busy_machine_leaves_no_shipped_schedule_out(monkeypatch):
    # A process that has to wait for its core for 0.3 s somewhere in the first moments of the search. The clock counts
    # how often it is asked (every 5 ms or so), so that the search does the same work on any machine.
    asked = itertools.count()

    def busy():
        number = next(asked)
        return number * 5e-3 + (0.3 if number >= 12 else 0.0)

    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=busy))
    costs = Costs([0.5] * 32, [0.8] * 32, [0.3] * 32, 0.1, activation=[0.5] * 32)
    found = plan(costs, ranks=16, microbatches=64, memory_cap=9.0, time_limit_s=1.0)
    assert found.timeline.makespan <= simulate(schedules.v_half(16, 64), costs).makespan + 1e-9


@pytest.mark.parametrize("name", ["v_half", "v_min", "hanayo"])
def test_a_search_that_is_told_to_stop_stops(name):
    search_of = schedules.by_name(name).search
    assert search_of(8, 64, go_on=lambda: False) is None
    assert search_of(4, 16, go_on=lambda: True) == schedules.by_name(name).make(4, 16)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_an_expensive_last_chunk_makes_the_plan_a_v_unasked(cap):
    """Where the head is 60 % longer its rank must begin at once: on a loop it begins last, on a V first."""
    each = [0.5] * 7 + [0.8]
    costs = Costs(each, each, each, activation=[0.5] * 8)
    slowest = 8 * 3 * (0.5 + 0.8)
    found = plan(costs, ranks=4, microbatches=8, memory_cap=cap, time_limit_s=5.0)
    assert found.program.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert found.timeline.makespan == pytest.approx(slowest, rel=1e-9)
    assert found.gap == pytest.approx(0.0, abs=1e-9)
    loop = plan(costs, ranks=4, microbatches=8, memory_cap=cap, placement=looped(4, 2), time_limit_s=5.0)
    assert loop.lower_bound == pytest.approx(slowest + 3 * 0.5, rel=1e-9)  # three forwards before it: 4.8 %
