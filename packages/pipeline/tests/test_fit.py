"""What a timeline shows of its costs is found again; what it does not show is said."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
from schedule_helpers import FLUSH, SCHEDULES

from sixfold.pipeline import Action, Costs, Kind, ScheduleError, interleaved, one_f_one_b, simulate, zb_h1, zb_v
from sixfold.pipeline.fit import fit
from sixfold.pipeline.passes import optimizer_step, reduce_grad, unshard
from sixfold.pipeline.simulation.simulate import measured


def some_costs(rng, stages, hop):
    """Uneven costs; nothing is free."""
    return Costs(*([rng.uniform(0.5, 2) for _ in range(stages)] for _ in range(3)), hop=hop)


def kinds_seen(timeline):
    """Kinds of each stage's actions outside overlaps."""
    seen = defaultdict(set)
    for _, action, *_ in timeline.events:
        seen[action.stage].add(action.kind.value)
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_simulated_timeline_gives_its_costs_back(name):
    rng = random.Random(name)
    for ranks, microbatches in ((1, 2), (2, 3), (3, 6), (4, 8)):
        program = SCHEDULES[name](ranks, microbatches)
        costs = some_costs(rng, program.stages, hop=rng.choice((0.0, 0.3, 1.7)))
        timeline = simulate(program, costs)
        found, seen = fit(timeline), kinds_seen(timeline)
        assert found.placement == program.placement
        assert found.forward == pytest.approx(costs.forward)
        for stage, (i, w) in enumerate(zip(costs.backward_input, costs.backward_weight, strict=True)):
            assert found.backward[stage] == pytest.approx(i + w)
            if len(seen[stage] & {"B", "I", "W"}) >= 2:
                assert (found.backward_input[stage], found.backward_weight[stage]) == pytest.approx((i, w))
            else:
                assert found.backward_input[stage] is found.backward_weight[stage] is None
        assert all(hop == pytest.approx(costs.hop) for hop in found.hops.values())
        assert all(limit >= costs.hop - 1e-9 for limit in found.at_most.values())
        used = {(a, b) for a, b in zip(program.placement, program.placement[1:], strict=False) if a != b}
        assert {*found.hops, *found.at_most} <= used | {(b, a) for a, b in used}
        if costs.hop:  # the first forward of every other rank waits, whatever the schedule
            assert {b for _, b in found.hops} >= set(range(1, ranks))


