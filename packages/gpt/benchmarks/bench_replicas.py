"""Milliseconds of a comparison of copies, beside the step before it, of ranks that hold the whole model.

    python packages/gpt/benchmarks/bench_replicas.py [--ranks 2] [--steps 40] [section.key=value ...]

The demo's model (4 x 192, 257 tokens of bytes, rows of 256, batch 8, fp32), ``parallel.sharding = "no_shard"``: weights
and both moments are compared after each step. Of the lines `step` and `replicas` of metrics.jsonl the median, the first
five steps left out. A comparison's time has the wait for the slowest rank in it. Then CPU time of the digests alone, in
one process, of shards of the same shapes. Two cores; one minute.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_recovery import TOML

from sixfold.gpt.engine.replica_digests import _bundles
from sixfold.gpt.observe.tensor_digest import DigestSums
from sixfold.indexed_data import IndexedDatasetBuilder

FIRST = 5
LAYER = [(192,)] * 2 + [(192, 192)] * 4 + [(512, 192)] * 3
SHAPES = [*LAYER * 4, (384, 192), (192,)] * 3


def seconds_of(records: list[dict[str, float]], kind: str) -> float:
    """The median of the lines of a kind."""
    return statistics.median(one["seconds"] for one in records if one["kind"] == kind and one["step"] > FIRST)


def cpu_seconds(rounds: int = 20) -> float:
    """Of the sums of all shards, by one thread."""
    torch.set_num_threads(1)
    tensors, sums = [torch.randn(shape).view(-1) for shape in SHAPES], DigestSums(torch.device("cpu"))
    found = []
    for _ in range(rounds):
        began = time.process_time()
        for bundle in _bundles(tensors):
            sums.of(bundle, 0)
        found.append(time.process_time() - began)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with IndexedDatasetBuilder(f"{folder}/text.bin", dtype=np.uint16) as builder:
            for length in np.random.default_rng(1).integers(50, 400, 500):
                builder.add_document(np.append(np.random.default_rng(length).integers(0, 256, length), 256))
        (folder / "run.toml").write_text(TOML.format(data=folder / "text", run=folder / "run"))
        words = [
            f"parallel.dp={args.ranks}", f"train.steps={args.steps}", "parallel.sharding=no_shard",
            "checkpoint.every=0", "elastic.compare_replicas_every=1", *args.overrides,
        ]  # fmt: skip
        subprocess.run([sys.executable, "-m", "sixfold.gpt", "train", str(folder / "run.toml"), *words], check=True)
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    step, compared = seconds_of(records, "step"), seconds_of(records, "replicas")
    shards = [one["shards"] for one in records if one["kind"] == "replicas"][-1]
    ranks = next(one["world"] for one in records if one["kind"] == "start")
    print(f"{ranks} ranks, {shards} shards: step {1e3 * step:.1f} ms, comparison {1e3 * compared:.1f} ms")
    elements = sum(int(np.prod(shape)) for shape in SHAPES)
    print(f"digests of {elements:,} elements in {len(SHAPES)} shards: {1e3 * cpu_seconds():.1f} ms of CPU")


if __name__ == "__main__":
    main()
