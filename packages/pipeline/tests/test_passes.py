"""Lowering equals PyTorch's, and what it makes runs there."""

from __future__ import annotations

import pytest
from schedule_helpers import FLUSH, FUSED, SCHEDULES

from sixfold.pipeline import (
    Costs,
    Kind,
    Program,
    ScheduleError,
    dualpipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    verify,
    zb_h1,
    zb_v,
)
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

PROGRAMS = [make(p, m) for make in FLUSH.values() for p, m in ((2, 5), (4, 6))]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_sends_and_receives_stand_where_pytorch_puts_them(program):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch's lowering is the oracle")
    compute = {r: [theirs._Action.from_str(str(a)) for a in row] for r, row in enumerate(program.ranks)}
    expected = theirs._add_send_recv(compute, lambda stage: program.placement[stage], program.stages)
    ours = [[str(a) for a in row if a.kind != "REDUCE_GRAD"] for row in lower(program).ranks]
    assert ours == [[str(a) for a in expected[rank]] for rank in range(len(program.ranks))]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_pytorch_validates_and_simulates_our_export(program):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch's checks are the oracle")
    rows = [row.split(",") for row in lower(program).to_csv().removesuffix("\r\n").split("\r\n")]
    read = {r: [theirs._Action.from_str(cell) for cell in row] for r, row in enumerate(rows)}
    placed = theirs._validate_schedule(read, len(rows), program.stages, program.microbatches)
    assert tuple(placed[stage] for stage in range(program.stages)) == program.placement
    if "OVERLAP" in str(program):
        return  # torch's simulator does not know it
    without = {r: [a for a in row if a.computation_type != theirs.REDUCE_GRAD] for r, row in read.items()}
    theirs._simulate_comms_compute(without, lambda stage: program.placement[stage], program.stages)


def test_each_stage_reduces_once_behind_its_last_backward_and_the_send_of_it():
    assert (
        str(lower(interleaved(2, 2, 2)))
        == """\
0: 0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2F0 2SEND_F0 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1 \
2REDUCE_GRAD 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD
1: 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 \
3F0 3RECV_F1 3B0 3SEND_B0 1RECV_B0 3F1 3B1 3SEND_B1 3REDUCE_GRAD 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD
"""
    )


def test_gradients_are_reduced_before_each_step_and_after_the_weights():
    program = Program.parse("0: 0F0 0I0 0W0 0STEP0 0F1 0B1 0STEP1")
    assert str(reduce_grad(program)) == "0: 0F0 0I0 0W0 0REDUCE_GRAD 0STEP0 0F1 0B1 0REDUCE_GRAD 0STEP1\n"


