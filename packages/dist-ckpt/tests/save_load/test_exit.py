"""The end of an interpreter whose load has failed: threads that still read end in order, and none holds it up."""

import subprocess
import sys
import time

import pytest

SCRIPT = """
import time
from sixfold.dist_ckpt.storage.range_reads import begun

def work():
    time.sleep({seconds})
    print("ended in order", flush=True)

begun(work)
"""


@pytest.mark.parametrize(("seconds", "ends"), [(0.3, True), (120, False)])
@pytest.mark.slow
def test_an_interpreter_waits_a_moment_for_threads_that_nobody_waits_for(seconds, ends):
    start = time.monotonic()
    command = [sys.executable, "-c", SCRIPT.format(seconds=seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert ("ended in order" in done.stdout) == ends
    assert time.monotonic() - start < 90
