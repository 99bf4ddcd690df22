"""Each schedule is its picture; orders ascend, every program is proved, sizes that cannot work are refused."""

from __future__ import annotations

import inspect
import re

import pytest
from schedule_helpers import SCHEDULES

from sixfold.pipeline import (
    Action,
    Costs,
    Kind,
    Program,
    ScheduleError,
    draw,
    hanayo,
    interleaved,
    looped_bfs,
    one_f_one_b,
    pipedream_2bw,
    schedules,
    simulate,
    v_min,
    verify,
    zb_v,
)
from sixfold.pipeline.passes import lower
from sixfold.pipeline.schedules import Schedule


def picture_of(entry: Schedule) -> str:
    """The picture in the documentation of a schedule's file: its indented lines ``rank: actions``."""
    lines = (inspect.getmodule(entry.make).__doc__ or "").splitlines()
    picture = [line[4:] for line in lines if re.fullmatch(r"    (weights|[0-9]+): .*", line)]
    assert picture, f"the docstring of schedules/{entry.name}.py has no picture, such as '    0: 0F0 0B0'"
    return "".join(f"{line}\n" for line in picture)


@pytest.mark.parametrize("entry", schedules.registered(), ids=lambda entry: entry.name)
def test_a_schedule_is_the_picture_in_its_documentation(entry):
    picture = picture_of(entry)
    steps = {"steps": 2} if "steps" in entry.arguments else {}
    m = 1 + max(int(number) for number in re.findall("F([0-9]+)", picture))
    assert draw(entry.make(2, m // steps.get("steps", 1), **steps)) == picture


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


def test_zb_v_on_four_ranks_never_idles_between_its_first_and_last_action():
    program = zb_v(ranks=3, microbatches=5)
    drawn = draw(simulate(program, Costs.per_rank(program)))
    for line in drawn.splitlines():
        assert "." not in line[3:].strip("."), drawn


def test_interleaved_with_ragged_microbatches_makes_groups_of_near_equal_size():
    # Five microbatches on two ranks: groups of 3 and 2, not 2, 2 and a short 1.
    assert (
        draw(interleaved(ranks=2, microbatches=5, chunks=2))
        == """\
0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4
1: 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4
"""
    )


def orders(program: Program, kinds: tuple[Kind, ...]) -> list[list[int | None]]:
    """Of each stage the microbatches of ``kinds``, in the order of the list."""
    found: list[list[int | None]] = [[] for _ in program.placement]
    for _, _, entry in program.entries():
        for part in entry.each():
            if part.kind in kinds:
                found[part.stage].append(part.microbatch)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.slow
def test_forwards_and_both_gradients_ascend_on_each_stage_and_the_program_is_proved(name):
    for p in (1, 2, 3, 5, 8):
        for m in (1, 2, 5, 2 * p):
            program = SCHEDULES[name](p, m)
            report = verify(program)
            for kinds in ((Kind.F,), (Kind.B, Kind.I), (Kind.B, Kind.W)):
                ascending = [list(range(program.microbatches))] * program.stages
                assert orders(program, kinds) == ascending, f"p={p} m={m} {kinds}"
            lowered = verify(lower(program))
            local = sum(a == b for a, b in zip(program.placement, program.placement[1:], strict=False))
            assert lowered.messages == report.messages
            assert lowered.messages == 2 * program.microbatches * (program.stages - 1 - local)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m", "words"), [(0, 1, "ranks is 0"), (2, 0, "microbatches is 0"), (1, -3, "is -3")])
def test_sizes_below_one_are_refused_by_name(name, p, m, words):
    if "2bw" in name and p:
        m = min(m, 0)
        make = lambda: pipedream_2bw(2, m)  # noqa: E731 - the table's own maker clamps m
    else:
        make = lambda: SCHEDULES[name](p, m)  # noqa: E731
    with pytest.raises(ScheduleError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: interleaved(2, 2, 0), "chunks is 0"),
        (lambda: interleaved(4, 8, 2, group=3), "group is 3"),
        (lambda: looped_bfs(2, 2, -1), "chunks is -1"),
        (lambda: hanayo(2, 2, 0), "waves is 0"),
        (lambda: hanayo(2, 2, memory_cap=0.5), "memory_cap is 0.5 microbatches; it is >= 1"),
        (lambda: v_min(4, 2, memory_cap=float("nan")), "memory_cap is nan microbatches; it is >= 1"),
        (lambda: one_f_one_b(2, 2.5), "microbatches is 2.5; it is a whole number >= 1"),
        (lambda: zb_v(float("nan"), 2), "ranks is nan; it is a whole number"),
        (lambda: interleaved(2, 2, "2"), "chunks is '2'; it is a whole number"),
        (lambda: pipedream_2bw(2, 2, 0), "steps is 0"),
        (lambda: pipedream_2bw(4, 2), "microbatches is 2; pipedream_2bw on 4 ranks takes at least 3"),
    ],
)
def test_other_sizes_that_cannot_work_are_refused_by_name(make, words):
    with pytest.raises(ScheduleError, match=words):
        make()


def test_a_group_wider_than_the_ranks_is_proved_too():
    program = interleaved(2, 8, 2, group=4)
    verify(lower(program))
    assert program.ranks[0][:4] == tuple(Action(0, Kind.F, k) for k in range(4))
