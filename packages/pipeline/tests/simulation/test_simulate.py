"""Timelines: hops, split backwards, overlaps, recomputation and weight versions, by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from machine_helpers import most_at_once, raised_times, random_program
from schedule_helpers import SCHEDULES

from sixfold.pipeline import (
    Costs,
    Kind,
    Program,
    ScheduleError,
    draw,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    verify,
)
from sixfold.pipeline.passes import lower, optimizer_step, post_ahead, recompute, reduce_grad, unshard


def times(program: Program, costs: Costs) -> dict[str, tuple[float, float]]:
    return {str(action): (start, end) for _, action, start, end in simulate(program, costs).events}


def test_a_tensor_from_another_rank_arrives_a_hop_later():
    costs = Costs([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], hop=0.5)
    assert times(gpipe(2, 1), costs) == {"0F0": (0, 1), "1F0": (1.5, 3.5), "1B0": (3.5, 13.5), "0B0": (14, 22)}


def test_within_a_rank_there_is_no_hop_and_weights_may_wait():
    program = Program.parse("0: 0F0 1F0 1I0 0I0 0W0 1W0")
    costs = Costs([1.0, 1.0], [2.0, 2.0], [4.0, 4.0], hop=9.0)
    assert times(program, costs)["1W0"] == (10, 14)
    assert simulate(program, costs).bubble_over_ideal == 0


def test_an_overlap_takes_its_factor_of_the_sum():
    program = Program.parse("0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    costs = Costs([1.0], [1.0], [1.0], overlap=0.5)
    assert times(program, costs)["(0F1;0B0)OVERLAP_F_B"] == (1, 2.5)


def test_with_factor_one_the_parts_of_an_overlap_wait_and_hand_on_alone():
    # Rank 0's second part waits for rank 1, which got the first part's output before.
    program = Program.parse("0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1\n1: 1F0 1B0 1F1 1B1")
    costs = Costs([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    played = times(program, costs)
    assert played["0F1"] == (1, 2) and played["0B0"] == (4, 6), "with a gap they are two events"
    assert played["1F1"] == (4, 5), "0F1 was there at 2"
    assert simulate(program, costs).bubble_over_total == pytest.approx(1 - 12 / (2 * 9))
    block = times(program, replace(costs, overlap=0.5))
    assert block["(0F1;0B0)OVERLAP_F_B"] == (4, 5.5) and block["1F1"] == (5.5, 6.5)
    together = Program.parse("0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    assert times(together, Costs([1.0], [1.0], [1.0]))["(0F1;0B0)OVERLAP_F_B"] == (1, 4)


def test_a_hop_is_a_number_a_table_or_a_function_of_the_two_ranks():
    program, ones = gpipe(3, 2), [1.0] * 3
    table = [[0.0, 0.5, 9.0], [0.25, 0.0, 2.0], [9.0, 3.0, 0.0]]
    costs = Costs(ones, ones, ones, hop=table)
    assert times(program, costs)["1F0"][0] == 1.5 and times(program, costs)["2F0"][0] == 4.5
    assert times(program, costs)["1B0"][0] == 6.5 + 2 + 3 and times(program, costs)["0B0"][0] == 11.5 + 2 + 0.25
    by_function = Costs(ones, ones, ones, hop=lambda a, b: table[a][b])
    assert simulate(program, by_function) == simulate(program, costs)
    assert by_function.hops(3) == costs.hops(3) == costs.hop == tuple(map(tuple, table))
    assert costs == Costs(ones, ones, ones, hop=[tuple(row) for row in table]) and len({costs, by_function}) == 2
    assert by_function == replace(by_function) and hash(by_function) == hash(replace(by_function))
    assert Costs(ones, ones, ones, hop=2).hops(2) == ((0, 2), (2, 0))
    numpys = pytest.importorskip("numpy", reason="its arrays are tables too").array(table)
    assert Costs(ones, ones, ones, hop=numpys) == costs


def test_steps_and_slots_take_their_time_and_only_steps_are_work():
    program = optimizer_step(unshard(reduce_grad(gpipe(1, 2))))
    costs = Costs([1.0], [1.0], [1.0], step=[0.5], unshard=[0.25], reduce=[2.0])
    played = times(program, costs)
    assert played["0UNSHARD"] == (0, 0.25) and played["0REDUCE_GRAD"] == (6.25, 8.25) and played["0STEP0"][1] == 8.75
    timeline = simulate(program, costs)
    assert (timeline.makespan, timeline.ideal) == (8.75, 6.5)
    assert simulate(program, replace(costs, unshard=None, reduce=None)).makespan == 6.5
    assert "0UNSHARD" not in times(program, replace(costs, unshard=None))


def some_costs(rng: random.Random, stages: int, ranks: int) -> Costs:
    def row() -> list[float]:
        return [rng.choice((0.0, 0.25, 1.0, 1.5)) for _ in range(stages)]

    table = [[rng.choice((0.0, 0.5, 2.0)) for _ in range(ranks)] for _ in range(ranks)]
    hop = rng.choice((0.0, 0.5, table, lambda a, b: table[a][b]))
    return Costs(row(), row(), row(), hop, overlap=rng.choice((0.5, 1.0, 1.0, 1.5)), step=row(), unshard=row())


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(60))
def test_all_times_are_the_earliest_that_break_no_rule(seed):
    rng = random.Random(seed)
    program = random_program(rng) if seed % 2 else SCHEDULES[rng.choice(list(SCHEDULES))](rng.randint(1, 4), 5)
    if seed % 3 == 0 and program.weights == "flushed":
        program = optimizer_step(program)
    if seed % 5 == 0:
        program = lower(program)
    program = unshard(program, 2) if seed % 7 < 3 else program
    costs = some_costs(rng, program.stages, len(program.ranks))
    wanted = raised_times(program, costs)
    played = simulate(program, costs)
    for _, entry, start, end in played.events:
        parts = list(entry.each())
        if entry.kind in (Kind.UNSHARD, Kind.REDUCE_GRAD):
            continue  # there may be several of one name
        if costs.overlap != 1:
            assert all(wanted[str(part)] == pytest.approx((start, end)) for part in parts)
        else:
            assert (wanted[str(parts[0])][0], wanted[str(parts[-1])][1]) == pytest.approx((start, end))
    assert played.makespan == pytest.approx(max(end for _, end in wanted.values()))


def test_the_three_bubbles_of_1f1b_differ_as_their_definitions_do():
    program = one_f_one_b(4, 8)
    timeline = simulate(program, Costs.per_rank(program))
    assert (timeline.makespan, timeline.ideal) == (33, 24)
    assert timeline.bubble_over_ideal == pytest.approx(9 / 24)
    assert timeline.bubble_over_total == pytest.approx(9 / 33)
    assert timeline.span_over_ideal == pytest.approx(9 / 24)


@pytest.mark.parametrize("program", [gpipe(3, 4), one_f_one_b(4, 5), interleaved(2, 5, 2)])
def test_messages_in_the_lists_change_no_time(program):
    costs = Costs.per_rank(program, 1.0, 1.5, 0.5, hop=0.25)
    assert simulate(lower(program), costs).events == simulate(program, costs).events


def test_recomputation_holds_inputs_only_and_costs_a_forward():
    program = Program.parse("0: 0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1")
    costs = Costs([1.0], [1.0], [1.0], activation=[10.0], input=[1.0])
    timeline = simulate(program, costs)
    assert timeline.makespan == 8
    assert timeline.peak_activations == (11,)


def test_the_input_gradient_frees_its_share():
    program = Program.parse("0: 0F0 0I0 0F1 0I1 0W0 0W1")
    assert simulate(program, Costs([1.0], [1.0], [1.0], input_share=0.5)).peak_activations == (1.5,)


def test_outputs_are_held_from_their_forward_to_their_input_gradient():
    def outputs(text):
        program = Program.parse(text)
        return simulate(
            program, Costs([1.0] * program.stages, [1.0] * program.stages, [1.0] * program.stages)
        ).peak_outputs

    assert outputs("0: 0F0 0I0 0F1 0I1 0W0 0W1") == (1,)
    assert outputs("0: 0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1") == (1,)
    assert outputs("0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1") == (4,)
    program = interleaved(4, 16, 2)
    assert simulate(program, Costs.per_rank(program)).peak_outputs[0] == 11  # PyTorch's runtime holds all 32


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_most_outputs_and_received_tensors_are_those_of_their_lifetimes(name):
    rng = random.Random(name)
    for turn in range(6):
        program = SCHEDULES[name](rng.randint(1, 4), rng.randint(1, 6))
        if turn % 3 == 0:
            program = recompute(program, microbatches=rng.randint(1, program.microbatches))
        if turn % 2:
            program = post_ahead(lower(program), rng.randint(0, 3))
        timeline = simulate(program, Costs.per_rank(program))
        outputs, received = most_at_once(program)
        assert timeline.peak_outputs == tuple(outputs), program
        assert timeline.peak_received == tuple(received), program


def test_a_receive_counts_from_where_it_is_posted():
    program = lower(one_f_one_b(2, 4))
    costs = Costs.per_rank(program)
    assert simulate(one_f_one_b(2, 4), costs).peak_received == (1, 1)
    assert simulate(program, costs).peak_received == (1, 2)  # rank 0 sends its second forward while the first runs here
    assert simulate(post_ahead(program, 0), costs).peak_received == (1, 2)
    assert simulate(post_ahead(program, 2), costs).peak_received == (2, 3)
    assert simulate(post_ahead(program, 9), costs).events == simulate(program, costs).events
    with pytest.raises(ScheduleError, match="lookahead is -1; it is >= 0"):
        post_ahead(program, -1)


def test_what_i_holds_for_w_is_counted():
    program = Program.parse("0: 0F0 0F1 0I0 0I1 0W0 0W1")
    costs = Costs([1.0], [1.0], [1.0], activation=[4.0], input_share=0.25, deferred=[3.0])
    assert simulate(program, costs).peak_activations == (12.0,)  # two of 4 - 1 + 3 behind both I's
    assert verify(program, costs=costs).peak_activations == (12.0,)
    with pytest.raises(ScheduleError, match="0I0: holds 10 of activations"):
        verify(program, costs=costs, memory_cap=9)


def test_weight_versions_are_those_in_use_and_the_newest():
    assert simulate(gpipe(2, 2), Costs([1.0] * 2, [1.0] * 2, [1.0] * 2)).weight_versions == (1, 1)
    program = Program.parse("weights: pipedream\n0: 0F0 0F1 0F2 0B0 0STEP0 0F3 0B1 0STEP1 0B2 0STEP2 0B3 0STEP3")
    assert simulate(program, Costs([1.0], [1.0], [1.0])).weight_versions == (3,)


def test_a_program_that_hangs_and_costs_for_another_one_are_refused():
    with pytest.raises(ScheduleError, match="0B0 never starts"):
        simulate(Program.parse("0: 0B0 0F0\n1: 1F0 1B0"), Costs([1.0] * 2, [1.0] * 2, [1.0] * 2))
    with pytest.raises(ScheduleError, match="costs are for 1 stages; the program has 2"):
        simulate(gpipe(2, 1), Costs([1.0], [1.0], [1.0]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Costs([1.0], [1.0, 2.0], [1.0]), "backward_input has 2 values, forward has 1"),
        (lambda: Costs([-1.0], [1.0], [1.0]), "forward of stage 0 is -1.0"),
        (lambda: Costs([1.0], [1.0], [float("nan")]), "backward_weight of stage 0 is nan"),
        (lambda: Costs([1.0], [1.0], [1.0], input_share=2.0), "input_share is 2.0"),
        (lambda: Costs([1.0], [1.0], [1.0], hop=-1.0), "hop is -1.0"),
        (lambda: Costs([1.0], [1.0], [1.0], hop=float("inf")), "hop is inf"),
        (lambda: Costs([1.0], [1.0], [1.0], overlap=0.0), "overlap is 0.0"),
        (lambda: Costs([1.0], [1.0], [1.0], hop=[[0.0, 1.0]]), "as a table it has a row per rank"),
        (lambda: Costs([1.0], [1.0], [1.0], hop="1"), "hop is '1'"),
        (lambda: Costs([1.0], [1.0], [1.0], hop=[[0.0, -1.0], [1.0, 0.0]]), "hop from rank 0 to rank 1 is -1.0"),
        (lambda: Costs([1.0], [1.0], [1.0], step=[1.0, 1.0]), "step has 2 values, forward has 1"),
        (lambda: Costs([1.0], [1.0], [1.0], unshard=2.0), "unshard is 2.0; it has one value per stage"),
        (
            lambda: simulate(gpipe(3, 1), Costs([1.0] * 3, [1.0] * 3, [1.0] * 3, hop=[[0.0, 1.0], [1.0, 0.0]])),
            "hop is a table of 2 ranks; rank 2 sends or receives",
        ),
        (
            lambda: simulate(gpipe(2, 1), Costs([1.0] * 2, [1.0] * 2, [1.0] * 2, hop=lambda a, b: "soon")),
            "hop from rank 0 to rank 1 is 'soon'",
        ),
        (lambda: draw(gpipe(1, 1), format="png"), "format is 'png'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(make, words):
    with pytest.raises(ScheduleError, match=words):
        make()


def test_costs_that_add_up_to_infinity_are_refused_and_make_no_nan():
    program = gpipe(2, 4)
    with pytest.raises(ScheduleError, match=r"the times of rank 0 add up to inf; .* in a larger unit"):
        simulate(program, Costs.per_rank(program, 1e308))
    assert simulate(program, Costs.per_rank(program, 1e300)).bubble_over_ideal < 1
