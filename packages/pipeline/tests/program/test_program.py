"""Text and CSV forms: round trips, PyTorch's own reader as oracle, and what they refuse."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_helpers import FLUSH, SCHEDULES

from sixfold.pipeline import Action, Kind, Program, ScheduleError, gpipe, one_f_one_b
from sixfold.pipeline.passes import lower, reduce_grad, strip, unshard
from sixfold.pipeline.program.action import PER_STAGE

NUMBERED = [kind for kind in Kind if kind not in PER_STAGE and kind is not Kind.OVERLAP_F_B]
numbers = st.integers(0, 300)
simple = st.one_of(
    st.builds(Action, numbers, st.sampled_from(NUMBERED), numbers),
    st.builds(Action, numbers, st.sampled_from(sorted(PER_STAGE))),
)
parts = st.builds(Action, numbers, st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W]), numbers)
actions = st.one_of(simple, st.lists(parts, min_size=2, max_size=3).map(lambda p: Action.overlap(*p)))


@given(actions)
@settings(max_examples=100, deadline=None)
def test_an_action_is_read_back_from_its_text(action):
    assert Action.parse(str(action)) == action


@given(actions)
@settings(max_examples=100, deadline=None)
def test_pytorch_reads_our_actions_as_we_do(action):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch's parser is the oracle")
    if any(part.kind in (Kind.RECOMPUTE, Kind.STEP) for part in action.each()):
        return
    read = theirs._Action.from_str(str(action))
    assert str(read) == str(action)
    assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in read.sub_actions or (read,)] == [
        (a.stage, a.kind.value, a.microbatch) for a in action.each()
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_programs_survive_text_and_csv(name):
    for ranks, microbatches in ((1, 1), (3, 5)):
        made = SCHEDULES[name](ranks, microbatches)
        for program in (made, lower(made), unshard(lower(made))):
            assert Program.parse(str(program)) == program
            if name in FLUSH and (program.lowered or program is made):
                assert Program.from_csv(program.to_csv()) == program
                assert program.to_csv().count("\r\n") == len(program.ranks)


def test_csv_is_pytorchs_own():
    assert lower(one_f_one_b(2, 1)).to_csv() == (
        "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\r\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\r\n"
    )


def test_idle_cells_blank_lines_and_comments_are_no_actions():
    assert Program.from_csv("0F0,,,0B0\n,1F0,1B0,\n") == gpipe(2, 1)
    assert Program.parse("# two ranks\n\n1: 1F0 1B0  # the last\n0: 0F0 0B0\n") == gpipe(2, 1)


def test_quoted_cells_are_read_as_pytorchs_reader_reads_them():
    text = '"0F0","","0B0"\r\n"1F0",1B0\r\n'
    torchs = [[cell for cell in row if cell] for row in csv.reader(text.splitlines())]
    assert [[str(action) for action in row] for row in Program.from_csv(text).ranks] == torchs
    assert Program.from_csv(text) == gpipe(2, 1)


def test_the_number_of_microbatches_is_read_or_given():
    assert Program.parse("0: 0F0 0F1 0B0 0B1 0STEP7").microbatches == 2
    assert Program.parse("0: 0F0 0B0", microbatches=3).microbatches == 3


@pytest.mark.parametrize(
    "cell",
    [
        "1F",
        "1F0x",
        "F0",
        "1G0",
        "1UNSHARD2",
        "1F0.1",
        "(0F0)B",
        "(0UNSHARD;1F0)OVERLAP_F_B",
        "-1F0",
        "1F" + "9" * 5000,
        "1F\u0663",
    ],
)
def test_a_cell_that_is_no_action_is_quoted_with_its_rank_and_column(cell):
    with pytest.raises(ScheduleError) as caught:
        Program.from_csv(f"0F0,0B0\n1F0,{cell}\n")
    assert "rank 1, column 1" in str(caught.value)
    assert cell in str(caught.value) or "OVERLAP" in str(caught.value)
    assert (caught.value.rank, caught.value.position) == (1, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0: 0F0\n0: 0B0", "rank 0 has two lines"),
        ("1: 0F0 0B0", "rank 0 has no line"),
        ("zero: 0F0", "is not 'rank: action"),
        ("0: 0F0 0B0 2F0 2B0", "stage 1 has no action"),
        ("0: 0UNSHARD", "no action with a microbatch"),
    ],
)
def test_a_text_that_is_no_program_says_why(text, words):
    with pytest.raises(ScheduleError, match=words):
        Program.parse(text)


def test_a_placement_outside_the_ranks_is_refused():
    with pytest.raises(ScheduleError, match="stage 1 is placed on rank 2; the program has 1 ranks"):
        Program(((),), 1, (0, 2))


def test_a_program_of_nothing_is_refused():
    for ranks, placement in (((), ()), (((),), ())):
        with pytest.raises(ScheduleError, match=f"the program has {len(ranks)} ranks and 0 stages; both are >= 1"):
            Program(ranks, 1, placement)
    with pytest.raises(ScheduleError, match="no action with a microbatch"):
        Program.parse("")


def test_exporting_what_pytorch_has_no_word_for_names_it_and_strip_removes_it():
    program = Program.parse("0: 0F0 0RECOMPUTE0 0B0 0STEP0")
    with pytest.raises(ScheduleError, match=r"rank 0 \[1\] 0RECOMPUTE0: CSV has no RECOMPUTE"):
        program.to_csv()
    assert strip(program).to_csv() == "0F0,0B0\r\n"


def test_an_export_that_pytorch_would_misread_is_refused():
    messages_only = Program.parse(str(lower(gpipe(2, 2))).replace(" 1REDUCE_GRAD", ""))
    with pytest.raises(
        ScheduleError, match="stage 1 has 0 REDUCE_GRADs; PyTorch divides gradients by m there"
    ) as caught:
        messages_only.to_csv()
    assert caught.value.rank == 1
    assert reduce_grad(messages_only).to_csv() == lower(gpipe(2, 2)).to_csv()
    with pytest.raises(
        ScheduleError, match=r"rank 0 \[0\] 0UNSHARD: PyTorch's CSV with compute actions alone has none of these"
    ):
        unshard(gpipe(2, 2)).to_csv()
    assert lower(unshard(gpipe(2, 2))).to_csv().startswith("0UNSHARD,0F0,0SEND_F0,")


@pytest.mark.parametrize("name", FLUSH)
def test_pytorchs_runtime_loads_both_forms_of_every_flush_schedule(name, tmp_path):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch's reader is the oracle")
    for ranks, microbatches in ((1, 2), (3, 5)):
        program = FLUSH[name](ranks, microbatches)
        stages = [SimpleNamespace(num_stages=program.stages, group_size=ranks, group_rank=0)]
        for form, exported in (("compute_only", program), ("compute_comms", lower(program))):
            file = tmp_path / f"{form}.csv"
            file.write_text(exported.to_csv(), newline="")
            runtime = theirs._PipelineScheduleRuntime(stages, microbatches)
            runtime._load_csv(str(file), format=form)
            assert tuple(runtime.stage_index_to_group_rank[s] for s in range(program.stages)) == program.placement
            loaded = runtime.pipeline_order_with_comms if form == "compute_comms" else runtime.pipeline_order
            assert [" ".join(map(str, loaded[rank])) for rank in range(ranks)] == [
                " ".join(map(str, row)) for row in exported.ranks
            ]
            runtime._dump_csv(str(tmp_path / "back.csv"), format=form)
            assert Program.from_csv((tmp_path / "back.csv").read_text()) == exported
