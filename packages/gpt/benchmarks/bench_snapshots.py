"""Seconds of a step with a snapshot in memory after each, with and without a copy in another domain.

    python packages/gpt/benchmarks/bench_snapshots.py [--steps 15] [--turns 3] [section.key=value ...]

The run of bench_recovery.py (the demo's model on four ranks, sharded) with batch 32: a step of about a second. Two
stand-ins for nodes are two folders of /dev/shm with two ranks each; copies go from one to the other over loopback, and
all of it shares the cores with the training. Without snapshots it is the same run, kept alive too. The variants take
turns. A line for each: the median over all turns of the seconds between the ends of two steps, and how many times that
without snapshots it is. Two cores; four minutes.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from bench_recovery import write_run

from sixfold.gpt.commands.train import prepare_member, train_generation
from sixfold.gpt.config.train_config import TrainConfig
from sixfold.gpt.elastic.generation import Generation
from sixfold.gpt.elastic.heartbeat import Heartbeat
from sixfold.gpt.elastic.supervisor import keep_alive

RANKS, SKIPPED = 4, 3  # steps at the start, which are slower
VARIANTS = {
    "none": ("elastic.memory_every=0",),
    "each step": ("elastic.memory_replicas=0",),
    "each step, one copy": ("elastic.memory_replicas=1",),
    "each step, one copy, lazy": ("elastic.memory_replicas=1", "elastic.memory_lazy=true"),
}


def node_of_member() -> str:
    """The stand-in on which this process is."""
    member = int(multiprocessing.current_process().name.rpartition(" ")[2])
    return f"bench-{member // 2 % 2}"


def prepare(config: TrainConfig) -> None:
    """As `prepare_member`."""
    prepare_member(config, node_of_member())


def train(generation: Generation, heartbeat: Heartbeat, config: TrainConfig) -> int:
    """As `train_generation`."""
    return train_generation(generation, heartbeat, config, node_of_member())


def seconds_of(keys: tuple[str, ...], steps: int, overrides: list[str]) -> list[float]:
    """Between the ends of two steps of one run."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = Path(name)
        write_run(folder)
        every = (
            "train.global_batch_size=32",
            f"train.steps={steps}",
            "elastic.spares=0",
            f"elastic.memory_folder={memory}",
        )
        config = TrainConfig.from_toml(folder / "run.toml", [*every, *keys, *overrides])
        keep_alive(train, RANKS, (config,), prepare=prepare, spares=0, attempts=1, hung_after_s=60.0)
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    ends = [line["time"] for line in lines if line["kind"] == "step"]
    return [after - before for before, after in pairwise(ends)][SKIPPED:-1]  # behind the last one it waits for a save


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(args.turns):
        for name in list(VARIANTS)[:: 1 if turn % 2 == 0 else -1]:
            found[name] += seconds_of(VARIANTS[name], args.steps, args.overrides)
            print(f"turn {turn}, {name}: {statistics.median(found[name]):.3f} s so far", flush=True)
    without = statistics.median(found["none"])
    for name, seconds in found.items():
        median = statistics.median(seconds)
        print(f"{name}: {median:.3f} s, {median / without:.3f} times")


if __name__ == "__main__":
    main()
