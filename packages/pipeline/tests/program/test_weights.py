"""Which weights a microbatch reads is part of a program: text, equality, pictures and traces say it, passes keep it."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
from schedule_helpers import FLUSH, SCHEDULES

from sixfold.pipeline import (
    Costs,
    Program,
    ScheduleError,
    Weights,
    draw,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    simulate,
    verify,
)
from sixfold.pipeline.drawing.trace import read_trace
from sixfold.pipeline.passes import (
    lower,
    merge_backward,
    optimizer_step,
    recompute,
    reduce_grad,
    split_backward,
    strip,
    unshard,
)

KEEP = (lower, merge_backward, recompute, reduce_grad, split_backward, unshard)  # passes that leave STEPs alone


def trained(program: Program, gradient=lambda weight, k: weight * 0.5 + k + 1) -> list[float]:
    """Weights of stage 1 after each STEP: the recurrences of the two papers, on the list of its rank."""
    rows = [part for entry in program.ranks[1] for part in entry.each() if part.stage == 1]
    size = program.microbatches // sum(part.kind == "STEP" for part in rows)
    versions, read, due, after = [1.0], {}, 0.0, []
    for part in rows:
        if part.kind == "F" and program.weights == "pipedream":
            read[part.microbatch] = versions[-1]
        elif part.kind == "F" and program.weights == "2bw":
            read[part.microbatch] = versions[max(part.microbatch // size - 1, 0)]
        elif part.kind == "B":
            due += gradient(read[part.microbatch], part.microbatch)
        elif part.kind == "STEP":
            versions.append(versions[-1] - 0.1 * due)
            due = 0.0
            after.append(versions[-1])
    return after


def test_programs_of_equal_lists_whose_recurrences_differ_are_different_values():
    double, stashed = pipedream_2bw(2, 1, steps=4), pipedream(2, 4)
    assert double.ranks == stashed.ranks
    assert trained(double) != trained(stashed)
    assert double != stashed
    assert hash(double) != hash(stashed)
    assert len({double, stashed, pipedream(2, 4)}) == 2
    assert str(double) != str(stashed)
    assert repr(double) != repr(stashed)
    assert draw(double) != draw(stashed)
    costs = Costs.per_rank(double)
    for form in ("text", "svg", "trace"):
        assert draw(simulate(double, costs), format=form) != draw(simulate(stashed, costs), format=form)
    assert verify(double).weight_versions == simulate(double, costs).weight_versions == (2, 2)
    assert verify(stashed).weight_versions == simulate(stashed, costs).weight_versions == (2, 1)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.slow
def test_every_round_trip_keeps_the_whole_value(name):
    for program in (SCHEDULES[name](3, 5), unshard(lower(SCHEDULES[name](2, 4)))):
        again = Program.parse(str(program))
        assert again == program and hash(again) == hash(program)
        for copied in (pickle.loads(pickle.dumps(program)), copy.deepcopy(program)):
            assert copied == program and repr(copied) == repr(program) and copied.name == program.name
        assert read_trace(draw(program, format="trace")).weights == program.weights
        timeline = simulate(program, Costs.per_rank(program))
        assert pickle.loads(pickle.dumps(timeline)) == timeline
        assert read_trace(draw(timeline, format="trace")).weight_versions == timeline.weight_versions
        assert (program.weights is Weights.FLUSHED) == (name in FLUSH)


@pytest.mark.parametrize("make", [pipedream, pipedream_2bw, one_f_one_b], ids=lambda make: make.__name__)
def test_passes_keep_weights_placement_name_and_microbatches(make):
    program = make(3, 4)
    for change in KEEP:
        made = change(program)
        for field in ("weights", "placement", "name", "microbatches"):
            assert getattr(made, field) == getattr(program, field), (change.__name__, field)
        assert verify(made).weight_versions == verify(program).weight_versions


def test_without_its_steps_a_program_is_one_flush():
    for program in (pipedream(2, 4), pipedream_2bw(2, 2)):
        assert strip(program) == one_f_one_b(2, 4)
        assert strip(program).weights is Weights.FLUSHED
        assert strip(lower(program)).to_csv() == lower(one_f_one_b(2, 4)).to_csv()


def test_the_pass_that_adds_steps_says_how_they_read():
    order = one_f_one_b(2, 4)
    assert optimizer_step(order).weights is optimizer_step(order, when="post_validated").weights is Weights.FLUSHED
    assert optimizer_step(order, when="2bw", steps=2) == pipedream_2bw(2, 2)
    assert optimizer_step(order, when="pipedream", steps=4) == pipedream(2, 4)
    with pytest.raises(ScheduleError, match="when is 'version'; it is 'flush', 'post_validated', 'pipedream' or '2bw'"):
        optimizer_step(order, when="version", steps=2)


def test_pytorchs_csv_has_no_place_for_it_and_a_program_that_would_lose_it_is_not_exported():
    program = replace(one_f_one_b(2, 4), weights=Weights.TWO_BW)
    with pytest.raises(ScheduleError, match=r"weights are 2bw; PyTorch's CSV has no place for that; passes\.strip"):
        program.to_csv()
    assert Program.from_csv(strip(program).to_csv()).weights is Weights.FLUSHED


def test_text_says_it_in_one_line_and_flushed_programs_need_none():
    assert str(pipedream(1, 2)) == "weights: pipedream\n0: 0F0 0B0 0STEP0 0F1 0B1 0STEP1\n"
    assert "weights" not in str(one_f_one_b(2, 2))
    assert Program.parse("weights: flushed\n0: 0F0 0B0") == Program.parse("0: 0F0 0B0")
    for text, words in (
        ("weights: stale\n0: 0F0 0B0", "weights is 'stale'; it is 'flushed', 'pipedream' or '2bw'"),
        ("weights: 2bw\nweights: 2bw\n0: 0F0 0B0", "weights are given twice"),
    ):
        with pytest.raises(ScheduleError, match=words):
            Program.parse(text)
    with pytest.raises(ScheduleError, match="weights is 'new'"):
        replace(one_f_one_b(2, 2), weights="new")
    assert replace(one_f_one_b(2, 2), weights="2bw").weights is Weights.TWO_BW


@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("0: 0F0 0F1 0B0 0STEP0 0B1 0STEP1", "[1] 0F1", "0STEP0 comes after it"),
        ("weights: 2bw\n0: 0F0 0F1 0F2 0B0 0STEP0 0B1 0STEP1 0B2 0STEP2", "[2] 0F2", "0STEP0 comes after it"),
        ("weights: pipedream\n0: 0F0 0B0", "0STEP0", "is missing"),
        ("weights: 2bw\n0: 0F0 0B0", "0STEP0", "is missing"),
    ],
)
def test_a_forward_before_the_step_that_makes_its_weights_is_refused(text, place, rule):
    program = Program.parse(text)
    for check in (verify, lambda program: simulate(program, Costs([1.0], [1.0], [1.0]))):
        with pytest.raises(ScheduleError) as caught:
            check(program)
        first = str(caught.value).splitlines()[0]
        assert place in first and rule in first, first


def test_the_same_lists_pass_where_the_versions_are_kept():
    assert verify(Program.parse("weights: 2bw\n0: 0F0 0F1 0B0 0STEP0 0B1 0STEP1")).weight_versions == (2,)
    kept = "weights: pipedream\n0: 0F0 0F1 0F2 0B0 0STEP0 0F3 0B1 0STEP1 0B2 0STEP2 0B3 0STEP3"
    assert verify(Program.parse(kept)).weight_versions == (3,)
