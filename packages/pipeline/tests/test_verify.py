"""The proof: it accepts exactly what a naive rendezvous machine gets through."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from sixfold.pipeline import Action, Kind, Program, ScheduleError, gpipe, interleaved, naive, one_f_one_b, verify
from sixfold.pipeline.passes import lower

PAIRS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


def gets_through(program: Program) -> bool:
    """The oracle: run a lowered program step by step, each message only when both ends stand at it."""
    n, m, at = program.stages, program.microbatches, program.placement
    wanted = Counter(Action(s, kind, k) for s in range(n) for kind in (Kind.F, Kind.B) for k in range(m))
    for s in range(n - 1):
        if at[s] != at[s + 1]:
            for k in range(m):
                wanted.update([Action(s, Kind.SEND_F, k), Action(s + 1, Kind.RECV_F, k)])
                wanted.update([Action(s + 1, Kind.SEND_B, k), Action(s, Kind.RECV_B, k)])
    lists = [[a for a in row if a.kind is not Kind.REDUCE_GRAD] for row in program.ranks]
    if Counter(a for row in lists for a in row) != wanted:
        return False
    there: set[tuple[Kind, int, int | None]] = set()  # (F or B, stage, microbatch): its input is on its rank
    done: set[tuple[Kind, int, int | None]] = set()
    moved = True
    while moved:
        moved = False
        for row in lists:
            if not row:
                continue
            a = row[0]
            if a.kind in (Kind.F, Kind.B):
                first = a.stage == (0 if a.kind is Kind.F else n - 1)
                if not (first or (a.kind, a.stage, a.microbatch) in there):
                    continue
                if a.kind is Kind.B and (Kind.F, a.stage, a.microbatch) not in done:
                    continue
                done.add((a.kind, a.stage, a.microbatch))
                to = a.stage + (1 if a.kind is Kind.F else -1)
                if 0 <= to < n and at[to] == at[a.stage]:
                    there.add((a.kind, to, a.microbatch))
                row.pop(0)
                moved = True
            elif a.kind in PAIRS:
                kind, ahead = PAIRS[a.kind]
                made = Kind.F if ahead == 1 else Kind.B
                peer = lists[at[a.stage + ahead]]
                meets = peer and peer[0] == Action(a.stage + ahead, kind, a.microbatch)
                if meets and (made, a.stage, a.microbatch) in done:
                    there.add((made, a.stage + ahead, a.microbatch))
                    row.pop(0)
                    peer.pop(0)
                    moved = True
    return not any(lists)


def mutate(program: Program, rng: random.Random) -> Program:
    """Delete, duplicate, swap or move one action of one rank."""
    rows = [list(row) for row in program.ranks]
    row = rng.choice([row for row in rows if len(row) > 1])
    i, j = rng.sample(range(len(row)), 2)
    what = rng.choice(["delete", "duplicate", "swap", "move"])
    if what == "delete":
        del row[i]
    elif what == "duplicate":
        row.insert(j, row[i])
    elif what == "swap":
        row[i], row[j] = row[j], row[i]
    else:
        row.insert(j, row.pop(i))
    return replace(program, ranks=tuple(map(tuple, rows)))


def reductions_are_right(program: Program) -> bool:
    for row in program.ranks:
        for i, a in enumerate(row):
            if a.kind is Kind.REDUCE_GRAD:
                later = [b for b in row[i + 1 :] if b.stage == a.stage and b.kind in (Kind.B, Kind.REDUCE_GRAD)]
                if later:
                    return False
    return True


def refusal(program: Program) -> ScheduleError | None:
    try:
        verify(program)
    except ScheduleError as error:
        return error
    return None


@pytest.mark.parametrize("seed", range(12))
def test_mutants_are_accepted_exactly_when_they_run(seed):
    rng = random.Random(seed)
    p, m = rng.randint(1, 4), rng.randint(1, 6)
    bases = [naive(p, m), gpipe(p, m), one_f_one_b(p, m), interleaved(p, m, 2), interleaved(p, m, 3)]
    verdicts = Counter()
    for _ in range(60):
        mutant = mutate(lower(rng.choice(bases)), rng)
        expected = gets_through(mutant) and reductions_are_right(mutant)
        error = refusal(mutant)
        assert (error is None) == expected, f"{mutant}"
        if error is not None:
            assert str(error).count("\n") < 60
            assert str(error.action) in str(error)
        verdicts[error is None] += 1
    assert verdicts[False] > 20


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
    assert verify(one_f_one_b(3, 9), memory_cap=3).peak_activations == (3, 2, 1)
