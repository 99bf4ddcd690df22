"""The formula of goodput beside a run that is killed again and again, with the costs that doctor measures in it.

Few kills are no fair sample of instants. So they come early, in the middle and late between two checkpoints, each once,
and somewhere within a step. What the formula is given of the run are means: a step, a save, detection, recovery, and
the time between failures. The steps that were done again it has to find out.
"""

import json
import os
import random
import signal
import time

import pytest
from gpt_helpers import tiny_config
from kept_alive_helpers import pids, run_kept_alive
from run_helpers import lines

from sixfold.gpt.commands import cli

EVERY, APART = 10, 30  # steps between checkpoints, and between kills
AFTER = (4, 8, 0, 6, 2)  # steps behind a checkpoint
KEYS = (
    "parallel.dp=2", f"train.steps={APART * (len(AFTER) + 1)}", f"checkpoint.every={EVERY}", "eval.every=0",
    "model.hidden_size=128", "model.ffn_hidden_size=512", "data.seq_length=128",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("snapshots", "from_checkpoint"), [(0, 1.0), (1, 0.0)])
def test_the_formula_is_within_five_percent_of_a_run_that_is_killed_again_and_again(
    tmp_path, capsys, snapshots, from_checkpoint
):
    config, chance = tiny_config(tmp_path, *KEYS, f"elastic.memory_every={snapshots}"), random.Random(7)
    targets = [APART * number + after for number, after in enumerate(AFTER, 1)]
    due = []  # when the next kill comes

    def kill():
        steps = lines(config, "step") if (tmp_path / "run/metrics.jsonl").exists() else []
        if due and time.monotonic() >= due[0]:
            os.kill(pids(config)[-1][chance.randrange(2)], signal.SIGKILL)
            due.clear()
        elif not due and targets and steps and steps[-1]["step"] >= targets[0]:
            due.append(time.monotonic() + chance.random() * steps[-1]["seconds"])
            del targets[0]

    run_kept_alive(config, 2, watch=kill)
    assert cli.main(["doctor", "--run", config.run.dir, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["failures"], found["interval"]) == (len(AFTER), EVERY)
    assert found["from_checkpoint"] == from_checkpoint and found["goodput"] < 0.95
    print(found)
    assert found["formula"] == pytest.approx(found["goodput"], rel=0.05)
