"""From weights to samples: the stateless order beside megatron-core's compiled greedy, and beside numpy.

    OMP_NUM_THREADS=1 pytest packages/blending/benchmarks/bench_order.py

CPU time, the least of three rounds or more. The greedy must place every sample before the first can be used; its time
is that of a size that runs in a tenth of a second. D is the number of datasets.
"""

import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from sixfold.blending import BlendedDataset, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.numbers.kernels import Level, forced, levels
from sixfold.blending.numbers.permutation import permute_range
from sixfold.blending.order import QuotaTree, permute
from sixfold.blending.source import ListSource

sys.path.insert(0, str(Path(__file__).parent))
from compared import compared

N = 2_000_000_000


def weights_of(D):
    weights = np.random.default_rng(0).random(D)
    return weights / weights.sum()


def timed(benchmark, rounds=5):
    """A call that times a function in CPU time and returns ns per element, the least of all rounds."""
    benchmark._timer = time.process_time

    def run(function, *args, elements=1):
        benchmark.pedantic(function, args, rounds=rounds, warmup_rounds=1)
        return benchmark.stats.stats.min / elements * 1e9

    return run


def least_ns(function, *args, elements, rounds=3):
    seconds = []
    for _ in range(rounds):
        begin = time.process_time()
        function(*args)
        seconds.append(time.process_time() - begin)
    return min(seconds) / elements * 1e9


@pytest.mark.parametrize("D", [10, 100, 1_000, 10_000])
def test_weights_to_the_first_index(benchmark, say, D):
    weights = weights_of(D).tolist()
    timed(benchmark)(lambda: QuotaTree(weights).locate([0]))
    tracemalloc.start()
    tree = QuotaTree(weights)
    tree.locate([0])
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    leaves_kib = D * 24 / 1024  # of the kernel: 8 bytes a quota, 16 a node
    say(
        f"weights to the first index, N = {N:.0e}, D = {D}: {benchmark.stats.stats.min * 1e3:.2f} ms, "
        f"{kept / 1024:.0f} + {leaves_kib:.0f} KiB kept, {peak / 1024:.0f} KiB at the peak; one more position "
        f"{call_us(tree):.1f} us a call"
    )


def call_us(tree):
    begin = time.process_time()
    for position in range(2_000):
        tree.locate([position])
    return (time.process_time() - begin) / 2_000 * 1e6


def peer_greedy(weights, size):
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="needs megatron-core, a peer")
    dataset, sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(dataset, sample, weights, weights.size, size, False)


@pytest.mark.parametrize("size", [10**4, 10**5, 10**6, 10**7], ids="{:.0e}".format)
@pytest.mark.parametrize("D", [10, 100, 1_000])
def test_places_in_the_quota_tree(benchmark, say, D, size):
    """Beside the peer's greedy, which is another order: it is timed on what it does in a tenth of a second."""
    weights = weights_of(D)
    tree, begin = QuotaTree(weights.tolist()), 10**9
    consecutive = np.arange(begin, begin + size)
    anywhere = np.random.default_rng(0).integers(0, N, min(size, 10**6))
    range_ns = timed(benchmark, 3)(tree.locate, consecutive, elements=size)
    random_ns = least_ns(tree.locate, anywhere, elements=anywhere.size)
    peer_size = min(size, 10**8 // D)
    peer_ns = least_ns(peer_greedy, weights, peer_size, elements=peer_size)
    say(
        f"quota tree, D = {D}, {size:.0e} positions: consecutive {range_ns:.1f} ns, anywhere {random_ns:.1f} ns; "
        f"megatron-core's greedy {peer_ns:.1f} ns: {peer_ns / range_ns:.0f}x and {peer_ns / random_ns:.0f}x"
    )


@pytest.mark.parametrize("D", [10, 1_000])
def test_places_in_the_quota_tree_are_those_of_numpy(benchmark, say, D):
    tree, size = QuotaTree(weights_of(D).tolist()), 100_000
    positions = np.arange(10**9, 10**9 + size)

    def by_numpy():
        with forced(Level.NUMPY):
            return tree.locate(positions)

    compared(benchmark, say, f"quota tree beside numpy, D = {D}", lambda: tree.locate(positions), by_numpy, size)


@pytest.mark.parametrize("size", [10**4, 10**5, 10**6, 10**7], ids="{:.0e}".format)
def test_a_range_of_the_keyed_permutation(benchmark, say, size):
    out = np.empty(size, dtype=np.uint32)
    ns = timed(benchmark, 3)(permute_range, 99, N, 12_345, out, elements=size)
    say(f"permute, n = {N:.0e}, a range of {size:.0e}: {ns:.1f} ns, so {ns * N * 1e-9:.1f} s for all of n")


@pytest.mark.parametrize("level", levels(), ids=lambda level: level.name)
def test_levels_of_the_keyed_permutation(benchmark, say, level):
    index, out = np.random.default_rng(0).integers(0, N, 100_000), []
    with forced(level):
        ns = timed(benchmark, 3)(lambda: out.append(permute(99, N, index)), elements=index.size)
    assert np.array_equal(out[-1], permute(99, N, index))
    say(f"permute, n = {N:.0e}, 1e5 numbers anywhere, {level.name}: {ns:.1f} ns")


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
