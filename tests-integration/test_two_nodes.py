"""Two nodes under a real torchrun: two agents on this machine, each with a rank."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from run_helpers import lines
from torchrun_helpers import end_with_descendants
from two_nodes_helpers import start_node

DEADLINE_S = 240.0  # ends what hangs and nothing else
pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_torchrun_starts_all_ranks_again_when_one_of_a_node_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("MAX_RESTARTS", "2")
    keys = ("train.steps=60", "train.global_batch_size=4", "checkpoint.every=2", "parallel.pp=2")
    config, path = tiny_config(tmp_path, *keys), tmp_path / "job.toml"
    path.write_text(config.to_toml())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outputs = [tmp_path / f"node-{node}.out" for node in (0, 1)]
    nodes = [start_node(node, path, port, output=outputs[node]) for node in (0, 1)]
    metrics, is_killed = Path(config.run.dir) / "metrics.jsonl", False
    try:
        deadline = time.monotonic() + DEADLINE_S
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            if not is_killed and metrics.exists() and '"save"' in metrics.read_text():
                os.kill(lines(config, "start")[0]["ranks"][1]["pid"], signal.SIGKILL)
                is_killed = True
            time.sleep(0.05)
        told = "\n".join(output.read_text() for output in outputs)
        assert [node.poll() for node in nodes] == [0, 0], told
    finally:
        for node in nodes:
            end_with_descendants(node)
    first, *later = lines(config, "start")
    assert later and not {one["pid"] for one in first["ranks"]} & {one["pid"] for one in later[-1]["ranks"]}
    assert lines(config, "resume")[-1]["step"] >= 2 and lines(config, "end")[-1]["reason"] == "finished"
    assert sorted({entry["step"] for entry in lines(config, "step")}) == list(range(1, 61))


@pytest.mark.slow
def test_torchrun_on_two_nodes_trains_one_run(tmp_path):
    config = tiny_config(tmp_path, "train.steps=3", "train.global_batch_size=4", "checkpoint.every=1", "parallel.pp=2")
    path = tmp_path / "job.toml"
    path.write_text(config.to_toml())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outputs = [tmp_path / f"node-{node}.out" for node in (0, 1)]
    nodes = [start_node(node, path, port, output=outputs[node]) for node in (0, 1)]
    try:
        deadline = time.monotonic() + DEADLINE_S
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            time.sleep(0.1)
        told = "\n".join(output.read_text() for output in outputs)
        assert [node.poll() for node in nodes] == [0, 0], told
    finally:
        for node in nodes:
            end_with_descendants(node)
    [start] = lines(config, "start")
    assert (start["world"], start["layout"]["pp"]) == (2, 2)
    assert len({entry["pid"] for entry in start["ranks"]}) == 2
    assert [entry["step"] for entry in lines(config, "step")] == [1, 2, 3]
    assert [entry["reason"] for entry in lines(config, "end")] == ["finished"]