def test_noise_of_a_few_samples_moves_nothing():
    rng = random.Random(3)
    program = zb_v(3, 12)
    costs = some_costs(rng, program.stages, hop=0.4)
    events = list(simulate(program, costs).events)
    late = {(rank, str(action)) for rank, action, *_ in rng.sample(events, len(events) // 8)}
    slow = [(r, a, start, end + 5.0 * ((r, str(a)) in late)) for r, a, start, end in events]
    found = fit(replace(simulate(program, costs), events=tuple(slow)))
    assert found.forward == pytest.approx(costs.forward)
    assert found.backward_input == pytest.approx(costs.backward_input)
    assert found.backward_weight == pytest.approx(costs.backward_weight)


def test_idle_time_of_the_interpreter_is_no_message():
    """Every action begins 0.01 late: where the rank was waiting, its input's time is the hop and that."""
    program, costs = one_f_one_b(3, 8), Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, hop=0.5)
    rows = defaultdict(list)
    for rank, action, start, end in simulate(
        program, replace(costs, forward=[1.01] * 3, backward_input=[1.01] * 3)
    ).events:
        rows[rank].append((rank, action, start + 0.01, end))
    found = fit(measured(event for row in rows.values() for event in row))
    assert found.forward == pytest.approx([1.0] * 3)
    assert found.backward == pytest.approx([2.0] * 3)
    assert found.hops and all(hop == pytest.approx(0.51) for hop in found.hops.values())


def test_what_taking_a_message_costs_is_no_wait():
    """Actions that take a message begin 0.02 late, others 0.005: nobody waited there who did not on paper."""
    program = zb_v(3, 8)
    costs = some_costs(random.Random(5), program.stages, hop=0.25)
    late = []
    for rank, action, start, end in simulate(program, costs).events:
        before = action.stage + (-1 if action.kind is Kind.F else 1)
        far = action.kind in (Kind.F, Kind.I) and 0 <= before < program.stages and program.placement[before] != rank
        late.append((rank, action, start + (0.02 if far else 0.005), end))
    found = fit(measured(late))
    assert set(found.hops) == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert all(hop == pytest.approx(0.27) for hop in found.hops.values())


def test_several_timelines_show_more_than_one():
    costs = Costs([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], hop=0.25)
    fused, split = simulate(one_f_one_b(2, 4), costs), simulate(zb_h1(2, 4), costs)
    assert fit(fused).unknown == ("only B was measured on stages 0, 1, not I and W apart",)
    both = fit([fused, split])
    assert both.unknown == () and both.backward_input == (3.0, 4.0)
    mixed = fit([fused, replace(split, events=tuple(e for e in split.events if str(e[1])[1] != "W"))])
    assert mixed.backward_weight == pytest.approx((5.0, 6.0))  # B less I


def test_what_no_message_showed_is_said():
    costs = Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, hop=0.5)
    said = fit(simulate(zb_h1(3, 6), costs)).unknown
    assert "no message went from rank 0 to 2" in said and "no message went from rank 2 to 0" in said
    slow_end = Costs([9.0, 1.0], [9.0, 1.0], [0.0, 0.0], hop=0.5)  # rank 0 is never idle
    found = fit(simulate(one_f_one_b(2, 6), slow_end))
    assert (0, 1) in found.hops
    events = simulate(one_f_one_b(2, 6), Costs([1.0, 9.0], [1.0, 9.0], [0.0, 0.0], hop=0.5)).events
    assert fit(measured(events)).hops[0, 1] == pytest.approx(0.5)  # its first forward alone


def test_an_overlaps_factor_is_found():
    program = SCHEDULES["dualpipe_v"](3, 8)
    assert any(action.parts for _, _, action in program.entries())
    costs = replace(some_costs(random.Random(4), program.stages, hop=0.1), overlap=0.8)
    assert fit(simulate(program, costs)).overlap == pytest.approx(0.8)
    assert fit(simulate(interleaved(2, 4), Costs.per_rank(interleaved(2, 4)))).overlap is None


def test_optimizer_steps_are_no_backward():
    program = optimizer_step(zb_h1(2, 4))
    timeline = simulate(program, Costs.per_rank(program))
    assert fit(timeline).backward == (2.0, 2.0) and None not in fit(timeline).step


def event(rank, text, start=0.0, end=1.0):
    """One event."""
    return rank, Action.parse(text), start, end


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([event(0, "0F0"), event(1, "0B0", 1.0, 2.0)], "stage 0 is on rank 0 and on rank 1"),
        ([event(0, "0F0")], "stage 0 has no backward"),
        ([event(0, "0B0")], "stage 0 has no forward"),
        ([event(0, "0F0"), event(0, "2F0")], r"events of stages \[0, 2\]"),
    ],
)
def test_timelines_that_lack_a_stage_are_refused(events, words):
    bare = replace(simulate(one_f_one_b(1, 1), Costs([1.0], [1.0], [1.0])), events=tuple(events))
    with pytest.raises(ScheduleError, match=words):
        fit(bare)
    with pytest.raises(ScheduleError, match="no timeline"):
        fit([])


@pytest.mark.parametrize("name", SCHEDULES)
def test_fitted_costs_simulate_the_step_that_was_measured(name):
    program = SCHEDULES[name](3, 6)
    costs = some_costs(random.Random(name), program.stages, hop=0.2)
    timeline = simulate(program, costs)
    fitted = Costs.fit(timeline, assume=Costs.per_rank(program))
    assert simulate(program, fitted).makespan == pytest.approx(timeline.makespan)
    assert simulate(program, fitted).peak_activations == timeline.peak_activations


