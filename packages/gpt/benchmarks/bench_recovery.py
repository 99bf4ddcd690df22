"""Seconds from a kill of a rank to the next update, of a run that is kept alive.

    python packages/gpt/benchmarks/bench_recovery.py [--kills 30] [--signal SIGKILL] [section.key=value ...]

The demo's model (4 x 192, 257 tokens of bytes, rows of 256, batch 8, fp32) on four ranks, sharded. Each step has a
snapshot in memory, and there is no checkpoint. A random rank is killed at a random instant. A line per kill: seconds
until the state was back, and until the line of the next update, which includes that update; and updates that were done
again. At the end: what is left behind of processes, files and memory. From a checkpoint of each step:
`checkpoint.every=1 elastic.memory_every=0`. The peer is the whole run started anew (`--restart checkpoint.every=1`):
kill it, start it, wait for its next update. Two cores; two minutes for 30 kills.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sixfold.indexed_data import IndexedDatasetBuilder

TOML = """
[model]
num_layers = 4
hidden_size = 192
num_attention_heads = 3
ffn_hidden_size = 512
vocab_size = 257
[data]
blend = ["{data}"]
seq_length = 256
max_epochs = 0
[parallel]
dp = 4
[train]
steps = 1000000
global_batch_size = 8
micro_batch_size = 2
precision = "fp32"
[optimizer]
lr = 2e-3
[checkpoint]
every = 0
background = false
[elastic]
attempts = 1000
[run]
dir = "{run}"
device = "cpu"
"""


def write_run(folder: Path) -> None:
    """Its data and configuration, and a folder for temporary files."""
    (folder / "tmp").mkdir()
    with IndexedDatasetBuilder(f"{folder}/text.bin", dtype=np.uint16) as builder:
        for length in np.random.default_rng(1).integers(50, 400, 500):
            builder.add_document(np.append(np.random.default_rng(length).integers(0, 256, length), 256))
    (folder / "run.toml").write_text(TOML.format(data=folder / "text", run=folder / "run"))


class Command:
    """`sixfold train`, and the lines that it has written."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.metrics = folder / "run" / "metrics.jsonl"
        with (folder / "stderr").open("ab") as told:
            command = [sys.executable, "-m", "sixfold.gpt", "train", str(folder / "run.toml"), *words]
            environ = {**os.environ, "TMPDIR": f"{folder}/tmp"}
            self.process = subprocess.Popen(command, stderr=told, env=environ, start_new_session=True)

    def records(self) -> list[dict[str, Any]]:
        """Whole lines so far."""
        text = self.metrics.read_text() if self.metrics.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait(self, found: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """What ``found`` makes of the records, as soon as it is something."""
        deadline = time.monotonic() + 120
        while not (it := found(self.records())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the run ended with {self.process.poll()}, or stands still; see its stderr")
            time.sleep(0.01)
        return it


def first_step_after(number: int, kind: str) -> Callable[[list[dict[str, Any]]], Any]:
    """Of records: the first line ``kind`` behind the first ``number``, and the first step that was done after it.

    A line of a step is written when its snapshot is whole, and has the time of its end: behind a recovery may come
    lines of steps that were done before the kill.
    """

    def found(records: list[dict[str, Any]]) -> Any:
        at = next((i for i, one in enumerate(records) if i >= number and one["kind"] == kind), len(records))
        later = [one for one in records[at + 1 :] if one["kind"] == "step" and one["time"] > records[at]["time"]]
        return (records[at], later[0]) if later else None

    return found


def left_behind(session: int, folder: Path) -> list[str]:
    """Processes of the session, and files that are no run's; a moment is given to processes that end."""
    for _ in range(50):
        living = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                state = (place / "stat").read_text().rpartition(")")[2].split()[0]
                if os.getsid(int(place.name)) == session and state != "Z":
                    living.append(f"process {place.name}")
            except OSError:
                continue
        if not living:
            break
        time.sleep(0.1)
    temporary = [one for one in (folder / "tmp").iterdir() if not one.name.startswith("torchinductor_")]
    return [*living, *map(str, temporary), *map(str, (folder / "memory").iterdir())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--signal", default="SIGKILL")
    parser.add_argument("--restart", action="store_true", help="the peer: all of it is killed and started anew")
    args = parser.parse_args()
    generator, seconds = random.Random(1), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench-recovery-")
        (folder / "memory").symlink_to(memory.name)
        write_run(folder)
        words = [f"elastic.memory_folder={memory.name}", *args.overrides, *([] if args.restart else ["--keep-alive"])]
        command = Command(folder, words)
        command.wait(lambda records: sum(one["kind"] == "step" for one in records) >= 3)
        for number in range(args.kills):
            time.sleep(generator.uniform(0.2, 1.5))
            before = command.records()
            ranks = [one for one in before if one["kind"] == "start"][-1]["ranks"]
            killed = time.time()
            if args.restart:
                command.process.kill()
                command.process.wait()
                while any(Path(f"/proc/{one['pid']}/task").exists() for one in ranks):  # they hold the run's folder
                    time.sleep(0.005)
                command = Command(folder, words)
            else:
                os.kill(generator.choice(ranks)["pid"], getattr(signal, args.signal))
            line, step = command.wait(first_step_after(len(before), "resume" if args.restart else "recovery"))
            seconds.append(step["time"] - killed)
            done = max((one["step"] for one in before if one["kind"] == "step"), default=0)
            redone = max(0, done - line["step"])
            print(
                f"{number}: state {line['time'] - killed:.2f} s, update {seconds[-1]:.2f} s, {redone} updates again",
                flush=True,
            )
        command.process.terminate()
        command.process.wait()
        print(f"left behind: {left_behind(command.process.pid, folder) or 'nothing'}")
        memory.cleanup()
    seconds.sort()
    most = seconds[int(0.95 * (len(seconds) - 1))]
    print(f"median {statistics.median(seconds):.2f} s, 95 % within {most:.2f} s, most {seconds[-1]:.2f} s")


if __name__ == "__main__":
    main()
