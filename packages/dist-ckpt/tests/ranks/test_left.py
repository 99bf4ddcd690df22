"""What killed background saves leave in a run's folder: a prune takes it, and nothing of one that lives."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from dist_ckpt_helpers import names
from forked_worker import Forked

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import ShardedTensor, retention
from sixfold.dist_ckpt.background import status_and_heartbeats, worker_process
from sixfold.dist_ckpt.background.saver import AsyncSaver


def state(rank, ranks, value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((30,), float(value)), (0, rank, ranks)), "it": value}


def save_beside_a_stopped_worker(rank, ranks, root, step):
    """Checkpoint 1, and a handle of a save of ``step`` of which rank 1 writes nothing."""
    worker_process._start_worker = Forked
    first = dist_ckpt.async_save(state(rank, ranks, 1), retention.step_path(root, 1), timeout_s=60)
    first.wait()
    if rank == 1:
        os.kill(first.worker_pid, signal.SIGSTOP)
    return dist_ckpt.async_save(state(rank, ranks, step), retention.step_path(root, step), timeout_s=60)


def age(root, seconds):
    """As if nothing in the hidden folders had changed for so long."""
    then = time.time() - seconds
    for folder in root.glob(".*"):
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (then, then))


def kinds(root):
    return sorted({name.split(".")[-1].partition("-")[0] for name in names(root)} - {"step"})


def be_killed(rank, ranks, root):
    save_beside_a_stopped_worker(rank, ranks, root, 5)
    deadline = time.monotonic() + 30
    while not list(root.glob(".*.tmp-*/*/__0_*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3 * rank)  # both have left their first heartbeat
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_what_killed_trainers_leave_of_the_newest_step_goes_with_a_prune_a_minute_later(tmp_path):
    run_ranks(be_killed, 2, tmp_path, allow_exit=(0, 1), timeout=60)
    assert kinds(tmp_path) == ["job", "tmp"]
    retention.prune(tmp_path, keep_last=1)
    assert kinds(tmp_path) == ["job", "tmp"], "the worker of a rank may be about to end"
    age(tmp_path, 90)
    retention.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.slow
def test_what_trainers_of_another_host_leave_goes_when_it_has_been_still_for_a_day(tmp_path, monkeypatch):
    run_ranks(be_killed, 2, tmp_path, allow_exit=(0, 1), timeout=60)
    monkeypatch.setattr(status_and_heartbeats, "_kernel", lambda: b"0" * 32)
    age(tmp_path, 23 * 3600)
    retention.prune(tmp_path, keep_last=1)
    assert kinds(tmp_path) == ["job", "tmp"], "no lock tells of another host"
    age(tmp_path, 25 * 3600)
    retention.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == ["step-00000001"]


def prune_beside_living(rank, ranks, root, silent):
    """A prune of a rank's own process, of a rank in another, and of a process that saves nothing."""
    if silent:  # as where an interpreter stands still: the lock alone tells
        status_and_heartbeats.Heartbeat.beat = lambda *_: None
    handle = save_beside_a_stopped_worker(rank, ranks, root, 5)
    seen = []
    for pruner in range(ranks + 1):
        dist.barrier()
        if rank == min(pruner, ranks - 1):
            age(root, 48 * 3600)
            pid = os.fork() if pruner == ranks else 0
            if pid == 0:
                retention.prune(root, keep_last=1)
            if pruner == ranks and pid == 0:
                os._exit(0)
            if pid:
                assert os.waitpid(pid, 0)[1] == 0
        dist.barrier()
        seen.append(kinds(root))
    if rank == 1:
        os.kill(handle.worker_pid, signal.SIGCONT)
    handle.wait(60)
    return seen, handle.done()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.slow
def test_a_living_background_save_that_stands_still_is_left_alone_by_any_prune(tmp_path, silent):
    for seen, _ in run_ranks(prune_beside_living, 2, tmp_path, silent, timeout=60):
        assert seen == [["job", "tmp"]] * 3
    assert [step for step, _ in retention.checkpoints(tmp_path)] == [1, 5]
    assert kinds(tmp_path) == []


def test_a_prune_looks_at_no_file_of_a_background_save_of_its_own_process(tmp_path, monkeypatch):
    """Trainers prune when they have begun one, of as many files as a job has ranks."""
    monkeypatch.setattr(worker_process, "_start_worker", Forked)
    with AsyncSaver(group=None, timeout_s=60) as saver:
        first = saver.save({"it": 1}, retention.step_path(tmp_path, 1))
        first.wait(60)
        os.kill(first.worker_pid, signal.SIGSTOP)
        second, seen, walk = saver.save({"it": 2}, retention.step_path(tmp_path, 2)), [], os.walk
        try:
            with monkeypatch.context() as patch:
                patch.setattr(os, "walk", lambda top, *rest, **more: seen.append(top) or walk(top, *rest, **more))
                retention.prune(tmp_path, keep_last=1)
            assert kinds(tmp_path) == ["tmp"]
        finally:
            os.kill(first.worker_pid, signal.SIGCONT)
        second.wait(60)
    assert seen == []
    assert [step for step, _ in retention.checkpoints(tmp_path)] == [1, 2]
