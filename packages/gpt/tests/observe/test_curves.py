"""Curves elsewhere: what a sink gets is what metrics.jsonl says, and no sink ends a run."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from config_helpers import words_of
from gpt_helpers import tiny_config

from sixfold.gpt import train
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe import curves, tensorboard, wandb_sink
from sixfold.gpt.observe.curves import CURVES, CurveFeed, scalars
from sixfold.gpt.observe.metrics import FIELDS, MetricsWriter, read_metrics
from sixfold.gpt.observe.tensorboard import TensorBoardSink, check_tensorboard
from sixfold.gpt.observe.wandb_sink import WandbSink, check_wandb

STEP = dict.fromkeys(FIELDS["step"], 1.0) | {"mfu": None, "loss_by_dataset": {"wiki": 2.0, "code": None}}
START = dict.fromkeys(FIELDS["start"], 0)


class Drawn:
    """A sink that keeps what it is given, and may break."""

    def __init__(self, breaks_at=None, hangs=None):
        self.points, self.ended, self.flushed, self._breaks_at, self._hangs = [], None, 0, breaks_at, hangs

    def __call__(self, folder):
        return self

    def take_back(self, step):
        self.points = [point for point in self.points if point[0] <= step]

    def add(self, step, seconds, values):
        if self._hangs is not None:
            self._hangs.wait()
        if step == self._breaks_at:
            raise ConnectionError("no route\nto host")
        self.points.append((step, values["train/loss"]))

    def flush(self):
        self.flushed += 1

    def close(self, failed):
        self.ended = failed


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(curves, "POLL_S", 0.02)


def feed(folder, sink, *losses, first=1, failed=False, name="drawn", **options):
    """A start behind step ``first - 1`` that writes these losses, beside one sink."""
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        one = CurveFeed(folder, name, sink)
        writer.write("start", **START | {"step": first - 1})
        for step, loss in enumerate(losses, first):
            writer.write("step", **STEP | {"step": step, "loss": loss})
        one.close(failed=failed, **options)
    return sink


def wait_until(true):
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true(), "within 20 s"


def test_a_sink_gets_the_steps_that_count_also_when_a_resume_takes_some_back(tmp_path):
    sink = feed(tmp_path, Drawn(), 5.0, 4.0, 3.0, failed=True)
    assert sink.points == [(1, 5.0), (2, 4.0), (3, 3.0)] and sink.ended is True
    feed(tmp_path, sink, 9.0, 8.0, first=2)
    assert sink.points == [(1, 5.0), (2, 9.0), (3, 8.0)] and sink.ended is False
    assert sink.points == [(r["step"], r["loss"]) for r in read_metrics(tmp_path) if r["kind"] == "step"]


def test_a_sink_that_is_asked_for_later_gets_the_whole_run_and_what_was_taken_back_never(tmp_path):
    feed(tmp_path, Drawn(breaks_at=1), 5.0, 4.0, 3.0)
    feed(tmp_path, Drawn(breaks_at=2), 9.0, first=2)
    assert feed(tmp_path, Drawn(), 8.0, first=3).points == [(1, 5.0), (2, 9.0), (3, 8.0)]


def test_a_process_that_is_killed_leaves_the_next_one_what_its_sink_had_not_got(tmp_path):
    script = f"""
import os, time
from pathlib import Path
from sixfold.gpt.observe import curves
from sixfold.gpt.observe.metrics import FIELDS, MetricsWriter
from sixfold.gpt.observe.tensorboard import TensorBoardSink
curves.POLL_S = 0.02
folder = Path({str(tmp_path)!r})
writer = MetricsWriter(folder / "metrics.jsonl")
curves.CurveFeed(folder, "tensorboard", TensorBoardSink)
step = dict.fromkeys(FIELDS["step"], 1.0) | {{"loss_by_dataset": {{}}}}
writer.write("start", **dict.fromkeys(FIELDS["start"], 0))
writer.write("step", **step | {{"step": 1, "loss": 5.0}})
while not (folder / "tensorboard" / curves.READ).exists():
    time.sleep(0.01)
