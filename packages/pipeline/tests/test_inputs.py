"""Numbers as users give them: numpy is taken and leaves no trace; what is no number, or none that can be, is named."""

from __future__ import annotations

import json
import math
import re

import pytest
from schedule_helpers import SCHEDULES

from sixfold.pipeline import (
    Action,
    Costs,
    Kind,
    LayerProfile,
    Program,
    ScheduleError,
    gpipe,
    interleaved,
    one_f_one_b,
    partition,
    plan,
    plan_2bw,
    plan_over,
    schedules,
    simulate,
    verify,
)
from sixfold.pipeline.passes import lower, optimizer_step, recompute, unshard


@pytest.fixture
def np():
    return pytest.importorskip("numpy", reason="its numbers are what is given")


@pytest.mark.parametrize("name", SCHEDULES)
def test_numpy_sizes_make_the_same_program_of_plain_ints(name, np):
    made, plain = SCHEDULES[name](np.int64(3), np.int32(5)), SCHEDULES[name](3, 5)
    assert made == plain and str(made) == str(plain) and repr(made) == repr(plain)
    numbers = [made.microbatches, *made.placement]
    for _, _, entry in made.entries():
        for action in entry.each():
            numbers += [action.stage, action.microbatch]
    assert {type(number) for number in numbers} <= {int, type(None)}
    json.dumps(numbers)


@pytest.mark.parametrize("name", schedules.__all__)
@pytest.mark.parametrize("size", [True, 2.0, "2", None, 0, -1], ids=repr)
def test_sizes_that_are_no_whole_numbers_from_one_on_are_named(name, size):
    make = getattr(schedules, name)
    for arguments, what in (((size, 2), "ranks"), ((2, size), "microbatches")):
        with pytest.raises(ScheduleError, match=f"{what} is "):
            make(*arguments)


def test_numpys_numbers_that_are_no_sizes_or_times_are_named(np):
    for name in schedules.__all__:
        for size in (np.float64(2), np.int64(0), np.bool_(True)):
            refused("ranks is ", lambda size=size, name=name: getattr(schedules, name)(size, 2))
            refused("microbatches is ", lambda size=size, name=name: getattr(schedules, name)(2, size))
    for time in (np.bool_(True), np.float32("nan"), np.float64(-1), np.array([1.0, 2.0])):
        refused("Costs.forward of stage 1 is", lambda time=time: Costs([1.0, time], [1.0] * 2, [1.0] * 2))
        refused("Costs.hop is", lambda time=time: Costs([1.0], [1.0], [1.0], hop=time))


def refused(words, act):
    with pytest.raises(ScheduleError, match=re.escape(words)):
        act()


def test_the_further_sizes_are_whole_numbers_too():
    refused("chunks is 2.0; it is a whole number >= 1", lambda: interleaved(2, 4, 2.0))
    refused("group is True; it is a whole number", lambda: interleaved(1, 4, 2, True))
    refused("waves is '1'", lambda: schedules.hanayo(2, 4, "1"))
    refused("steps is 2.5", lambda: schedules.pipedream_2bw(2, 4, 2.5))
    refused("max_active is 1.5", lambda: unshard(gpipe(2, 2), 1.5))
    refused("steps is True", lambda: optimizer_step(gpipe(2, 2), when="2bw", steps=True))
    refused("microbatches is 2.0; it is a whole number", lambda: Program.parse("0: 0F0 0B0 0F1 0B1", 2.0))
    refused("rank of stage 1 is 0.0; it is a whole number", lambda: Program(((),), 1, (0, 0.0)))
    refused(
        "microbatches is 2.5; it is a whole number, or which of them", lambda: recompute(gpipe(2, 4), microbatches=2.5)
    )
    refused("microbatches is True; it is a whole number, or which", lambda: recompute(gpipe(2, 4), microbatches=True))
    refused("recompute of microbatch 'a'", lambda: recompute(gpipe(2, 4), microbatches=["a"]))


def test_passes_take_numpys_integers(np):
    program = gpipe(2, 4)
    assert recompute(program, microbatches=np.int64(2)) == recompute(program, microbatches=2)
    assert recompute(program, microbatches=np.array([1, 3])) == recompute(program, microbatches=[1, 3])
    assert unshard(program, np.int64(2)) == unshard(program, 2)


def test_an_action_of_a_kinds_spelling_is_that_action(np):
    made, plain = Action(np.int64(3), "F", np.int32(0)), Action(3, Kind.F, 0)
    assert made == plain and repr(made) == repr(plain) and made.kind is Kind.F and str(made) == "3F0"
    program = Program(((Action(0, "F", 0), Action(0, "B", 0)),), 1, (0,))
    assert verify(program) == verify(gpipe(1, 1)) and lower(program) == lower(gpipe(1, 1))
    refused("kind is 'G'; it is one of F, B, I, W,", lambda: Action(0, "G", 0))
    for value in (True, 1.0, "1"):
        refused(f"stage is {value!r}", lambda value=value: Action(value, Kind.F, 0))
        refused(f"microbatch is {value!r}", lambda value=value: Action(0, Kind.F, value))


def test_a_program_of_lists_and_numpys_numbers_is_the_one_of_tuples_and_ints(np):
    plain = one_f_one_b(2, 3)
    made = Program([list(row) for row in plain.ranks], np.int64(3), np.array([0, 1]))
    assert made == plain and hash(made) == hash(plain) and repr(made).replace("''", "'one_f_one_b'") == repr(plain)


