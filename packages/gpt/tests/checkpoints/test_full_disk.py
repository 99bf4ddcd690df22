"""A disk that fills in a save: path and bytes are named, the run stops, older checkpoints are whole.

The disk is a real one: a file system in memory of a few MiB, mounted in a name space of the test's own.
"""

import os
import shutil
import subprocess
import sys

import pytest
from gpt_helpers import tiny_config

from sixfold.dist_ckpt import retention
from sixfold.gpt.observe.metrics import read_all

PROGRAM = """
import shutil, subprocess, sys
from pathlib import Path
from sixfold.gpt.commands import cli
from sixfold.gpt.commands import train as train_verb
train_verb.start_ranks = lambda target, ranks, args, watch=None, tell=None: target(*args)
for folder in map(Path, sys.argv[1:]):
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "sixfold", disk], check=True)
    status = cli.main(["train", str(folder / "filling.toml")])
    print("status", status, file=sys.stderr)
    shutil.copytree(disk, folder / "kept")
"""


def can_mount():
    """Whether this user may mount a file system in a name space of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this user may not mount a file system in a name space of its own")
@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_its_path_and_bytes_and_leaves_the_older_checkpoints_whole(tmp_path):
    folders = [tmp_path / mode for mode in ("background", "foreground")]
    for folder in folders:
        folder.mkdir()
        background = f"checkpoint.background={str(folder.name == 'background').lower()}"
        sizes = ("train.steps=50", "checkpoint.every=1", "checkpoint.keep=99", "train.global_batch_size=2")
        (folder / "filling.toml").write_text(tiny_config(folder, *sizes, background, run="disk/run").to_toml())
    command = ["unshare", "-rm", sys.executable, "-c", PROGRAM, *map(str, folders)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    *parts, _ = done.stderr.split("status 1\n")
    assert len(parts) == 2, done.stderr
    for folder, told in zip(folders, parts, strict=True):
        last = told.splitlines()[-1]
        assert last.startswith("sixfold: ENOSPC: ") and "bytes" in last, told
        assert str(folder / "disk" / "run" / "checkpoints") in last, told
        run = folder / "kept" / "run"
        steps = [step for step, _ in retention.checkpoints(run / "checkpoints")]
        assert steps and steps == list(range(1, steps[-1] + 1)), "each save before it is whole"
        assert [r["step"] for r in read_all(run) if r["kind"] == "save"] == steps
