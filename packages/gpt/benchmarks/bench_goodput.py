"""Goodput of real runs whose ranks are killed at random times, beside the formula of `sixfold plan`.

    python packages/gpt/benchmarks/bench_goodput.py [--runs 3] [--kills 6] [--mtbf 8] [section.key=value ...]

The runs of bench_recovery.py (the demo's model on four ranks): with snapshots in memory and no checkpoint, and with a
checkpoint each ten steps and no snapshots. A random rank is killed at times of a Poisson process; a seed for each run
draws both. A line per run: what `sixfold doctor --run` measures, and what the formula gives for the costs that it
measured. Few kills are no fair sample of instants between checkpoints, so the last line pools all runs of a kind. Two
cores; a minute for six kills.
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
from pathlib import Path

from bench_recovery import Command, first_step_after, write_run

KINDS = {
    "memory": ("elastic.memory_every=1", "checkpoint.every=0"),
    "checkpoints": ("elastic.memory_every=0", "checkpoint.every=10"),
}


def killed_run(folder: Path, memory: str, seed: int, kills: int, mtbf_s: float, words: list[str]) -> dict[str, float]:
    """One run; what doctor says of it."""
    generator = random.Random(seed)
    write_run(folder)
    command = Command(folder, [f"elastic.memory_folder={memory}", "--keep-alive", *words])
    command.wait(lambda records: sum(one["kind"] == "step" for one in records) >= 3)
    for _ in range(kills):
        time.sleep(generator.expovariate(1 / mtbf_s))
        before = command.records()
        ranks = [one for one in before if one["kind"] == "start"][-1]["ranks"]
        os.kill(generator.choice(ranks)["pid"], signal.SIGKILL)
        command.wait(first_step_after(len(before), "recovery"))  # one failure, one line: see run_costs.py
    time.sleep(generator.expovariate(1 / mtbf_s))
    command.process.terminate()
    command.process.wait()
    said = [sys.executable, "-m", "sixfold.gpt", "doctor", "--run", f"{folder}/run", "--json"]
    found: dict[str, float] = json.loads(subprocess.run(said, capture_output=True, check=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--mtbf", type=float, default=8.0)
    args = parser.parse_args()
    for kind, keys in KINDS.items():
        measured, formula = [], []
        for seed in range(args.runs):
            with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
                words = [*keys, *args.overrides]
                found = killed_run(Path(name), memory, seed, args.kills, args.mtbf, words)
            measured.append(found["goodput"])
            formula.append(found["formula"])
            off = found["formula"] / found["goodput"] - 1
            print(
                f"{kind}, seed {seed}: {found['failures']} failures, goodput {found['goodput']:.3f}, "
                f"formula {found['formula']:.3f}, {off:+.1%}",
                flush=True,
            )
        real, ours = statistics.fmean(measured), statistics.fmean(formula)
        print(f"{kind}, all: goodput {real:.3f}, formula {ours:.3f}, {ours / real - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
