"""Waits of one process: each has an end when the other side is stopped, and none ends what goes on slowly."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dist_ckpt_helpers import names, one
from forked_worker import Forked

from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError, LostPeerError, ShardedObject
from sixfold.dist_ckpt.background import saver as background
from sixfold.dist_ckpt.background import worker_process
from sixfold.dist_ckpt.strategies.torch import TorchDistSaveShardedStrategy

ODD_WORKER = Path(__file__).parents[1] / "odd_worker.py"
ONE_THREAD = TorchDistSaveShardedStrategy(thread_count=1)


def large_job():
    """A state dict whose job is larger than any socket's buffer, though its tensors are small."""
    return {"w": one("w", torch.ones(5)), "o": ShardedObject("o", "x" * 8_000_000, (1,), (0,))}


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(worker_process, "_start_worker", Forked)


@pytest.fixture
def stopped(tmp_path, forked):
    """A saver whose worker is stopped, with a deadline of a second."""
    saver = background.AsyncSaver(group=None, timeout_s=1.0)
    saver._timeout_s = 60.0
    pid = saver.save({"it": 1}, tmp_path / "c").worker_pid
    saver._let_go()
    saver._timeout_s = 1.0
    os.kill(pid, signal.SIGSTOP)
    yield saver, pid
    saver._timeout_s = 60.0
    saver.close()


def test_a_stopped_worker_ends_a_save_whose_job_does_not_fit_into_the_socket_and_the_next_one_runs(stopped, tmp_path):
    saver, pid = stopped
    saver._timeout_s = 3.0
    handle = saver.save(large_job(), tmp_path / "c")
    assert handle.blocked_s < 3.0, "the call itself does not wait for the worker, which would last its deadline"
    with pytest.raises(LostPeerError, match="the worker of rank 0 hangs and was killed"):
        handle.wait(50)
    assert names(tmp_path) == ["c"]
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"it": 1}
    saver._timeout_s = 60.0
    again = saver.save({"it": 3}, tmp_path / "c")
    again.wait(60)
    assert again.worker_pid != pid
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"it": 3}


def born_stopped(fds):
    """A worker that is stopped before it can be given a job: stopped later, it may have done it."""
    worker = Forked(fds)
    os.kill(worker.pid, signal.SIGSTOP)
    return worker


@pytest.mark.slow
def test_the_next_save_and_close_end_beside_a_stopped_worker(stopped, tmp_path, monkeypatch):
    saver, _ = stopped
    monkeypatch.setattr(worker_process, "_CLOSE_S", 0.3)
    start = time.monotonic()
    with background.AsyncSaver(group=None, timeout_s=60.0) as other:
        other.save({"it": 1}, tmp_path / "e").wait(60)
    usual_s = time.monotonic() - start  # a worker forked, a save, its end: a tenth of a second where nothing else runs
    monkeypatch.setattr(worker_process, "_start_worker", born_stopped)
    start = time.monotonic()
    saver.save(large_job(), tmp_path / "c")
    with pytest.warns(UserWarning, match="nobody waited for it: the worker of rank 0 hangs"):
        saver.save({"it": 2}, tmp_path / "d")
    with pytest.warns(UserWarning, match="nobody waited for it: the worker of rank 0 hangs"):
        saver.close()
    assert time.monotonic() - start < 15 + 10 * usual_s, "the deadline of what waits without end is 60 s"


def test_close_ends_a_stopped_worker_that_has_nothing_to_do(stopped, monkeypatch):
    saver, pid = stopped
    saver._timeout_s = 60.0
    monkeypatch.setattr(worker_process, "_CLOSE_S", 0.3)
    process = saver._worker.process
    start = time.monotonic()
    saver.close()
    assert time.monotonic() - start < 30, "the deadline of the saver is 60 s"
    process.wait(20)  # it was killed; the kernel may need longer than 0.3 s to end it
    assert not os.path.exists(f"/proc/{pid}")


ENDS_BESIDE_A_STOPPED_WORKER = """
import os, signal, sys
from sixfold import dist_ckpt
save = dict(group=None, timeout_s=1.0)
dist_ckpt.async_save({"it": 1}, sys.argv[1], group=None)
from sixfold.dist_ckpt.background import saver as background
saver = background._saver_of(os.getpid())
saver._let_go()
os.kill(saver._worker.process.pid, signal.SIGSTOP)
o = dist_ckpt.ShardedObject("o", "x" * 8_000_000, (1,), (0,))
dist_ckpt.async_save({"it": 2, "o": o}, sys.argv[1], group=None, timeout_s=1.0)
print("ends", flush=True)
"""


