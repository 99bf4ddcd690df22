"""SIGTERM that reaches one rank of two, at any instant: both stop at the same step, saved, and nothing is lost."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gpt_helpers import tiny_config
from run_helpers import JOB_S, lines, losses, run_all, world_of
from torch.distributed import PrefixStore

import ranktest
from sixfold.dist_ckpt import retention
from sixfold.gpt import TrainConfig
from sixfold.gpt.launch import stop_signals
from sixfold.gpt.training.loop import train_in

SMALL = (
    "train.steps=3", "train.global_batch_size=4", "checkpoint.every=2", "eval.every=1", "eval.batches=2",
    "model.num_layers=2", "parallel.pp=2",
)  # fmt: skip
# A function, and the rank that is asked when it first calls it: rank 0 alone commits.
PLACES = {
    "saving.py:write": 1,
    "saving.py:commit": 0,
    "step.py:evaluate": 1,
}


def asked_rank(rank: int, ranks: int, jobs: list[tuple[str, int, str]]) -> list[tuple[int, str]]:
    """Train each configuration; one rank gets SIGTERM when it first calls the function at a place, once armed."""
    arm, ends = stop_signals.StopFlag.arm, []
    for number, (text, whom, place) in enumerate(jobs):
        asked = []

        def look(frame, event, argument, place=place, asked=asked):
            name = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
            if event == "call" and name == place and not asked:
                asked.append(name)
                os.kill(os.getpid(), signal.SIGTERM)

        def armed(flag, whom=whom, look=look):
            arm(flag)
            if rank == whom and sys.getprofile() is None:
                sys.setprofile(look)

        stop_signals.StopFlag.arm = armed
        result = train_in(TrainConfig.from_text(text), job_world(rank, ranks, number))
        sys.setprofile(None)
        assert asked or rank != whom, f"{place} was not called"
        ends.append((result.step, result.reason))
    return ends


def job_world(rank, ranks, number):
    """A job has a store of its own."""
    world = world_of(rank, ranks)
    return replace(world, store=PrefixStore(f"job-{number}", world.store))


@pytest.mark.slow
def test_one_rank_that_is_asked_stops_all_at_the_same_saved_step(tmp_path):
    jobs = [
        (tiny_config(tmp_path, *SMALL, run=f"job-{number}"), whom, place)
        for number, (place, whom) in enumerate(PLACES.items())
    ]
    whole = tiny_config(tmp_path, *SMALL, run="whole")
    run_all([(2, whole)])
    found = ranktest.run_ranks(asked_rank, 2, [(c.to_toml(), whom, place) for c, whom, place in jobs], timeout=JOB_S)
    assert found[0] == found[1], "both end alike"
    for (config, _, place), (step, reason) in zip(jobs, found[0], strict=True):
        assert reason == "sigterm", place
        root = Path(config.run.dir) / "checkpoints"
        assert retention.latest(root) == retention.step_path(root, step), place
        assert lines(config, "end")[-1]["reason"] == "sigterm"
    run_all([(2, config) for config, _, _ in jobs])
    for config, _, place in jobs:
        assert losses(config) == losses(whole), place
        assert [e["loss"] for e in lines(config, "eval")] == [e["loss"] for e in lines(whole, "eval")], place
