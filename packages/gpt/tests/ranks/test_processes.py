"""Starting ranks and what becomes of them: real processes, most of them without torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpt_launch_helpers as ranks
import pytest

from sixfold.gpt.launch import spawn
from sixfold.gpt.launch.spawn import RankError, start_ranks

HELPERS = Path(ranks.__file__)


@pytest.fixture(autouse=True)
def _no_preload(monkeypatch):
    monkeypatch.setattr(spawn, "PRELOAD", ())
    monkeypatch.setattr(spawn, "TERM_S", 0.3)


def launcher(target, folder, count=2, same_s="1"):
    command = [sys.executable, HELPERS, target, str(count), folder, same_s]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for(folder, count, prefix="ready-", seconds=30.0):
    """Pids of ``count`` ranks that said they are ready."""
    deadline = time.monotonic() + seconds
    while len(found := sorted(Path(folder).glob(f"{prefix}*"))) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} ranks were ready after {seconds} s"
        time.sleep(0.01)
    return [int(path.name.rpartition("-")[2]) for path in found]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_rank_runs_once_with_its_number_and_one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert start_ranks(ranks.succeed, 3, (tmp_path,)) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"rank-{i}-of-3-threads-1" for i in range(3)]


def test_a_rank_that_reads_a_file_cut_under_its_map_is_told_with_what_sigbus_means(tmp_path):
    with pytest.raises(RankError, match="rank 1 was killed by SIGBUS; a file of data was cut or written over while it"):
        start_ranks(ranks.read_what_is_cut_on_rank_one, 2, (tmp_path / "a",))


def test_a_typed_error_is_one_line_with_its_rank_and_ends_the_others():
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        start_ranks(ranks.fail_on_rank_one, 2, ("typed",))
    assert str(error.value) == "rank 1: the cause"
    assert (error.value.rank, error.value.exit_code) == (1, 1)
    assert time.monotonic() - began < 5


def test_the_first_error_counts_and_a_config_error_keeps_its_exit_status():
    with pytest.raises(RankError) as error:
        start_ranks(ranks.fail_on_rank_one, 2, ("config",))
    assert str(error.value) == "rank 1: the cause"
    assert error.value.exit_code == 2


def test_an_unexpected_error_comes_with_its_traceback_from_the_target_on():
    with pytest.raises(RankError) as error:
        start_ranks(ranks.fail_on_rank_one, 2, ("untyped",))
    text = str(error.value)
    assert text.startswith("rank 1: Traceback") and text.endswith("KeyError: 'the cause'")
    assert "spawn.py" not in text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_named_with_its_signal_rather_than_its_peers_complaints(number):
    with pytest.raises(RankError) as error:
        start_ranks(ranks.die_on_rank_one, 2, (number,))
    assert f"rank 1 was killed by {number.name}" in str(error.value)
    assert error.value.killed_by == number


def test_a_rank_that_ends_without_a_word_is_a_failure():
    with pytest.raises(RankError, match="rank 0 ended with exit status 7 and no message"):
        start_ranks(ranks.leave_without_a_word, 1)


def test_a_stopped_rank_is_named_and_gone_within_five_seconds():
    began = time.monotonic()
    with pytest.raises(RankError) as error:
        start_ranks(ranks.hang_while_rank_one_fails, 2)
    assert str(error.value) == "rank 1: the cause; rank 0 did not answer: a signal had stopped its process"
    assert time.monotonic() - began < 5


def test_what_watch_raises_ends_the_ranks(tmp_path):
    def watch():
        if len(list(tmp_path.glob("ready-*"))) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start_ranks(ranks.sleep_unprepared, 2, (tmp_path,), watch=watch)
    assert not any(map(is_alive, wait_for(tmp_path, 2)))


@pytest.mark.slow
def test_sigterm_reaches_every_rank_and_the_launcher_says_143(tmp_path):
    process = launcher("save_on_sigterm", tmp_path)
    wait_for(tmp_path, 2)
    process.terminate()
    assert process.wait(10) == 143
    assert {p.name for p in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert process.stderr.read() == ""


@pytest.mark.slow
def test_sigterm_before_the_ranks_can_save_is_143_too(tmp_path):
    process = launcher("sleep_unprepared", tmp_path)
    wait_for(tmp_path, 2)
    process.terminate()
    assert process.wait(10) == 143


@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT, signal.SIGTERM), (signal.SIGHUP,),
        (signal.SIGUSR1, signal.SIGUSR2),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_signals_of_one_moment_are_one_and_every_rank_saves(tmp_path, numbers):
    process = launcher("save_slowly_on_sigterm", tmp_path, same_s="5")
    wait_for(tmp_path, 2)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.15)
    assert process.wait(10) == 143
    assert {p.name for p in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.slow
def test_a_signal_that_comes_later_ends_the_ranks_at_once_and_the_status_does_not_say_saved(tmp_path):
    process = launcher("ignore_sigterm", tmp_path, same_s="0.2")
    pids = wait_for(tmp_path, 2)
    process.terminate()
    time.sleep(0.4)
    assert process.poll() is None
    process.terminate()
    assert process.wait(3) == 137
    assert not any(map(is_alive, pids))
    assert "a second signal ended the run at once" in process.stderr.read()


def test_a_failure_after_a_signal_is_not_started_again(tmp_path):
    with pytest.raises(RankError) as error:
        start_ranks(ranks.die_after_sigterm, 1, (tmp_path,), watch=stop_this_process_once(tmp_path))
    assert error.value.killed_by == signal.SIGKILL and error.value.final


def stop_this_process_once(folder):
    """SIGTERM to this process when its rank is ready."""
    sent = []

    def watch():
        if not sent and list(Path(folder).glob("ready-*")):
            sent.append(1)
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


@pytest.mark.slow
def test_ranks_die_with_a_killed_launcher_and_share_its_session(tmp_path):
    process = launcher("ignore_sigterm", tmp_path)
    pids = wait_for(tmp_path, 2)
    assert {os.getsid(pid) for pid in pids} == {os.getsid(process.pid)}
    process.kill()
    process.wait(5)
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_a_warning_of_a_rank_is_one_line_that_names_it(tmp_path):
    process = launcher("warn", tmp_path, count=1)
    assert process.wait(20) == 0
    assert process.stderr.read() == "sixfold: rank 0 warns: a thing of two lines (UserWarning)\n"
