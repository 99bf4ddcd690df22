"""Random weight vectors: the bound of every prefix, exact counts, and a bijection with its inverse.

``--weight-vectors 10000`` tests that many, each at one of the levels of the compiled kernels, numpy among them.
"""

from collections import Counter
from fractions import Fraction
from math import lcm

import numpy as np
import pytest

from sixfold.blending.numbers.kernels import forced, levels
from sixfold.blending.order import QuotaTree

PREFIX = 600  # positions from each begin
Q = 2**31


def powers(rng, datasets):
    return 10.0 ** rng.uniform(-4, 2, datasets)


def one_of_most(rng, datasets):
    weights = rng.random(datasets) * 1e-3 + 1e-5
    weights[rng.integers(datasets)] = 1
    return weights


def fibonacci(rng, datasets):
    """The Huffman tree of these is as deep as can be."""
    weights = [1.0, 1.0]
    while len(weights) < datasets:
        weights.append(weights[-1] + weights[-2])
    return rng.permutation(weights[: min(datasets, 40)])


def some_are_0(rng, datasets):
    return np.append(rng.random(datasets) * rng.integers(0, 2, datasets), 1.0)


KINDS = [
    lambda rng, datasets: rng.random(datasets) + 1e-6,
    powers,
    lambda rng, datasets: rng.integers(1, 5, datasets).astype(float),
    lambda rng, datasets: np.full(datasets, 0.1),
    one_of_most,
    fibonacci,
    some_are_0,
]


def random_weights(seed):
    rng = np.random.default_rng(seed)
    datasets = int(rng.integers(60, 300)) if seed % 20 == 0 else int(rng.integers(1, 13))
    return [float(weight) for weight in KINDS[seed % len(KINDS)](rng, datasets)]


def whole(weights):
    """The weights as integers of the same proportions."""
    exact = [Fraction(weight) for weight in weights]
    scale = lcm(*(share.denominator for share in exact))
    return [int(share * scale) for share in exact]


def exact_quotas(integers):
    """Largest remainders of the shares of Q, lower index first."""
    total = sum(integers)
    quotas, rests = zip(*(divmod(share * Q, total) for share in integers), strict=True)
    more = sorted(range(len(rests)), key=lambda i: (-rests[i], i))[: Q - sum(quotas)]
    return [quota + (i in more) for i, quota in enumerate(quotas)]


def given_before(dataset, begin, counts, datasets):
    """(PREFIX + 1, D): how many samples of each came before begin, begin + 1, ..."""
    one_hot = np.zeros((PREFIX + 1, datasets), dtype=np.int64)
    one_hot[np.arange(1, PREFIX + 1), dataset] = 1
    return np.cumsum(one_hot, axis=0) + counts


