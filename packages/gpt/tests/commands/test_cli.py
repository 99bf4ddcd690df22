"""Verbs, exit status, and one line for an error."""

import errno
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from gpt_helpers import tiny_config
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sixfold.dist_ckpt import LostPeerError, StorageError
from sixfold.gpt.commands import cli
from sixfold.gpt.commands import train as train_verb
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.errors import ConfigError, FinalError, TrainError
from sixfold.gpt.launch.rendezvous import Rendezvous
from sixfold.gpt.launch.spawn import Failure, RankError, is_final
from sixfold.gpt.observe import metrics
from sixfold.indexed_data import IndexedDataError
from sixfold.pipeline import ScheduleError

COMMAND = [sys.executable, "-m", "sixfold.gpt"]


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(tiny_config(tmp_path).to_toml())
    return path


@pytest.fixture
def started(monkeypatch):
    """Ranks that would be started, with their config, instead of starting them."""
    calls = []
    monkeypatch.setattr(
        train_verb, "start_ranks", lambda target, ranks, args, **options: calls.append((ranks, args[0])) or 0
    )
    for name in ("RANK", "SLURM_PROCID", "SIXFOLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    return calls


def one_line(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith("sixfold: ")
    return line


def test_print_config_prints_the_resolved_toml_and_nothing_else(config_file, capsys, started):
    assert cli.main(["train", str(config_file), "train.steps=7", "--print-config", "optimizer.lr=0.5"]) == 0
    captured = capsys.readouterr()
    config = TrainConfig.from_text(captured.out)
    assert (config.train.steps, config.optimizer.lr) == (7, 0.5)
    assert captured.err == "" and started == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optimizer.learning_rate=1"], "optimizer.lr"),
        (["train.steps=-1"], "train.steps"),
        (["--ranks", "3", "parallel.pp=2"], "parallel.pp"),
        (['data.blend=["nowhere/text"]', "data.weights=[1.0]"], "nowhere/text"),
    ],
)
def test_a_wrong_config_is_one_line_before_a_rank_or_folder(config_file, tmp_path, capsys, started, words, says):
    assert cli.main(["train", str(config_file), *words]) == (1 if "nowhere" in says else 2)
    assert says in one_line(capsys)
    assert started == [] and not list(tmp_path.glob("**/metrics.jsonl"))


def test_ranks_are_the_product_of_the_degrees_unless_said(config_file, started):
    assert cli.main(["train", str(config_file), "parallel.pp=2"]) == 0
    assert cli.main(["train", str(config_file), "--ranks", "4", "parallel.pp=2"]) == 0
    assert [ranks for ranks, _ in started] == [2, 4]


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ConfigError("a wrong key"), 2, "sixfold: a wrong key"),
        (TrainError("a failed run"), 1, "sixfold: a failed run"),
        (OSError(28, "No space left on device"), 1, "sixfold: [Errno 28] No space left on device"),
        (RankError(Failure(rank=1, time=0.0, text="rank 1: no", exit_code=2)), 2, "sixfold: rank 1: no"),
    ],
)
def test_an_error_is_its_text_and_an_exit_status(monkeypatch, capsys, error, status, line):
    def fail(args):
        raise error

    monkeypatch.setattr(cli, "_plot", fail)
    assert cli.main(["plot", "run"]) == status
    assert one_line(capsys) == line


def failing(*failures):
    """A run that fails so, then finishes; the value of checkpoint.resume of each start."""
    starts, left = [], list(failures)

    def run(config):
        starts.append(config.checkpoint.resume)
        if left:
            raise RankError(left.pop(0))
        return 0

    return run, starts


KILLED = Failure(rank=1, time=0.0, text="rank 1 was killed by SIGKILL")


@pytest.mark.parametrize(("most", "starts"), [(0, 1), (1, 2), (2, 3), (9, 3)])
def test_a_lost_run_is_started_again_so_many_times_and_goes_on_whatever_resume_says(tmp_path, capsys, most, starts):
    config = tiny_config(tmp_path, "checkpoint.resume=never")
    run, seen = failing(KILLED, KILLED)
    if most < 2:
        with pytest.raises(RankError, match="killed"):
            train_verb.restarted(config, most, run)
    else:
        assert train_verb.restarted(config, most, run) == 0
    assert seen == ["never", "auto", "auto"][:starts]
    told = capsys.readouterr().err.splitlines()
    assert told == [f"sixfold: {KILLED.text}; restart {n} of {most}" for n in range(1, starts)]


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (FinalError("step 3, rank 0: loss nan"), False),
        (ConfigError("a wrong key"), False),
        (IndexedDataError("no such pair"), False),
        (StorageError("disk full", errno.ENOSPC), False),
        (LostPeerError("rank 1 did not answer"), True),
        (TrainError("another rank died"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error"), True),
    ],
)
def test_a_run_that_would_fail_again_is_not_started_again(tmp_path, error, again):
    assert is_final(error) is not again
    run, seen = failing(Failure(rank=0, time=0.0, text=str(error), final=is_final(error)))
    if again:
        assert train_verb.restarted(tiny_config(tmp_path), 3, run) == 0
    else:
        with pytest.raises(RankError):
            train_verb.restarted(tiny_config(tmp_path), 3, run)
    assert len(seen) == 1 + again


