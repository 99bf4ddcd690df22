"""The quota tree: exact counts, the 1.75 bound, and the walk against a loop that counts."""

from fractions import Fraction

import numpy as np
import pytest
from blending_helpers import naive_blend, naive_quotas
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.blending import BlendingError
from sixfold.blending.order import QuotaTree, apportion

weight_vectors = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=30)


def fibonacci(D):
    numbers = [1, 1]
    while len(numbers) < D:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:D]


@settings(max_examples=60, deadline=None)
@given(weight_vectors, st.integers(0, 10_000))
def test_shares_are_the_largest_remainders(weights, total):
    assert apportion(weights, total).tolist() == naive_quotas(weights, total)


def test_ties_go_to_the_lower_index():
    assert apportion([1, 1, 1], 5).tolist() == [2, 2, 1]
    assert apportion([0.5, 0.25, 0.25], 2).tolist() == [1, 1, 0]


@settings(max_examples=15, deadline=None)
@given(weight_vectors)
def test_the_walk_equals_a_loop_that_counts(weights):
    tree = QuotaTree(weights)
    assert tree.quotas.tolist() == naive_quotas(weights)
    dataset, sample = tree.locate(range(150))
    assert list(zip(dataset.tolist(), sample.tolist(), strict=True)) == naive_blend(naive_quotas(weights), 150)


@pytest.mark.parametrize(
    "weights",
    [
        *(np.random.default_rng(seed).random(2 + 17 * seed) ** (1 + seed % 4) + 1e-6 for seed in range(12)),
        fibonacci(40),
    ],
    ids=str,
)
def test_every_prefix_is_within_1_75_samples_of_the_quotas(weights):
    weights = [float(weight) for weight in weights]
    tree, n = QuotaTree(weights), 20_000
    dataset, sample = tree.locate(np.arange(n))
    worst = 0.0
    for number in range(len(weights)):
        at = np.flatnonzero(dataset == number)
        share = int(tree.quotas[number]) / tree.period
        # The count moves by one at each of its own positions: the error is largest just before and just after.
        edges = np.concatenate([at, at + 1, [n]])
        worst = max(worst, np.abs(np.searchsorted(at, edges) - edges * share).max())
        assert sample[at].tolist() == list(range(at.size)), "each dataset counts its samples from 0"
    assert worst < 1.75


@settings(max_examples=40, deadline=None)
@given(weight_vectors, st.integers(0, 2**34))
def test_counts_and_find_agree_with_locate_anywhere(weights, position):
    tree = QuotaTree(weights)
    dataset, sample = tree.locate([position])
    assert tree.find(int(dataset[0]), int(sample[0])) == position
    before, after = tree.counts(position), tree.counts(position + 1)
    assert before.sum() == position
    assert (after - before).tolist() == [int(number == dataset[0]) for number in range(len(weights))]
    assert before[dataset[0]] == sample[0]
    errors = [abs(int(c) - Fraction(position * int(q), tree.period)) for c, q in zip(before, tree.quotas, strict=True)]
    assert max(errors) < Fraction(7, 4)


@pytest.mark.parametrize("counts", [[5], [0, 7, 0, 3], [1] * 50, [1000, 1, 1, 999], fibonacci(15)], ids=str)
def test_a_period_gives_each_dataset_exactly_its_count_and_repeats(counts):
    tree, n = QuotaTree.from_counts(counts), sum(counts)
    dataset, sample = tree.locate(np.arange(2 * n))
    assert np.bincount(dataset[:n], minlength=len(counts)).tolist() == counts
    assert dataset[n:].tolist() == dataset[:n].tolist()
    assert len(set(zip(dataset.tolist(), sample.tolist(), strict=True))) == 2 * n


def test_totals_above_2_to_31_are_exact():
    counts = [3 * 2**32 + 1, 5, 7 * 2**31 + 3, 2**20]
    tree = QuotaTree.from_counts(counts)
    positions = [0, 1, 2**31, 2**33 + 5, sum(counts) - 1]
    dataset, sample = tree.locate(positions)
    assert [tree.find(*pair) for pair in zip(dataset.tolist(), sample.tolist(), strict=True)] == positions
    assert tree.counts(sum(counts)).tolist() == counts


def test_the_scale_of_the_weights_and_datasets_of_weight_0_do_not_matter():
    plain = QuotaTree([3, 1, 2]).locate(range(500))[0]
    assert QuotaTree([0.75, 0.25, 0.5]).locate(range(500))[0].tolist() == plain.tolist()
    spread = QuotaTree([0, 3, 1, 0, 2, 0]).locate(range(500))[0]
    assert spread.tolist() == np.array([1, 2, 4])[plain].tolist()


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([], "no weights"),
        ([0.0, 0.0], "all 2 weights are 0"),
        ([1.0, -0.5], "weight 1 is -0.5"),
        ([float("nan"), 1.0], "weight 0 is nan"),
        ([1.0, float("inf")], "weight 1 is inf"),
        ([1.0, "2"], "weight 1 is '2'"),
        ([1.0, 1e-12], "weight 1 is 1e-12: its share of 2\\^31 samples rounds to 0"),
    ],
    ids=str,
)
def test_unfit_weights_are_refused_with_index_and_value(weights, problem):
    with pytest.raises(BlendingError, match=problem):
        QuotaTree(weights)


def test_unfit_counts_are_refused():
    with pytest.raises(BlendingError, match="count 1 is -2"):
        QuotaTree.from_counts([3, -2])
    with pytest.raises(BlendingError, match="all 0"):
        QuotaTree.from_counts([0, 0])
    with pytest.raises(BlendingError, match="dataset 1 of 2 has quota 0, so no sample 0"):
        QuotaTree([1, 0]).find(1, 0)
    with pytest.raises(BlendingError, match="counts are float64"):
        QuotaTree.from_counts([1.5, 2])
    for total in (-1, 2.5):
        with pytest.raises(BlendingError, match=f"total is {total}"):
            apportion([1], total)


def test_places_that_are_none_are_refused():
    tree = QuotaTree([1, 2])
    with pytest.raises(BlendingError, match="position -1 is negative"):
        tree.locate([3, -1])
    with pytest.raises(BlendingError, match="positions are float64"):
        tree.locate([0.5])
    for dataset, sample in [(2, 0), (-1, 0), (0, -1), (0, 0.5)]:
        with pytest.raises(BlendingError, match=r"dataset (2|is -1)|sample is"):
            tree.find(dataset, sample)
    with pytest.raises(BlendingError, match="n is -1"):
        tree.counts(-1)


def test_numpy_integers_do_not_overflow_on_the_way_back():
    tree, position = QuotaTree([0.3, 0.7]), 2**45 + 12_345
    dataset, sample = tree.locate(np.array([position]))
    assert tree.find(dataset[0], sample[0]) == position
