"""Batches of a blend whose pairs lie behind http, while a step takes 100 ms: how long steps wait, and bytes that come.

    python packages/blending/benchmarks/remote_batches.py --steps 300

The server of indexed-data's tests runs in a thread of this process. It answers after 50 ms, and 5 % of its answers
fail: half of those with 503, half cut. `Prefetcher` has ids fetched 8 batches ahead. The first batch is left out: it
waits until reading ahead has begun. A batch is 8 rows of 2,048 tokens of two pairs of uint16. Beside it: without
look-ahead. Floors: at most 1 % of the time of the steps is spent waiting, at most 1.1 times the bytes needed come, all
batches equal those of the local pairs.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from sixfold.blending import BlendedMegatronDatasetBuilder, GPTDataset, GPTDatasetConfig, Prefetcher
from sixfold.indexed_data import IndexedDatasetBuilder

sys.path.append(str(Path(__file__).parents[2] / "indexed-data" / "tests"))

from range_server_helpers import RangeServer

ROWS, TOKENS, STEP_S = 8, 2048, 0.1


class Tokenizer:
    """What the configuration asks for."""

    eod = 0
    vocab_size = 60_000
    unique_identifiers = {"class": "none"}  # noqa: RUF012


def blend(prefixes):
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=TOKENS, blend=(prefixes, [1.0, 2.0]), split="1,0,0", tokenizer=Tokenizer(),
        max_epochs=None,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, [100_000, None, None], lambda: True, config).build()[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--failing", type=float, default=0.05)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in ("wiki", "code"):
            with IndexedDatasetBuilder(f"{name}.bin", np.uint16) as builder:
                for _ in range(12_000):
                    builder.add_document(rng.integers(1, 60_000, rng.integers(200, 2_000)).astype(np.uint16))
        local = blend(["wiki", "code"])
        files = {path.name: path.read_bytes() for path in Path().glob("*.*")}
        with RangeServer(files, failing=options.failing, delay_s=options.delay) as server:
            for ahead in (0, 8):
                far = blend([f"{server.url}/wiki", f"{server.url}/code"])
                # Not the batches of the other turn: a cache would have them.
                batches = [range((ahead + s) * ROWS, (ahead + s + 1) * ROWS) for s in range(options.steps)]
                given, failed, waited, slowest = server.given, server.failed, 0.0, 0.0
                with Prefetcher(far, batches, 2 if ahead else 1, ahead=ahead) as reader:
                    for step, some in enumerate(batches):
                        start = time.perf_counter()
                        batch = next(reader)
                        took = time.perf_counter() - start
                        if step:
                            waited, slowest = waited + took, max(slowest, took)
                        assert np.array_equal(batch["tokens"], local.get_batch(some)["tokens"]), "those of local pairs"
                        time.sleep(max(0.0, STEP_S - (time.perf_counter() - start - took)))
                needed = options.steps * ROWS * (TOKENS + 1) * 2
                share = waited / ((options.steps - 1) * STEP_S)
                print(
                    f"{ahead} batches ahead: {100 * share:.2f} % of the steps waited, the slowest {1000 * slowest:.1f} "
                    f"ms; {(server.given - given) / needed:.3f} of the bytes, {server.failed - failed} failed requests"
                )
        os.chdir("/")


if __name__ == "__main__":
    main()
