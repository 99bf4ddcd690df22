"""``sixfold doctor --run``, and the line that it prints, given to ``sixfold plan``."""

import json
import shlex

import pytest
from config_helpers import MINIMAL
from run_script import Script, kept_alive

from sixfold.gpt.commands import cli


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.toml").write_text(MINIMAL)

    def write(lines):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path

    return write


def said(capsys, *words):
    assert cli.main([*map(str, words)]) == 0
    return capsys.readouterr().out


def test_what_doctor_measured_is_what_plan_takes(folder, capsys):
    run = folder(kept_alive())
    text = said(capsys, "doctor", "--run", run)
    *lines, last = text.splitlines()
    assert f"sixfold plan {run / 'config.toml'} --world 3 --mtbf-hours " in last
    for line in ("a step          2 s", "between steps   0.25 s", "a save          0.5 s blocked, whole after 1.5 s"):
        assert any(one.startswith(line) for one in lines), text
    assert "recovery        not measured from memory, 3.1 s from a checkpoint" in lines
    found = json.loads(said(capsys, "doctor", "--run", run, "--json"))
    assert found["plan"] == last
    words = ["checkpoint.every=4", "train.global_batch_size=12", "--json"]
    planned = json.loads(said(capsys, *shlex.split(last)[1:], *words))["goodput"]
    assert planned["assumed"] == [] and planned["interval_steps"] == found["interval"] == 4
    assert planned["goodput"] == pytest.approx(found["formula"], rel=1e-3)
    # 2.25 s a step, 5 updates were lost beside those begun: two failures are few, so within a tenth.
    assert planned["goodput"] == pytest.approx(found["goodput"], rel=0.1)


def test_a_run_without_failures_leaves_to_the_user_what_it_does_not_know(folder, capsys):
    run = Script()
    run.start(0)
    run.updates(1, 6)
    text = said(capsys, "doctor", "--run", folder(run.lines))
    assert "--mtbf-hours HOURS --step-seconds 2 --snapshot-seconds 0.25 --save-seconds 0.5" in text
    assert "--detect-seconds" not in text and "detection and recovery are yours" in text


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert cli.main(["doctor", "--run", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl; name the run.dir of a run" in capsys.readouterr().err
