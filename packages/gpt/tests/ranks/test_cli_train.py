"""``sixfold train`` as a user runs it: its own ranks, SIGTERM, a killed rank, the next start."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from gpt_helpers import tiny_config

from sixfold.gpt.metrics import read_all


@pytest.fixture
def run(tmp_path):
    """(start, records): start a job with overrides; the records of its metrics.jsonl."""
    config = tmp_path / "tiny.toml"
    config.write_text(tiny_config(tmp_path, "train.steps=100000", "checkpoint.every=3").to_toml())
    folder = tmp_path / "launched"
    processes = []

    def start(*overrides):
        command = [sys.executable, "-m", "sixfold.gpt", "train", config, f'run.dir="{folder}"', *overrides]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    def records(kind):
        return [r for r in read_all(folder) if r["kind"] == kind] if (folder / "metrics.jsonl").exists() else []

    yield start, records
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_steps(process, records, count):
    deadline = time.monotonic() + 60
    while len(records("step")) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline, f"no {count} steps within 60 s"
        time.sleep(0.02)


def test_sigterm_saves_and_is_143_and_the_next_start_goes_on_until_a_rank_is_killed(run):
    start, records = run
    process = start("parallel.pp=2")
    wait_for_steps(process, records, 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "")
    [end] = records("end")
    assert (end["reason"], end["step"]) == ("sigterm", records("save")[-1]["step"])
    assert records("step")[-1]["step"] == end["step"]

    process = start("parallel.dp=2")
    wait_for_steps(process, records, end["step"] + 3)
    [resume] = records("resume")
    assert resume["step"] == end["step"] and resume["layout"]["dp"] == 2
    os.kill(records("start")[-1]["ranks"][1]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("sixfold: rank 1 was killed by SIGKILL")
    assert "Traceback" not in err


def test_an_error_that_every_rank_meets_is_said_once(run):
    start, records = run
    process = start("parallel.pp=2", "train.steps=2", "checkpoint.every=0")
    process.communicate(timeout=60)
    assert process.returncode == 0
    process = start("parallel.pp=2", "train.steps=4", "optimizer.lr=0.5")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.count("optimizer.lr") == 1 and err.splitlines()[-1].startswith("sixfold: ")
    assert json.dumps(records("step")[-1]["step"]) == "2"
