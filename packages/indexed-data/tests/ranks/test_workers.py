"""Worker processes end with the build that started them, however it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from sixfold.indexed_data import IndexedDataset

SLOW = """
import time

class Slow:
    vocab_size, eod = 9, 8

    def encode(self, text):
        time.sleep(0.05)
        return [1]
"""


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.slow
def test_workers_do_not_outlive_their_build(tmp_path, monkeypatch, stop):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow_tokenizer.py").write_text(SLOW)
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n' * 80)
    (tmp_path / "run.py").write_text("""
from sixfold.indexed_data import build
if __name__ == "__main__":
    build(["a.jsonl"], "out", tokenizer="slow_tokenizer:Slow", workers=2, part_bytes=60)
""")
    process = subprocess.Popen(
        [sys.executable, "run.py"],
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A shell starts background jobs with SIGINT ignored, and Python would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    parts = [f"out.building/part-0000{i}.json" for i in range(2)]  # either may be done first
    while not all(map(os.path.exists, parts)) and time.monotonic() < deadline:
        time.sleep(0.005)
    if stop == signal.SIGINT:
        os.killpg(process.pid, stop)  # as a terminal does
    else:
        process.send_signal(stop)
    process.communicate()  # ends when the last worker has closed the pipes
    assert process.returncode != 0
    assert not IndexedDataset.exists("out")
    assert os.path.exists("out.building/part-00000.json")
