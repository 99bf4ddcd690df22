"""Timelines: hops, split backwards, overlaps, recomputation and weight versions, by hand."""

from __future__ import annotations

import pytest

from sixfold.pipeline import Costs, Program, ScheduleError, draw, gpipe, interleaved, one_f_one_b, simulate
from sixfold.pipeline.passes import lower


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
        (lambda: draw(gpipe(1, 1), format="png"), "format is 'png'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(make, words):
    with pytest.raises(ScheduleError, match=words):
        make()
