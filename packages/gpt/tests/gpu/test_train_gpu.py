"""The train loop on CUDA devices: one process alone, and one rank per GPU over NCCL."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpt_helpers import plain_losses, tiny_config

from sixfold.gpt.launch.rendezvous import World
from sixfold.gpt.training.loop import train_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.mark.parametrize("sharding", ["no_shard", "optim_grads_params"])
def test_one_gpu_trains_as_a_plain_loop_on_the_cpu(tmp_path, sharding):
    config = tiny_config(tmp_path, "run.device=cuda", f"parallel.sharding={sharding}")
    train_in(config, World(rank=0, size=1, local_rank=0, store=None, device=torch.device("cuda", 0)))
    assert losses(tmp_path / "run") == pytest.approx(plain_losses(config, config.train.steps), rel=1e-4)


@pytest.mark.parametrize("option", ["train.offload_activations=true", "fsdp.offload=true"])
def test_what_waits_in_host_memory_changes_no_bit(tmp_path, option):
    world = World(rank=0, size=1, local_rank=0, store=None, device=torch.device("cuda", 0))
    options = ("run.device=cuda", "model.hidden_size=256", "train.deterministic=true")
    train_in(tiny_config(tmp_path, *options, run="plain"), world)
    train_in(tiny_config(tmp_path, *options, option, run="away"), world)
    assert losses(tmp_path / "away") == losses(tmp_path / "plain")


def test_a_snapshot_of_memory_has_the_allocations_of_the_step_with_their_lines(tmp_path):
    config = tiny_config(tmp_path, "run.device=cuda", "train.steps=2", "log.memory_steps=[2]")
    train_in(config, World(rank=0, size=1, local_rank=0, store=None, device=torch.device("cuda", 0)))
    [path] = (tmp_path / "run" / "memory").iterdir()
    assert path.name == "step-00000002-rank-0.pickle"
    snapshot = pickle.loads(path.read_bytes())
    frames = {frame["name"] for events in snapshot["device_traces"] for one in events for frame in one["frames"]}
    assert snapshot["segments"] and "train_step" in frames


@pytest.mark.parametrize(
    "layout", ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "parallel.tp=2 parallel.tp_overlap=true"]
)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one")
def test_two_gpus_train_as_a_plain_loop_on_the_cpu(tmp_path, layout):
    config = tiny_config(tmp_path, "run.device=cuda")
    command = [
        sys.executable,
        "-m",
        "sixfold.gpt",
        "train",
        "tiny.toml",
        "run.device=cuda",
        *layout.split(),
        "--ranks",
        "2",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=100)
    assert losses(tmp_path / "run") == pytest.approx(plain_losses(config, config.train.steps), rel=1e-4)
