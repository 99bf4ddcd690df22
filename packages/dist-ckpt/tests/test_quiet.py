"""Waiting for a background save, turn by turn and without processes: what it costs, and whom it finds dead."""

import fcntl
import os
import random

import pytest
from counted import LISTING, counting

from sixfold.dist_ckpt import LostPeerError
from sixfold.dist_ckpt.background import control
from sixfold.dist_ckpt.background.board import FolderBoard
from sixfold.dist_ckpt.background.channel import Gauge
from sixfold.dist_ckpt.background.control import Gathering, Job, Waiting
from sixfold.dist_ckpt.ranks.exchange import Outcome
from sixfold.dist_ckpt.road.saving import Ticket

OPERATIONS_PER_S = 2
readlink = os.readlink  # not counted


class Ranks:
    """The waiting sides of ``count`` ranks in one process; locks are told, since one process cannot hold them."""

    def __init__(self, folder, count, patch, locks_work=True):
        self.folder, self.count, self.dead = folder, count, set()
        self.gauge = Gauge()
        ticket = Ticket("01", str(folder / ".c.tmp-01"), str(folder / "c"), "replace", False)
        fields = {"ranks": count, "content": None, "ticket": ticket, "check_finite": False, "places": {}}
        fields |= {"arena_bytes": 0, "key": b"k" * 32, "locks_work": locks_work, "timeout_s": 600.0, "stale_s": 9.0}
        self.jobs = [Job(rank=rank, **fields) for rank in range(count)]
        self.board = control.board_of(self.jobs[0])
        self.board.make()
        self.signs = [self.board.sign(rank) for rank in range(count)]
        patch.setattr(fcntl, "lockf", self._lockf)
        self.waiting = [None, *(Waiting(job, control.board_of(job), self.gauge) for job in self.jobs[1:])]
        self.gathering = Gathering(self.jobs[0], control.board_of(self.jobs[0]), self.gauge, "share 0")

    def _lockf(self, handle, how):
        name = readlink(f"/proc/self/fd/{handle}")
        assert how == fcntl.LOCK_SH | fcntl.LOCK_NB
        if int(name.rpartition("-")[2]) not in self.dead:
            raise BlockingIOError

    def put(self, rank):
        self.board.put(f"rank-{rank}", Outcome(value=f"share {rank}"))

    def turn(self, rank):
        """One turn of a rank, as its worker does it; None while it goes on."""
        if rank:
            return self.waiting[rank].turn()
        try:
            shares = self.gathering.turn()
        except LostPeerError as error:
            return control.fail(self.jobs[0], self.board, error, lambda: True)
        return None if shares is None else Outcome(value=shares)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    made = []

    def make(count, **options):
        made.append(Ranks(tmp_path, count, monkeypatch, **options))
        return made[-1]

    yield make
    monkeypatch.undo()
    for each in made:
        each.gauge.close()
        for sign in each.signs:
            sign.close()


@pytest.mark.parametrize("locks_work", [True, False])
@pytest.mark.parametrize("count", [2, 64, 1024])
def test_a_wait_costs_two_operations_a_second_and_rank_and_lists_nothing(ranks, monkeypatch, count, locks_work):
    all_ranks, turns = ranks(count, locks_work=locks_work), 8
    job = all_ranks.jobs[0]
    for rank in {0, 1, count // 2, count - 1}:
        with counting(monkeypatch) as beats:
            all_ranks.signs[rank].beat(7)
        with counting(monkeypatch) as seen:
            assert [all_ranks.turn(rank) for _ in range(turns)] == [None] * turns
        assert not LISTING & {*seen, *beats}
        assert len(seen) / (turns * job.look_s) + len(beats) / job.beat_s <= OPERATIONS_PER_S, (rank, seen, beats)


def test_the_first_rank_reads_each_record_once(ranks, monkeypatch):
    all_ranks = ranks(64)
    for rank in range(1, 64):
        all_ranks.put(rank)
    with counting(monkeypatch) as seen:
        outcome = all_ranks.turn(0)
    assert outcome.value == [f"share {rank}" for rank in range(64)]
    assert len(seen) <= 3 * 64
    assert not LISTING & {*seen}


@pytest.mark.parametrize("seed", range(25))
def test_whoever_dies_together_is_found_within_ten_seconds_and_all_others_end_alike(ranks, seed):
    """At each turn of the others, in any order; records that are there already save the save."""
    rng = random.Random(seed)
    count = rng.choice([2, 3, 8, 64])
    all_ranks = ranks(count)
    for _ in range(rng.randrange(6)):  # turns at which all live
        assert {all_ranks.turn(rank) for rank in range(count)} == {None}
    first, size = rng.randrange(count), rng.randint(1, count - 1)
    all_ranks.dead |= {(first + i) % count for i in range(size)} if seed % 2 else set(rng.sample(range(count), size))
    with_record = {rank for rank in range(1, count) if rng.random() < rng.choice([0.2, 0.95])}
    for rank in with_record:
        all_ranks.put(rank)
    living = [rank for rank in range(count) if rank not in all_ranks.dead]
    outcomes, turns = {}, 0
    while len(outcomes) < len(living) and turns * all_ranks.jobs[0].look_s < 10:
        turns += 1
        for rank in rng.sample(living, len(living)):
            if rank not in outcomes and (outcome := all_ranks.turn(rank)) is not None:
                outcomes[rank] = outcome
    lost = all_ranks.dead - with_record
    if not lost:
        missing = {*range(1, count)} - with_record
        assert (0 in outcomes) == (not missing), "the save goes on, or all records are there"
        return
    assert len(outcomes) == len(living), f"{lost} found after {turns} turns by {sorted(outcomes)} of {living}"
    texts = {str(outcome.error) for outcome in outcomes.values()}
    assert len(texts) == 1, texts
    assert any(f"rank {rank} " in texts.copy().pop() for rank in lost)


def test_a_rank_without_a_look_at_a_lost_board_ends(ranks):
    all_ranks = ranks(3)
    all_ranks.board.remove()
    assert isinstance(all_ranks.turn(1).error, LostPeerError)


def test_a_verdict_whose_maker_died_before_it_said_why_is_taken_over(ranks, monkeypatch):
    all_ranks = ranks(3)
    all_ranks.board.verdict(f"{control.GIVE_UP}-2")
    all_ranks.dead.add(2)
    monkeypatch.setattr(control, "_WORD_S", -7.0)
    ended = [all_ranks.turn(0) or all_ranks.turn(0), all_ranks.turn(1)]
    assert {str(outcome.error) for outcome in ended} == {
        f"rank 2 of 3 died during a background save; {control._ADVICE}"
    }
    assert isinstance(all_ranks.board, FolderBoard)