def test_an_overlap_is_lowered_as_its_parts():
    program = Program.parse("0: 0F0 0F1 0B0 0B1\n1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    lowered = lower(program)
    assert "(1F1;1B0)OVERLAP_F_B 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD" in str(lowered)


def test_lowering_keeps_what_is_there_and_refuses_messages():
    once = lower(gpipe(2, 2))
    with pytest.raises(ScheduleError, match=r"rank 0 \[1\] 0SEND_F0: the program has messages"):
        lower(once)
    assert str(lower(reduce_grad(gpipe(1, 2)))) == "0: 0F0 0F1 0B0 0B1 0REDUCE_GRAD\n"
    assert once.lowered
    assert not gpipe(2, 2).lowered


def test_lowering_an_order_that_hangs_names_the_first_action_that_waits():
    program = Program.parse("0: 0B0 0F0\n1: 1F0 1B0")
    with pytest.raises(ScheduleError, match=r"rank 0 \[0\] 0B0: its input is never made"):
        lower(program)


def test_a_split_backward_sends_its_gradient_before_the_weights_and_merging_takes_it_back():
    assert str(split_backward(gpipe(2, 1))) == "0: 0F0 0I0 0W0\n1: 1F0 1I0 1W0\n"
    lowered = lower(gpipe(2, 2))
    split = split_backward(lowered)
    assert str(split).splitlines()[1] == ("1: 1RECV_F0 1F0 1RECV_F1 1F1 1I0 1SEND_B0 1W0 1I1 1SEND_B1 1W1 1REDUCE_GRAD")
    assert verify(split) == verify(lowered)
    assert merge_backward(split) == lowered
    for name in FUSED:
        program = FLUSH[name](3, 5)
        verify(split_backward(program))
        assert merge_backward(split_backward(program)) == program
    overlaps = split_backward(dualpipe_v(2, 4))
    assert "(0F3;3I1;3W1)OVERLAP_F_B" in str(overlaps)
    verify(lower(overlaps))


def test_merging_leaves_weights_that_wait_for_something_else():
    program = zb_h1(3, 5)
    merged = merge_backward(program)
    assert {a.kind for a in merged.ranks[0]} == {Kind.F, Kind.B}
    assert merged.ranks[2] == program.ranks[2]
    verify(lower(merged))


@pytest.mark.parametrize("program", [zb_h1(3, 5), zb_v(2, 4), interleaved(2, 4)], ids=lambda program: program.name)
def test_merging_equals_pytorchs(program):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch's pass is the oracle")
    for rank, row in enumerate(program.ranks):
        merged = theirs._merge_bw([theirs._Action.from_str(str(a)) for a in row])
        assert [str(a) for a in merge_backward(program).ranks[rank]] == [str(a) for a in merged]


@pytest.mark.parametrize("max_active", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "program", [gpipe(2, 3), interleaved(2, 5, 4), zb_v(2, 4), dualpipe_v(2, 5)], ids=lambda program: program.name
)
def test_gathers_equal_pytorchs_and_are_proved(program, max_active):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch's pass is the oracle")
    ours = unshard(program, max_active)
    verify(lower(ours))
    assert unshard(lower(program), max_active).ranks[0].count(ours.ranks[0][0]) == ours.ranks[0].count(ours.ranks[0][0])
    for rank, row in enumerate(program.ranks):
        expected = theirs._add_unshard_reshard([theirs._Action.from_str(str(a)) for a in row], max_active)
        assert sorted_slots(ours.ranks[rank]) == sorted_slots(expected)


def sorted_slots(row) -> list[str]:
    """Text of a row with each run of RESHARDs sorted: PyTorch takes them from a set."""
    texts: list[str] = []
    run: list[str] = []
    for text in map(str, row):
        if text.endswith("RESHARD"):
            run.append(text)
        else:
            texts += [*sorted(run), text]
            run = []
    return texts + sorted(run)


def test_recomputed_microbatches_are_spread_evenly_and_hold_their_input_until_their_backward():
    program = one_f_one_b(4, 8)
    half = recompute(program, microbatches=4)
    last = " ".join(f"3F{k} 3B{k} 3F{k + 1} 3RECOMPUTE{k + 1} 3B{k + 1}" for k in (0, 2, 4, 6))
    assert str(half).splitlines()[3] == f"3: {last}"
    costs = Costs.per_rank(program)
    whole, some, none = (
        simulate(p, costs).peak_activations for p in (program, half, recompute(program, microbatches=8))
    )
    assert whole == (4, 3, 2, 1)
    assert some == (
        3,
        2,
        2,
        1,
    )  # of four in flight on rank 0 two hold nothing but their input, one of them is run again
    assert none == (1, 1, 1, 1)
    assert recompute(program) == recompute(program, microbatches=8)
    assert recompute(program, microbatches=0) == program
    assert str(recompute(zb_h1(1, 2), microbatches=[1])) == "0: 0F0 0I0 0W0 0F1 0RECOMPUTE1 0I1 0W1\n"
    for name, make in SCHEDULES.items():
        made = recompute(make(2, 4), microbatches=[0, 3])
        assert verify(lower(made)).messages == verify(made).messages, name
        assert strip(made) == strip(make(2, 4))


def test_a_step_waits_for_a_reduction_that_stands_behind_messages():
    program = Program.parse(
        "0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD\n1: 1RECV_F0 1F0 1B0 1SEND_B0 2F0 1REDUCE_GRAD 2B0 2REDUCE_GRAD"
    )
    stepped = str(optimizer_step(program, when="post_validated")).splitlines()[1]
    assert stepped == "1: 1RECV_F0 1F0 1B0 1SEND_B0 2F0 1REDUCE_GRAD 1STEP0 2B0 2REDUCE_GRAD 2STEP0"
    for made in (interleaved(2, 4), dualpipe_v(2, 4), zb_v(4, 6)):
        for reduced in (lower(reduce_grad(made)), reduce_grad(lower(unshard(made, 1)))):
            verify(optimizer_step(reduced, when="post_validated"))


def test_the_optimizer_steps_after_a_flush_or_as_soon_as_a_stage_is_done_or_per_version():
    program = zb_v(2, 2)
    flush, early = optimizer_step(program), optimizer_step(program, when="post_validated")
    assert [str(a) for a in flush.ranks[0][-2:]] == ["0STEP0", "3STEP0"]
    for slots in ("3REDUCE_GRAD 3STEP0", "0REDUCE_GRAD 0STEP0"):
        assert slots in str(lower(early))
    lowered_first = optimizer_step(lower(program), when="post_validated")
    assert lowered_first == lower(early)
    twice = optimizer_step(one_f_one_b(2, 4), when="2bw", steps=2)
    assert str(twice).splitlines()[2] == "1: 1F0 1B0 1F1 1B1 1STEP0 1F2 1B2 1F3 1B3 1STEP1"
    assert optimizer_step(lower(one_f_one_b(2, 4)), when="2bw", steps=2).ranks[0].count(twice.ranks[0][-1]) == 1
    for name, make in FLUSH.items():
        for when in ("flush", "post_validated"):
            stepped = optimizer_step(make(3, 5), when=when)
            verify(stepped)
            assert verify(lower(stepped)).weight_versions == (1, 1, 1), name
            assert strip(stepped) == make(3, 5)


def test_stripping_steps_leaves_one_reduction_per_stage():
    program = lower(SCHEDULES["pipedream_2bw"](2, 2))
    assert str(program).count("0REDUCE_GRAD") == 2
    stripped = strip(program)
    assert str(stripped).count("0REDUCE_GRAD") == 1
    verify(stripped)
    assert stripped.to_csv() == lower(one_f_one_b(2, 4)).to_csv()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: unshard(gpipe(1, 1), max_active=0), "max_active is 0"),
        (lambda: unshard(unshard(gpipe(1, 1))), r"rank 0 \[0\] 0UNSHARD: the program has UNSHARDs already"),
        (lambda: recompute(gpipe(1, 2), microbatches=3), "recompute of 3 microbatches; the program has 2"),
        (lambda: recompute(gpipe(1, 2), microbatches=-1), "recompute of -1 microbatches"),
        (lambda: recompute(gpipe(1, 2), microbatches=[2]), "recompute of microbatch 2; microbatches are 0..1"),
        (lambda: recompute(recompute(gpipe(1, 1))), "the program has RECOMPUTEs already"),
        (lambda: optimizer_step(gpipe(1, 4), when="often"), "when is 'often'"),
        (lambda: optimizer_step(gpipe(1, 4), when="2bw", steps=3), "steps is 3; it divides the program's 4"),
        (lambda: optimizer_step(gpipe(1, 4), steps=2), "steps is 2; with when='flush' there is one"),
        (lambda: optimizer_step(optimizer_step(gpipe(1, 1))), "the program has STEPs already"),
        (lambda: lower(Program.parse("0: 0F0 0F3 0B0 0B3", microbatches=2)), r"0F3: microbatches are 0..1"),
    ],
)
def test_passes_refuse_what_they_cannot_do_by_name(act, words):
    with pytest.raises(ScheduleError, match=words):
        act()
