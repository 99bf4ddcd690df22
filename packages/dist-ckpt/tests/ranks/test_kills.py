"""Kills at random moments: what a next load finds is the old checkpoint or the new one, whole.

    DIST_CKPT_KILLS=1000 pytest packages/dist-ckpt/tests/ranks/test_kills.py    # 10 without it, 20 by --every-case

Each job saves in a loop until one of its processes is killed: a rank by its own interval timer, which strikes in
the middle of any system call, or a worker by its trainer. Each rank notes every save that has returned.
"""

import os
import random
import signal
import threading
import time

import pytest
import torch
from forked_worker import Forked

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import LostPeerError, ShardedObject, ShardedTensor, retention
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.background import worker_process
from sixfold.dist_ckpt.storage import local as storage

KILLS = int(os.environ.get("DIST_CKPT_KILLS", "0"))
RANKS = 2
SHARES = {"steps": 0.3, "overwrite": 0.3, "aside": 0.17, "prune": 0.17, "async": 0.03, "worker": 0.03}


def state(rank, ranks, value):
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((9_000,), float(value)), (0, rank, ranks)),
        "v": ShardedTensor.from_rank_offsets("v", torch.full((7,), value), (0, rank, ranks)),
        "o": ShardedObject("o", value, (ranks,), (rank,)),
        "it": value,
    }


def save_step(rank, ranks, folder, value):
    dist_ckpt.save(state(rank, ranks, value), retention.step_path(folder, value), timeout_s=20)


def save_over(rank, ranks, folder, value):
    dist_ckpt.save(state(rank, ranks, value), folder / "c", timeout_s=20)


def save_and_prune(rank, ranks, folder, value):
    save_step(rank, ranks, folder, value)
    if rank == 0:
        retention.prune(folder, keep_last=2)


def save_in_background(rank, ranks, folder, value):
    handle = dist_ckpt.async_save(state(rank, ranks, value), folder / "c", timeout_s=60)
    handle.wait()
    return handle


ACTIONS = {
    "steps": save_step,
    "overwrite": save_over,
    "aside": save_over,
    "prune": save_and_prune,
    "async": save_in_background,
}


class Journal:
    """The saves that have returned on one rank; a line is written by one system call."""

    def __init__(self, folder, rank):
        self._file = os.open(folder / f"returned-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, value):
        os.write(self._file, f"{value}\n".encode())


def live(rank, ranks, folder, kind, seed, first):
    """Save until one rank dies; returns how this one's loop ended."""
    rng = random.Random(seed)
    victim, share = rng.randrange(ranks), rng.random()
    if kind == "aside":
        storage.exchange = lambda a, b: False  # as on older NFS
    journal, act = Journal(folder, rank), ACTIONS[kind]
    act(rank, ranks, folder, first)
    journal.note(first)
    start = time.perf_counter()
    act(rank, ranks, folder, first + 1)
    journal.note(first + 1)
    if rank == victim:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which kills without asking Python
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + 3 * share * (time.perf_counter() - start))
    for value in range(first + 2, first + 300):
        try:
            act(rank, ranks, folder, value)
        except LostPeerError:
            return "lost"
        journal.note(value)
    return "never killed"


def lose_workers(rank, ranks, folder, kills, seed, first):
    """Kill a worker again and again; returns how each save ended here."""
    rng = random.Random(seed)
    journal, ends = Journal(folder, rank), []
    save_in_background(rank, ranks, folder, first)
    journal.note(first)
    start = time.perf_counter()
    worker = save_in_background(rank, ranks, folder, first + 1).worker_pid
    journal.note(first + 1)
    usual_s = time.perf_counter() - start
    worker_process._start_worker = Forked
    for value in range(first + 2, first + 2 + 2 * kills, 2):
        victim, after_s = rng.randrange(ranks), 1.2 * rng.random() * usual_s
        killer = threading.Timer(
            after_s if rank == victim else 0, os.kill, (worker, signal.SIGKILL if rank == victim else 0)
        )
        killer.start()
        try:
            save_in_background(rank, ranks, folder, value)
            journal.note(value)
            ends.append("committed")
        except LostPeerError as error:
            ends.append(str(error))
        killer.join()
        if rank == victim:
            background._saver_of(os.getpid())._worker.process.wait(10)
        worker = save_in_background(rank, ranks, folder, value + 1).worker_pid
        journal.note(value + 1)
    return ends


def value_of(path):
    """The step that a folder holds; fails if it is a mixture."""
    asked = {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(9_000 * RANKS)),
        "v": ShardedTensor.from_rank_offsets("v", torch.zeros(7 * RANKS, dtype=torch.int64)),
        "o": [ShardedObject("o", None, (RANKS,), (rank,)) for rank in range(RANKS)],
    }
    loaded = dist_ckpt.load(asked, path, group=None, verify="full")
    assert loaded["w"].unique().tolist() == [loaded["it"]]
    assert loaded["v"].unique().tolist() == [loaded["it"]]
    assert loaded["o"] == [loaded["it"]] * RANKS
    return loaded["it"]


def newest(folder, kind):
    if kind in ("steps", "prune"):
        steps = retention.checkpoints(folder)
        assert [value_of(path) for _, path in steps] == [step for step, _ in steps]
        return steps[-1][0]
    return value_of(folder / "c")


def returned(folder):
    """The newest save that has returned on any rank."""
    notes = (path.read_text().split() for path in folder.glob("returned-*"))
    return max(int(note) for part in notes for note in part)


def jobs(of_all):
    """(kind, seed, kills of this test) for all tests; a test holds so many jobs that it ends in time."""
    for kind, share in SHARES.items():
        kills = max(1, round(share * of_all))
        chunk = {"worker": 4, "async": 5}.get(kind, 25)  # workers take their time to start
        for start in range(0, kills, chunk):
            yield kind, start, min(chunk, kills - start)


def pytest_generate_tests(metafunc):
    of_all = KILLS or (20 if metafunc.config.getoption("--every-case") else 10)
    metafunc.parametrize(("kind", "start", "kills"), list(jobs(of_all)))


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_kill_leaves_the_old_checkpoint_or_the_new_one_whole(tmp_path, kind, start, kills):
    ends, first = {"before": 0, "after": 0}, 1
    for seed in range(start, start + (1 if kind == "worker" else kills)):
        if kind == "worker":
            by_rank = run_ranks(lose_workers, RANKS, tmp_path, kills, seed, first, timeout=120)
            assert by_rank[0] == by_rank[1], "the save ends alike on all ranks"
        else:
            victim = random.Random(seed).randrange(RANKS)
            results = run_ranks(live, RANKS, tmp_path, kind, seed, first, timeout=60, allow_exit=(victim,))
            assert results == [None if rank == victim else "lost" for rank in range(RANKS)]
        last, found = returned(tmp_path), newest(tmp_path, kind)
        assert last <= found <= last + 1
        ends["after" if found > last else "before"] += 1
        first = found + 10
    print(f"{kind}: {kills} kills, {ends}")