def test_i_and_w_of_a_measured_b_are_asked_for_or_taken_from_what_is_assumed():
    costs = Costs([1.0, 2.0], [3.0, 1.0], [1.0, 3.0], hop=0.5, activation=[2.0, 5.0])
    timeline = simulate(one_f_one_b(2, 4), costs)
    with pytest.raises(ScheduleError, match=r"stage 0: only B was measured \(4\), so I and W are not known apart"):
        Costs.fit(timeline)
    with pytest.raises(ScheduleError, match="not known apart"):
        Costs.fit(timeline, assume=replace(costs, backward_input=[0, 0], backward_weight=[0, 0]))
    assumed = Costs([9.0, 9.0], [1.0, 3.0], [3.0, 1.0], activation=[2.0, 5.0], input_share=0.25)
    fitted = Costs.fit(timeline, assume=assumed)
    assert fitted.backward_input == pytest.approx((1, 3)) and fitted.backward_weight == pytest.approx((3, 1))
    assert (fitted.forward, fitted.activation, fitted.input_share) == ((1, 2), (2, 5), 0.25)
    assert fitted.between(0, 1) == fitted.between(1, 0) == pytest.approx(0.5)
    with pytest.raises(ScheduleError, match="assume is for 3 stages; the timelines have 2"):
        Costs.fit(timeline, assume=Costs([1.0] * 3, [1.0] * 3, [1.0] * 3))


def test_hops_of_pairs_that_no_message_showed():
    found = fit(simulate(zb_h1(3, 6), Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, hop=0.5)))
    asked = []

    def assumed(a, b):
        asked.append((a, b))
        return 7.0

    filled = found.hop(assumed)
    assert set(asked) == set(product(range(3), repeat=2)) - set(found.hops) - {(0, 0), (1, 1), (2, 2)}
    assert (filled[0][2], filled[2][0]) == (7, 7) and all(filled[a][a] == 0 for a in range(3))
    bounded = replace(found, hops={(0, 1): 0.5, (1, 2): 0.7}, at_most={(2, 1): 0.1, (1, 0): 9.0}).hop(None)
    assert bounded[2][1] == 0.1 and bounded[1][0] == bounded[0][2] == pytest.approx(0.6)


@pytest.mark.parametrize("name", FLUSH)
def test_hops_of_each_pair_and_times_of_steps_and_slots_are_found(name):
    rng = random.Random(name)
    program = optimizer_step(reduce_grad(unshard(FLUSH[name](3, 6), 1)))
    table = [[rng.uniform(0.1, 0.9) for _ in range(3)] for _ in range(3)]
    slots = {what: [rng.uniform(0.1, 0.9) for _ in range(program.stages)] for what in ("step", "unshard", "reduce")}
    costs = replace(some_costs(rng, program.stages, hop=table), **slots)
    timeline = simulate(program, costs)
    found, fitted = fit(timeline), Costs.fit(timeline, assume=Costs.per_rank(program, hop=9.0))
    for a, b in found.hops:
        assert fitted.between(a, b) == pytest.approx(table[a][b])
    for a, b in set(product(range(3), repeat=2)) - set(found.hops) - {(0, 0), (1, 1), (2, 2)}:
        assert fitted.between(a, b) == found.at_most.get((a, b), 9.0)
        assert fitted.between(a, b) >= table[a][b] - 1e-9
    for what, times in slots.items():
        assert getattr(fitted, what) == pytest.approx(times)
    assert simulate(program, fitted).makespan == pytest.approx(timeline.makespan)
    assert Costs.fit(simulate(program, replace(costs, step=None)), assume=replace(costs, step=None)).step is None
