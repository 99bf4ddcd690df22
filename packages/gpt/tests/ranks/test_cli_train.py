"""``sixfold train`` as a user runs it: its own ranks, SIGTERM, a killed rank, the next start."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import gpt_launch_helpers
import pytest
from gpt_helpers import tiny_config

from sixfold.gpt.commands import cli
from sixfold.gpt.commands import train as train_verb
from sixfold.gpt.observe.metrics import read_all


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "endless.toml"
    path.write_text(tiny_config(tmp_path, "train.steps=100000", "checkpoint.every=3").to_toml())
    return str(path)


def records(folder, kind):
    return [r for r in read_all(folder) if r["kind"] == kind] if (folder / "metrics.jsonl").exists() else []


def wait_for_delivery(pid, number):
    """Until no signal ``number`` waits for the process: its handler has been called."""
    pending = number
    while pending:
        with open(f"/proc/{pid}/status") as file:
            words = [line.split() for line in file]
        pending = any(int(line[1], 16) >> (number - 1) & 1 for line in words if line[0] in ("SigPnd:", "ShdPnd:"))


def wait_for_steps(folder, count, seconds=240):
    deadline = time.monotonic() + seconds
    while len(records(folder, "step")) < count:
        assert time.monotonic() < deadline, f"no {count} steps within {seconds} s"
        time.sleep(0.02)


@pytest.mark.slow
def test_two_sigterms_to_the_command_save_the_step_at_hand_and_are_143(config_file, tmp_path):
    command = [sys.executable, "-m", "sixfold.gpt", "train", config_file, "parallel.pp=2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_steps(tmp_path / "run", 2)
        process.send_signal(signal.SIGTERM)
        wait_for_delivery(process.pid, signal.SIGTERM)  # two that wait at once would be one to the kernel
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out) == (143, ""), err
    assert err.count("sixfold: asked to stop: finishing this step and saving it") == 1
    [end] = records(tmp_path / "run", "end")
    assert (end["reason"], end["step"]) == ("sigterm", records(tmp_path / "run", "save")[-1]["step"])
    assert records(tmp_path / "run", "step")[-1]["step"] == end["step"]


# Below, the command runs in this process: its ranks come from a server that has torch loaded already.


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_next_start_goes_on_at_another_layout(config_file, tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["train", config_file, "parallel.pp=2", "train.steps=2"]) == 0

    def kill_rank_one():
        wait_for_steps(run, 4)
        os.kill(records(run, "start")[-1]["ranks"][1]["pid"], signal.SIGKILL)

    thread = threading.Thread(target=kill_rank_one)
    thread.start()
    assert cli.main(["train", config_file, "parallel.dp=2"]) == 1
    thread.join()
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("sixfold: rank 1 was killed by SIGKILL")
    assert "Traceback" not in error
    [resume] = records(run, "resume")
    assert resume["step"] == 2 and resume["layout"]["dp"] == 2


KILLED = r"rank 1 was killed by SIGKILL; the kernel does so when memory runs out"


@pytest.mark.sampled(2)  # a killed rank and a stopped one
@pytest.mark.parametrize(
    ("layout", "number", "seconds", "why"),
    [
        ("parallel.dp=2", signal.SIGKILL, 120, KILLED),
        ("parallel.pp=2", signal.SIGKILL, 120, KILLED),
        ("parallel.pp=2", signal.SIGSTOP, 5, "rank 0 waits .* rank 1 did not answer: a signal had stopped its process"),
    ],
)
@pytest.mark.slow
def test_a_run_that_lost_a_rank_is_started_again_from_its_newest_checkpoint(
    tmp_path, capsys, monkeypatch, layout, number, seconds, why
):
    path = tmp_path / "short.toml"
    ends = ("train.steps=5", "checkpoint.every=2", "checkpoint.resume=never", f"run.timeout_seconds={seconds}")
    path.write_text(tiny_config(tmp_path, *ends).to_toml())
    start = train_verb.start_ranks

    def started(target, ranks, args, **options):
        return start(partial(gpt_launch_helpers.train_and_die_once, str(tmp_path), number), ranks, args, **options)

    monkeypatch.setattr(train_verb, "start_ranks", started)
    assert cli.main(["train", str(path), layout, "--max-restarts", "2"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sixfold: ")]
    assert len(told) == 1 and re.fullmatch(f"sixfold: {why}; restart 1 of 2", told[0]), told
    assert [entry["step"] for entry in records(tmp_path / "run", "resume")] == [2]
    losses = [(entry["step"], entry["loss"]) for entry in records(tmp_path / "run", "step")]
    assert [step for step, _ in losses] == [1, 2, 3, 3, 4, 5]
    assert losses[2] == losses[3], "the repeated step has the loss that it had"


@pytest.mark.slow
def test_an_error_that_every_rank_meets_is_said_once(config_file, tmp_path, capsys):
    command = ["train", config_file, "parallel.pp=2", "train.steps=1"]
    assert cli.main(command) == 0
    assert cli.main([*command, "train.seed=5"]) == 2
    error = capsys.readouterr().err
    assert error.count("train.seed") == 1 and error.splitlines()[-1].startswith("sixfold: ")
    assert len(records(tmp_path / "run", "start")) == 1
