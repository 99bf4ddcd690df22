"""`sixfold watch` and `sixfold report`: what they show, when they end, and that they wait for a run."""

import io
import json
import threading
import time

import pytest
from config_helpers import MINIMAL, words_of
from gpt_helpers import tiny_config
from run_script import Script

from sixfold.gpt import train
from sixfold.gpt.commands import cli, watch_run
from sixfold.gpt.errors import ConfigError
from sixfold.gpt.observe.live_view import PLAIN_BLOCKS, LiveView, spark


class Lines(Script):
    """Lines of a run that began so many seconds ago; `write` appends those that are new."""

    def __init__(self, folder, ago=100.0):
        super().__init__()
        self.folder, self.clock, self.written = folder, time.time() - ago, 0

    def line(self, kind, **fields):
        if kind == "step":
            fields |= {"tokens_per_second": 32.0, "wall_tokens_per_second": 24.0, "data_seconds": 0.5, "mfu": 0.4,
                       "memory_bytes": 3 * 2**30, "lr": 1e-3, "loss": 9.0 - fields["step"] / 10}  # fmt: skip
        super().line(kind, **fields)

    def start(self, step, recovery=None, world=3):
        self.line("start", step=step, world=world, order="stateless", epochs={})
        if recovery:
            self.line("recovery", step=step, **recovery)

    def write(self):
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.toml").write_text(MINIMAL)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in self.lines[self.written :])
        self.written = len(self.lines)
        return self.folder


