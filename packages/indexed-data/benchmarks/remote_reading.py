"""Batches of a pair behind http while a step takes 100 ms: how long each step waits, and how many bytes come.

    python packages/indexed-data/benchmarks/remote_reading.py --steps 200

The server of the tests runs in a thread of this process. It answers after 50 ms, and 5 % of its answers fail: half of
those with 503, half cut. The first step waits until reading ahead has begun, and is left out. A batch is 8 samples of
2,049 tokens of uint16 at random places, known 8 steps before.
Floors: at most 1 % of the time of the steps is spent waiting, at most 1.1 times the bytes needed come, and all ids
equal those of the local pair.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from sixfold.indexed_data import IndexedDataset, IndexedDatasetBuilder, RemoteOptions

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from range_server_helpers import RangeServer

BATCH, TOKENS, STEP_S, AHEAD = 8, 2049, 0.1, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--failing", type=float, default=0.05)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with IndexedDatasetBuilder("wiki.bin", np.uint16) as builder:
            for _ in range(4_000):
                builder.add_document(rng.integers(0, 60_000, TOKENS + 1000).astype(np.uint16))
        local = IndexedDataset("wiki")
        files = {f"wiki{end}": Path(f"wiki{end}").read_bytes() for end in (".bin", ".idx")}
        with RangeServer(files, failing=options.failing, delay_s=options.delay) as server:
            for ahead in (0, AHEAD):
                remote = IndexedDataset(f"{server.url}/wiki", remote=RemoteOptions(timeout_s=5))
                documents = rng.integers(0, len(local), (options.steps, BATCH))
                offsets = rng.integers(0, 1000, (options.steps, BATCH))
                begins = local.sequence_pointers[documents] // 2 + offsets
                given, failed, waited, slowest = server.given, server.failed, 0.0, 0.0
                for step in range(-ahead, options.steps):
                    if ahead and step + ahead < options.steps:
                        remote.prefetch(begins[step + ahead], np.full(BATCH, TOKENS))
                    if step < 0:
                        continue
                    start = time.perf_counter()
                    rows = [
                        remote.get(int(d), int(o), TOKENS) for d, o in zip(documents[step], offsets[step], strict=True)
                    ]
                    took = time.perf_counter() - start
                    if step:  # the first waits until reading ahead has begun
                        waited, slowest = waited + took, max(slowest, took)
                    for row, d, o in zip(rows, documents[step], offsets[step], strict=True):
                        assert np.array_equal(row, local.get(int(d), int(o), TOKENS)), "the ids of the local pair"
                    time.sleep(STEP_S)
                needed = options.steps * BATCH * TOKENS * 2
                share, slowest_ms = waited / ((options.steps - 1) * STEP_S), 1000 * slowest
                print(f"{ahead} steps ahead: {100 * share:.2f} % of the steps waited, the slowest {slowest_ms:.1f} ms")
                print(
                    f"    {(server.given - given) / needed:.3f} of the bytes, {server.failed - failed} failed requests"
                )
        os.chdir("/")


if __name__ == "__main__":
    main()
