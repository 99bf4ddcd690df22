"""Where a run's time went: lines with times that are known beforehand, and a run of its own."""

import time
from dataclasses import replace

import pytest
from gpt_helpers import tiny_config
from run_script import Script, kept_alive

from sixfold.gpt import train
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.metrics import read_all
from sixfold.gpt.observe.time_spent import CAUSES, spent


class Told(Script):
    """Also what a step's line says of tokens, data and MFU: 64 tokens a step, a quarter of a second for data."""

    def line(self, kind, **fields):
        if kind == "step":
            fields |= {"tokens_per_second": 64 / fields["seconds"], "data_seconds": 0.25, "mfu": 0.4}
        super().line(kind, **fields)


def whole():
    """12 updates, an evaluation of 3 s behind the 6th. Killed 1.5 s after the 10th; 10 s later it goes on from 8."""
    run = Told()
    run.start(0, world=2)
    run.clock += 5.0
    run.updates(1, 6)
    run.clock += 3.0
    run.line("eval", step=6, loss=1.0, tokens=64, seconds=3.0)
    run.updates(7, 10)
    run.clock += 1.5 + 10.0
    run.start(8, world=2)
    run.clock += 4.0
    run.updates(9, 12)
    run.line("end", step=12, reason="finished")
    return run


def test_each_second_has_its_cause():
    run = whole()
    found = spent(run.lines)
    assert found.seconds == pytest.approx(
        {
            "steps": 12 * 1.75,
            "data": 12 * 0.25,
            "evaluation": 3.0,
            "saves": 2 * 0.5 + 0.75,  # the run ends 0.75 s after update 12, and waits for its save
            "again": 2 * 2.0,  # 9 and 10
            "start": 5.0 + 4.0,
            "recovery": 0.0,
            "down": 0.25 + 11.5,  # from the line of update 10 on
            "other": 9 * 0.25 + 3 * 0.25,
        }
    )
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s) == pytest.approx(run.clock - 1000.0)
    assert found.seconds.keys() == CAUSES.keys()
    assert (found.steps, found.tokens, found.starts, found.recoveries, found.step) == (12, 12 * 64, 2, 0, 12)


def test_speed_and_mfu_by_the_clock_count_all_of_it():
    run = whole()
    found = spent(run.lines)
    assert found.tokens_per_second == pytest.approx(12 * 64 / (run.clock - 1000.0))
    assert found.step_tokens_per_second == pytest.approx(32.0)
    assert found.step_mfu == pytest.approx(0.4)
    assert found.mfu == pytest.approx(0.4 * 12 * 2.0 / (run.clock - 1000.0))


def test_lines_of_some_updates_tell_the_same_within_what_lies_between_updates():
    one, some = Told(), Told()
    for run, every in ((one, 1), (some, 4)):
        run.start(0)
        run.updates(1, 40, every)
        run.line("end", step=40, reason="finished")
    first, second = spent(one.lines), spent(some.lines)
    assert second.wall_s == first.wall_s and second.tokens == first.tokens == 40 * 64
    first, second = first.seconds, second.seconds
    assert second["saves"] == pytest.approx(first["saves"])
    between = first["other"]  # is told as part of updates, and before the first line as part of the start
    assert second["steps"] + second["data"] + second["start"] == pytest.approx(first["steps"] + first["data"] + between)


def test_a_run_that_was_kept_alive_has_recoveries_and_is_never_down():
    lines = kept_alive()
    for line in lines:
        if line["kind"] == "step":
            line |= {"tokens_per_second": 64 / line["seconds"], "data_seconds": 0.0}
    found = spent(lines)
    assert found.recoveries == 2 and found.seconds["down"] == 0.0 and found.seconds["start"] == 0.0
    # Twice 0.9 s of an update that was lost, 0.25 s before it, 0.3 + 2 s, and 0.7 s until the next one begins.
    assert found.seconds["recovery"] == pytest.approx(2 * (0.25 + 0.9 + 0.3 + 2.0 + 0.7))
    assert found.seconds["again"] == pytest.approx(4 * 2.0), "9, 10, 13 and 14 were done again"


def test_time_between_an_end_as_it_should_be_and_the_next_start_does_not_count():
    run = Told()
    run.start(0)
    run.updates(1, 3)
    run.line("end", step=3, reason="sigterm")
    run.clock += 86400.0
    run.start(3)
    run.updates(4, 6)
    found = spent(run.lines)
    assert found.stopped_s == 86400.0 and found.wall_s < 20 and found.seconds["down"] == 0.0
    failed = [line | {"reason": "error"} if line["kind"] == "end" else line for line in run.lines]
    assert spent(failed).seconds["down"] == 86400.0


def test_a_run_without_a_step_and_one_of_an_earlier_release_have_a_report():
    run = Told()
    with pytest.raises(ConfigError, match="the run has no line of a start"):
        spent(run.lines)
    run.start(0)
    run.clock += 7.0
    run.line("end", step=0, reason="error")
    found = spent(run.lines)
    assert found.seconds["start"] == 7.0 and found.mfu is None and found.tokens_per_second == 0.0
    old = [{key: value for key, value in line.items() if key != "seconds" or line["kind"] != "eval"}
           for line in whole().lines]  # fmt: skip
    assert spent(old).seconds["evaluation"] == 0.0 and spent(old).wall_s == pytest.approx(spent(whole().lines).wall_s)


@pytest.mark.slow
def test_a_real_run_and_its_resume_add_up_to_the_clock(tmp_path):
    config = tiny_config(tmp_path, "train.steps=4", "eval.every=2", "checkpoint.every=2")
    began = time.time()
    train(config)
    train(replace(config, train=replace(config.train, steps=6)))
    took = time.time() - began
    found = spent(read_all(config.run.dir))
    assert 0 < found.wall_s + found.stopped_s < took and found.steps == 6
    assert found.seconds["evaluation"] > 0 and found.seconds["saves"] > 0 and found.seconds["steps"] > 0
    assert found.tokens == 6 * 8 * 32 and found.mfu is None