curves.POLL_S = 1000
time.sleep(0.2)
writer.write("step", **step | {{"step": 2, "loss": 4.0}})
os.kill(os.getpid(), 9)
"""
    pytest.importorskip("tensorboard", reason="needs tensorboard, an extra")
    subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    feed(tmp_path, TensorBoardSink, 3.0, first=3, name="tensorboard")
    assert drawn_in(tmp_path)["train/loss"] == [(1, 5.0), (2, 4.0), (3, 3.0)]


def test_a_process_that_begins_within_the_second_of_another_hides_nothing_of_it(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard, an extra")
    first = TensorBoardSink(tmp_path / "tensorboard")
    first.add(1, time.time(), {"train/loss": 5.0})
    first.close(failed=True)
    [file] = (tmp_path / "tensorboard").iterdir()
    ahead = int(time.time()) + 1  # the second that has most of its time before it
    file.rename(file.with_name(f"events.out.tfevents.{ahead}.zzzz.1.0"))
    time.sleep(max(0.0, ahead - time.time()))
    second = TensorBoardSink(tmp_path / "tensorboard")
    second.take_back(1)
    second.add(2, time.time(), {"train/loss": 4.0})
    second.close(failed=False)
    assert drawn_in(tmp_path)["train/loss"] == [(1, 5.0), (2, 4.0)]


def test_a_sink_that_fails_says_so_once_and_the_next_start_hands_over_what_it_lacks(tmp_path, capsys):
    feed(tmp_path, Drawn(breaks_at=2), 5.0, 4.0, 3.0)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("sixfold: log.drawn gets no more of this run (ConnectionError: no route); the run goes on")
    assert feed(tmp_path, Drawn(), 2.0, first=4).points == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]


def test_a_sink_that_hangs_keeps_nobody_waiting_but_a_moment_at_the_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(curves, "CLOSE_S", 0.1)
    free = threading.Event()
    try:
        began = time.monotonic()
        feed(tmp_path, Drawn(hangs=free), 5.0, waits=False)
        assert time.monotonic() - began < 5 and not capsys.readouterr().err, "a generation that ends waits for nothing"
        feed(tmp_path, Drawn(hangs=free), 4.0, first=2)
        assert "has not taken the last lines within 0.1 s" in capsys.readouterr().err
    finally:
        free.set()
        wait_until(lambda: not any(one.name == "sixfold-drawn" for one in threading.enumerate()))


def test_another_metrics_file_in_the_same_folder_is_read_from_its_start(tmp_path):
    feed(tmp_path, Drawn(), 5.0)
    (tmp_path / "metrics.jsonl").unlink()
    assert feed(tmp_path, Drawn(), 7.0, 6.0, 5.0, 4.0).points == [(1, 7.0), (2, 6.0), (3, 5.0), (4, 4.0)]


def drawn_in(folder):
    """(step, value) by name, as TensorBoard itself reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="an extra")
    found = reader.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_tensorboard_has_every_number_of_a_step_and_of_its_datasets(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard, an extra")
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        one = CurveFeed(tmp_path, "tensorboard", TensorBoardSink)
        for step, loss in enumerate((4.0, 3.0), 1):
            writer.write("step", **STEP | {"step": step, "loss": loss})
        for name, loss in (("", 0.5), ("code", 0.25)):
            writer.write("eval", **dict.fromkeys(FIELDS["eval"], 1) | {"name": name, "loss": loss})
        one.close(failed=False)
    found = drawn_in(tmp_path)
    assert found["train/loss"] == [(1, 4.0), (2, 3.0)] and found["valid/loss"] == [(1, 0.5)]
    assert found["loss by validation set/code"] == [(1, 0.25)]
    assert found["loss by dataset/wiki"] == [(1, 2.0), (2, 2.0)]
    assert "train/mfu" not in found and "loss by dataset/code" not in found, "null is no number"
    assert {f"train/{name}" for name in CURVES} - found.keys() == {"train/mfu"}


def test_steps_that_a_resumed_run_repeats_replace_the_first_ones_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard, an extra")
    feed(tmp_path, TensorBoardSink, 5.0, 4.0, 3.0, name="tensorboard")
    feed(tmp_path, TensorBoardSink, 9.0, first=2, name="tensorboard")
    assert drawn_in(tmp_path)["train/loss"] == [(1, 5.0), (2, 9.0)]


def test_mfu_by_the_clock_is_the_steps_own_with_the_time_between_steps():
    line = STEP | {"kind": "step", "mfu": 0.4, "tokens_per_second": 4000.0, "wall_tokens_per_second": 1000.0}
    assert scalars(line)["train/wall_mfu"] == pytest.approx(0.1)
    assert "train/wall_mfu" not in scalars(line | {"mfu": None})


@pytest.mark.parametrize(
    ("module", "check", "key"),
    [(tensorboard, lambda: check_tensorboard(True), "tensorboard is true"),
     (wandb_sink, lambda: check_wandb("team/gpt"), "wandb is 'team/gpt'")],
)  # fmt: skip
def test_a_sink_that_is_not_installed_is_refused_with_its_extra(monkeypatch, module, check, key):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    check_tensorboard(False)
    check_wandb("")
    with pytest.raises(ConfigError) as error:
        check()
    assert words_of(error).startswith(f"log.{key} and ") and f"sixfold-gpt[{key.split()[0]}]" in words_of(error)


@pytest.mark.slow
def test_a_run_and_its_resume_are_one_run_of_wandb_offline(tmp_path, monkeypatch, capsys):
    pytest.importorskip("wandb", reason="needs wandb, an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = tiny_config(tmp_path, "train.steps=3", "log.wandb=team/gpt", "eval.every=3", "checkpoint.every=2")
    train(config)
    train(tiny_config(tmp_path, "train.steps=5", "log.wandb=team/gpt", "eval.every=3", "checkpoint.every=2"))
    folder = Path(config.run.dir) / "wandb"
    [first, second] = sorted(folder.glob("offline-run-*"))
    name = (folder / wandb_sink.ID).read_text().strip()
    assert first.name.endswith(name) and second.name.endswith(name)
    assert "`wandb sync " in capsys.readouterr().err
    drawn = history_of(first) + history_of(second)
    logged = [(r["step"], r["loss"]) for r in read_metrics(config.run.dir) if r["kind"] == "step"]
    assert [(row["step"], row["train/loss"]) for row in drawn if "train/loss" in row] == logged
    assert [row["step"] for row in drawn if "valid/loss" in row] == [3, 5]


def history_of(folder):
    """The rows of an offline run: records of a LevelDB log, in blocks of 32 KiB, behind a head of 7 bytes."""
    record_of = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="needs wandb, an extra").Record
    data, at, begun, rows = next(folder.glob("*.wandb")).read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for a head: the rest of the block is empty
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record, begun = record_of.FromString(begun), b""
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_wandb_is_asked_for_the_team_the_project_the_kept_id_and_a_quiet_terminal(tmp_path, monkeypatch):
    """wandb's own interface in a few lines, where it is not installed."""
    asked, rows, ended = [], [], []

    class Run:
        url, dir = "https://wandb/run", "x/files"

        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, row):
            rows.append(row)

        def finish(self, exit_code):
            ended.append(exit_code)

    class Module:
        Settings = staticmethod(lambda **options: options)

        @staticmethod
        def init(**options):
            asked.append(options)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Module)
    folder = tmp_path / "a" / "wandb"
    folder.mkdir(parents=True)
    for failed in (True, False):
        sink = WandbSink(folder, project="team/gpt", config={"train": {"steps": 3}})
        sink.add(7, 0.0, {"train/loss": 2.0})
        sink.close(failed)
    assert asked[0] == asked[1] and rows == [{"step": 7, "train/loss": 2.0}] * 2 and ended == [1, 0]
    assert asked[0]["entity"] == "team" and asked[0]["project"] == "gpt" and asked[0]["name"] == "a"
    assert asked[0]["resume"] == "allow" and asked[0]["settings"] == {"console": "off", "silent": True}
    WandbSink(folder, project="gpt", config={})
    assert asked[2]["entity"] is None and asked[2]["id"] == asked[0]["id"]
