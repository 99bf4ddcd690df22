"""``order="megatron"`` beside megatron-core's own builders, on the same input, results compared in the same run.

    OMP_NUM_THREADS=1 pytest packages/blending/benchmarks/bench_megatron.py --benchmark-only

CPU time, data in memory, no cache files. D is the number of datasets. megatron-core is
loaded as the tests load it (``tests/megatron_peer.py``).
"""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sixfold.blending.megatron.documents import plan_epochs
from sixfold.blending.megatron.index import INDICES, build_indices, indices_fit
from sixfold.blending.megatron.weights import normalized
from sixfold.blending.order import exhaustive, greedy
from sixfold.blending.source import Part

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from megatron_peer import peer

SEED, DOCUMENTS = 1234, 300_000
SHAPES = [(1, 1024), (3, 256)]  # epochs, sequence length
BLEND = 50_000


class Lengths:
    """Documents of 1 to 2,000 tokens without a token."""

    dtype = np.dtype(np.uint16)

    def __init__(self):
        self.sequence_lengths = np.random.default_rng(0).integers(1, 2000, DOCUMENTS).astype(np.int32)
        self.sequence_pointers = (np.cumsum(self.sequence_lengths, dtype=np.int64) - self.sequence_lengths) * 2


def part_and_plan(epochs, sequence_length):
    part = Part(Lengths(), range(DOCUMENTS))
    return part, plan_epochs(part.tokens, int(part.tokens * (epochs - 0.05)) // sequence_length, sequence_length, 1)


def timed(benchmark, function, *args, elements):
    benchmark._timer = time.process_time
    result = benchmark.pedantic(function, args, rounds=3, warmup_rounds=1)
    benchmark.extra_info.update(elements=elements, ns_per_element=benchmark.stats.stats.min / elements * 1e9)
    return result


def peer_indices(part, plan):
    gpt, helpers, random = peer("gpt_dataset"), peer("helpers"), np.random.RandomState(SEED)
    lengths, separate = part.source.sequence_lengths, plan.before_last is not None
    ids = np.arange(DOCUMENTS, dtype=np.int32)
    documents = gpt._build_document_index(ids, plan.epochs, random, separate)
    args = (plan.sequence_length, plan.epochs, plan.tokens, True, 1)
    samples = helpers.build_sample_idx(lengths, documents, *args)
    n = len(samples) - 1
    return documents, samples, gpt._build_shuffle_index(plan.before_last if separate else n, n, random)


@pytest.mark.parametrize(("epochs", "sequence_length"), SHAPES)
def test_three_indices(benchmark, epochs, sequence_length):
    part, plan = part_and_plan(epochs, sequence_length)
    elements = DOCUMENTS * plan.epochs + plan.samples
    built = timed(benchmark, build_indices, part, plan, SEED, elements=elements)
    for name, array in zip(INDICES, peer_indices(part, plan), strict=True):
        assert np.array_equal(built[name], array)


@pytest.mark.parametrize(("epochs", "sequence_length"), SHAPES)
def test_peer_three_indices(benchmark, epochs, sequence_length):
    part, plan = part_and_plan(epochs, sequence_length)
    timed(benchmark, peer_indices, part, plan, elements=DOCUMENTS * plan.epochs + plan.samples)


@pytest.mark.parametrize(("epochs", "sequence_length"), SHAPES)
def test_full_check_of_a_foreign_cache(benchmark, epochs, sequence_length):
    part, plan = part_and_plan(epochs, sequence_length)
    arrays, elements = build_indices(part, plan, SEED), DOCUMENTS * plan.epochs + plan.samples
    assert timed(benchmark, indices_fit, arrays, part, plan, elements=elements)


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


@pytest.mark.parametrize("D", [10, 100, 1_000])
def test_greedy(benchmark, D):
    built = timed(benchmark, greedy, weights_of(D), BLEND, elements=BLEND)
    assert all(map(np.array_equal, built, peer_greedy(weights_of(D), BLEND)))


@pytest.mark.parametrize("D", [10, 100, 1_000])
def test_peer_greedy(benchmark, D):
    timed(benchmark, peer_greedy, weights_of(D), BLEND, elements=BLEND)


@pytest.mark.parametrize("D", [10, 1_000])
def test_exhaustive(benchmark, D):
    sizes = [int(BLEND // D)] * D
    built = timed(benchmark, exhaustive, sizes, elements=sum(sizes))
    assert all(map(np.array_equal, built, peer_exhaustive(sizes)))


@pytest.mark.parametrize("D", [10, 1_000])
def test_peer_exhaustive(benchmark, D):
    sizes = [int(BLEND // D)] * D
    timed(benchmark, peer_exhaustive, sizes, elements=sum(sizes))