def worst_prefix(tree, quotas, integers, begin):
    """The largest error in samples over the positions from ``begin``; the two bounds are asserted exactly."""
    dataset, sample = tree.locate(np.arange(begin, begin + PREFIX))
    given = given_before(dataset, begin, tree.counts(begin), len(quotas))
    assert np.array_equal(sample, given[np.arange(PREFIX), dataset]), "each dataset counts on, one by one"
    assert np.array_equal(given[-1], tree.counts(begin + PREFIX))
    places = np.arange(begin, begin + PREFIX + 1)
    in_period = given - (places // Q)[:, None] * quotas
    error = in_period * Q - (places % Q)[:, None] * quotas  # times Q; below 2^62
    assert np.abs(error).max() * 4 < 7 * Q, "1.75 samples"
    if begin + PREFIX <= Q:
        for row in (int(np.abs(error).max(axis=1).argmax()), PREFIX):
            off = [
                count * sum(integers) - (begin + row) * w
                for count, w in zip(given[row].tolist(), integers, strict=True)
            ]
            assert max(map(abs, off)) * 4 < 11 * sum(integers), "2.75 samples from the real weights"
    return np.abs(error).max() / Q


def check_period(rng, weights):
    """A small period in full: an epoch of each dataset, once, and the next epoch continues it."""
    counts = rng.integers(0, 9, len(weights)) if len(weights) > 12 else (np.array(weights) * 97 % 200).astype(np.int64)
    counts[rng.integers(len(counts))] += 1
    tree, n = QuotaTree.from_counts(counts), int(counts.sum())
    dataset, sample = tree.locate(np.arange(2 * n))
    for epoch in (0, 1):
        here = slice(epoch * n, (epoch + 1) * n)
        pairs = sorted(zip(dataset[here].tolist(), sample[here].tolist(), strict=True))
        assert pairs == [(d, epoch * q + i) for d, q in enumerate(counts.tolist()) for i in range(q)]
    for position in rng.integers(0, 2 * n, 10).tolist():
        assert tree.find(int(dataset[position]), int(sample[position])) == position


def check_inverse(rng, tree, quotas):
    positions = rng.integers(0, 2 ** rng.integers(1, 41), 10)
    for position, dataset, sample in zip(
        positions.tolist(), *map(np.ndarray.tolist, tree.locate(positions)), strict=True
    ):
        assert tree.find(dataset, sample) == position
    for dataset in rng.choice(np.flatnonzero(quotas), 3).tolist():
        sample = int(rng.integers(0, 3 * quotas[dataset]))
        assert [array.tolist() for array in tree.locate([tree.find(dataset, sample)])] == [[dataset], [sample]]


def check_vector(seed):
    rng, weights = np.random.default_rng([seed, 1]), random_weights(seed)
    tree, integers = QuotaTree(weights), whole(weights)
    quotas = np.array(exact_quotas(integers))
    assert tree.period == Q == quotas.sum()
    assert tree.quotas.tolist() == quotas.tolist()
    assert tree.counts(Q).tolist() == quotas.tolist(), "exact counts in every period"
    assert tree.counts(3 * Q + 5).tolist() == (3 * quotas + tree.counts(5)).tolist()
    begins = [0, int(rng.integers(0, Q - PREFIX)), Q - PREFIX, int(rng.integers(Q - PREFIX, 2**40 - PREFIX))]
    worst = max(worst_prefix(tree, quotas, integers, begin) for begin in begins)
    check_period(rng, weights)
    check_inverse(rng, tree, quotas)
    return worst


def test_every_prefix_is_in_its_bound_counts_are_exact_and_find_is_the_inverse_of_locate(vector_chunk, record_property):
    found: Counter[str] = Counter()
    for seed in vector_chunk:
        level = levels()[seed // len(KINDS) % len(levels())]
        with forced(level):
            worst = check_vector(seed)
        found[f"at {level.name}"] += 1
        found[f"off by up to {int(worst * 4) / 4 + 0.25} samples"] += 1
    record_property("vector_chunk", found)


def worst_of_a_period(counts):
    """The largest error of a whole period: a count is furthest off just before and just behind a sample of its own."""
    tree = QuotaTree.from_counts(counts)
    positions = np.arange(tree.period)
    dataset, sample = tree.locate(positions)
    share = tree.quotas[dataset] / tree.period
    return max(np.abs(sample - positions * share).max(), np.abs(sample + 1 - (positions + 1) * share).max())


def test_the_worst_vectors_known_are_below_the_constant_of_the_proof():
    """See docs/design/blending/blend.md: half the sum of Fibonacci's reciprocals, 1.67994."""
    assert worst_of_a_period([1, 1]) == 0.5
    climbed = [1, 33, 34, 47, 77, 124, 233, 404, 652, 1133, 2097, 2860, 3106, 4352, 14761]
    assert 1.56 < worst_of_a_period(climbed) < 1.67994
    assert worst_of_a_period([1, 200, 200, 201, 401, 602, 1003, 1605, 2608, 4213]) < 1.67994, "as deep as can be"


def test_the_bound_is_not_met_by_an_order_that_gives_a_dataset_twice_as_fast():
    """The check above can fail: a tree of other weights than it is held against."""
    tree, others = QuotaTree([2, 1, 1]), [1, 1, 1]
    with pytest.raises(AssertionError, match=r"1\.75"):
        worst_prefix(tree, np.array(exact_quotas(others)), others, 0)
