"""The table of bubbles, memory, weight versions and messages, through ``simulate``, for p <= 8 and many m."""

from __future__ import annotations

import pytest

from sixfold.pipeline import (
    Costs,
    Program,
    Timeline,
    dualpipe_v,
    eager_one_f_one_b,
    gpipe,
    hanayo,
    interleaved,
    looped_bfs,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    simulate,
    v_half,
    v_min,
    verify,
    zb_h1,
    zb_h2,
    zb_interleaved,
    zb_v,
)

EVERY_M = (1, 2, 3, 4, 5, 8, 13)
ranks = pytest.mark.parametrize("p", range(1, 9))


def timed(program: Program, **costs: float) -> Timeline:
    """The timeline of equal ranks; F = I = W = 1 unless said otherwise."""
    return simulate(program, Costs.per_rank(program, **costs))


def from_(start: int) -> list[int]:
    """Several m from ``start`` on."""
    return [start, start + 1, start + 3, 2 * start + 1]


@ranks
def test_schedules_of_one_chunk_have_the_closed_forms(p):
    for m in EVERY_M:
        in_flight = tuple(min(m, p - r) for r in range(p))
        for make, bubble, peaks in (
            (naive, p - 1, (1,) * p),
            (gpipe, (p - 1) / m, (m,) * p),
            (one_f_one_b, (p - 1) / m, in_flight),
            (pipedream, (p - 1) / m, in_flight),
            (eager_one_f_one_b, (p - 1) / m, tuple(min(m, 2 * (p - r) - 1) for r in range(p))),
        ):
            program = make(p, m)
            for costs in ({}, {"forward": 2.0, "backward_input": 1.5, "backward_weight": 0.5}):
                timeline = timed(program, **costs)
                assert timeline.bubble_over_ideal == pytest.approx(bubble), f"{program.name} m={m}"
                assert timeline.peak_activations == peaks, f"{program.name} m={m}"


@pytest.mark.sampled
@pytest.mark.parametrize("chunks", [2, 3, 4])
@ranks
def test_loops_divide_the_bubble_by_their_chunks_for_every_m_from_p_on(p, chunks):
    for m in range(p, 4 * p + 1, 1 if p < 5 else 5):
        timeline = timed(interleaved(p, m, chunks))
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (chunks * m)), f"m={m}"
        if m % p == 0 and m >= 2 * p:
            assert max(timeline.peak_activations) == pytest.approx(p + (p - 1) / chunks)
        breadth_first = timed(looped_bfs(p, m, chunks))
        assert breadth_first.bubble_over_ideal == pytest.approx((p - 1) / (chunks * m)), f"m={m}"
        assert breadth_first.peak_activations == pytest.approx((m,) * p)


@ranks
def test_zb_h1_has_a_third_of_the_bubble_within_the_memory_of_1f1b(p):
    for m in from_(p):
        assert timed(zb_h1(p, m)).bubble_over_ideal == pytest.approx((p - 1) / (3 * m)), f"m={m}"
    for m in EVERY_M:
        assert max(timed(zb_h1(p, m)).peak_activations) <= min(m, p), f"m={m}"


@pytest.mark.parametrize("chunks", [1, 2, 3])
@ranks
def test_zb_interleaved_has_a_third_of_interleaveds_bubble_in_less_memory(p, chunks):
    for m in from_(p):
        timeline = timed(zb_interleaved(p, m, chunks))
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (3 * chunks * m)), f"m={m}"
        assert max(timeline.peak_activations) <= max(timed(interleaved(p, m, chunks)).peak_activations), f"m={m}"
        if m % p == 0:
            assert max(timeline.peak_activations) <= p + 1e-9, f"m={m}"
    assert zb_interleaved(p, 5, 1) == zb_h1(p, 5)


@ranks
def test_zb_h2_has_no_idle_span_and_ends_p_minus_one_forwards_late(p):
    for m in from_(2 * p - 1):
        timeline = timed(zb_h2(p, m))
        assert timeline.span_over_ideal == pytest.approx(0), f"m={m}"
        assert timeline.makespan - timeline.ideal == pytest.approx(p - 1), f"m={m}"
    for m in EVERY_M:
        assert max(timed(zb_h2(p, m)).peak_activations) <= 2 * p - 1, f"m={m}"


@ranks
def test_zb_v_has_no_idle_span_within_the_memory_of_1f1b(p):
    for m in from_(2 * p - 1):
        timeline = timed(zb_v(p, m))
        assert timeline.span_over_ideal == pytest.approx(0), f"m={m}"
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (6 * m)), f"m={m}"
    for m in EVERY_M:
        assert max(timed(zb_v(p, m)).peak_activations) <= p, f"m={m}"


@ranks
def test_dualpipe_v_reaches_zb_vs_bubble_although_it_pairs_actions(p):
    for m in from_(2 * p):
        assert timed(dualpipe_v(p, m)).bubble_over_ideal <= (p - 1) / (6 * m) + 1e-12, f"m={m}"
    for m in EVERY_M:
        assert max(timed(dualpipe_v(p, m)).peak_activations) <= p + 0.5, f"m={m}"