def test_costs_of_numpy_are_those_of_lists(np):
    lists = Costs([1, 2], [3, 4], [5, 6], 1, activation=[1, 1], input=[0, 0])
    rows = [np.array(row) for row in ([1, 2], [3.0, 4.0], [5, 6])]
    arrays = Costs(*rows, np.float32(1), activation=np.ones(2), input=np.zeros(2, int))
    assert arrays == lists and hash(arrays) == hash(lists) and repr(arrays) == repr(lists)
    rows[0][0] = 99  # the caller's array is the caller's
    assert arrays == lists
    program = gpipe(2, 3)
    assert simulate(program, arrays) == simulate(program, lists)
    found = plan(arrays, ranks=np.int64(2), microbatches=np.int32(3), memory_cap=np.float64(9), time_limit_s=0.05)
    assert type(found.timeline.makespan) is float and type(found.lower_bound) is float
    json.dumps([found.lower_bound, found.gap, found.timeline.makespan, found.program.placement])


@pytest.mark.parametrize("value", [True, "1", None, -1.0, math.nan, math.inf, [1.0]], ids=repr)
def test_times_that_are_no_times_are_named(value):
    ok = [1.0, 1.0]
    refused("Costs.forward of stage 1 is", lambda: Costs([1.0, value], ok, ok))
    refused("Costs.activation of stage 0 is", lambda: Costs(ok, ok, ok, activation=[value, 1.0]))
    refused("Costs.hop is", lambda: Costs(ok, ok, ok, hop=value))
    refused("Costs.overlap is", lambda: Costs(ok, ok, ok, overlap=value))
    refused("Costs.input_share is", lambda: Costs(ok, ok, ok, input_share=value))
    for name in ("forward", "backward_input", "backward_weight", "hop"):
        refused(f"{name} is ", lambda name=name: Costs.per_rank(gpipe(2, 2), **{name: value}))
    refused("layer_costs[1] is", lambda: partition([1.0, value, 1.0], 2))
    refused("first is", lambda: partition([1.0, 1.0], 2, first=value))
    refused("LayerProfile.hop_s is", lambda: LayerProfile(1, 1, 1, 1, 1, value, 1))
    refused("time_limit_s is", lambda: plan(Costs(ok, ok, ok), ranks=2, microbatches=2, time_limit_s=value))
    if value not in (None, math.inf):
        refused("memory_cap is", lambda: plan(Costs(ok, ok, ok), ranks=2, microbatches=2, memory_cap=value))
        refused("memory_cap is", lambda: verify(gpipe(2, 2), memory_cap=value))


def test_costs_of_no_stage_or_no_row_are_refused():
    refused("Costs.forward has no values", lambda: Costs([], [], []))
    refused("Costs.forward is 1.0; it has one value per stage", lambda: Costs(1.0, [1.0], [1.0]))
    refused("Costs.forward is '12'; it has one value per stage", lambda: Costs("12", [1.0], [1.0]))


@pytest.mark.parametrize("value", [True, 2.0, "2", 0, -1], ids=repr)
def test_counts_of_the_planners_are_whole_numbers(value):
    profile = LayerProfile(1, 1, 1, 1, 1, 0, 0)
    good = {"layers": 4, "devices": 2, "batch": 8}
    for name in good:
        refused(f"{name} is", lambda name=name: plan_2bw({1: profile}, memory_cap=99, **{**good, name: value}))
    refused("microbatch is", lambda: plan_2bw({value: profile}, memory_cap=99, **good))
    refused("stages is", lambda: partition([1.0, 1.0], value))
    costs = Costs([1.0] * 2, [1.0] * 2, [1.0] * 2)
    refused("ranks is", lambda: plan(costs, ranks=value, microbatches=2))
    refused("microbatches is", lambda: plan(costs, ranks=2, microbatches=value))
    refused("microbatches is", lambda: plan_over([(value, costs)], ranks=2))


def test_numpys_numbers_reach_the_planners(np):
    assert partition(np.array([3.0, 1.0, 1.0, 1.0]), np.int64(2)) == (1, 3)
    profile = LayerProfile(np.float64(1), 1, 1, 1, 1, 0, 0)
    plain = plan_2bw({1: LayerProfile(1, 1, 1, 1, 1, 0, 0)}, layers=4, devices=2, batch=8, memory_cap=99)
    made = plan_2bw({np.int64(1): profile}, layers=np.int64(4), devices=np.int64(2), batch=np.int64(8), memory_cap=99)
    assert made == plain and repr(made) == repr(plain)
    refused("memory_cap is nan", lambda: plan_2bw({1: profile}, layers=4, devices=2, batch=8, memory_cap=math.nan))
    refused("memory_cap is '9'", lambda: plan_2bw({1: profile}, layers=4, devices=2, batch=8, memory_cap="9"))
    refused("profiles is empty", lambda: plan_2bw({}, layers=4, devices=2, batch=8, memory_cap=9))
    for given, words in (
        ({1: (1.0, 2.0)}, "profiles[1] is a tuple; give {1: LayerProfile"),
        ([(1.0, 2.0)], "profiles is a list; give {1: LayerProfile"),
        (None, "profiles is a NoneType"),
    ):
        refused(words, lambda given=given: plan_2bw(given, layers=4, devices=2, batch=8, memory_cap=9))
