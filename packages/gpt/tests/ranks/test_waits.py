"""Every wait of a run ends: groups have the run's deadline, and a stopped rank is named."""

import os
import re
import signal
import threading
import time

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import JOB_S, lines, train_rank, world_of

import ranktest
from sixfold.gpt.commands import cli
from sixfold.gpt.config.train_config import ParallelConfig
from sixfold.gpt.errors import TrainError
from sixfold.gpt.observe.metrics import read_all
from sixfold.gpt.parallel.mesh import make_mesh, pair_group
from sixfold.gpt.training import loop
from sixfold.pipeline import ScheduleError


def deadlines(rank, ranks, parallel):
    """Seconds that each group of a rank's mesh waits."""
    mesh = make_mesh(parallel, world_of(rank, ranks), torch.device("cpu"), 7.0)
    groups = [mesh.pipeline, mesh.data, mesh.control, pair_group(mesh, 0, parallel.pp - 1)]
    if mesh.hybrid is not None:
        groups += [mesh.hybrid.get_group(axis) for axis in (0, 1)]
    found = [group._get_backend(torch.device("cpu")) for group in groups if group is not None]
    return {backend.options._timeout.total_seconds() for backend in found}


@pytest.mark.parametrize(
    "parallel", [ParallelConfig(pp=2, dp=2), ParallelConfig(dp=4, dp_replicate=2)], ids=["pp2dp2", "hsdp"]
)
def test_every_group_of_a_mesh_has_the_deadline_of_the_run(parallel):
    assert ranktest.run_ranks(deadlines, 4, parallel, timeout=JOB_S) == [{7.0}] * 4


@pytest.mark.slow
def test_a_stopped_rank_ends_the_run_within_its_deadline_and_is_named(tmp_path, capsys):
    path = tmp_path / "endless.toml"
    path.write_text(tiny_config(tmp_path, "train.steps=100000", "run.timeout_seconds=5").to_toml())
    stopped_at = []

    def stop_rank_one():
        deadline = time.monotonic() + 60
        metrics = tmp_path / "run" / "metrics.jsonl"
        while time.monotonic() < deadline:
            records = read_all(metrics) if metrics.exists() else []
            if sum(r["kind"] == "step" for r in records) >= 2:
                pid = next(r for r in records if r["kind"] == "start")["ranks"][1]["pid"]
                stopped_at.append(time.monotonic())
                os.kill(pid, signal.SIGSTOP)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=stop_rank_one)
    thread.start()
    status = cli.main(["train", str(path), "parallel.pp=2"])
    ended = time.monotonic()
    thread.join()
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 1, error
    assert "rank 1 did not answer: a signal had stopped its process" in error
    assert ended - stopped_at[0] < 5 + 15


def hanging_rank(rank, ranks, text):
    """Train; rank 1 hangs before its second step."""
    steps, step = [], loop.train_step

    def stepping(*args, **options):
        steps.append(1)
        if rank == 1 and len(steps) == 2:
            time.sleep(JOB_S)
        return step(*args, **options)

    loop.train_step = stepping
    train_rank(rank, ranks, text)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("parallel.pp=2", r"rank 0 waits at \[4/9\] 0RECV_B0 for rank 1; rank 1 silent"),
        ("parallel.dp=2", r"rank 1 lives but did not come; .*step 1; op gather; rank 1"),
    ],
)
@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_what_was_waited_for(tmp_path, layout, words):
    config = tiny_config(tmp_path, "train.steps=3", "train.global_batch_size=4", "run.timeout_seconds=2", layout)
    began = time.monotonic()
    with pytest.raises(ranktest.RankFailed, match=words):
        ranktest.run_ranks(hanging_rank, 2, config.to_toml(), timeout=JOB_S)
    assert time.monotonic() - began < JOB_S / 2
    assert lines(config, "end")[-1]["reason"] == "error"


def told_of_the_last_rank(rank: int, ranks: int, text: str) -> str:
    """What this rank's run ended with, whose last rank stays away from its second step until all others know."""
    store, steps, step = ranktest.store(), [], loop.train_step

    def stepping(*args, **options):
        steps.append(1)
        if rank == ranks - 1 and len(steps) == 2:
            store.wait([f"told{other}" for other in range(ranks - 1)])
            raise TrainError("it comes too late")
        return step(*args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises((TrainError, ScheduleError)) as caught:
        patch.setattr(loop, "train_step", stepping)
        train_rank(rank, ranks, text)
    store.set(f"told{rank}", "")
    return str(caught.value)


@pytest.mark.slow
def test_ranks_have_their_numbers_in_the_job_wherever_a_pipeline_tells_of_them(tmp_path):
    layout = ("parallel.pp=2", "parallel.tp=2")  # pipelines of ranks 0 and 2, 1 and 3
    config = tiny_config(tmp_path, "train.steps=3", "train.global_batch_size=4", "run.timeout_seconds=3", *layout)
    first, second, third, _ = ranktest.run_ranks(told_of_the_last_rank, 4, config.to_toml(), timeout=JOB_S)
    here = r"over tp of ranks 2, 3: rank 2 waited \d+\.\d s .* process of rank 3"
    assert re.match(rf"rank 2 failed at \[\d+/\d+\] 1F0: .* {here}", third), third
    assert re.match(r"rank (2 failed at \[\d+/\d+\] 1F0: |0 waits at .* for rank 2; rank 2 )", first), first
    assert re.match(r"rank 1 waits at \[\d+/\d+\] 0RECV_B\d for rank 3; rank 3 silent", second), second
