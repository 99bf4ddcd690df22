"""From weights to samples: the stateless order beside megatron-core's compiled greedy and a plain loop.

    OMP_NUM_THREADS=1 pytest packages/blending/benchmarks/bench_order.py --benchmark-only

The greedy must place every sample before the first can be used, so its time is that of a size that
runs in seconds; ``per_sample_ns`` in the report lets it be scaled to N.
"""

import time

import numpy as np
import pytest

from sixfold.blending import BlendedDataset, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.order import QuotaTree
from sixfold.blending.source import ListSource

N = 2_000_000_000
GREEDY_SAMPLES = 200_000
LOOP_SAMPLES = 2_000


def weights_of(D):
    weights = np.random.default_rng(0).random(D)
    return weights / weights.sum()


def timed(benchmark, rounds=5):
    """CPU time, as the results page says: the machine is shared."""
    benchmark._timer = time.process_time
    return lambda function, *args: benchmark.pedantic(function, args, rounds=rounds, warmup_rounds=1)


@pytest.mark.parametrize("D", [10, 1_000])
def test_weights_to_the_first_index(benchmark, D):
    benchmark.extra_info.update(N=N, D=D)
    timed(benchmark)(lambda weights: QuotaTree(weights).locate([0]), weights_of(D).tolist())


@pytest.mark.parametrize("D", [10, 1_000])
def test_peer_compiled_greedy_of_the_first_samples(benchmark, D):
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="needs megatron-core, a peer")
    dataset, sample = np.zeros(GREEDY_SAMPLES, dtype=np.int16), np.zeros(GREEDY_SAMPLES, dtype=np.int64)
    timed(benchmark)(helpers.build_blending_indices, dataset, sample, weights_of(D), D, GREEDY_SAMPLES, False)
    benchmark.extra_info.update(
        samples=GREEDY_SAMPLES, D=D, per_sample_ns=benchmark.stats.stats.min / GREEDY_SAMPLES * 1e9
    )


@pytest.mark.parametrize("D", [10, 1_000])
def test_floor_greedy_as_a_numpy_loop(benchmark, D):
    def greedy(weights, samples):
        counts = np.zeros(weights.size)
        for n in range(samples):
            counts[np.argmax(weights * max(n, 1) - counts)] += 1

    timed(benchmark, 3)(greedy, weights_of(D), LOOP_SAMPLES)
    benchmark.extra_info.update(samples=LOOP_SAMPLES, D=D, per_sample_ns=benchmark.stats.stats.min / LOOP_SAMPLES * 1e9)


@pytest.mark.parametrize("D", [10, 1_000])
def test_a_range_of_positions(benchmark, D):
    tree, positions = QuotaTree(weights_of(D).tolist()), np.arange(10**9, 10**9 + 100_000)
    timed(benchmark)(tree.locate, positions)
    benchmark.extra_info.update(positions=positions.size, D=D, per_sample_ns=benchmark.stats.stats.min / 1e5 * 1e9)


class Tokenizer:
    eod = 0


def sources():
    rng = np.random.default_rng(0)
    return [
        ListSource([[*rng.integers(1, 256, rng.integers(1, 2 * mean)).tolist(), 0] for _ in range(count)], np.uint16)
        for mean, count in [(300, 3000), (100, 5000)]
    ]


@pytest.mark.parametrize(("B", "S"), [(8, 256), (16, 2048)])
def test_a_batch_with_document_boundaries(benchmark, B, S):
    config = GPTDatasetConfig(random_seed=1, sequence_length=S, tokenizer=Tokenizer(), create_cu_seqlens=True)
    parts = [
        GPTDataset(source, str(number), range(len(source.sequence_lengths)), 0, Split.train, config)
        for number, source in enumerate(sources())
    ]
    data = BlendedDataset(parts, [0.7, 0.3], N, config)
    benchmark.extra_info.update(B=B, S=S, D=2)

    def batches():
        for step in range(20):
            data.get_batch(range(step * B, step * B + B))

    timed(benchmark)(batches)
    benchmark.extra_info["ms_per_batch"] = benchmark.stats.stats.min / 20 * 1e3


@pytest.mark.parametrize(("B", "S"), [(8, 256), (16, 2048)])
def test_floor_copying_the_same_tokens_from_known_places(benchmark, B, S):
    tokens = sources()[0].tokens
    begins = np.random.default_rng(0).integers(0, tokens.size - S - 1, (20, B))

    def batches():
        for row in begins:
            text = np.stack([tokens[begin : begin + S + 1] for begin in row]).astype(np.int64)
            text[:, :-1].copy(), text[:, 1:].copy(), np.ones((B, S), np.float32), np.tile(np.arange(S), (B, 1))

    timed(benchmark)(batches)
    benchmark.extra_info.update(B=B, S=S, ms_per_batch=benchmark.stats.stats.min / 20 * 1e3)
