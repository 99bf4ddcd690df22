"""V-Half and V-Min beside their authors' public generator (zero-bubble's greedy): its memory, two ratios of costs."""

from __future__ import annotations

import time

import pytest

from sixfold.pipeline import Costs, plan, simulate, v_half, v_min, verify
from sixfold.pipeline.schedules.optima import OPTIMA, optimum

TIMES = (2, 3, 4, 6, 8)  # microbatches, of p
# Of each p the authors' memory in microbatches, what their orders idle at F = I = W in sixths of a rank's time for one
# microbatch (whatever m is), and their bubble over ideal at 1 : 1.6 : 0.6 with hops of 0.1 for m = 2 p, 3 p, 4 p, 6 p,
# 8 p. Their program ran elsewhere; its orders were timed by ``simulate``. The first agree with the published ones.
THEIRS = {
    v_half: {
        4: (3, 5, (0.3906, 0.3125, 0.2734, 0.2344, 0.2148)),
        8: (5, 17, (0.5039, 0.388, 0.3301, 0.2721, 0.2432)),
        12: (7, 29, (0.5456, 0.4158, 0.3509, 0.286, 0.2536)),
        16: (9, 41, (0.5635, 0.4277, 0.3599, 0.292, 0.2581)),
        24: (13, 65, (0.5853, 0.4423, 0.3708, 0.2993, 0.2635)),
        32: (17, 89, (0.5947, 0.4486, 0.3755, 0.3024, 0.2659)),
    },
    v_min: {
        4: (2, 11, (0.8867, 0.7995, 0.7559, 0.7122, 0.6904)),
        8: (4, 27, (1.002, 0.8867, 0.8291, 0.7715, 0.7427)),
        12: (5, 41, (1.0456, 0.921, 0.8587, 0.7964, 0.7653)),
        16: (6, 59, (1.0889, 0.9512, 0.8823, 0.8135, 0.7786)),
        24: (9, 89, (1.1009, 0.9605, 0.8903, 0.8201, 0.785)),
        32: (12, 123, (1.1177, 0.9723, 0.8997, 0.827, 0.7904)),
    },
}
SIZES = [(make, p, times) for make in THEIRS for p in THEIRS[make] for times in TIMES]
QUICK = [(make, p, times) for make, p, times in SIZES if (p <= 8) or (p, times) in ((12, 3), (16, 4), (24, 2))]


def pytest_generate_tests(metafunc):
    if "times" in metafunc.fixturenames:
        sizes = SIZES if metafunc.config.getoption("--all-bubbles") else QUICK
        ids = [f"{make.__name__}({p}, {times * p})" for make, p, times in sizes]
        metafunc.parametrize(("make", "p", "times"), sizes, ids=ids)


@pytest.mark.slow
def test_no_more_bubble_than_the_authors_in_their_memory_at_equal_and_unequal_costs(make, p, times):
    memory, idle, unequal = THEIRS[make][p]
    program = make(p, times * p)
    verify(program)
    equal = simulate(program, Costs.per_rank(program))
    assert max(equal.peak_activations) <= memory
    assert equal.bubble_over_ideal <= idle / (6 * times * p) + 1e-9
    other = simulate(program, Costs.per_rank(program, 1.0, 1.6, 0.6, 0.1))
    assert other.bubble_over_ideal <= unequal[TIMES.index(times)] + 5e-5  # theirs have four digits


@pytest.mark.parametrize("make", [v_half, v_min])
def test_the_steady_state_has_no_bubble_at_equal_costs(make):
    shorter, longer = (simulate(program, Costs.per_rank(program)) for program in (make(8, 48), make(8, 64)))
    assert longer.makespan - shorter.makespan == pytest.approx(16 * 3.0)


def test_the_published_figures():
    assert THEIRS[v_half][8][1] / 96 == pytest.approx(0.177, abs=5e-4)
    assert THEIRS[v_half][12][1] / 216 == pytest.approx(0.134, abs=5e-4)
    assert THEIRS[v_half][16][1] / 384 == pytest.approx(0.107, abs=5e-4)
    assert THEIRS[v_half][16][2][2] == pytest.approx(0.360, abs=5e-4)
    assert THEIRS[v_min][4][1] / 48 == pytest.approx(0.229, abs=5e-4)
    assert THEIRS[v_min][12][1] / 216 == pytest.approx(0.190, abs=5e-4)
    assert THEIRS[v_min][16][1] / 384 == pytest.approx(0.154, abs=5e-4)


def test_more_memory_is_used_where_it_is_given_and_less_where_it_is_asked_for():
    by_cap = {cap: v_half(6, 18, memory_cap=cap) for cap in (1.0, 2.5, 4.0, 6.0)}
    timelines = [simulate(program, Costs.per_rank(program)) for program in by_cap.values()]
    assert all(max(t.peak_activations) <= cap for cap, t in zip(by_cap, timelines, strict=True))
    assert sorted((t.makespan for t in timelines), reverse=True) == [t.makespan for t in timelines]


def test_v_min_with_half_a_microbatch_more_is_the_proven_optimum():
    for cap, microbatches, bubble in ((2.5, 8, 8 / 48), (2.9, 8, 8 / 48), (2.0, 8, 11 / 48)):
        timeline = simulate(program := v_min(4, microbatches, memory_cap=cap), Costs.per_rank(program))
        assert timeline.bubble_over_ideal == pytest.approx(bubble, abs=1e-9)
        assert max(timeline.peak_activations) <= cap
    verify(v_min(4, 8, memory_cap=2.5), memory_cap=2.5)


@pytest.mark.parametrize(("ranks", "microbatches"), list(OPTIMA))
def test_a_plan_finds_what_is_written_down_and_nothing_shorter(ranks, microbatches, request):
    if not request.config.getoption("--all-bubbles"):
        pytest.skip("five seconds of searching; --all-bubbles does it")
    cap, _ = OPTIMA[ranks, microbatches]
    program = optimum(ranks, microbatches, cap, "v_min")
    costs = Costs.per_rank(program)
    found = plan(costs, ranks=ranks, microbatches=microbatches, memory_cap=cap, placement=program.placement)
    assert found.timeline.makespan == pytest.approx(simulate(program, costs).makespan, rel=1e-9)


@pytest.mark.slow
def test_a_large_one_takes_seconds_of_this_process():
    before = time.process_time()
    v_half(32, 256)
    assert time.process_time() - before < 10.0
