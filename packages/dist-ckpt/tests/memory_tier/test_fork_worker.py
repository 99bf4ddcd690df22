"""A worker that is forked from its trainer: ready at once, and refused where a fork could hang."""

import subprocess
import sys

FORKED = """
import os, sys, threading
import torch
from sixfold import dist_ckpt

tier = dist_ckpt.MemoryTier(sys.argv[1], "a-run", replicas=0, group=None, timeout_s=20)
if sys.argv[2] == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
tier.fork_worker()
pid = tier._saver._worker.process.pid
command = open(f"/proc/{pid}/cmdline").read()
assert command == open("/proc/self/cmdline").read(), command
for step in (1, 2):
    tier.save(step, {"w": torch.full((300_000,), float(step))})
tier.wait()
assert tier._saver._worker.process.pid == pid
found = {"w": torch.zeros(300_000)}
assert tier.restore(found).step == 2 and found["w"].eq(2).all()
tier.discard()
assert tier._saver._worker is None and not os.path.exists(f"/proc/{pid}/task")
print("done")
"""


def run(folder, what):
    return subprocess.run(
        [sys.executable, "-c", FORKED, str(folder), what], capture_output=True, text=True, timeout=120
    )


def test_a_forked_worker_is_there_at_once_and_writes_snapshots(tmp_path):
    ended = run(tmp_path, "")
    assert ended.stdout == "done\n" and ended.returncode == 0, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_process_with_threads_forks_no_worker(tmp_path):
    ended = run(tmp_path, "thread")
    assert "CheckpointError: this process has 2 threads; fork the worker before that" in ended.stderr
