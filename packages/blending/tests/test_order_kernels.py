"""The compiled order kernels, at every level of instructions, beside the numpy statement of the same.

The numpy statements have their own oracles (loops, fractions, megatron-core) in the tests of their files.
"""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.blending.native import Level, forced, kernels, levels
from sixfold.blending.order import QuotaTree, exhaustive, greedy

LEVELS = [level for level in levels() if level != Level.NUMPY]
pytestmark = pytest.mark.skipif(kernels() is None, reason="the extension is not installed")


def by_numpy(function, *args):
    with forced(Level.NUMPY):
        return function(*args)


def assert_every_level_equals_numpy(function, *args):
    expected = by_numpy(function, *args)
    for level in LEVELS:
        with forced(level):
            found = function(*args)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert np.array_equal(one, other), f"{level.name} differs at {np.flatnonzero(one != other)[:5]}"


def weights_of_shape(shape, D, rng):
    weights = {
        "random": rng.random(D) + 1e-9,
        "equal": np.ones(D),
        "zipf": 1 / np.arange(1, D + 1),
        "lognormal": np.exp(3 * rng.normal(size=D)),
        "two values": rng.choice([1.0, 3.0], D),
    }[shape]
    return weights / weights.sum()


SHAPES = ["random", "equal", "zipf", "lognormal", "two values"]


# 40 and 96 datasets are where the kernel changes from one list to two windows.
@pytest.mark.parametrize("D", [1, 2, 7, 8, 40, 41, 64, 96, 97, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_numpys(D, shape):
    weights = weights_of_shape(shape, D, np.random.default_rng(D)).tolist()
    assert_every_level_equals_numpy(greedy, weights, 900)


@pytest.mark.parametrize("scale", [1e-300, 0.01, 0.9, 1.1, 40.0, 1e6, 1e150, 1e250])
@pytest.mark.parametrize("D", [5, 60, 130])
def test_greedy_of_weights_that_do_not_sum_to_one_is_numpys(D, scale):
    weights = (weights_of_shape("random", D, np.random.default_rng(D)) * scale).tolist()
    assert_every_level_equals_numpy(greedy, weights, 600)


@pytest.mark.parametrize("D", [1, 3, 39, 64, 97, 250])
def test_exhaustive_is_numpys(D):
    rng = np.random.default_rng(D)
    for sizes in ([4] * D, rng.integers(1, 12, D).tolist(), [1] * D, [int(8 * D), *[1] * (D - 1)]):
        assert_every_level_equals_numpy(exhaustive, sizes)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=120), st.integers(0, 300))
def test_greedy_of_any_weights_is_numpys(weights, size):
    assert_every_level_equals_numpy(greedy, weights, size)


def test_an_empty_order_has_no_position():
    assert_every_level_equals_numpy(greedy, [1.0, 2.0], 0)


@pytest.mark.parametrize("D", [1, 2, 3, 50, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_places_in_a_quota_tree_are_numpys(D, shape):
    rng = np.random.default_rng(D)
    tree = QuotaTree(weights_of_shape(shape, D, rng).tolist())
    anywhere, end = rng.integers(0, 2**45, 1500), tree.period
    for positions in (anywhere, np.arange(end - 700, end + 900), np.arange(7, 30_000, 64), np.arange(5), anywhere[:0]):
        assert_every_level_equals_numpy(tree.locate, positions)
    assert_every_level_equals_numpy(pickle.loads(pickle.dumps(tree)).locate, range(end + 5, end + 4000))


@pytest.mark.parametrize(
    "counts",
    [
        [5],
        [0, 7, 0, 3],
        [1] * 500,
        [3 * 2**32 + 1, 5, 7 * 2**31 + 3, 2**20],
        [2**31 - 1, 1],
        [2**31, 1],
        [2**61, 2**60, 1],
    ],
    ids=str,
)
def test_places_in_a_tree_of_counts_are_numpys(counts):
    tree = QuotaTree.from_counts(counts)
    around = np.concatenate([np.arange(300), tree.period + np.arange(-300, 300), 2 * tree.period - np.arange(1, 300)])
    for positions in (around[around >= 0], np.arange(max(0, tree.period - 4000), tree.period + 10)):
        assert_every_level_equals_numpy(tree.locate, positions)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=60).filter(any), st.integers(0, 2**40))
def test_places_in_any_tree_are_numpys(counts, begin):
    tree = QuotaTree.from_counts(counts)
    assert_every_level_equals_numpy(tree.locate, range(begin, begin + 100))
    assert_every_level_equals_numpy(tree.locate, range(begin, begin + 10**6, 9973))
