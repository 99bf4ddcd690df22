"""Programs continued without end: their pieces repeat, and n batches of them are the generator's own n."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sixfold.pipeline import (
    Action,
    Program,
    ScheduleError,
    Weights,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    verify,
)
from sixfold.pipeline.passes import lower, optimizer_step, reduce_grad, split_backward
from sixfold.pipeline.program.action import MESSAGES
from sixfold.pipeline.proof.endless import Endless, endless

SIZES = [(p, m) for p in range(1, 7) for m in sorted({max(1, p - 1), p, p + 1, 2 * p, 3 * p})]


def continued(program: Program) -> Endless:
    found = endless(program)
    assert found is not None
    return found


def bare(program: Program) -> Program:
    """Without messages."""
    return replace(program, ranks=tuple(tuple(a for a in row if a.kind not in MESSAGES) for row in program.ranks))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.slow
def test_2bw_of_any_number_of_steps_is_continued_alike_and_as_the_generator_does(p, m):
    found = [continued(pipedream_2bw(p, m, steps)) for steps in range(2, 6)]
    assert all((each.steps, each.tails) == (found[0].steps, found[0].tails) for each in found)
    assert len(found[0].steps) == (1 if p == 1 else 2)
    for n in range(1, 6):
        program = found[n % 4].unrolled(n)
        assert bare(program) == reduce_grad(pipedream_2bw(p, m, n))
        verify(program, transport="buffered")


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.slow
def test_pipedream_fills_over_its_first_batches(p):
    found = [continued(pipedream(p, m)) for m in range(max(2, p), 3 * p + 2)]
    assert all((each.steps, each.tails) == (found[0].steps, found[0].tails) for each in found)
    for n in range(1, 3 * p):
        program = found[-1].unrolled(n)
        assert bare(program) == reduce_grad(pipedream(p, n))
        verify(program, transport="buffered")


def test_the_pieces_of_2bw_can_be_read():
    found = continued(pipedream_2bw(2, 2))
    assert [[" ".join(map(str, row)) for row in found.step(t)] for t in (0, 1, 2)] == [
        [
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1",
            "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP0",
        ],
        [
            "0F2 0SEND_F2 0B1 0REDUCE_GRAD 0STEP0 0F3 0SEND_F3 0RECV_B2 0B2 0RECV_B3",
            "1RECV_F2 1F2 1B2 1SEND_B2 1RECV_F3 1F3 1B3 1SEND_B3 1REDUCE_GRAD 1STEP1",
        ],
        [
            "0F4 0SEND_F4 0B3 0REDUCE_GRAD 0STEP1 0F5 0SEND_F5 0RECV_B4 0B4 0RECV_B5",
            "1RECV_F4 1F4 1B4 1SEND_B4 1RECV_F5 1F5 1B5 1SEND_B5 1REDUCE_GRAD 1STEP2",
        ],
    ]
    assert [" ".join(map(str, row)) for row in found.tail(2)] == ["0B3 0REDUCE_GRAD 0STEP1", ""]


@pytest.mark.parametrize(
    "program",
    [
        *(pipedream_2bw(p, m) for p, m in SIZES),
        *(pipedream(p, p + 1) for p in range(1, 7)),
        split_backward(pipedream_2bw(3, 4)),
        optimizer_step(interleaved(2, 8, 2), when="2bw", steps=2),
        optimizer_step(gpipe(3, 8), when="2bw", steps=2),
        optimizer_step(one_f_one_b(3, 12), when="pipedream", steps=4),
    ],
    ids=lambda program: f"{program.weights}-{len(program.ranks)}-{program.microbatches}",
)
@pytest.mark.slow
def test_at_the_end_of_a_step_all_that_was_sent_is_asked_for_and_all_that_is_used_was_sent(program):
    found = continued(program)
    sent, asked, used = set(), set(), set()
    partner = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
    for t in range(6):
        for row in found.step(t):
            for action in row:
                if action.kind in partner:
                    kind, ahead = partner[action.kind]
                    sent.add(Action(action.stage + ahead, kind, action.microbatch))
                elif action.kind in ("RECV_F", "RECV_B"):
                    asked.add(action)
                elif action.kind in ("F", "B", "I"):
                    used.add(Action(action.stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch))
        assert sent == asked
        assert used & {Action(a.stage, a.kind, a.microbatch) for a in found_messages(found, t + 3)} <= sent


def found_messages(found: Endless, n: int) -> set[Action]:
    return {action for _, _, action in found.unrolled(n).entries() if action.kind in ("RECV_F", "RECV_B")}


def test_messages_of_ones_own_program_do_not_matter():
    program = pipedream_2bw(3, 4, 3)
    assert continued(lower(program)).steps == continued(program).steps


@pytest.mark.parametrize("program", [one_f_one_b(2, 3), pipedream_2bw(3, 2, 1), pipedream(3, 1)], ids=str)
def test_flushed_programs_and_those_of_one_batch_end(program):
    assert endless(program) is None


def test_rings_of_slots():
    assert continued(pipedream_2bw(4, 8)).in_flight == 2
    assert continued(pipedream_2bw(1, 8)).in_flight == 1
    assert continued(pipedream(4, 5)).in_flight == 4
    assert continued(optimizer_step(gpipe(3, 8), when="2bw", steps=2)).in_flight == 2


def test_one_batch_alone_is_a_flush():
    program = continued(pipedream_2bw(3, 4, 2)).forward
    assert (program.weights, program.microbatches) == (Weights.FLUSHED, 4)
    verify(program, transport="buffered")


def test_batches_whose_forwards_mix_are_refused():
    with pytest.raises(ScheduleError, match=r"rank \d 2F0: .*steps=1"):
        endless(optimizer_step(looped_bfs(2, 8, 2), when="2bw", steps=2))


def test_a_rank_that_waits_for_its_peers_next_step_is_refused():
    # Rank 1 ends its first batch with a gradient that rank 0 makes behind its forward of the second.
    program = Program.parse(
        "weights: 2bw\n"
        "0: 0F0 2F0 0F1 2B0 2STEP0 0B0 0STEP0 2F1 2B1 2STEP1 0B1 0STEP1\n"
        "1: 1F0 1B0 1STEP0 1F1 1B1 1STEP1\n"
    )
    verify(program)
    with pytest.raises(ScheduleError, match=r"rank 1 uses the tensor of 1RECV_B0 in step 0; rank 0 makes it in step 1"):
        endless(program)


def test_a_microbatch_whose_way_depends_on_later_batches_is_refused():
    # The steady order recomputes every other microbatch, the tail those that it has left.
    row = "0F0 0F1 0RECOMPUTE0 0B0 0F2 0B1 0STEP0 0F3 0RECOMPUTE2 0B2 0RECOMPUTE3 0B3 0STEP1"
    program = Program.parse(f"weights: 2bw\n0: {row}\n")
    verify(program)
    with pytest.raises(ScheduleError, match=r"0B1 with or without a RECOMPUTE"):
        endless(program)


def test_a_rank_whose_stages_fall_apart_is_refused():
    # Behind its first batch the rank ends two batches of stage 2 before it has ended one of stage 0.
    program = Program.parse(
        "weights: pipedream\n"
        "0: 0F0 2F0 0F1 2F1 2B0 2STEP0 2B1 2STEP1 0B0 0STEP0 0B1 0STEP1\n"
        "1: 1F0 1F1 1B0 1STEP0 1B1 1STEP1\n"
    )
    verify(program)
    with pytest.raises(ScheduleError, match=r"rank 0 0F1: no 1 forwards, 1 backwards"):
        endless(program)
