"""The compiled order kernels, at every level of instructions, beside the numpy statement of the same.

The numpy statements have their own oracles (loops, fractions, megatron-core) in the tests of their files.
"""

import mmap
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sixfold.blending.megatron.document_index import EpochPlan, _shuffle, plan_epochs
from sixfold.blending.megatron.sample_index import sample_index, sample_index_of
from sixfold.blending.numbers.kernels import Level, forced, kernels, levels
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


def shuffled(dtype, size, seed, drawn_before):
    """The array, and what the state gives next."""
    random, items = np.random.RandomState(seed), np.arange(size, dtype=dtype)
    random.randint(0, 7, drawn_before)
    random.normal()  # RandomState keeps the second of a pair of normals: it is to survive
    _shuffle(random, items)
    return items, np.array([random.normal(), random.randint(2**31), random.random_sample()])


# Around the blocks of 256 swaps, the 624 words of a state, and the powers of two where the mask of draws changes.
@pytest.mark.parametrize("size", [1_000, 1_024, 1_025, 1_247, 1_248, 4_096, 4_097, 70_000])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_a_shuffle_is_that_of_random_state_and_so_is_the_state_it_leaves(size, dtype):
    for seed, drawn_before in [(1234, 0), (5, 1), (6, 623), (7, 624)]:
        assert_every_level_equals_numpy(shuffled, dtype, size, seed, drawn_before)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 17, 255, 256, 257, 258, 513])
def test_short_shuffles_are_those_of_random_state(size):
    random, items, state = np.random.RandomState(9), np.arange(size), np.random.RandomState(9).get_state(legacy=False)
    expected = items.copy()
    random.shuffle(expected)
    twister = state["state"]
    twister["pos"] = kernels().shuffle(twister["key"], twister["pos"], items, 1)
    assert items.tolist() == expected.tolist()
    after = np.random.RandomState()
    after.set_state(state)
    assert after.randint(2**31) == random.randint(2**31)


def test_above_32_bits_a_draw_is_64_with_the_high_word_first():
    n, swaps = 2**32 + 600, 1_000  # 600 swaps with wide draws, 400 with narrow ones
    memory = mmap.mmap(-1, 4 * n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    items = np.frombuffer(memory, dtype=np.uint32)  # zeros of which no page exists until it is touched
    words = iter(np.random.RandomState(3).randint(0, 2**32, 10_000, dtype=np.uint32).tolist())
    expected = {}
    items[n - swaps :] = np.arange(1, swaps + 1)
    expected.update(enumerate(range(1, swaps + 1), n - swaps))
    for i in range(n - 1, n - 1 - swaps, -1):
        wide, mask = i >= 2**32, 2 ** i.bit_length() - 1
        while (j := ((next(words) << 32 | next(words)) if wide else next(words)) & mask) > i:
            pass
        expected[i], expected[j] = expected.get(j, 0), expected.get(i, 0)
    state = np.random.RandomState(3).get_state(legacy=False)["state"]
    kernels().shuffle(state["key"], state["pos"], items, n - swaps)
    assert {place: int(items[place]) for place in expected} == expected
    del items
    memory.close()


@pytest.mark.parametrize("sequence_length", [1, 3, 16, 100])
@pytest.mark.parametrize("extra", [0, 1])
def test_rows_of_a_sample_index_are_numpys(sequence_length, extra):
    rng = np.random.default_rng(sequence_length)
    for keep_partial in (False, True):
        for mean in (1, 4, 60):
            low, lengths = int(rng.integers(0, 50)), rng.integers(0, 2 * mean, 90)
            lengths[0] += 1
            documents = rng.permutation(np.tile(np.arange(90), 3)).astype(np.int32)
            plan = plan_epochs(int(lengths.sum()), None, sequence_length, extra, keep_partial=keep_partial)
            plan = EpochPlan(3, plan.tokens, sequence_length, extra, 3 * plan.samples, None)
            expected = sample_index(documents, lengths[documents], plan)
            assert_every_level_equals_numpy(lambda *args: [sample_index_of(*args)], documents + low, lengths, low, plan)
            assert np.array_equal(sample_index_of(documents + np.int32(low), lengths, low, plan), expected)


def test_rows_of_lengths_beyond_int32_are_int64():
    lengths, documents = np.array([5, 2**31 + 7, 3]), np.array([2, 1, 0, 1], dtype=np.int32)
    plan = EpochPlan(1, int(lengths.sum()), 2**28, 1, 15, None)
    rows = sample_index_of(documents, lengths, 0, plan)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, sample_index(documents, lengths[documents], plan))
