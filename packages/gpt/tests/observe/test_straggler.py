"""Who is slow, told from the times of all ranks; a clock of parts within parts; the line on the terminal."""

import time
from types import SimpleNamespace

import pytest
import torch
from gpt_helpers import tiny_config
from run_helpers import lines

from sixfold.gpt import train
from sixfold.gpt.config.train_config import LogConfig
from sixfold.gpt.engine.optimizer import Optimizers
from sixfold.gpt.observe import straggler
from sixfold.gpt.observe.metrics import describe
from sixfold.gpt.observe.straggler import Clock, RankTimes, slow_ranks
from sixfold.pipeline import Action, StepResult


def times(*rows, stages=None):
    """A rank per row: data, compute, optimizer, save; the rest of a step of 10 s is communication."""
    found = []
    for rank, row in enumerate(rows):
        parts = dict(zip(straggler.OWN, row, strict=True)) | {"communication": 10 - sum(row), "seconds": 10.0}
        found.append(RankTimes(stage=stages[rank] if stages else 0, host=f"node{rank}", parts=parts))
    return found


USUAL = (0.1, 3.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("row", "part"),
    [((6.1, 3.0, 0.5, 0.0), "data"), ((0.1, 9.0, 0.5, 0.0), "compute"), ((0.1, 3.0, 6.5, 0.0), "optimizer"),
     ((0.1, 3.0, 0.5, 6.0), "save")],
)  # fmt: skip
def test_a_rank_that_takes_twice_the_others_time_is_named_with_the_part_that_it_takes_it_in(row, part):
    [slow] = slow_ranks(times(USUAL, USUAL, row, USUAL), 2.0)
    assert (slow.rank, slow.host, slow.part) == (2, "node2", part)
    assert slow.seconds == pytest.approx(9.6, abs=0.05) and slow.others_seconds == pytest.approx(3.6)
    assert slow.part_seconds - slow.others_part_seconds == pytest.approx(6.0)


def test_waiting_for_others_is_not_being_slow_and_little_is_nothing():
    assert slow_ranks(times(USUAL, USUAL, USUAL), 2.0) == []
    assert slow_ranks(times((0.0, 0.1, 0.0, 0.0), (0.0, 0.9, 0.0, 0.0)), 2.0) == [], "less than a tenth of the step"
    assert [slow.rank for slow in slow_ranks(times((0.0, 1.0, 0.0, 0.0), (0.0, 2.1, 0.0, 0.0)), 2.0)] == [1]
    assert slow_ranks(times(USUAL), 2.0) == [], "a rank alone"


def test_a_rank_is_compared_with_those_of_its_stage_where_there_are_any():
    head = (0.1, 8.0, 0.5, 0.0)
    assert slow_ranks(times(USUAL, USUAL, head, head, stages=(0, 0, 1, 1)), 2.0) == []
    assert [slow.rank for slow in slow_ranks(times(USUAL, head, stages=(0, 1)), 2.0)] == [1]


def test_the_slowest_comes_first():
    found = slow_ranks(times(*[USUAL] * 5, (0.1, 7.5, 0.5, 0.0), (5.0, 4.0, 0.5, 0.0)), 2.0)
    assert [slow.rank for slow in found] == [6, 5]


def test_a_part_within_a_part_is_counted_once(monkeypatch):
    now = iter([0.0, 0.0, 1.0, 3.0, 7.0, 12.0, 20.0, 20.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    clock = Clock()
    with clock.part("compute"), clock.part("communication"), clock.part("optimizer"):
        pass
    assert clock.seconds == {"data": 0.0, "compute": 9.0, "optimizer": 4.0, "save": 0.0, "communication": 7.0}
    clock.waited(2.0)
    assert (clock.seconds["compute"], clock.seconds["communication"]) == (7.0, 9.0)
    clock.steps = 2
    assert clock.per_step()["seconds"] == 10.0


def test_waits_are_taken_off_the_part_in_which_they_were_and_off_none_outside(monkeypatch):
    now = [0.0, 0.0]  # time, waited
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock()
    clock.waits = lambda: now[1]

    def passes(seconds, waited):
        now[0], now[1] = now[0] + seconds, now[1] + waited

    passes(5.0, 4.0)  # as an evaluation
    with clock.part("compute"):
        passes(3.0, 1.0)
        with clock.part("optimizer"):
            passes(2.0, 1.5)
        passes(1.0, 0.0)
    assert clock.seconds == {"data": 0.0, "compute": 3.0, "optimizer": 0.5, "save": 0.0, "communication": 2.5}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_times_of_a_device_are_not_taken_off_those_of_the_host(monkeypatch, device):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    rank = SimpleNamespace(
        clock=Clock(), device=torch.device(device), optimizer=Optimizers([]), model=SimpleNamespace(waited_s=0.0)
    )
    report = straggler.StragglerReport(rank, LogConfig(straggler_every=0))
    report._began = True
    rank.clock.seconds["compute"] = 5.0
    ran = StepResult(events=((0, Action.parse("0RECV_B0"), 1.0, 4.0), (0, Action.parse("0F0"), 4.0, 5.0)))
    report.after_step(2, ran, lambda *_, **__: None)
    assert rank.clock.seconds["compute"] == (2.0 if device == "cpu" else 5.0)


def test_a_line_says_who_by_how_much_and_in_what():
    found = slow_ranks(times(USUAL, (6.1, 3.0, 0.5, 0.0)), 2.0)
    text = describe({"kind": "straggler", "step": 40, "slow": [straggler.asdict(slow) for slow in found]})
    assert text == (
        "step 40  rank 1 on node1 is slow: 9.600 s of its own in a step, the others 3.600 s; most in data: 6.100 s, "
        "the others 0.100 s"
    )


@pytest.mark.slow
def test_a_run_tells_where_its_time_went_and_leaves_its_first_step_out(tmp_path):
    config = tiny_config(tmp_path, "train.steps=5", "log.straggler_every=2", "checkpoint.every=3")
    train(config)
    told = lines(config, "straggler")
    assert [(entry["step"], entry["steps"], entry["slow"]) for entry in told] == [(2, 1, []), (4, 2, [])]
    seconds = {entry["step"]: entry["seconds"] for entry in lines(config, "step")}
    [parts] = [entry["parts"] for entry in told if entry["step"] == 4]
    assert parts["save"][0] > 0 and parts["optimizer"][0] > 0 and parts["communication"][0] < parts["compute"][0]
    assert sum(parts[part][0] for part in straggler.PARTS) <= parts["seconds"][0]
    assert parts["compute"][0] + parts["optimizer"][0] + parts["data"][0] <= (seconds[3] + seconds[4]) / 2
    quiet = tiny_config(tmp_path, "log.straggler_every=0", run="quiet")
    train(quiet)
    assert lines(quiet, "straggler") == []
