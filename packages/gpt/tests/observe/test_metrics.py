"""metrics.jsonl: what is written, what is read back after kills and resumes, what is shown."""

import errno
import io
import json
import math

import pytest

from sixfold.gpt.errors import FinalError, TrainError
from sixfold.gpt.observe import metrics
from sixfold.gpt.observe.metrics import (
    FIELDS,
    MetricsTail,
    MetricsWriter,
    ProgressLine,
    describe,
    read_all,
    read_metrics,
)

STEP = dict.fromkeys(FIELDS["step"], 1.0) | {"mfu": None, "batch_size": 8, "samples": 8, "tokens": 64}


def step(number, loss=1.0):
    return STEP | {"step": number, "loss": loss}


def test_a_line_holds_kind_time_and_the_fields_and_floats_read_back_bitwise(tmp_path):
    values = [0.1 + 0.2, 1e-300, 5e-324, 1.7976931348623157e308, 2 / 3]
    with MetricsWriter(tmp_path / "run" / "metrics.jsonl") as writer:
        for i, value in enumerate(values):
            writer.write("step", **step(i, value))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == values
    assert all(set(line) == {"kind", "time", *FIELDS["step"]} for line in lines)


def test_what_is_not_finite_is_null_at_any_depth(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write("step", **step(1, math.nan))
        writer.write("start", **dict.fromkeys(FIELDS["start"]) | {"step": 0, "ranks": [{"rank": math.inf}]})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second = map(json.loads, text.splitlines())
    assert first["loss"] is None and second["ranks"] == [{"rank": None}]


def test_a_wrong_field_is_our_own_mistake(tmp_path):
    with MetricsWriter(tmp_path / "m") as writer, pytest.raises(AssertionError, match="end line has fields"):
        writer.write("end", step=1)


def test_a_full_disk_is_named_with_its_file():
    with (
        MetricsWriter("/dev/full") as writer,
        pytest.raises(FinalError, match=r"/dev/full: 0 of the \d+ bytes .* No space"),
    ):
        writer.write("end", step=1, reason="finished")


@pytest.mark.parametrize(
    ("number", "kind"),
    [(None, FinalError), (errno.EDQUOT, FinalError), (errno.EIO, TrainError), (errno.ESTALE, TrainError)],
)
def test_only_a_disk_without_room_is_so_at_the_next_start(tmp_path, monkeypatch, number, kind):
    def refuse(file, line):
        if number is None:
            return len(line) - 1
        raise OSError(number, "no")

    with MetricsWriter(tmp_path / "m") as writer, pytest.raises(TrainError, match="bytes of a line") as error:
        monkeypatch.setattr(metrics.os, "write", refuse)
        writer.write("end", step=1, reason="finished")
    assert type(error.value) is kind


def test_each_line_is_on_disk_when_written(tmp_path):
    with MetricsWriter(tmp_path / "m") as writer:
        writer.write("end", step=1, reason="finished")
        assert read_metrics(tmp_path / "m")[0]["reason"] == "finished"


EVENT = {"step": 3, "why": "no room"}


def kinds_and_steps(path):
    return [(line["kind"], line["step"]) for line in read_all(path)]


def test_lines_of_steps_wait_until_they_are_told_and_other_lines_do_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("step", **step(1))
        writer.holds = True
        for number in (2, 3, 4):
            writer.write("step", **step(number))
            writer.write("digest", step=number, digest="0", seconds=0.0)
        writer.write("no_snapshot", **EVENT)
        assert kinds_and_steps(path) == [("step", 1), ("no_snapshot", 3)]
        writer.tell(3)
        told = [("step", 1), ("no_snapshot", 3), ("step", 2), ("digest", 2), ("step", 3), ("digest", 3)]
        assert kinds_and_steps(path) == told
        times = [line["time"] for line in writer.untold]
    assert kinds_and_steps(path) == told, "what was not told goes with the process"
    with MetricsWriter(path) as writer:
        writer.holds = True
        writer.write("step", **step(4))
        writer.write("end", step=4, reason="finished")
    assert kinds_and_steps(path) == [*told, ("step", 4), ("end", 4)] and times[0] < read_all(path)[-2]["time"]


def test_lines_that_waited_in_a_process_that_is_lost_are_told_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.holds = True
        for number in (1, 2):
            writer.write("step", **step(number))
        waited = list(writer.untold)
        writer.tell(1)
    with MetricsWriter(path) as writer:
        writer.tell_again(waited)
        writer.tell_again(waited)
        writer.tell_again([])
    assert read_all(path) == waited


def test_the_last_line_of_a_repeated_step_counts_and_restarts_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for i in (1, 2, 3):
            writer.write("step", **step(i, float(i)))
        writer.write("resume", step=1, checkpoint="c", layout={}, changed={})
        for i in (2, 3, 4):
            writer.write("step", **step(i, 10.0 * i))
    records = read_metrics(tmp_path)
    assert [(r["kind"], r["step"], r.get("loss")) for r in records] == [
        ("step", 1, 1.0), ("resume", 1, None), ("step", 2, 20.0), ("step", 3, 30.0), ("step", 4, 40.0),
    ]  # fmt: skip
    assert len(read_all(path)) == 7


@pytest.mark.parametrize("kind", ["resume", "start"])
def test_steps_that_a_restart_took_back_are_no_part_of_the_run_before_they_are_done_again(tmp_path, kind):
    """A run that is looked at while it makes up for a kill, or that a shorter branch goes on from."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for i in (1, 2, 3, 4, 5):
            writer.write("step", **step(i, float(i)))
        for i in (2, 4):
            writer.write("eval", step=i, name="", loss=1.0, tokens=1, seconds=0.1)
        writer.write(kind, **dict.fromkeys(FIELDS[kind]) | {"step": 2})
        writer.write("step", **step(3, 30.0))
    found = [(r["kind"], r["step"], r.get("loss")) for r in read_metrics(path)]
    assert found == [("step", 1, 1.0), ("step", 2, 2.0), ("eval", 2, 1.0), (kind, 2, None), ("step", 3, 30.0)]
    assert len(read_all(path)) == 9


def test_an_evaluation_of_one_set_replaces_none_of_another(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for name, loss in (("wiki", 1.0), ("code", 2.0), ("wiki", 3.0)):
            writer.write("eval", step=2, name=name, loss=loss, tokens=1, seconds=0.1)
    assert [(r["name"], r["loss"]) for r in read_metrics(path)] == [("code", 2.0), ("wiki", 3.0)]
    assert describe(read_metrics(path)[0]) == "step 2  validation loss of code 2.0000 nats/token over 1 tokens"


def test_a_line_cut_by_a_kill_is_skipped_and_the_next_writer_begins_a_new_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write("step", **step(1))
    whole = path.read_bytes()
    for cut in range(1, len(whole) - 1):
        path.write_bytes(whole + whole[:cut])
        assert [r["step"] for r in read_metrics(path)] == [1]
        with MetricsWriter(path) as writer:
            writer.write("step", **step(2))
        assert [r["step"] for r in read_metrics(path)] == [1, 2]


def test_a_tail_gives_each_line_once_and_waits_for_a_line_to_be_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    with MetricsWriter(path) as writer:
        writer.write("step", **step(1))
        assert [r["step"] for r in tail.read()] == [1]
        writer.write("step", **step(2))
    with path.open("ab") as file:
        file.write(b'{"kind": "end", "st')
    assert [r["step"] for r in tail.read()] == [2]
    with path.open("ab") as file:
        file.write(b'ep": 2, "reason": "finished"}\n')
    assert [r["kind"] for r in tail.read()] == ["end"]
    assert MetricsTail(path).read() == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_one_line_that_is_overwritten_whole(tmp_path):
    path, screen = tmp_path / "metrics.jsonl", Terminal()
    line = ProgressLine(path, 20, stream=screen, every_s=0.0)
    with MetricsWriter(path) as writer:
        writer.write("step", **step(9, 123.0))
        line.poll()
        writer.write("step", **step(10, 1.0))
        line._shown_at = -math.inf
        line.poll()
    line.close()
    first, second = screen.getvalue().rstrip("\n").split("\r")[1:]
    assert first.startswith("step 9/20  loss 123.0") and second.startswith("step 10/20  loss 1.0")
    assert len(second) >= len(first)


def test_a_file_gets_a_line_now_and_then_and_the_last_step(tmp_path):
    path, out = tmp_path / "metrics.jsonl", io.StringIO()
    line = ProgressLine(path, 100, stream=out, every_s=1000.0)
    with MetricsWriter(path) as writer:
        for i in range(1, 51):
            writer.write("step", **step(i))
            line.poll()
        writer.write("end", step=50, reason="sigterm")
    line.close()
    assert [text.split()[1] for text in out.getvalue().splitlines()] == ["1/100", "50/100", "50"]


class Closed(io.StringIO):
    refused = 0

    def write(self, text):
        self.refused += 1
        raise BrokenPipeError


def test_a_reader_that_went_away_does_not_end_the_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    stream = Closed()
    line = ProgressLine(path, 100, stream=stream)
    with MetricsWriter(path) as writer:
        writer.write("step", **step(1))
    line.poll()
    line.close()
    assert stream.refused, "the line was to be written, and its reader to be gone"


def test_every_kind_has_a_text():
    assert describe({"kind": "eval", "step": 3, "loss": 1.5, "tokens": 4096}) == (
        "step 3  validation loss 1.5000 nats/token over 4,096 tokens"
    )
    assert describe({"kind": "resume", "step": 3, "checkpoint": "c", "layout": {"pp": 1, "dp": 2}}).endswith("as dp2")
    where = {"kind": "nonfinite", "step": 3, "rank": 1, "where": "layers.2.ffn", "what": "gradient"}
    assert describe(where) == "step 3  gradient is not finite on rank 1 in layers.2.ffn"
    assert "2:00 left" in describe({"kind": "step", **step(80)} | {"seconds": 6.0}, 100)
    assert "not finite" in describe({"kind": "step", **step(80, None)}, 100)


def test_a_step_is_shown_with_its_wait_for_data_and_its_memory():
    shown = describe(
        STEP | {"kind": "step", "step": 5, "seconds": 2.0, "data_seconds": 0.5, "memory_bytes": 3 * 2**30}, 8
    )
    assert "step 5/8" in shown and "data 25%" in shown and "3.0 GiB" in shown and shown.endswith("0:06 left")
    older = {key: value for key, value in STEP.items() if key not in ("data_seconds", "loss_by_dataset")}
    assert "data" not in describe(older | {"kind": "step", "step": 5}, 8), (
        "a line of an older release says nothing of it"
    )


def test_the_time_left_goes_by_the_clock_with_evaluations_and_saves(tmp_path, monkeypatch):
    path, out, now = tmp_path / "metrics.jsonl", io.StringIO(), [1000.0]
    line = ProgressLine(path, 100, stream=out, every_s=0.0)
    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    with MetricsWriter(path) as writer:
        for number in range(1, 11):  # steps of a second, with an evaluation of two behind each
            speeds = {"seconds": 1.0, "tokens_per_second": 3000.0, "wall_tokens_per_second": 1000.0}
            writer.write("step", **step(number) | speeds)
            line.poll()
            now[0] += 3.0
    shown = out.getvalue().splitlines()
    assert "1,000 tokens/s (steps alone 3,000)" in shown[-1]
    assert shown[-1].endswith("4:30 left"), "90 steps, three seconds each"
    assert shown[0].endswith("1:39 left"), "one step says nothing of what comes between"


def test_steps_as_fast_as_the_clock_are_shown_with_one_speed():
    speeds = {"tokens_per_second": 1010.0, "wall_tokens_per_second": 1000.0}
    assert "  1,000 tokens/s  " in describe(STEP | {"kind": "step", "step": 5} | speeds, 8)
