"""Processes beside this one: running, stopped, ended, and the PID of one given to another."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sixfold.fsdp.faults.local_processes import LocalProcesses, this_process


@pytest.fixture
def process():
    started = subprocess.Popen(["sleep", "60"])
    yield started
    started.kill()
    started.wait()


def row_of(pid: int) -> list[int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return [this_process()[0], pid, int(fields[19])]


def wait_for(true) -> None:
    deadline = time.monotonic() + 10.0
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert true()


def test_a_process_is_known_to_run_to_be_stopped_and_to_have_ended(process):
    beside = LocalProcesses([this_process(), row_of(process.pid)], 0)
    assert beside.ended() == beside.stopped() == ()
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: beside.stopped() == (1,))
    assert beside.ended() == ()
    process.kill()
    wait_for(lambda: beside.ended() == (1,))  # its parent has not heard of it yet
    process.wait()
    assert beside.ended() == (1,) and beside.stopped() == ()


def test_ranks_of_other_machines_of_this_process_and_hidden_ones_are_not_watched(process):
    machine, pid, began = row_of(process.pid)
    rows = [
        this_process(),
        [machine + 1, pid, began],
        this_process(),
        [machine, pid, began - 1],
        [0, 0, 0],
        [machine, 2**22 + 1, 1],
    ]
    beside = LocalProcesses(rows, 0)
    process.kill()
    process.wait()
    assert beside.ended() == beside.stopped() == ()
    assert this_process()[1] == os.getpid() and row_of(os.getpid()) == this_process()


def test_where_proc_does_not_tell_nobody_is_watched():
    beside = LocalProcesses([[0, 0, 0], [0, 0, 0]], 1)
    assert beside.ended() == beside.stopped() == ()