@ranks
@pytest.mark.slow
def test_v_half_and_v_min_hold_what_they_promise_and_lose_less_than_naive(p):
    for m in EVERY_M:
        half, least = timed(v_half(p, m)), timed(v_min(p, m))
        assert max(half.peak_activations) <= p / 2 + 1
        assert max(least.peak_activations) <= (p + 4) // 3 <= p / 3 + 1.5
        assert max(half.bubble_over_ideal, least.bubble_over_ideal) <= p - 1, f"m={m}"


@pytest.mark.parametrize("p", range(1, 5))
def test_one_wave_has_hanayos_bubble_from_two_p_on(p):
    for m in from_(2 * p):
        assert timed(hanayo(p, m, memory_cap=m)).bubble_over_ideal == pytest.approx((p - 1) / (2 * m)), f"m={m}"


def test_hanayo_where_the_paper_is_too_good_and_where_two_waves_reach_it():
    assert timed(hanayo(4, 4)).bubble_over_ideal == pytest.approx(0.5)  # the proven optimum, not 0.375
    eight = timed(hanayo(4, 8, memory_cap=8))
    assert eight.bubble_over_ideal == pytest.approx(0.1875)
    assert max(eight.peak_activations) == 5.5
    assert timed(hanayo(4, 8, waves=2, memory_cap=8)).bubble_over_ideal == pytest.approx(3 / (2 * 2 * 8))


@pytest.mark.parametrize(("p", "m", "waves"), [(2, 8, 1), (4, 8, 1), (4, 16, 2), (8, 16, 1), (8, 64, 1), (8, 24, 2)])
@pytest.mark.slow
def test_hanayo_holds_little_where_that_costs_little(p, m, waves):
    program, wide = timed(hanayo(p, m, waves)), timed(hanayo(p, m, waves, memory_cap=m))
    assert max(program.peak_activations) < m  # GPipe's
    assert program.bubble_over_ideal <= wide.bubble_over_ideal + 0.1 + 1e-9
    narrow = timed(hanayo(p, m, waves, memory_cap=2.0))
    assert max(narrow.peak_activations) <= 2.0
    assert wide.makespan <= program.makespan <= narrow.makespan


def test_hanayo_of_many_microbatches_holds_no_more_than_1f1b():
    program = timed(hanayo(8, 64))
    assert program.bubble_over_ideal < 0.13
    assert max(program.peak_activations) <= 8


@pytest.mark.parametrize(("memory_cap", "held", "bubble"), [(None, 16, 60), (20, 20, 52), (24, 23.5, 45)])
@pytest.mark.slow
def test_what_hanayos_bubble_on_sixteen_ranks_costs_in_memory(memory_cap, held, bubble):
    """The docstring's three figures; ``bubble`` of 384 times a chunk's forward, 45 is the known (p - 1) / (2 m)."""
    program = timed(hanayo(16, 64, memory_cap=memory_cap))
    assert program.bubble_over_ideal == pytest.approx(bubble / 384)
    assert max(program.peak_activations) == held


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 11])
@pytest.mark.slow
def test_one_wave_has_the_known_bubble_in_half_as_much_more_memory_than_1f1b_and_four_thirds_of_it_in_its_own(p):
    for m in (2 * p + 1, 3 * p, 4 * p + 1):
        known = (p - 1) / (2 * m)
        wide, usual = timed(hanayo(p, m, memory_cap=1.5 * p)), timed(hanayo(p, m))
        assert wide.bubble_over_ideal == pytest.approx(known), f"m={m}"
        assert max(wide.peak_activations) == (3 * p - 1) / 2, f"m={m}"
        assert usual.bubble_over_ideal == pytest.approx(4 / 3 * known), f"m={m}"
        assert max(usual.peak_activations) == p, f"m={m}"


@ranks
def test_pipedream_keeps_a_version_per_microbatch_in_flight_and_2bw_keeps_two(p):
    stashed = pipedream(p, 3 * p)
    assert verify(stashed).weight_versions == timed(stashed).weight_versions == tuple(p - r for r in range(p))
    for m in (max(1, p - 1), p, 2 * p + 1):
        for steps in (1, 2, 3):
            program = pipedream_2bw(p, m, steps)
            timeline = timed(program)
            assert program.microbatches == steps * m
            assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (steps * m)), f"m={m} steps={steps}"
            assert timeline.peak_activations == tuple(min(steps * m, p - r) for r in range(p))
            if m > 1:
                assert timeline.weight_versions == (2 if steps > 1 else 1,) * p


def test_the_memory_and_the_messages_that_interleaving_costs():
    assert max(timed(interleaved(4, 8)).peak_activations) == 5.5
    assert verify(interleaved(4, 8)).messages / verify(one_f_one_b(4, 8)).messages == pytest.approx(7 / 3)
    assert verify(zb_v(4, 8)).messages == 2 * verify(one_f_one_b(4, 8)).messages
    assert verify(hanayo(4, 8, waves=2)).messages == 4 * verify(one_f_one_b(4, 8)).messages


def test_eager_1f1b_is_the_cheap_answer_to_slow_links():
    plain, eager = (timed(make(4, 8), hop=0.3) for make in (one_f_one_b, eager_one_f_one_b))
    assert (plain.bubble_over_ideal, eager.bubble_over_ideal) == (pytest.approx(0.575), pytest.approx(0.45))