def test_a_spark_has_a_character_for_each_value_or_for_the_mean_of_several():
    assert spark([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert spark([0, 0, 8, 8], 2) == "▁█" and spark([3.0, 3.0], 5) == "▁▁" and spark([], 5) == ""
    assert spark([1, 8], 9, PLAIN_BLOCKS) == "_@"


@pytest.fixture
def run(tmp_path):
    return Lines(tmp_path / "a")


def test_each_validation_set_of_the_last_evaluation_is_shown_by_its_name(run):
    run.start(0)
    run.updates(1, 20)
    run.line("eval", step=10, name="old", loss=9.0, tokens=64, seconds=0.0)
    for name, loss in (("wiki", 7.5), ("loss", 6.25)):
        run.line("eval", step=20, name=name, loss=loss, tokens=64, seconds=0.0)
    view = LiveView(run.write())
    view.poll()
    assert ", validation 'wiki' 7.5000, 'loss' 6.2500 at step 20" in "\n".join(view.frame(run.clock + 5.2, 100))


def test_the_view_has_loss_speed_mfu_data_memory_time_saves_and_events(run):
    run.start(0)
    run.updates(1, 20)
    run.line("eval", step=20, loss=7.5, tokens=64, seconds=0.0)
    lost = {"source": "memory", "seconds": 0.5, "generation": 2, "lost": [{"rank": 1, "why": "rank 1 was killed"}]}
    run.start(20, lost)
    run.updates(21, 30)
    slow = {"rank": 2, "host": "h", "seconds": 2.0, "others_seconds": 1.0, "part": "data", "part_seconds": 1.5,
            "others_part_seconds": 0.5}  # fmt: skip
    run.line("straggler", step=30, slow=[slow])
    run.line("straggler", step=30, slow=[])
    view = LiveView(run.write())
    view.poll()
    text = "\n".join(view.frame(run.clock + 5.2, 100))
    for words in (
        ": training", "step 30 of 100 (30%)", "loss    6.0000, validation 7.5000 at step 20", "6.000 to 8.900",
        "tokens/s 32 in the last update, 2", "MFU     40.0% in the last update, 30.0% with what lies between updates",
        "data wait 25.0%, memory 3.0 GiB, update 2 s",
        " gone, ", "saved   step 28, 0:10 ago; took 1.5 s, held up 0.5 s",
        " left", "steps 6", "saves 5%", "generation 2 goes on from memory, 0.50 s later (rank 1 was killed)",
        "rank 2 on h is slow: 2.000 s of its own",
    ):  # fmt: skip
        assert words in text, f"{words}\n{text}"
    assert "no rank is slow" not in text


@pytest.mark.parametrize("width", [20, 38, 79, 200])
def test_a_narrow_or_low_terminal_has_no_longer_and_no_more_lines(run, width):
    run.start(0)
    run.updates(1, 300)
    view = LiveView(run.write())
    view.poll()
    for height in (4, 10, 60):
        rows = view.frame(run.clock, width, height)
        assert len(rows) <= height and max(map(len, rows)) <= width
    assert all(ord(character) < 128 for row in view.frame(run.clock, width, blocks=PLAIN_BLOCKS) for character in row)


def test_a_resume_takes_steps_back_in_the_view_too(run):
    run.start(0)
    run.updates(1, 10)
    view = LiveView(run.write())
    view.poll()
    run.start(4)
    run.updates(5, 6)
    run.write()
    view.poll()
    assert [one["step"] for one in view.steps] == [1, 2, 3, 4, 5, 6]


def test_a_run_without_lines_for_long_is_said_to_hang(run):
    run.start(0)
    run.updates(1, 5)
    view = LiveView(run.write())
    view.poll()
    assert view.state(run.clock + 30) == "training"
    assert view.state(run.clock + 3725) == "no line for 1:02:05: it hangs, or was killed"


def watched(folder, **options):
    stream = options.pop("stream", io.StringIO())
    status = watch_run.watch(folder, once=False, every_s=0.02, stream=stream)
    return status, stream.getvalue()


def test_without_a_terminal_there_are_lines_and_the_end_ends_it(run):
    run.start(0)
    run.updates(1, 5)
    run.line("end", step=5, reason="finished")
    status, text = watched(run.write())
    assert status == 0 and text.splitlines()[0].startswith("step 5/100  loss 8.5000") and "finished" in text
    assert "\x1b" not in text and "\r" not in text


def test_a_run_that_failed_is_waited_for_a_moment_and_a_restart_is_followed(run, monkeypatch):
    monkeypatch.setattr(watch_run, "GRACE_S", 1e9)
    run.clock = time.time() - 10
    run.start(0)
    run.line("end", step=0, reason="error")
    found = []
    thread = threading.Thread(target=lambda: found.append(watched(run.write())))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    run.start(0)
    run.updates(1, 1)
    run.line("end", step=1, reason="finished")
    run.write()
    thread.join(20)
    assert found and found[0][0] == 0
    monkeypatch.setattr(watch_run, "GRACE_S", 0.0)
    run.line("end", step=1, reason="error")
    assert watched(run.write())[0] == 1


@pytest.mark.slow
def test_a_run_that_has_not_begun_is_waited_for_and_followed_to_its_end(tmp_path):
    config = tiny_config(tmp_path, "train.steps=3", "eval.every=3")
    found = []
    thread = threading.Thread(target=lambda: found.append(watched(tmp_path / "run")))
    thread.start()
    time.sleep(0.1)
    train(config)
    thread.join(30)
    [(status, text)] = found
    assert status == 0 and text.startswith("waiting for ") and "step 3/3  loss " in text
    assert "validation loss" in text and text.rstrip().endswith("step 3  finished")


class Terminal(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return True


def test_a_terminal_is_drawn_on_its_other_screen_and_keeps_the_last_view(run):
    run.start(0)
    run.updates(1, 5)
    run.line("end", step=5, reason="finished")
    status, text = watched(run.write(), stream=Terminal())
    assert status == 0 and text.startswith("\x1b[?1049h\x1b[H") and text.count("\x1b[?1049l") == 1
    last = text.partition("\x1b[?1049l")[2]
    assert "\x1b" not in last and ": finished" in last and text.isascii()


def test_once_prints_one_view_and_what_is_no_run_is_refused(run, tmp_path, capsys):
    run.start(0)
    run.updates(1, 5)
    assert cli.main(["watch", str(run.write()), "--once"]) == 0
    assert "step 5 of 100" in capsys.readouterr().out
    with pytest.raises(ConfigError) as error:
        watch_run.watch(tmp_path / "nothing", once=True, every_s=1.0)
    assert "holds no metrics.jsonl" in words_of(error)
    assert cli.main(["watch", str(run.folder / "config.toml")]) == 2 and "is a file" in capsys.readouterr().err
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2 and "holds no metrics" in capsys.readouterr().err


def test_the_report_says_seconds_by_cause_as_text_and_as_an_object(run, capsys):
    run.start(0)
    run.updates(1, 9)
    assert cli.main(["report", str(run.write())]) == 0
    text = capsys.readouterr().out
    assert text.startswith("9 updates and 576 tokens stay; starts: 1, recoveries: 0\nsteps")
    assert "MFU" in text and "by the clock" in text
    assert cli.main(["report", str(run.folder / "metrics.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 9 and sum(found["seconds"].values()) == pytest.approx(found["wall_s"])
