import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranktest import RankFailed, RanksTimeout, run_ranks, store


@dataclass(frozen=True)
class Point:
    """A class that only this test file defines: it can cross only if the file is loaded in the rank."""

    x: int


def add_up(rank, ranks, start):
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return total.item()


def move_point(rank, ranks, point):
    return Point(point.x + rank)


def receive_only(rank, ranks):
    dist.recv(torch.zeros(1), src=1 - rank)


def fail_on_one(rank, ranks):
    if rank == 1:
        expected = [1, 2]
        assert expected == [1, 3]
    dist.barrier()


def kill_one(rank, ranks):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def exit_without_result(rank, ranks):
    os._exit(3)


def never_leave(rank, ranks):
    threading.Thread(target=time.sleep, args=(600,)).start()


def die_after_the_result(rank, ranks):
    multiprocessing.util.Finalize(None, os._exit, args=(3,), exitpriority=0)


def environment(rank, ranks):
    return torch.get_num_threads(), os.getcwd(), os.environ.get("RANKTEST_EXAMPLE"), dist.get_backend()


def pass_by_store(rank, ranks):
    store().set(f"from {rank}", str(rank * 10))
    return int(store().get(f"from {1 - rank}"))


def print_line(rank, ranks):
    print(f"hello from {rank}")


def skip_all(rank, ranks):
    pytest.skip("no such device")


def start_a_child(rank, ranks):
    return subprocess.Popen(["sleep", "600"]).pid


JOB_WITHOUT_END = """
import os, pathlib, time
def wait(rank, ranks, folder):
    pathlib.Path(folder, str(rank)).write_text(str(os.getpid()))
    time.sleep(600)
"""


def test_results_come_back_by_rank():
    assert run_ranks(add_up, 2, 10) == [21, 21]


def test_one_rank_is_a_group_too():
    assert run_ranks(add_up, 1, 5) == [5]


def test_classes_of_the_test_file_cross_both_ways():
    assert run_ranks(move_point, 2, Point(3)) == [Point(3), Point(4)]


def test_fixture_is_run_ranks(ranks):
    assert ranks(add_up, 3, 0) == [3, 3, 3]


def test_ranks_have_one_thread_and_the_callers_folder_and_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANKTEST_EXAMPLE", "seen")
    assert run_ranks(environment, 2) == [(1, str(tmp_path), "seen", "gloo")] * 2


def test_store_is_shared_by_the_ranks_of_a_job():
    assert run_ranks(pass_by_store, 2) == [10, 0]
    assert run_ranks(pass_by_store, 2) == [10, 0]


def test_store_outside_a_rank_is_refused():
    with pytest.raises(RuntimeError, match="outside a rank"):
        store()


def test_a_failing_assert_names_its_rank_and_shows_its_values():
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(fail_on_one, 2)
    text = str(caught.value)
    assert caught.value.rank == 1
    assert "rank 1 of 2 failed" in text
    assert "in fail_on_one" in text
    assert "[1, 2] == [1, 3]" in text
    assert time.monotonic() - started < 10, "rank 0 waits in a barrier and was not ended at once"


def test_a_deadlock_shows_the_stack_of_every_rank():
    started = time.monotonic()
    with pytest.raises(RanksTimeout) as caught:
        run_ranks(receive_only, 2, timeout=0.5)
    text = str(caught.value)
    assert "2 of 2 ranks gave no result within 0.5 s" in text
    assert text.count("in receive_only") == 2
    assert "rank 0 stands at" in text
    assert "rank 1 stands at" in text
    assert time.monotonic() - started < 10


def test_a_killed_rank_is_named_with_its_signal():
    with pytest.raises(RankFailed, match=r"rank 1 of 2 was killed by SIGKILL"):
        run_ranks(kill_one, 2)


def test_a_rank_that_may_die_gives_none():
    assert run_ranks(kill_one, 2, allow_exit={1}) == [0, None]


def test_an_exit_without_a_result_is_a_failure():
    with pytest.raises(RankFailed, match="exited with status 3"):
        run_ranks(exit_without_result, 2)


def test_a_rank_that_does_not_leave_is_a_failure(monkeypatch):
    monkeypatch.setattr("ranktest.launch.EXIT_WAIT_S", 0.5)
    with pytest.raises(RanksTimeout, match="rank 0 gave its result but did not end"):
        run_ranks(never_leave, 1)


def test_a_rank_that_dies_on_leaving_is_a_failure():
    with pytest.raises(RankFailed, match="gave its result and then ended with status 3"):
        run_ranks(die_after_the_result, 1)


def test_output_of_ranks_reaches_the_test(capsys):
    run_ranks(print_line, 2)
    assert capsys.readouterr().out == ("--- output of rank 0\nhello from 0\n--- output of rank 1\nhello from 1\n")


def test_a_skip_inside_a_rank_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        run_ranks(skip_all, 2)


def test_a_function_without_a_name_is_refused():
    with pytest.raises(TypeError, match="top level"):
        run_ranks(lambda rank, ranks: rank, 2)


def test_processes_started_by_a_rank_end_with_the_job():
    pids = run_ranks(start_a_child, 2)
    assert all(_ended(pid) for pid in pids)


def test_ranks_die_when_pytest_is_killed(tmp_path):
    """Run a long job from another process, as pytest would, and kill that process."""
    code = f"import job; from ranktest import run_ranks; run_ranks(job.wait, 2, {str(tmp_path)!r})"
    (tmp_path / "job.py").write_text(JOB_WITHOUT_END)
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)})
    files = [tmp_path / "0", tmp_path / "1"]
    until = time.monotonic() + 60
    while not all(f.exists() and f.read_text() for f in files):
        assert time.monotonic() < until, "the job did not start"
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert all(_ended(int(f.read_text())) for f in files)


def _ended(pid: int, within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
