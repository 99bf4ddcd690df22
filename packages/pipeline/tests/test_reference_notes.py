"""The formulas of the reference notes, each where it holds, and what the notes say too loosely, put right.

The notes call two ratios by one name (空泡率): bubble time over ideal time, and bubble time over all time. A test
here names its metric.
"""

import pytest

from sixfold.pipeline import (
    Costs,
    gpipe,
    hanayo,
    interleaved,
    naive,
    one_f_one_b,
    pipedream_2bw,
    simulate,
    verify,
    zb_v,
)

SIZES = [(2, 2), (2, 5), (3, 4), (4, 4), (4, 8), (5, 11)]


def timeline_of(program, **costs):
    return simulate(program, Costs.per_rank(program, **costs))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubble_lasts_p_minus_one_forwards_and_backwards(p, m):
    # t_bubble = (p - 1)(t_f + t_b), whatever m
    for make in (gpipe, one_f_one_b):
        timeline = timeline_of(make(p, m), forward=2.0, backward_input=3.0, backward_weight=1.5)
        assert timeline.makespan - timeline.ideal == pytest.approx((p - 1) * (2.0 + 4.5))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_two_ratios_are_p_minus_one_over_m_and_over_m_plus_p_minus_one(p, m):
    timeline = timeline_of(gpipe(p, m))
    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m)
    assert timeline.bubble_over_total == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_naive_pipelining_has_a_bubble_of_p_minus_one_whatever_m(p, m):
    # The notes derive GPipe's formula in the section on naive pipelining.
    assert timeline_of(naive(p, m)).bubble_over_ideal == pytest.approx(p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_holds_every_microbatch_and_1f1b_as_many_as_stages_follow(p, m):
    # "m becomes p" is the first rank's figure: rank r holds min(m, p - r), so rank 0 runs out of memory first.
    assert timeline_of(gpipe(p, m)).peak_activations == (m,) * p
    assert timeline_of(one_f_one_b(p, m)).peak_activations == tuple(min(m, p - r) for r in range(p))
    assert timeline_of(one_f_one_b(p, m)).makespan == timeline_of(gpipe(p, m)).makespan


@pytest.mark.parametrize("m", [4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaving_divides_the_bubble_by_v_for_any_m_of_at_least_p(m, v):
    # The notes require p to divide m; near-equal groups do without.
    p = 4
    assert timeline_of(interleaved(p, m, v)).bubble_over_ideal == pytest.approx((p - 1) / (v * m))


def test_interleaving_multiplies_messages_by_more_than_v_and_raises_memory():
    # "v times the traffic" leaves out the way from the last rank to the first: (pv - 1) / (p - 1).
    p, m, v = 4, 8, 2
    ratio = verify(interleaved(p, m, v)).messages / verify(one_f_one_b(p, m)).messages
    assert ratio == pytest.approx((p * v - 1) / (p - 1)) == pytest.approx(7 / 3)
    assert (
        max(timeline_of(interleaved(p, m, v)).peak_activations)
        == 5.5
        > max(timeline_of(one_f_one_b(p, m)).peak_activations)
    )
    # A V and a wave turn within a rank: exactly v.
    assert verify(zb_v(p, m)).messages == v * verify(one_f_one_b(p, m)).messages
    assert verify(hanayo(p, m, 2)).messages == 4 * verify(one_f_one_b(p, m)).messages


def test_zb_v_has_no_bubble_in_its_span_and_half_a_forward_per_rank_from_flush_to_flush():
    p, m = 4, 8
    timeline = timeline_of(zb_v(p, m))
    assert timeline.span_over_ideal == 0
    assert timeline.makespan - timeline.ideal == pytest.approx((p - 1) / 2)
    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (6 * m))


def test_hanayo_divides_by_2w_only_where_there_is_room():
    # One wave at p = m = 4: the optimum is 0.5, not the formula's 0.375; no search finds less.
    assert timeline_of(hanayo(4, 4)).bubble_over_ideal == pytest.approx(0.5)
    # At m = 8 the formula's 0.1875 takes (3 p - 1) / 2 microbatches, more than the p of 1F1B.
    timeline = timeline_of(hanayo(4, 8, memory_cap=8))
    assert timeline.bubble_over_ideal == pytest.approx(3 / 16)
    assert max(timeline.peak_activations) == 5.5
    assert timeline_of(hanayo(4, 8, 2, memory_cap=8)).bubble_over_ideal == pytest.approx(3 / 32)


def test_2bw_trains_on_weights_one_step_old():
    # Not "the semantics of data parallelism": two versions live, and a batch runs on the one before the newest.
    program = pipedream_2bw(3, 4, steps=3)
    assert simulate(program, Costs.per_rank(program)).weight_versions == (2, 2, 2)
