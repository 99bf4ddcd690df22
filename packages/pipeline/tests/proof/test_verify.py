"""What the proof says of a wrong program; ``test_mutants`` asks a machine whether it is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sixfold.pipeline import (
    Action,
    Costs,
    Kind,
    Program,
    ScheduleError,
    gpipe,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    verify,
    zb_h2,
)
from sixfold.pipeline.passes import lower, optimizer_step, recompute, unshard
from sixfold.pipeline.proof.unit_rules import check_steps


def test_the_shortest_cycle_of_crossing_messages_has_two_links():
    program = Program.parse(
        "0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1: 1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    )
    with pytest.raises(ScheduleError) as caught:
        verify(program)
    assert [(r, i, str(a)) for r, i, a in caught.value.cycle] == [(0, 1, "0SEND_F0"), (1, 0, "1RECV_F1")]
    assert str(caught.value).splitlines()[1:3] == [
        "  rank 0 [1] 0SEND_F0 waits for rank 1 [1] 1RECV_F0",
        "  rank 1 [0] 1RECV_F1 waits for rank 0 [3] 0SEND_F1",
    ]


def test_a_chain_of_buffered_messages_names_the_send_that_each_receive_waits_for():
    program = Program.parse("0: 0F0 0RECV_B0 0B0 0SEND_F0\n1: 1RECV_F0 1F0 1B0 1SEND_B0")
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        verify(program, transport="buffered")
    assert str(caught.value).splitlines()[1:3] == [
        "  rank 0 [1] 0RECV_B0 waits for rank 1 [3] 1SEND_B0",
        "  rank 1 [0] 1RECV_F0 waits for rank 0 [3] 0SEND_F0",
    ]


def test_a_cycle_over_three_ranks_has_three_links_and_a_crossing_behind_it_is_preferred():
    # A circle of sends and receives between three ranks of two stages each; every pair alone is in order.
    ring = Program.parse(
        "0: 0F0 3RECV_F0 0SEND_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0\n"
        "1: 1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0\n"
        "2: 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0"
    )
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        verify(ring)
    assert [str(a) for _, _, a in caught.value.cycle] == ["3RECV_F0", "2RECV_F0", "1RECV_F0"]


def test_where_sends_never_wait_more_programs_pass_but_an_edge_keeps_its_order():
    # Rank 0 posts the receive of a gradient before it sends what the gradient needs: only a buffer could help, and
    # even that cannot; but two ranks that both send before they receive hang on rendezvous alone.
    both_send = Program.parse(
        "0: 0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0 0F1 0SEND_F1 3RECV_F1 3F1 3B1 3SEND_B1 0RECV_B1 0B1\n"
        "1: 1RECV_F0 1F0 2F0 1RECV_F1 1F1 2SEND_F0 2F1 2SEND_F1 2RECV_B0 2B0 1B0 1SEND_B0 2RECV_B1 2B1 1B1 1SEND_B1"
    )
    for transport in ("rendezvous", "buffered"):
        with pytest.raises(ScheduleError, match="deadlock"):
            verify(both_send, transport=transport)
    early = Program.parse(
        "0: 0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        verify(early)
    assert verify(early, transport="buffered").messages == 4
    crossed = Program.parse(
        "0: 0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1\n1: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    )
    with pytest.raises(ScheduleError, match="an edge keeps its order"):
        verify(crossed, transport="buffered")
    with pytest.raises(ScheduleError, match="transport is 'pigeon'"):
        verify(early, transport="pigeon")


@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("0: 0B0 0F0", "[1] 0F0", "F comes before it"),
        ("0: 0F0 0W0 0I0", "[1] 0W0", "W comes after I"),
        ("0: 0F0 0B0 0I0 0W0", "[2] 0I0", "either B or I and W"),
        ("0: 0F0 0I0", "0W0", "is missing"),
        ("0: 0F0 0W0", "0I0", "is missing"),
        ("0: 0F0", "0B0", "is missing"),
        ("0: 0F0 0F0 0B0", "[1] 0F0", "already at [0]"),
        ("0: 0F0 0B0 0RECOMPUTE0", "[2] 0RECOMPUTE0", "stands between"),
        ("0: 0F0 0B0\n1: 0F1 0B1", "rank 1 [0] 0F1", "stage 0 is on rank 0"),
        ("0: 1F0 0F0 1B0 0B0", "[0] 1F0", "its input is made at [1]"),
        ("0: 0F0 0SEND_F0 1F0 1B0 0B0 0REDUCE_GRAD", "[1] 0SEND_F0", "both its stages are on this rank"),
        ("0: 0F0 0B0 0SEND_B0", "[2] 0SEND_B0", "no stage at its end"),
        ("0: 0UNSHARD 0F0 0RESHARD 0B0", "[3] 0B0", "not unsharded at this compute action"),
        ("0: 0UNSHARD 0F0 0B0", "0RESHARD", "is missing"),
        ("0: 0F0 0B0 0RESHARD", "[2] 0RESHARD", "the stage is not unsharded"),
        ("0: 0F0 0REDUCE_GRAD 0B0", "[1] 0REDUCE_GRAD", "a backward of the stage comes after it"),
        ("0: 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "[3] 0REDUCE_GRAD", "once per step"),
        ("0: 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD 0STEP0", "[2] 0REDUCE_GRAD", "once per step"),
        ("0: 0F0 0B0 0STEP0 0REDUCE_GRAD", "[3] 0REDUCE_GRAD", "no STEP of the stage follows"),
        ("0: 0F0 0B0 0STEP1", "[2] 0STEP1", "it is optimizer step 0"),
        ("0: 0F0 0B0 0STEP0 0STEP0", "[3] 0STEP0", "it is optimizer step 1"),
        ("0: 0F0 0STEP0 0B0", "[1] 0STEP0", "a backward of its batch (microbatches 0..0) comes after it"),
        ("0: 0F0 0F1 0B0 0B1 0STEP0 0STEP1", "[4] 0STEP0", "a backward of a later batch is at [3]"),
        ("0: 0F0 0F1 0B0 0I1 0STEP0 0W1 0STEP1", "[4] 0STEP0", "a backward of a later batch is at [3]"),
        ("0: 0F0 0F1 0F2 0B0 0B1 0STEP0 0B2 0STEP1", "[7] 0STEP1", "2 steps share 3 microbatches"),
        ("0: 0F0 1F0 1B0 0B0 0STEP0", "1STEP0", "is missing"),
        ("0: 0F0 (0W0;0I0)OVERLAP_F_B", "(0W0;0I0)OVERLAP_F_B", "in execution order"),
    ],
)
def test_a_broken_rule_names_action_place_and_rule(text, place, rule):
    with pytest.raises(ScheduleError) as caught:
        verify(Program.parse(text))
    assert place in str(caught.value)
    assert rule in str(caught.value)


def test_microbatches_beyond_m_are_refused():
    with pytest.raises(ScheduleError, match=r"0F1: microbatches are 0..0"):
        verify(Program.parse("0: 0F0 0F1 0B0 0B1", microbatches=1))


def test_a_number_with_too_many_digits_is_a_missing_action_and_no_lack_of_memory():
    program = Program.parse("0: 0F0 0F999999999999999 0B999999999999999")
    for read in (verify, lower):
        with pytest.raises(ScheduleError, match="rank 0: 0F1 is missing") as caught:
            read(program)
        assert (caught.value.rank, str(caught.value.action)) == (0, "0F1")
    assert str(recompute(program)) == "0: 0F0 0F999999999999999 0RECOMPUTE999999999999999 0B999999999999999\n"


def test_the_proof_of_a_program_with_a_step_per_microbatch_takes_linear_time():
    looks = []

    class Counted(list):
        def __getitem__(self, at):
            found = super().__getitem__(at)
            looks.append(len(found) if isinstance(at, slice) else 1)
            return Counted(found) if isinstance(at, slice) else found

    for m in (64, 256):
        looks.clear()
        program = pipedream(1, m)
        positions = [3 * k + 1 for k in range(m)]
        check_steps(program, Counted(positions), Counted(positions))
        assert sum(looks) <= 8 * m


def test_gathers_steps_and_reductions_in_their_places_pass():
    for text in (
        "0: 0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD 0REDUCE_GRAD 0STEP0",
        "0: 0F0 0I0 0W0 0REDUCE_GRAD 0STEP0 0F1 0RECOMPUTE1 0B1 0REDUCE_GRAD 0STEP1",
    ):
        assert verify(Program.parse(text)).peak_activations == (1,), text


def test_a_memory_cap_names_the_first_action_over_it():
    with pytest.raises(ScheduleError, match=r"rank 0 \[2\] 0F2: holds 3 of activations; memory_cap is 2") as caught:
        verify(gpipe(2, 4), memory_cap=2)
    assert (caught.value.rank, caught.value.position) == (0, 2)
    assert str(caught.value).splitlines()[1] == "    0 [0]: 0F0 0F1 >>0F2<< 0F3 0B0 0B1 0B2 0B3"
    assert verify(one_f_one_b(3, 9), memory_cap=3).peak_activations == (3, 2, 1)


def test_no_activations_at_all_or_costs_of_another_program_are_refused():
    for cap in (0, -1, float("nan")):
        with pytest.raises(ScheduleError, match=f"memory_cap is {cap}"):
            verify(gpipe(2, 4), memory_cap=cap)
    with pytest.raises(ScheduleError, match="costs are for 3 stages; the program has 2"):
        verify(gpipe(2, 4), costs=Costs([1] * 3, [1] * 3, [1] * 3))


def test_a_cap_counts_what_recomputation_and_early_input_gradients_leave():
    program = gpipe(2, 4)
    again = recompute(program)
    costs = Costs([1, 1], [1, 1], [1, 1], activation=[2, 2], input=[0.25, 0.25])
    assert verify(program, costs=costs).peak_activations == (8, 8)
    assert verify(again, costs=costs, memory_cap=2.75).peak_activations == (2.75, 2.75)
    with pytest.raises(ScheduleError, match=r"rank 0 \[4\] 0RECOMPUTE0: holds 2.75 of activations; memory_cap is 2.5"):
        verify(again, costs=costs, memory_cap=2.5)
    early = Costs([1, 1], [1, 1], [1, 1], activation=[1, 1], input_share=1.0)
    assert verify(zb_h2(2, 4)).peak_activations == (3, 3)
    assert verify(zb_h2(2, 4), costs=early).peak_activations == (3, 1)


def test_an_overlap_of_one_stages_own_actions_runs_in_their_order():
    assert verify(Program.parse("0: (0F0;0I0;0W0)OVERLAP_F_B (0F1;0B1)OVERLAP_F_B")).messages == 0


def test_overlaps_that_no_text_can_spell_are_refused():
    good = gpipe(1, 1)
    for odd, rule in (
        (Action(0, Kind.F, 0, (Action(0, Kind.F, 0),)), "OVERLAP_F_B has two parts or more"),
        (Action(0, Kind.OVERLAP_F_B), "OVERLAP_F_B has two parts or more"),
        (Action(0, Kind.OVERLAP_F_B, None, (Action(0, Kind.F, 0),)), "OVERLAP_F_B has two parts or more"),
        (Action(0, Kind.OVERLAP_F_B, None, (Action(0, Kind.F, 0), Action(0, Kind.STEP, 0))), "parts are F, B, I or W"),
        (Action(0, Kind.OVERLAP_F_B, 1, (Action(0, Kind.F, 0), Action(0, Kind.B, 0))), "no microbatch of its own"),
        (Action(3, Kind.OVERLAP_F_B, None, (Action(0, Kind.F, 0), Action(0, Kind.B, 0))), "that of its first part"),
    ):
        with pytest.raises(ScheduleError, match=rule):
            verify(replace(good, ranks=((odd, *good.ranks[0][1:]),)))


def test_a_slot_with_a_microbatch_and_a_step_without_one_are_refused():
    good = gpipe(1, 1)
    for odd, rule in (
        (Action(0, Kind.REDUCE_GRAD, 0), "takes no microbatch"),
        (Action(0, Kind.STEP), "optimizer step 0"),
    ):
        with pytest.raises(ScheduleError, match=rule):
            verify(replace(good, ranks=((*good.ranks[0], odd),)))


def test_a_refusal_shows_the_grid_with_the_wrong_cell_marked():
    text = "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1B1 1F1"
    with pytest.raises(ScheduleError) as caught:
        verify(Program.parse(text))
    assert str(caught.value) == (
        "rank 1 [3] 1F1: its backward is at [2]; F comes before it\n"
        "    0 [0]: 0F0 0F1 0B0 0B1\n"
        "    1 [0]: 1F0 1B0 1B1 >>1F1<<"
    )
    with pytest.raises(ScheduleError) as caught:
        verify(Program.parse("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1"))
    assert str(caught.value) == (
        "rank 1: 1B1 is missing; the program needs it once\n"
        "    0 [0]: 0F0 0F1 0B0 0B1\n"
        "    1 [0]: 1F0 1B0 1F1 >>no 1B1<<"
    )


def test_a_report_of_many_ranks_and_a_long_cycle_stays_below_60_lines():
    p = 64
    ring = [f"{r}: {r}RECV_F0 {r}F0 {r}SEND_F0 {r}RECV_B0 {r}B0 {r}SEND_B0" for r in range(1, p)]
    first = f"0: 0F0 {p}RECV_F0 0SEND_F0 {p}F0 {p}B0 {p}SEND_B0 0RECV_B0 0B0"
    text = "\n".join([first, *ring]).replace(f"{p - 1}RECV_B0", f"{p - 1}SEND_F0 {p - 1}RECV_B0", 1)
    text = text.replace(f"{p - 1}SEND_F0 {p - 1}SEND_F0", f"{p - 1}SEND_F0")
    with pytest.raises(ScheduleError, match="deadlock") as caught:
        verify(Program.parse(text))
    assert len(caught.value.cycle) == p
    assert len(str(caught.value).splitlines()) <= 60
    assert "and 40 more" in str(caught.value)


def test_a_cell_far_into_a_long_list_is_shown_with_its_neighbours():
    program = one_f_one_b(40, 200)
    rows = [list(row) for row in program.ranks]
    rows[30][250], rows[30][251] = rows[30][251], rows[30][250]
    rows[30].insert(300, rows[30][299])
    with pytest.raises(ScheduleError, match="it is already at") as caught:
        verify(replace(program, ranks=tuple(map(tuple, rows))))
    lines = str(caught.value).splitlines()
    assert len(lines) <= 60
    assert any(">>" in line and line.startswith("    30 [295]: ... ") for line in lines)


def test_steps_of_several_batches_pass_and_count_versions():
    report = verify(lower(pipedream_2bw(3, 4)))
    assert report.weight_versions == (2, 2, 2)
    assert report.messages == 2 * 8 * 2
    for when in ("flush", "post_validated"):
        assert verify(optimizer_step(lower(one_f_one_b(3, 4)), when=when)).weight_versions == (1, 1, 1)


def test_a_stage_is_gathered_anew_behind_its_step():
    text = "weights: 2bw\n0: 0UNSHARD 0F0 0B0 {}0STEP0 {}0F1 0B1 0STEP1 0RESHARD"
    with pytest.raises(ScheduleError, match="0F1: the stage was unsharded before 0STEP0"):
        verify(Program.parse(text.format("", "")))
    verify(Program.parse(text.format("0RESHARD ", "0UNSHARD ")))
    verify(Program.parse(text.format("", "0RESHARD 0UNSHARD ")))
    made = unshard(optimizer_step(one_f_one_b(2, 4), when="2bw", steps=2))
    verify(made)
    assert str(made).count("1UNSHARD") == 2 and "1RESHARD 1STEP0" in str(made)
