"""A rank that is slow in its data or in its computation is named, also where all ranks take equally long."""

from __future__ import annotations

import time

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import JOB_S, lines, train_rank

import ranktest
from sixfold.gpt.observe.straggler import PARTS
from sixfold.gpt.training import loop

SLEEP_S = 1.0  # a busy machine takes half of it for a step


def slow_rank(rank: int, ranks: int, text: str, part: str) -> None:
    """Train; rank 1 sleeps in each step."""
    # Where data is waited for: what the thread that reads ahead sleeps is hidden by a slow step.
    owner, name = (loop.Run, "_await_data") if part == "data" else (loop, "train_step")
    call = getattr(owner, name)

    def slowly(*args, **options):
        time.sleep(SLEEP_S)
        return call(*args, **options)

    if rank == 1:
        setattr(owner, name, slowly)
    train_rank(rank, ranks, text)


def late_rank(rank: int, ranks: int, text: str) -> None:
    """Train; rank 1 sleeps before each evaluation and before each step of Muon, where the other one waits for it."""
    if rank == 1:
        for owner, name in ((loop, "evaluate"), (torch.optim.Muon, "step")):
            call = getattr(owner, name)

            def slowly(*args, call=call, **options):
                time.sleep(SLEEP_S / 2)
                return call(*args, **options)

            setattr(owner, name, slowly)
    train_rank(rank, ranks, text)


@pytest.mark.slow
def test_waits_of_evaluations_and_of_optimizers_are_taken_off_no_other_part(tmp_path):
    config = tiny_config(
        tmp_path, "train.steps=3", "train.global_batch_size=4", "log.straggler_every=3", "parallel.dp=2",
        "optimizer.name=muon", "train.clip_grad=0", "eval.every=1", "eval.batches=1",
    )  # fmt: skip
    ranktest.run_ranks(late_rank, 2, config.to_toml(), timeout=JOB_S)
    [line] = lines(config, "straggler")
    parts = [{part: seconds[rank] for part, seconds in line["parts"].items()} for rank in (0, 1)]
    for mine in parts:
        assert all(seconds >= 0 for seconds in mine.values()), mine
        assert sum(mine[part] for part in PARTS) <= mine["seconds"], mine
    assert parts[0]["communication"] > SLEEP_S / 4 > parts[0]["optimizer"], "rank 0 waits in its optimizer"


@pytest.mark.parametrize(("layout", "part"), [("parallel.dp=2", "compute"), ("parallel.pp=2", "data")])
@pytest.mark.slow
def test_a_slow_rank_is_named_with_what_it_is_slow_in(tmp_path, layout, part):
    config = tiny_config(tmp_path, "train.steps=2", "train.global_batch_size=4", "log.straggler_every=2", layout)
    ranktest.run_ranks(slow_rank, 2, config.to_toml(), part, timeout=JOB_S)
    [line] = lines(config, "straggler")
    assert [(slow["rank"], slow["part"]) for slow in line["slow"]] == [(1, part)]
    waited, seconds = line["parts"]["communication"], line["parts"]["seconds"]
    assert waited[0] > SLEEP_S / 2 > waited[1], "the other rank waits for it"
    assert seconds[0] == pytest.approx(seconds[1], rel=0.5), "and takes as long"
