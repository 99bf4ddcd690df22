"""Pipeline x FSDP under a real torchrun: text to tokens, tokens to a blend, four ranks, a kill, another layout.

On a machine with at least four GPUs the same job takes NCCL and all of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torchrun_helpers import descendants, end_with_descendants, run_torchrun, start_torchrun, world_for

CONFIG = """
[model]
num_layers = 4
hidden_size = 64
num_attention_heads = 4
num_query_groups = 2
ffn_hidden_size = 128
vocab_size = 257

[data]
blend = ["data/stories", "data/notes"]
weights = [0.75, 0.25]
split = "90,10,0"
seq_length = 64

[train]
steps = 12
global_batch_size = {batch}
micro_batch_size = 1
precision = "fp32"

[optimizer]
lr = 2e-3

[checkpoint]
every = 4

[run]
dir = "run"
device = "{device}"
timeout_seconds = 60
"""


@pytest.fixture
def job(tmp_path):
    """A folder with two prepared datasets and a config; the world that this machine can give."""
    world = world_for(least_ranks=4)
    (tmp_path / "data").mkdir()
    stories = [f"Once there was a number {i}, and its square was {i * i}. " * (1 + i % 7) for i in range(300)]
    notes = [json.dumps({"text": f"note {i}: " + "la " * (i % 40)}) for i in range(300)]
    (tmp_path / "stories.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in stories))
    (tmp_path / "notes.jsonl").write_text("\n".join(notes) + "\n")
    for name in ("stories", "notes"):
        sixfold(tmp_path, "prepare", f"{name}.jsonl", "--out", f"data/{name}")
    (tmp_path / "job.toml").write_text(CONFIG.format(batch=4 * world.ranks, device=world.device))
    return tmp_path, world


def sixfold(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder`` and check its exit status."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sixfold.gpt", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def entries(folder: Path, kind: str, run: str = "run") -> list[dict]:
    path = folder / run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def losses(folder: Path, run: str = "run") -> dict[int, float]:
    """By step; the last line of a repeated step counts."""
    return {entry["step"]: entry["loss"] for entry in entries(folder, "step", run)}


def test_two_by_two_trains_like_one_process_and_resumes_at_another_layout(job):
    folder, world = job
    command = ["-m", "sixfold.gpt", "train", "job.toml"]
    run_torchrun(world, [*command, "parallel.pp=2", "train.steps=8"], folder=folder)
    start = entries(folder, "start")[0]
    assert start["world"] == world.ranks
    assert start["layout"] == {"pp": 2, "dp": world.ranks // 2, "cp": 1, "tp": 1, "ep": 1}
    # Second half without pipeline, the weights sharded over all ranks.
    run_torchrun(world, [*command, "train.steps=12"], folder=folder)
    assert [entry["step"] for entry in entries(folder, "resume")] == [8]
    sixfold(folder, "train", "job.toml", "run.dir=alone", "train.steps=8")
    sixfold(folder, "train", "job.toml", "run.dir=alone", "train.steps=12")
    found, alone = losses(folder), losses(folder, "alone")
    assert list(found) == list(alone) == list(range(1, 13))
    assert list(found.values()) == pytest.approx(list(alone.values()), rel=1e-6 if world.device == "cpu" else 1e-3)
    assert found[12] < found[1]


def test_a_rank_that_is_killed_ends_the_job_and_the_next_start_continues(job):
    folder, world = job
    command = ["-m", "sixfold.gpt", "train", "job.toml", "parallel.pp=2", "train.steps=4000", "log.every=1"]
    process = start_torchrun(world, command, folder=folder)
    try:
        until = time.monotonic() + 60
        while not entries(folder, "save"):
            output = (folder / "torchrun.out").read_text()
            assert time.monotonic() < until and process.poll() is None, f"no checkpoint came\n{output}"
            time.sleep(0.05)
        ranks = entries(folder, "start")[0]["ranks"]
        assert {entry["pid"] for entry in ranks} <= set(descendants(process.pid))
        os.kill(ranks[-1]["pid"], signal.SIGKILL)
        assert process.wait(45) != 0
    finally:
        end_with_descendants(process)
    saved = max(entry["step"] for entry in entries(folder, "save"))
    steps = saved + 2
    run_torchrun(
        world, [*command[:4], f"train.steps={steps}", "parallel.pp=2", "checkpoint.resume=must"], folder=folder
    )
    assert entries(folder, "resume")[-1]["step"] >= saved
    assert max(losses(folder)) >= steps
