"""A run that waits for the save before, on a slow disk: the wait is told as seconds for which a save held it up."""

from itertools import pairwise

import pytest
from gpt_helpers import tiny_config
from run_helpers import lines

from sixfold.gpt import train
from sixfold.gpt.checkpoints import training_state
from sixfold.gpt.observe.metrics import read_all
from sixfold.gpt.observe.run_costs import measure
from sixfold.gpt.observe.time_spent import spent

WRITES_S = 0.5


class SlowDisk:
    """The handle of a save whose bytes are there, and whose disk says so half a second later."""

    total_s = WRITES_S

    def __init__(self, sleep):
        self.wait = lambda: sleep(WRITES_S)

    def done(self):
        return False


@pytest.mark.slow
def test_what_a_run_waits_for_the_save_before_is_told_as_held_up_by_the_save_that_waits(tmp_path, monkeypatch):
    import time

    real = training_state.save

    def save(*arguments, background, **options):
        blocked, _ = real(*arguments, background=False, **options)
        return blocked, SlowDisk(time.sleep) if background else None

    monkeypatch.setattr(training_state, "save", save)
    options = ("model.num_layers=1", "train.steps=4", "checkpoint.every=1", "checkpoint.background=true")
    config = tiny_config(tmp_path, *options)
    train(config)
    first, *others = lines(config, "save")
    assert [save["blocked_seconds"] >= WRITES_S for save in others] == [True] * 3
    assert others[-1]["seconds"] >= others[-1]["blocked_seconds"]
    # The last save waits behind the last update.
    steps = lines(config, "step")
    stood = sum(b["time"] - a["time"] - b["seconds"] for a, b in pairwise(steps))
    told = sum(save["blocked_seconds"] for save in (first, *others[:2]))
    assert 2 * WRITES_S <= told <= stood + 0.05
    records = read_all(tmp_path / "run/metrics.jsonl")
    seconds = spent(records).seconds
    assert seconds["saves"] >= 3 * WRITES_S and seconds["other"] < 2 * WRITES_S
    found = measure(records)
    assert found.save_s > 2 / 3 * WRITES_S and found.snapshot_s < WRITES_S / 2
