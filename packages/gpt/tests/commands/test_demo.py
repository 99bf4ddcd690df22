"""The demo's clock and folder, without training: when it kills, what it resumes, what it replaces."""

import io
import json
import os
import signal

import pytest

from sixfold.gpt.commands import demo
from sixfold.gpt.data.cpython_corpus import Corpus
from sixfold.gpt.data.prepare import prepare_cpython
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.metrics import ProgressLine

CORPUS = Corpus(train={"topics": [b"topic"] * 3, "docstrings": [b"text"] * 9}, valid=[b"valid"], sha256="0" * 64)


def first_half(tmp_path, **fields):
    metrics = tmp_path / "metrics.jsonl"
    line = ProgressLine(metrics, 100, stream=io.StringIO())
    return demo.FirstHalf(metrics=metrics, **{"seconds": 10.0, "most_steps": 90, "line": line} | fields)


def write(first, *records):
    with first.metrics.open("a") as file:
        for record in records:
            file.write(json.dumps({"time": 0.0, "lr": 0.1, "loss": 2.0, "seconds": 0.5} | record) + "\n")


@pytest.fixture
def killed(monkeypatch):
    pids = []
    monkeypatch.setattr(os, "kill", lambda pid, number: pids.append((pid, number)))
    return pids


START = {"kind": "start", "ranks": [{"pid": 11}, {"pid": 12}]}


def test_all_ranks_are_killed_once_after_half_of_the_time_and_a_checkpoint(tmp_path, killed, monkeypatch):
    first, now = first_half(tmp_path), 0.0
    monkeypatch.setattr(demo.time, "time", lambda: now)
    write(first, START, {"kind": "step", "step": 1})
    for now, records in (
        (11.0, []),  # half of the time, but nothing is saved
        (12.0, [{"kind": "step", "step": 2}, {"kind": "save", "step": 2}]),  # saved, but nothing would be lost
    ):
        write(first, *records)
        first.watch()
        assert killed == [], now
    write(first, {"kind": "step", "step": 3})
    for _ in range(2):
        first.watch()
        assert killed == [(11, signal.SIGKILL), (12, signal.SIGKILL)]
    assert (first.saved_step, first.last["step"], first.killed) == (2, 3, True)


def test_a_machine_faster_than_guessed_is_killed_before_its_steps_are_done(tmp_path, killed, monkeypatch):
    first = first_half(tmp_path, most_steps=4)
    monkeypatch.setattr(demo.time, "time", lambda: 1.0)
    write(first, START, {"kind": "step", "step": 3}, {"kind": "save", "step": 3})
    first.watch()
    assert killed == []
    write(first, {"kind": "step", "step": 4})
    first.watch()
    assert len(killed) == 2


def test_one_rank_of_the_second_half_is_killed_once_and_what_it_cost_is_told(tmp_path, killed, monkeypatch):
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    loss = demo.OneLoss(tail=demo.MetricsTail(metrics), at_step=7)
    monkeypatch.setattr(demo.time, "time", lambda: 20.0)
    half = first_half(tmp_path)
    write(half, START, {"kind": "step", "step": 6, "time": 18.0})
    loss.watch()
    assert killed == [] and loss.told() == {}
    write(half, {"kind": "step", "step": 7, "time": 19.5, "loss": 1.5}, {"kind": "step", "step": 8, "time": 20.0})
    loss.watch()
    assert killed == [(12, signal.SIGKILL)] and loss.told() == {}
    write(half, START, {"kind": "recovery", "step": 6, "source": "memory", "time": 21.0})
    write(half, {"kind": "step", "step": 7, "time": 21.5, "loss": 1.5}, {"kind": "step", "step": 8, "time": 22.0})
    loss.watch()
    assert len(killed) == 1
    expected = {"after_step": 7, "source": "memory", "from_step": 6, "seconds_to_the_next_update": 1.5}
    assert loss.told() == {**expected, "loss": 1.5, "loss_again": 1.5}


def test_the_second_half_gets_the_updates_that_its_time_allows(tmp_path):
    first = first_half(tmp_path)
    write(first, *({"kind": "step", "step": i, "seconds": s} for i, s in enumerate((9.0, 0.25, 0.25, 0.25), start=1)))
    write(first, {"kind": "save", "step": 3})
    first.read()
    assert first.steps_for(90.0) == 360
    prepared = prepare_cpython(tmp_path / "data" / "cp", CORPUS)
    demo._config(tmp_path, prepared, minutes=3.0, ranks=2)
    config = demo._resumed_config(tmp_path, first, minutes=3.0, ranks=2)
    assert config.train.steps == 3 + 360
    assert (config.parallel.pp, config.parallel.dp, config.parallel.sharding) == (1, 2, "optim_grads_params")
    assert config.checkpoint.resume == "must"


@pytest.mark.parametrize("ranks", range(1, 9))
def test_batches_divide_in_both_layouts_and_demo_toml_is_a_config(tmp_path, ranks):
    batches = demo.Batches(ranks=ranks)
    assert batches.total == batches.sharded * ranks and batches.sharded % batches.pipeline == 0
    prepared = prepare_cpython(tmp_path / "data" / "cp", CORPUS)
    config = demo._config(tmp_path, prepared, minutes=3.0, ranks=ranks)
    assert config.parallel.pp == ranks and config.run.device == "cpu"
    assert config.data.weights == pytest.approx((18 / 63, 45 / 63), abs=1e-4)


def test_an_older_demo_is_replaced_and_anything_else_is_refused(tmp_path):
    folder = tmp_path / "out"
    demo._clear(folder)
    for name in ("run/checkpoints", "data"):
        (folder / name).mkdir(parents=True)
    for name in ("summary.json", "loss.svg", "notes.txt"):
        (folder / name).touch()
    demo._clear(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["demo.toml", "notes.txt"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds files that no demo wrote"):
        demo._clear(other)
    assert (other / "thesis.txt").exists()
    with pytest.raises(ConfigError, match="is a file"):
        demo._clear(other / "thesis.txt")
