"""Kills at random moments: what a next load finds is the old checkpoint or the new one, whole.

    pytest packages/dist-ckpt/tests/ranks/test_kills.py --save-kills 1000    # 12 without it

Each job saves in a loop until one of its processes is killed: a rank by its own interval timer, which strikes in
the middle of any system call, or a worker by its trainer. Each rank notes every save that has returned. The state
has a value of each kind: shards, plain tensors, objects with a state dict, values of each rank, numbers.
"""

import functools
import os
import random
import signal
import threading
import time
from importlib.util import find_spec

import pytest
import torch
from forked_worker import Forked, fork_workers
from torch import nn

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointManager, LostPeerError, PerRank, ShardedObject, ShardedTensor, retention
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.background import worker_process
from sixfold.dist_ckpt.storage import local as storage

RANKS = 2
SHARES = {
    "steps": 0.1, "overwrite": 0.2, "aside": 0.1, "prune": 0.1, "since": 0.1, "managed": 0.2, "in background": 0.14,
    "async": 0.03, "worker": 0.03,
}  # fmt: skip
if find_spec("zstandard") is not None:  # the extra zstd
    SHARES["compressed"] = 0.1
FROZEN = 50_000  # elements of what "since" links


def objects(value):
    """A model and an optimizer whose weights, buffers and moments are all ``value``."""
    model = nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(3))
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer.state = {p: {"momentum_buffer": torch.full_like(p, value)} for p in model.parameters()}
    return {"model": model, "optimizer": optimizer}


def state(rank, ranks, value):
    own = {"rng": torch.full((5_000,), value * ranks + rank), "position": [value, rank]}
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((9_000,), float(value)), (0, rank, ranks)),
        "v": ShardedTensor.from_rank_offsets("v", torch.full((7,), value), (0, rank, ranks)),
        "o": ShardedObject("o", value, (ranks,), (rank,)),
        "plain": {"large": torch.full((20_000,), float(value)), "small": [torch.full((3,), value)]},
        "own": PerRank(own),
        **objects(value),
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


def save_since_and_prune(rank, ranks, folder, value):
    """What is frozen is in every step, and in its files alone; what trains is another in each."""
    frozen = ShardedTensor.from_rank_offsets("f", torch.arange(float(FROZEN)), (0, rank, ranks))
    options = {"since": retention.latest(folder), "timeout_s": 20}  # the save before, which has returned on all
    dist_ckpt.save({**state(rank, ranks, value), "f": frozen}, retention.step_path(folder, value), **options)
    if rank == 0:
        retention.prune(folder, keep_last=2)


def save_compressed(rank, ranks, folder, value):
    path, since = retention.step_path(folder, value), retention.latest(folder)
    dist_ckpt.save(state(rank, ranks, value), path, compress="zstd", since=since, timeout_s=20)


def save_in_background(rank, ranks, folder, value):
    handle = dist_ckpt.async_save(state(rank, ranks, value), folder / "c", timeout_s=60)
    handle.wait()
    return handle


@functools.cache
def manager_of(folder, background):
    return CheckpointManager(folder, keep_last=2, best="loss", background=background, timeout_s=20)


def save_managed(rank, ranks, folder, value):
    manager_of(folder, False).save(value, state(rank, ranks, value), {"loss": -value})


def save_managed_in_background(rank, ranks, folder, value):
    """What is committed when it returns is the save before."""
    fork_workers()
    manager_of(folder, True).save(value, state(rank, ranks, value), {"loss": -value})


ACTIONS = {
    "managed": save_managed,
    "in background": save_managed_in_background,
    "steps": save_step,
    "overwrite": save_over,
    "aside": save_over,
    "prune": save_and_prune,
    "since": save_since_and_prune,
    "compressed": save_compressed,
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
    journal, act, behind = Journal(folder, rank), ACTIONS[kind], int(kind == "in background")
    act(rank, ranks, folder, first)
    start = time.perf_counter()
    act(rank, ranks, folder, first + 1)
    journal.note(first + 1 - behind)
    if rank == victim:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which kills without asking Python
        signal.setitimer(signal.ITIMER_REAL, 1e-6 + 3 * share * (time.perf_counter() - start))
    for value in range(first + 2, first + 300):
        try:
            act(rank, ranks, folder, value)
        except LostPeerError:
            return "lost"
        journal.note(value - behind)
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
        "plain": {"large": torch.zeros(20_000), "small": [torch.zeros(3, dtype=torch.int64)]},
        "own": PerRank(None, lambda found, rank, ranks: found),
        **objects(0),
    }
    loaded = dist_ckpt.load(asked, path, group=None, verify="full")
    value = loaded["it"]
    moments = [part["momentum_buffer"] for part in loaded["optimizer"].state.values()]
    tensors = [loaded["w"], loaded["v"], loaded["plain"]["large"], *loaded["plain"]["small"], *moments]
    assert len(moments) == 4
    assert [t.unique().tolist() for t in (*tensors, *loaded["model"].state_dict().values())] == [[value]] * 15
    assert loaded["o"] == [value] * RANKS
    assert [own["position"] for own in loaded["own"]] == [[value, rank] for rank in range(RANKS)]
    assert [own["rng"].unique().tolist() for own in loaded["own"]] == [[value * RANKS + rank] for rank in range(RANKS)]
    return value


def newest(folder, kind, since):
    """The value of the newest checkpoint; every other one from ``since`` on that a search finds is whole too."""
    if kind in ("overwrite", "aside", "async", "worker"):
        return value_of(folder / "c")
    steps = retention.checkpoints(folder)
    assert [(step, value_of(path)) for step, path in steps if step >= since] == [(s, s) for s, _ in steps if s >= since]
    assert len(steps) >= 2, "the last ones are not removed"
    shown = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert shown == {path.name for _, path in steps}, "nothing half shows"
    for path in (path for step, path in steps if step >= since and kind == "since"):
        asked = {"f": ShardedTensor.from_rank_offsets("f", torch.zeros(FROZEN * RANKS))}
        found = dist_ckpt.load(asked, path, group=None)["f"]
        assert torch.equal(found.view(RANKS, FROZEN), torch.arange(float(FROZEN)).expand(RANKS, FROZEN))
    if kind in ("managed", "in background"):
        manager = CheckpointManager(folder, best="loss", group=None)
        assert (manager.latest(), manager.best()) == (steps[-1][0], steps[-1][0])
    return steps[-1][0]


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
    metafunc.parametrize(("kind", "start", "kills"), list(jobs(metafunc.config.getoption("--save-kills"))))


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
        last, found = returned(tmp_path), newest(tmp_path, kind, first)
        assert last <= found <= last + 1 + (kind == "in background")
        ends["after" if found > last else "before"] += 1
        first = found + 10
    newest(tmp_path, kind, 0)
    print(f"{kind}: {kills} kills, {ends}")
