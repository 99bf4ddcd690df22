"""The scripts of the guide, run as Slurm would run them, one task after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from indexed_data_helpers import pair_bytes

from sixfold.indexed_data import build

EXAMPLES = Path(__file__).parents[2] / "examples"
TASKS = 3


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(script, *arguments, task=None) -> exit code, in a folder of seven inputs."""
    monkeypatch.chdir(tmp_path)
    for i in range(7):
        Path(f"in{i}.jsonl").write_text("".join(json.dumps({"text": f"{i} {j} " * j}) + "\n" for j in range(1, 6)))
    Path("inputs.txt").write_text("".join(f"in{i}.jsonl\n" for i in range(7)))
    command = tmp_path / "bin" / "sixfold-data"  # whatever the environment has installed: this very package
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m sixfold.indexed_data "$@"\n')
    command.chmod(0o755)
    path = [str(Path(p)) for p in sys.path if p]  # what makes the package importable here
    environment = {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path),
        "SLURM_ARRAY_TASK_COUNT": str(TASKS),
    }

    def run_script(script, *arguments, task=None):
        slurm = {} if task is None else {"SLURM_ARRAY_TASK_ID": str(task)}
        done = subprocess.run(
            ["bash", EXAMPLES / script, *arguments], env={**environment, **slurm}, capture_output=True
        )
        return done.returncode

    return run_script


@pytest.mark.slow
def test_many_machines_write_what_one_build_writes(run):
    for task in range(TASKS):
        assert run("many_machines_build.sh", "inputs.txt", "wiki", task=task) == 0
    assert run("many_machines_build.sh", "inputs.txt", "wiki", task=1) == 0  # requeued when it was done
    assert run("many_machines_merge.sh", "wiki", str(TASKS)) == 0
    build([f"in{i}.jsonl" for i in range(7)], "whole")
    assert pair_bytes("wiki") == pair_bytes("whole")
    assert sorted(name for name in os.listdir() if name.startswith("wiki")) == [
        "wiki.bin",
        "wiki.idx",
        "wiki.manifest.json",
    ]


@pytest.mark.slow
def test_a_missing_shard_is_no_shorter_corpus(run):
    assert run("many_machines_build.sh", "inputs.txt", "wiki", task=0) == 0
    assert run("many_machines_merge.sh", "wiki", str(TASKS)) == 1
    assert not os.path.exists("wiki.idx")
    assert os.path.exists("wiki-00000.idx")


def test_more_tasks_than_files_is_said(run):
    Path("inputs.txt").write_text("in0.jsonl\n")
    assert run("many_machines_build.sh", "inputs.txt", "wiki", task=0) == 2
