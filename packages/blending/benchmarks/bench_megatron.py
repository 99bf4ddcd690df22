"""``order="megatron"`` beside megatron-core's compiled builders on the same input, results compared in the same run.

    OMP_NUM_THREADS=1 pytest packages/blending/benchmarks/bench_megatron.py

CPU time, the least of three rounds, both sides in turn; data in memory, no cache files. D is the number of datasets, N
of positions. megatron-core is loaded as the tests load it (``tests/megatron_peer.py``).
"""

import sys
from pathlib import Path

import numpy as np
import pytest

from sixfold.blending.documents.part import Part
from sixfold.blending.megatron.document_index import _shuffle, plan_epochs
from sixfold.blending.megatron.index_order import INDICES, build_indices, indices_fit
from sixfold.blending.megatron.sample_counts import normalized
from sixfold.blending.numbers.kernels import Level, forced, levels
from sixfold.blending.order import exhaustive, greedy

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "tests")]
from compared import compared  # noqa: E402
from megatron_peer import peer  # noqa: E402

SEED = 1234
PEERS_PATIENCE = 10**9  # datasets looked at by the peer: a second


class Lengths:
    """Documents of 1 to 2,000 tokens without a token."""

    dtype = np.dtype(np.uint16)

    def __init__(self, documents):
        self.sequence_lengths = np.random.default_rng(0).integers(1, 2000, documents).astype(np.int32)
        self.sequence_pointers = (np.cumsum(self.sequence_lengths, dtype=np.int64) - self.sequence_lengths) * 2


def part_and_plan(documents, epochs, sequence_length):
    part = Part(Lengths(documents), range(documents))
    return part, plan_epochs(part.tokens, int(part.tokens * (epochs - 0.05)) // sequence_length, sequence_length, 1)


def peer_indices(part, plan):
    gpt, helpers, random = peer("gpt_dataset"), peer("helpers"), np.random.RandomState(SEED)
    lengths, separate = part.source.sequence_lengths, plan.before_last is not None
    ids = np.arange(lengths.size, dtype=np.int32)
    documents = gpt._build_document_index(ids, plan.epochs, random, separate)
    args = (plan.sequence_length, plan.epochs, plan.tokens, True, 1)
    samples = helpers.build_sample_idx(lengths, documents, *args)
    n = len(samples) - 1
    return documents, samples, gpt._build_shuffle_index(plan.before_last if separate else n, n, random)


@pytest.mark.parametrize("documents", [10**4, 10**5, 10**6])
@pytest.mark.parametrize(("epochs", "sequence_length"), [(1, 1024), (3, 256)])
def test_three_indices_per_shuffled_element(benchmark, say, documents, epochs, sequence_length):
    part, plan = part_and_plan(documents, epochs, sequence_length)
    what = f"three indices, {documents:.0e} documents, {epochs} epochs, S = {sequence_length}, {plan.samples} samples"
    elements = documents * plan.epochs + plan.samples
    compared(
        benchmark,
        say,
        what,
        lambda: list(map(build_indices(part, plan, SEED).get, INDICES)),
        lambda: peer_indices(part, plan),
        elements,
    )


@pytest.mark.parametrize(("epochs", "sequence_length"), [(1, 1024), (3, 256)])
def test_full_check_of_a_foreign_cache(benchmark, say, epochs, sequence_length):
    part, plan = part_and_plan(300_000, epochs, sequence_length)
    arrays, elements = build_indices(part, plan, SEED), 300_000 * plan.epochs + plan.samples
    assert benchmark.pedantic(indices_fit, (arrays, part, plan), rounds=3)
    ns = benchmark.stats.stats.min / elements * 1e9
    say(f"full check of a foreign cache of {elements} elements: {ns:.1f} ns each")


@pytest.mark.parametrize("N", [10**4, 10**5, 10**6, 10**7], ids="{:.0e}".format)
def test_shuffle_of_random_state(benchmark, say, N):
    def shuffled(shuffle):
        random, items = np.random.RandomState(SEED), np.arange(N, dtype=np.int32)
        shuffle(random, items)
        return [items]

    what = f"RandomState's shuffle of int32, N = {N:.0e}, beside numpy"
    compared(benchmark, say, what, lambda: shuffled(_shuffle), lambda: shuffled(np.random.RandomState.shuffle), N)


def weights_of(D):
    return normalized(np.random.default_rng(0).random(D))


def peer_greedy(weights, size):
    dataset, sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    peer("helpers").build_blending_indices(dataset, sample, weights, len(weights), size, False)
    return dataset, sample


def peer_exhaustive(sizes):
    dataset, sample = np.zeros(sum(sizes), dtype=np.int16), np.zeros(sum(sizes), dtype=np.int64)
    peer("helpers").build_exhaustive_blending_indices(dataset, sample, sizes, len(sizes))
    return dataset, sample


@pytest.mark.parametrize("N", [10**4, 10**5, 10**6, 10**7], ids="{:.0e}".format)
@pytest.mark.parametrize("D", [10, 100, 1_000])
def test_greedy(benchmark, say, D, N):
    if N * D > PEERS_PATIENCE:
        pytest.skip(f"the peer would take {N * D / PEERS_PATIENCE:.0f} s for each round")
    weights, rounds = weights_of(D), 3 if N * D < PEERS_PATIENCE else 1
    what = f"greedy, D = {D}, N = {N:.0e}"
    compared(benchmark, say, what, lambda: greedy(weights, N), lambda: peer_greedy(weights, N), N, rounds)


@pytest.mark.parametrize("level", [level for level in levels() if level != Level.NUMPY], ids=lambda level: level.name)
@pytest.mark.parametrize("shape", ["equal", "zipf"])
def test_greedy_of_other_weights_and_lower_levels(benchmark, say, shape, level):
    weights = normalized(np.ones(1_000) if shape == "equal" else 1 / np.arange(1, 1_001))
    with forced(level):
        what = f"greedy, D = 1000, N = 3e4, {shape} weights, {level.name}"
        compared(benchmark, say, what, lambda: greedy(weights, 30_000), lambda: peer_greedy(weights, 30_000), 30_000)


@pytest.mark.parametrize("N", [10**4, 10**5])
@pytest.mark.parametrize("D", [10, 100, 1_000])
def test_exhaustive(benchmark, say, D, N):
    sizes = np.random.default_rng(0).multinomial(N - D, weights_of(D)) + 1
    what = f"exhaustive, D = {D}, N = {N:.0e}"
    given = [int(size) for size in sizes]
    compared(benchmark, say, what, lambda: exhaustive(given), lambda: peer_exhaustive(given), N)