@pytest.mark.slow
def test_an_interpreter_ends_beside_a_stopped_worker(tmp_path):
    run = [sys.executable, "-c", ENDS_BESIDE_A_STOPPED_WORKER, tmp_path / "c"]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process_that_ends:
        assert process_that_ends.stdout.readline() == "ends\n", process_that_ends.stderr.read()
        try:  # from here on: two processes have imported torch, which may take a minute on a busy machine
            _, told = process_that_ends.communicate(timeout=120)
        finally:
            process_that_ends.kill()
    assert "nobody waited for it: the worker of rank 0 hangs" in told
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"it": 1}


def test_a_slow_save_that_advances_outlives_its_deadline_and_tells_how_far_it_is(tmp_path, monkeypatch, forked):
    monkeypatch.setattr(worker_process, "_WORKER", (str(ODD_WORKER), "slow:0.4"))
    with background.AsyncSaver(group=None, timeout_s=30) as saver:
        saver.save({"it": 1}, tmp_path / "c").wait(60)  # the worker is up
        saver._timeout_s = 4.0  # ten times what a piece takes
        saved = {"w": one("w", torch.ones(12 << 20)), "v": one("v", torch.ones(9, dtype=torch.int8)), "it": 2}
        handle = saver.save(saved, tmp_path / "c", ONE_THREAD)
        seen = [handle.progress()]
        while not handle.done():
            if (share := handle.progress()) != seen[-1]:
                seen.append(share)
            time.sleep(0.01)
        handle.wait()
        assert handle.total_s > 4.0, "it took longer than its deadline"
    assert seen[0] == 0.0
    assert seen == sorted(seen), "it never goes back"
    inside = [share for share in seen if 0 < share < 0.98]
    assert len(inside) >= 4, seen
    # 48 MiB in pieces of 4 MiB: after the first of them a twelfth is written.
    assert 0.05 < inside[0] < 0.3
    assert [handle.progress() for _ in range(3)] == [1.0] * 3
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"it": 2}


@pytest.mark.slow
def test_a_worker_that_starts_slowly_is_waited_for_and_one_that_is_stopped_at_its_start_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "_WORKER", (str(ODD_WORKER), "late:1.5"))
    with background.AsyncSaver(group=None, timeout_s=1.0) as saver:
        handle = saver.save({"it": 1}, tmp_path / "c")
        time.sleep(1.4)
        assert not handle.done(), "its deadline has passed, and it still starts"
        watch = saver._flight._watch
        watch._job = replace(watch._job, timeout_s=60.0)  # a busy disk may stand still for seconds
        handle.wait(60)
    with background.AsyncSaver(group=None, timeout_s=1.0) as saver:
        handle = saver.save({"it": 2}, tmp_path / "c")
        os.kill(handle.worker_pid, signal.SIGSTOP)
        with pytest.raises(LostPeerError, match="the worker of rank 0 hangs and was killed"):
            handle.wait(60)
    assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"it": 1}


def test_a_forked_process_uses_neither_its_parents_saver_nor_its_handles(tmp_path, forked):
    with background.AsyncSaver(group=None, timeout_s=60) as saver:
        handle = saver.save({"it": 1}, tmp_path / "c")
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            texts = []
            for action in (lambda: handle.wait(5), lambda: saver.save({"it": 2}, tmp_path / "d")):
                try:
                    action()
                    texts.append("nothing")
                except CheckpointError as error:
                    texts.append(str(error))
            saver.close()  # as a with block of the child would
            os.write(theirs, "\n".join(texts).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        texts = os.read(ours, 10_000).decode().splitlines()
        assert f"is of process {os.getpid()}" in texts[0]
        assert f"this AsyncSaver is of process {os.getpid()}" in texts[1]
        handle.wait(60)
        saver.save({"it": 3}, tmp_path / "c").wait(60)
        assert dist_ckpt.load_common_state_dict(tmp_path / "c") == {"it": 3}


def test_a_worker_ends_at_once_though_a_forked_process_holds_its_connection(tmp_path, forked, monkeypatch):
    monkeypatch.setattr(worker_process, "_CLOSE_S", 60.0)
    saver = background.AsyncSaver(group=None, timeout_s=60)
    saver.save({"it": 1}, tmp_path / "c").wait(60)
    if (pid := os.fork()) == 0:
        time.sleep(120)
        os._exit(0)
    start = time.monotonic()
    saver.close()
    seconds = time.monotonic() - start
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert seconds < worker_process._CLOSE_S / 2
