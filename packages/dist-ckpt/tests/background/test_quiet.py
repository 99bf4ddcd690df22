"""Waiting for a background save, turn by turn and without processes: what it costs, and whom it finds dead."""

import fcntl
import os
import random
from types import SimpleNamespace

import pytest
from counted import LISTING, counting

from sixfold.dist_ckpt import LostPeerError
from sixfold.dist_ckpt.background import folder_watch, lost_ranks, status_and_heartbeats
from sixfold.dist_ckpt.background.arena import Arena, ProgressCounter
from sixfold.dist_ckpt.background.lost_ranks import Job, Wait
from sixfold.dist_ckpt.background.status_and_heartbeats import FolderStatus
from sixfold.dist_ckpt.collectives.exchange import Outcome
from sixfold.dist_ckpt.save_load.saving import Ticket
from sixfold.dist_ckpt.stores import LocalStore, Save

OPERATIONS_PER_S = 2
readlink = os.readlink  # not counted


class Ranks:
    """The waiting sides of ``count`` ranks in one process; locks are told, since one process cannot hold them."""

    def __init__(self, folder, count, patch, locks_work=True):
        self.folder, self.count, self.dead = folder, count, set()
        self.arena = Arena()
        self.counter = ProgressCounter(self.arena.fd)
        ticket = Ticket(Save(save_id="01", target=str(folder / "c"), staging=str(folder / ".c.tmp-01")))
        content = SimpleNamespace(store=LocalStore.at(folder / "c"))
        fields = {"ranks": count, "content": content, "ticket": ticket, "check_finite": False, "places": {}}
        fields |= {"key": b"k" * 32, "locks_work": locks_work, "timeout_s": 600.0, "stale_s": 9.0}
        self.jobs = [Job(rank=rank, **fields) for rank in range(count)]
        self.status = lost_ranks.status_of(self.jobs[0])
        self.status.make()
        self.heartbeats = [self.status.heartbeat(rank) for rank in range(count)]
        patch.setattr(fcntl, "lockf", self._lockf)
        self.waits = [Wait(job, lost_ranks.status_of(job), self.counter, "share 0") for job in self.jobs]

    def _lockf(self, handle, how):
        name = readlink(f"/proc/self/fd/{handle}")
        assert how == fcntl.LOCK_SH | fcntl.LOCK_NB
        if int(name.rpartition("-")[2]) not in self.dead:
            raise BlockingIOError

    def put(self, rank):
        self.status.put(f"rank-{rank}", Outcome(value=f"share {rank}"))

    def turn(self, rank):
        """One turn of a rank, as its worker does it; None while it goes on."""
        outcome = self.waits[rank].turn()
        if rank or outcome is None or outcome.error is None:
            return outcome
        return lost_ranks.fail(self.jobs[0], outcome.error, self.counter)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    made = []

    def make(count, **options):
        made.append(Ranks(tmp_path, count, monkeypatch, **options))
        return made[-1]

    yield make
    monkeypatch.undo()
    for each in made:
        each.arena.close()
        for heartbeat in each.heartbeats:
            heartbeat.close()


class Things:
    """Objects of a store in a dict, with each request noted."""

    def __init__(self):
        self.data, self.seen = {}, []

    def read(self, name, start=0, stop=None):
        self.seen.append(("read", name))
        try:
            return self.data[name][start:stop]
        except KeyError:
            raise FileNotFoundError(name) from None

    def replace(self, name, data):
        self.seen.append(("write", name))
        self.data[name] = data

    def create_new(self, name, data):
        self.seen.append(("create", name))
        return self.data.setdefault(name, data) is data

    def delete(self, name):
        self.seen.append(("delete", name))
        self.data.pop(name, None)

    def list_files(self):
        self.seen.append(("list", ""))
        return dict.fromkeys(self.data, 1)


class StoreRanks:
    """As ``Ranks``, at a status of a store; a trainer that lives beats when it is time."""

    def __init__(self, count, timeout_s=600.0):
        self.things, self.arena = Things(), Arena()
        self.counter = ProgressCounter(self.arena.fd)
        store = SimpleNamespace(name="a store", local_folder=None, board=lambda save: self.things)
        store.patient = lambda timeout_s: store
        store.holds, store.abandon = lambda save_id: False, lambda save: None
        fields = {"ranks": count, "content": SimpleNamespace(store=store), "key": b"k" * 32, "locks_work": True}
        fields |= {"ticket": Ticket(Save(save_id="01", target="a store")), "check_finite": False, "places": {}}
        fields |= {"timeout_s": timeout_s, "stale_s": 9.0}
        self.jobs = [Job(rank=rank, **fields) for rank in range(count)]
        self.statuses = [lost_ranks.status_of(job) for job in self.jobs]
        self.statuses[0].make()
        self.heartbeats = [made.heartbeat(rank) for rank, made in enumerate(self.statuses)]
        self.waits = [
            Wait(job, made, self.counter, "share 0") for job, made in zip(self.jobs, self.statuses, strict=True)
        ]

    turn = Ranks.turn

    @property
    def status(self):
        return self.statuses[0]


