"""The examples for Slurm and for Kubernetes: the command that they start, run by two ranks that see two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from gpt_helpers import tiny_config
from run_helpers import JOB_S, final_tensors, lines
from two_nodes_helpers import EXAMPLES, command_of

import ranktest
from sixfold.gpt.commands import cli


def task(rank: int, ranks: int, command: list[str], variables: list[dict[str, str]]) -> int:
    """One task of one node: the command, with the variables that its launcher gives it."""
    dist.destroy_process_group()  # ranktest's own
    os.environ.update(variables[rank])
    assert command[0] == "sixfold"
    return cli.main(command[1:])


def run_tasks(command: list[str], variables: list[dict[str, str]]) -> None:
    assert ranktest.run_ranks(task, len(variables), command, variables, timeout=JOB_S) == [0] * len(variables)


def free_port() -> str:
    with socket.create_server(("localhost", 0)) as free:
        return str(free.getsockname()[1])


def written(tmp_path: Path) -> tuple[Path, object]:
    config = tiny_config(tmp_path, "train.steps=2", "train.global_batch_size=4", "parallel.pp=2")
    path = tmp_path / "job.toml"
    path.write_text(config.to_toml())
    return path, config


@pytest.mark.slow
def test_the_batch_script_trains_on_two_nodes_as_srun_starts_it(tmp_path):
    path, config = written(tmp_path)
    command = command_of(EXAMPLES / "slurm_two_nodes.sbatch", [str(path), "log.every=1"], tmp_path)
    assert command == ["sixfold", "train", str(path), "log.every=1"]
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost,node[2]", "SLURM_JOB_ID": "77"}
    port = {"MASTER_PORT": free_port()}  # of a job alone on its node it is the job's; here other tests run
    run_tasks(command, [step | port | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"} for rank in (0, 1)])
    assert [entry["step"] for entry in lines(config, "step")] == [1, 2]
    assert final_tensors(config)


def requeued_task(rank: int, ranks: int, command: list[str], variables: list[dict[str, str]], metrics: str) -> int:
    """`task`, to which Slurm sends the signal of its batch script when two steps are done, if it is the first start."""

    def signal_later() -> None:
        while not Path(metrics).exists() or Path(metrics).read_text().count('"step", ') < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if not Path(metrics).exists():
        threading.Thread(target=signal_later, daemon=True).start()
    return task(rank, ranks, command, variables)


@pytest.mark.slow
def test_a_job_that_slurm_stops_and_queues_again_goes_on_from_what_it_saved(tmp_path):
    keys = ("train.steps=40", "train.global_batch_size=4", "parallel.pp=2")
    config, path = tiny_config(tmp_path, *keys), tmp_path / "job.toml"
    path.write_text(config.to_toml())
    command = command_of(EXAMPLES / "slurm_two_nodes.sbatch", [str(path)], tmp_path)
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost,node[2]", "SLURM_JOB_ID": "78"}
    statuses = []
    for _ in range(2):
        variables = [
            step | {"MASTER_PORT": free_port(), "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"} for rank in (0, 1)
        ]
        variables = [one | {"MASTER_PORT": variables[0]["MASTER_PORT"]} for one in variables]
        metrics = str(Path(config.run.dir) / "metrics.jsonl")
        statuses.append(ranktest.run_ranks(requeued_task, 2, command, variables, metrics, timeout=JOB_S))
    assert statuses == [[143, 143], [0, 0]]
    [stopped, finished] = lines(config, "end")
    [resume] = lines(config, "resume")
    assert (stopped["reason"], finished["reason"]) == ("sigterm", "finished")
    assert resume["step"] == stopped["step"] < 40
    assert [entry["step"] for entry in lines(config, "step")] == list(range(1, 41)), "no step twice, none left out"


def test_the_batch_script_asks_for_a_gpu_a_task_and_for_a_signal_before_its_time_is_over():
    text = (EXAMPLES / "slurm_two_nodes.sbatch").read_text()
    options = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=(\S+)$", text))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-task"]) == ("2", "8", "1")
    assert options["signal"] == "TERM@600" and "#SBATCH --requeue" in text


@pytest.mark.slow
def test_the_pytorchjob_trains_on_two_pods_as_the_operator_starts_them(tmp_path):
    path, config = written(tmp_path)
    text = (EXAMPLES / "pytorchjob.yaml").read_text()
    [command] = [json.loads(found) for found in re.findall(r"(?m)^ +command: (\[.*\])$", text)]
    assert command == ["sixfold", "train", "/run/config.toml"]
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": "2", "PET_NNODES": "2"}
    run_tasks([*command[:-1], str(path)], [master | {"RANK": str(rank)} for rank in (0, 1)])
    assert [entry["step"] for entry in lines(config, "step")] == [1, 2]
    assert final_tensors(config)
