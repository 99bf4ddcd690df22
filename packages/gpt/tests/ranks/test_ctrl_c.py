"""Ctrl-C in the first seconds of ``sixfold train``, while Python, numpy and torch are imported: no frames of theirs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpt_helpers import tiny_config


def numpy_is_loading(pid):
    return "_multiarray_umath" in Path(f"/proc/{pid}/maps").read_text()


def ranks_are_being_prepared(pid):
    """The server that ranks are forked from is there, and has torch to load."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)


@pytest.mark.parametrize(
    ("until", "moments"), [(numpy_is_loading, (0.0,)), (ranks_are_being_prepared, (0.0, 0.3))], ids=["imports", "ranks"]
)
@pytest.mark.slow
def test_ctrl_c_leaves_no_traceback_whenever_it_comes(tmp_path, until, moments):
    path = tmp_path / "endless.toml"
    path.write_text(tiny_config(tmp_path, "train.steps=100000").to_toml())
    command = [sys.executable, "-m", "sixfold.gpt", "train", str(path), "parallel.pp=2"]
    for moment in moments:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            while not until(process.pid):
                assert time.monotonic() < deadline, f"not {until.__name__} within a minute"
                time.sleep(0.005)
            time.sleep(moment)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the command
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode in (130, 143), err
        assert len(err.splitlines()) <= 1 and all(line.startswith("sixfold: ") for line in err.splitlines()), err
