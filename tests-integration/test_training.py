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
from torchrun_helpers import (
    OUTPUT,
    World,
    descendants,
    end_with_descendants,
    run_torchrun,
    start_torchrun,
    world_for,
)

from sixfold.gpt import TrainConfig, train

# Deadlines of what takes seconds on a quiet machine: they only end what hangs, and this may be a busy one.
START_S, END_S = 240.0, 120.0
pytestmark = pytest.mark.timeout(900)

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

[schedule]
shape = "constant"

[checkpoint]
every = 4

[run]
dir = "run"
device = "{device}"
timeout_seconds = 180
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
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == status, f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def entries(folder: Path, kind: str, run: str = "run") -> list[dict]:
    path = folder / run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["kind"] == kind]


def losses(folder: Path, run: str = "run") -> dict[int, float]:
    """By step; the last line of a repeated step counts."""
    return {entry["step"]: entry["loss"] for entry in entries(folder, "step", run)}


def test_a_pipeline_killed_and_resumed_as_sharded_trains_like_one_process(job, monkeypatch):
    """Two by two, a rank killed after a checkpoint, then all ranks sharded; beside one process, this one."""
    folder, world = job
    command = ["-m", "sixfold.gpt", "train", "job.toml"]
    saved = kill_a_rank_after_a_save(folder, world, [*command, "parallel.pp=2", "train.steps=4000"])
    start = entries(folder, "start")[0]
    assert start["world"] == world.ranks
    assert start["layout"] == {"pp": 2, "dp": world.ranks // 2, "cp": 1, "tp": 1, "ep": 1}
    # On without a pipeline, the weights sharded over all ranks.
    last = saved + 8  # a save may be whole that the metrics do not tell of yet
    run_torchrun(world, [*command, f"train.steps={last}", "checkpoint.resume=must"], folder=folder)
    (resumed,) = entries(folder, "resume")
    assert resumed["step"] >= saved
    assert resumed["layout"]["pp"] == 1
    monkeypatch.chdir(folder)
    options = ["run.dir=alone", f"train.steps={last}", "checkpoint.background=false"]
    train(TrainConfig.from_toml(folder / "job.toml", options))
    found, alone = losses(folder), losses(folder, "alone")
    assert set(range(1, last + 1)) <= set(found), "a step is missing"
    assert list(alone) == list(range(1, last + 1))
    rel = 1e-6 if world.device == "cpu" else 1e-3
    assert [found[step] for step in alone] == pytest.approx(list(alone.values()), rel=rel)
    assert alone[last] < alone[1]


def kill_a_rank_after_a_save(folder: Path, world: World, command: list[str]) -> int:
    """Start a job, kill its last rank once a checkpoint is there, and see the job end; the newest saved step."""
    process = start_torchrun(world, command, folder=folder)
    try:
        until = time.monotonic() + START_S
        while not entries(folder, "save"):
            output = (folder / OUTPUT).read_text()
            assert time.monotonic() < until and process.poll() is None, f"no checkpoint came\n{output}"
            time.sleep(0.05)
        ranks = entries(folder, "start")[0]["ranks"]
        assert {entry["pid"] for entry in ranks} <= set(descendants(process.pid))
        os.kill(ranks[-1]["pid"], signal.SIGKILL)
        assert process.wait(END_S) != 0
    finally:
        end_with_descendants(process)
    return max(entry["step"] for entry in entries(folder, "save"))
