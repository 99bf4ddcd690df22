"""Each schedule is its picture; its bubble and its memory are the closed forms."""

from __future__ import annotations

import itertools

import pytest

from sixfold.pipeline import (
    Action,
    Costs,
    Kind,
    Program,
    ScheduleError,
    draw,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    simulate,
    verify,
)
from sixfold.pipeline.passes import lower


def test_naive_on_two_stages():
    assert (
        draw(naive(ranks=2, microbatches=3))
        == """\
0: 0F0 0B0 0F1 0B1 0F2 0B2
1: 1F0 1B0 1F1 1B1 1F2 1B2
"""
    )


def test_gpipe_on_two_stages():
    assert (
        draw(gpipe(ranks=2, microbatches=3))
        == """\
0: 0F0 0F1 0F2 0B0 0B1 0B2
1: 1F0 1F1 1F2 1B0 1B1 1B2
"""
    )


def test_1f1b_on_two_stages():
    assert (
        draw(one_f_one_b(ranks=2, microbatches=3))
        == """\
0: 0F0 0F1 0B0 0F2 0B1 0B2
1: 1F0 1B0 1F1 1B1 1F2 1B2
"""
    )


def test_1f1b_on_four_stages_in_time():
    program = one_f_one_b(ranks=4, microbatches=4)
    assert (
        draw(simulate(program, Costs.per_rank(program)))
        == """\
0: 0F0 0F1 0F2 0F3 ........................0B0     ....0B1     ....0B2     ....0B3
1: ....1F0 1F1 1F2 ................1B0     1F3 1B1     ....1B2     ....1B3     ........
2: ........2F0 2F1 ........2B0     2F2 2B1     2F3 2B2     ....2B3     ................
3: ............3F0 3B0     3F1 3B1     3F2 3B2     3F3 3B3     ........................
"""
    )


def test_interleaved_on_two_ranks_of_two_chunks():
    assert (
        draw(interleaved(ranks=2, microbatches=4, chunks=2))
        == """\
0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""
    )


def test_interleaved_with_ragged_microbatches_makes_groups_of_near_equal_size():
    # Five microbatches on two ranks: groups of 3 and 2, not 2, 2 and a short 1.
    assert (
        draw(interleaved(ranks=2, microbatches=5, chunks=2))
        == """\
0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4
1: 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4
"""
    )


SIZES = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 4, 7, 16)))


def bubble(program: Program) -> float:
    return simulate(program, Costs.per_rank(program)).bubble_over_ideal


def peaks(program: Program) -> tuple[float, ...]:
    return simulate(program, Costs.per_rank(program)).peak_activations


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubbles_and_peaks_are_the_closed_forms(p, m):
    assert bubble(naive(p, m)) == pytest.approx(p - 1)
    assert bubble(gpipe(p, m)) == pytest.approx((p - 1) / m)
    assert bubble(one_f_one_b(p, m)) == pytest.approx((p - 1) / m)
    assert peaks(naive(p, m)) == (1,) * p
    assert peaks(gpipe(p, m)) == (m,) * p
    assert peaks(one_f_one_b(p, m)) == tuple(min(m, p - r) for r in range(p))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p in (2, 3, 4, 6) for m in range(p, 3 * p + 1)])
def test_the_interleaved_bubble_is_one_vth_for_every_m_from_p_on(p, m, chunks):
    program = interleaved(p, m, chunks)
    assert bubble(program) == pytest.approx((p - 1) / (chunks * m))
    if m % p == 0 and m >= 2 * p:
        assert max(peaks(program)) == pytest.approx(p + (p - 1) / chunks)


@pytest.mark.parametrize("p", range(1, 9))
def test_every_generated_program_is_proved_as_made_and_as_lowered(p):
    for m in (*range(1, 10), 13, 16):
        for program in (naive(p, m), gpipe(p, m), one_f_one_b(p, m), *(interleaved(p, m, v) for v in range(1, 5))):
            verify(program)
            chunks = program.stages // p
            assert verify(lower(program)).messages == 2 * m * (p * chunks - 1 if p > 1 else 0)


@pytest.mark.parametrize("program", [naive(3, 4), gpipe(3, 4), one_f_one_b(3, 7), interleaved(3, 7, 2)])
def test_microbatches_come_in_ascending_order_on_each_stage(program):
    for stage, kind in itertools.product(range(program.stages), (Kind.F, Kind.B)):
        order = [a.microbatch for _, _, a in program.entries() if (a.stage, a.kind) == (stage, kind)]
        assert order == list(range(program.microbatches))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: naive(0, 1), "ranks is 0"),
        (lambda: gpipe(1, 0), "microbatches is 0"),
        (lambda: one_f_one_b(2, -1), "microbatches is -1"),
        (lambda: interleaved(2, 2, 0), "chunks is 0"),
        (lambda: interleaved(4, 8, 2, group=3), "group is 3"),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(make, name):
    with pytest.raises(ScheduleError, match=name):
        make()


def test_a_group_wider_than_the_ranks_is_proved_too():
    program = interleaved(2, 8, 2, group=4)
    verify(lower(program))
    assert program.ranks[0][:4] == tuple(Action(0, Kind.F, k) for k in range(4))
