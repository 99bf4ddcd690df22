"""SIGKILL at random moments and before each step: the old pair, the new pair or none, and the next run finishes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.with_name("killed_writers.py")
each_kind = pytest.mark.parametrize("kind", ["builder", "build", "merge"])


def run(folder, *arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@each_kind
@pytest.mark.slow
def test_a_writer_killed_at_a_random_moment_leaves_a_whole_pair_or_none(tmp_path, kind, kill_chunk):
    seed, kills = kill_chunk
    kills = kills if kind == "build" else kills // 4  # a build is made of the others
    outcomes = run(tmp_path, "random", kind, kills, seed)
    assert outcomes["killed"] == kills
    assert outcomes["old"] > 0


@each_kind
@pytest.mark.slow
def test_a_writer_killed_before_any_of_its_steps_leaves_a_whole_pair_or_none(tmp_path, kind):
    outcomes = run(tmp_path, "steps", kind)
    assert outcomes["old"] >= 3
    # Between the removal of the old .idx and the name of the new one: flush, .bin, .idx; of a build the old manifest
    # goes, and the new one gets its name.
    assert outcomes["none"] == (5 if kind == "build" else 3)
    assert outcomes["new"] >= 1