@pytest.mark.parametrize("count", [2, 64, 1024])
def test_a_wait_at_a_store_costs_two_requests_a_second_and_rank_and_lists_nothing(count):
    ranks, turns = StoreRanks(count), 8
    for heartbeat in ranks.heartbeats:
        heartbeat.beat(1)
    job = ranks.jobs[0]
    for rank in {0, 1, count // 2, count - 1}:
        ranks.things.seen.clear()
        ranks.heartbeats[rank].beat(2)
        beats = len(ranks.things.seen)
        assert [ranks.turn(rank) for _ in range(turns)] == [None] * turns
        assert {what for what, _ in ranks.things.seen} == {"read", "write"}
        assert (len(ranks.things.seen) - beats) / (turns * job.look_s) + beats / job.beat_s <= OPERATIONS_PER_S
    ranks.arena.close()


@pytest.mark.parametrize("seed", range(12))
def test_whoever_stands_still_at_a_store_is_found_and_all_others_end_alike(seed, monkeypatch):
    """Killed with their workers, so that nobody speaks for them; records that are there already save the save."""
    rng, clock = random.Random(seed), [100.0]
    monkeypatch.setattr(status_and_heartbeats, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    count = rng.choice([2, 3, 8, 20])
    ranks = StoreRanks(count, timeout_s=60.0)
    job, dead = ranks.jobs[0], set(rng.sample(range(count), rng.randint(1, count - 1)))
    late = set(rng.sample(range(count), rng.randrange(count)))  # whose first beat comes later
    with_record = {rank for rank in range(1, count) if rng.random() < 0.6}
    living, outcomes, turns = [rank for rank in range(count) if rank not in dead], {}, 0
    for rank in with_record:
        ranks.statuses[rank].put(f"rank-{rank}", Outcome(value=rank))
    longest_s = 75.0 + 20.0 * len(dead & with_record)  # each of them hides who is before it for a quarter
    while len(outcomes) < len(living) and clock[0] - 100.0 < longest_s:
        for rank in range(count):
            if (rank not in dead or turns < 3) and (rank not in late or turns > 2):
                ranks.heartbeats[rank].beat(turns)
        for rank in rng.sample(living, len(living)):
            if rank not in outcomes and (outcome := ranks.turn(rank)) is not None:
                outcomes[rank] = outcome
        turns, clock[0] = turns + 1, clock[0] + job.look_s
    ranks.arena.close()
    if dead <= with_record:
        assert (0 in outcomes) == (not {*range(1, count)} - with_record)
        return
    assert len(outcomes) == len(living), f"{dead} found after {turns} turns by {sorted(outcomes)} of {living}"
    assert len({str(outcome.error) for outcome in outcomes.values()}) == 1


@pytest.mark.parametrize("locks_work", [True, False])
@pytest.mark.parametrize("count", [2, 64, 1024])
@pytest.mark.slow
def test_a_wait_costs_two_operations_a_second_and_rank_and_lists_nothing(ranks, monkeypatch, count, locks_work):
    all_ranks, turns = ranks(count, locks_work=locks_work), 8
    job = all_ranks.jobs[0]
    for rank in {0, 1, count // 2, count - 1}:
        with counting(monkeypatch) as beats:
            all_ranks.heartbeats[rank].beat(7)
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
    all_ranks.status.remove()
    assert isinstance(all_ranks.turn(1).error, LostPeerError)


def test_a_verdict_whose_maker_died_before_it_said_why_is_taken_over(ranks, monkeypatch):
    all_ranks = ranks(3)
    all_ranks.status.verdict(f"{lost_ranks.GIVE_UP}-2")
    all_ranks.dead.add(2)
    monkeypatch.setattr(lost_ranks, "_WORD_S", -7.0)
    ended = [all_ranks.turn(0) or all_ranks.turn(0), all_ranks.turn(1)]
    assert {str(outcome.error) for outcome in ended} == {
        f"rank 2 of 3 died during a background save; {lost_ranks._ADVICE}"
    }
    assert isinstance(all_ranks.status, FolderStatus)


def test_a_board_at_a_store_stays_until_a_rank_that_has_not_yet_shown_itself_has_left(monkeypatch):
    ranks = StoreRanks(2)
    steps = iter([lambda: ranks.heartbeats[1].beat(0), ranks.heartbeats[1].close])

    def wait(*_):
        next(steps)()
        return set()

    monkeypatch.setattr(folder_watch.FolderWatch, "wait", wait)
    lost_ranks.remove(ranks.jobs[0], lost_ranks.status_of(ranks.jobs[0]))
    assert next(steps, None) is None, "the status went before the rank had left"
    assert not ranks.things.data
    ranks.heartbeats[0].close()  # late, when the status is gone
    assert not ranks.things.data
    ranks.arena.close()
