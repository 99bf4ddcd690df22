"""Lowering equals PyTorch's, and what it makes runs there."""

from __future__ import annotations

import pytest

from sixfold.pipeline import Program, ScheduleError, gpipe, interleaved, naive, one_f_one_b
from sixfold.pipeline.passes import lower, reduce_grad

PROGRAMS = [naive(3, 2), gpipe(2, 4), one_f_one_b(4, 6), interleaved(2, 5, 2), interleaved(4, 8, 3)]


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