@pytest.mark.parametrize(
    ("environ", "whose"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "torchrun --max"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "backoffLimit"),
    ],
)
def test_restarts_are_the_launchers_own_where_there_is_one(config_file, capsys, started, monkeypatch, environ, whose):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", str(config_file), "--max-restarts", "2"]) == 2
    assert whose in one_line(capsys) and started == []


def test_a_progress_line_that_hangs_does_not_hold_a_rank_that_is_done(tmp_path, monkeypatch):
    free, polled = threading.Event(), []

    def hang(line):
        polled.append(threading.current_thread().name)
        free.wait(60)

    monkeypatch.setattr(train_verb, "PROGRESS_S", 0.1)
    monkeypatch.setattr(metrics.ProgressLine, "poll", hang)
    monkeypatch.setattr(train_verb, "train_rank", lambda config: time.sleep(0.5) or 0)
    first = Rendezvous(launcher="torchrun", rank=0, size=2, local_rank=0, url="env://")
    began = time.monotonic()
    assert train_verb._be_a_rank(tiny_config(tmp_path), first) == 0
    assert polled == ["sixfold-progress"] and time.monotonic() - began < 30
    free.set()


def raised_by_a_stage(cause):
    """As a pipeline raises what a stage raised."""
    try:
        raise ScheduleError("rank 1 failed at [0/4] 1F0: it was told") from cause
    except ScheduleError as error:
        return error


def torchrun_shows(error, folder, monkeypatch):
    """Run a rank that fails by ``error``: what was raised, and what torchrun says of that rank."""

    def deep_inside(config):
        raise error

    monkeypatch.setattr(train_verb, "train_rank", deep_inside)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    with pytest.raises(Exception) as caught:
        train_verb._be_a_rank(
            tiny_config(folder), Rendezvous(launcher="torchrun", rank=1, size=2, local_rank=1, url="env://")
        )
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(folder / "error.json"))
    return caught.value, ChildFailedError("sixfold", {1: failure}).format_msg()


@pytest.mark.parametrize(
    ("error", "status", "lead"),
    [
        (ConfigError("a key is wrong"), 2, "rank 1: "),
        (TrainError("step 3: rank 1 did not read its data"), 1, "rank 1: "),
        (raised_by_a_stage(TrainError("a sum over tp")), 1, ""),
    ],
)
def test_torchrun_shows_one_line_of_a_rank_whose_error_says_all(error, status, lead, tmp_path, monkeypatch):
    raised, shown = torchrun_shows(error, tmp_path, monkeypatch)
    assert (type(raised), raised.exit_code, str(raised)) == (RankError, status, f"{lead}{error}")
    (line,) = [line for line in shown.splitlines() if str(error) in line]
    assert re.fullmatch(rf"  traceback : sixfold\.\w+\.errors\.{type(error).__name__}: {re.escape(str(error))}", line)
    assert "File" not in shown and "Traceback" not in shown


@pytest.mark.parametrize("error", [ZeroDivisionError("a fault"), raised_by_a_stage(ZeroDivisionError("a fault"))])
def test_torchrun_shows_where_a_fault_is(error, tmp_path, monkeypatch):
    raised, shown = torchrun_shows(error, tmp_path, monkeypatch)
    assert raised is error
    assert "a fault" in shown and shown.count("in deep_inside") == 1


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch):
    def fail(args):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_plot", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plot", "run"])


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["train"],
        ["train", "x.toml", "--rank", "x"],
        ["plot", "r", "extra", "--no"],
        ["demo", "--minutes", "0"],
    ],
)
def test_wrong_usage_is_exit_status_2(words, capsys):
    assert cli.main(words) == 2
    assert "usage: sixfold" in capsys.readouterr().err


def test_help_is_exit_status_0_and_names_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("train", "demo", "prepare", "plot", "sample"))


def test_prepare_writes_a_pair_and_says_so(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("hello")
    assert cli.main(["prepare", str(tmp_path / "a.txt"), "--out", str(tmp_path / "p")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'p'}: 1 documents, 6 tokens\n"
    assert cli.main(["prepare", "--out", str(tmp_path / "q")]) == 2


@pytest.mark.parametrize("words", [["--print-config"], ["optimizer.learning_rate=1"], ["--help"]])
@pytest.mark.slow
def test_configuration_needs_no_torch(config_file, words):
    program = "import sys; sys.modules['torch'] = None; from sixfold.gpt.commands.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, "train", config_file, *words], capture_output=True, text=True)
    assert done.returncode == (2 if "=" in words[0] else 0), done.stderr
    assert "Traceback" not in done.stderr


EARLY_SIGNAL = """
import os, signal, sys, time
from sixfold.gpt.commands import cli
from sixfold.gpt.commands import train as train_verb
from sixfold.gpt.config import train_config as config

class Dropper:
    def __del__(self):  # what is raised here is dropped, as in much C code
        os.kill(os.getpid(), int(sys.argv[1]))
        time.sleep(0.01)

def from_toml(path, overrides=(), **_):
    Dropper()
    time.sleep(30)

config.TrainConfig.from_toml = from_toml
sys.exit(cli.main(["train", "x.toml"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_is_143_and_one_line_even_where_exceptions_are_dropped(number):
    command = [sys.executable, "-c", EARLY_SIGNAL, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    line = f"sixfold: {number.name} while no step is at work; there is nothing to save\n"
    assert (done.returncode, done.stdout, done.stderr) == (143, "", line)


def test_signals_are_their_users_again_after_the_command(config_file, started):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)]
    assert cli.main(["train", str(config_file)]) == 0
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)]
    assert after == before
