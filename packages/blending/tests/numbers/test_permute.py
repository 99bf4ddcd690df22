"""The keyed permutation: every number of it is fixed for version 1 of the order."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import naive_key, naive_permute

from sixfold.blending import BlendingError
from sixfold.blending.numbers.permutation import order_key, permute_back, permute_range
from sixfold.blending.order import permute

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "order-1.json").read_text())


def test_keys_and_permutations_are_those_of_version_1(level):
    for parts, key in GOLDEN["keys"]:
        assert order_key(*parts) == key
    for key, n, index, image in GOLDEN["permutations"]:
        assert permute(key, n, index).tolist() == image


@cache
def naive_image(key, n, begin, count):
    """Once for all levels: the loop takes longer than they do."""
    return [naive_permute(key, n, begin + i) for i in range(count)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 1000])
def test_it_is_the_plain_statement_and_a_bijection(n, level):
    key = naive_key("some", n)
    image = permute(key, n, np.arange(n))
    assert image.tolist() == naive_image(key, n, 0, n)
    assert sorted(image.tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**40 + 7, 2**53])
def test_large_sizes_equal_the_plain_statement(n, level):
    index = np.random.default_rng(n).integers(0, n, 40)
    assert permute(99, n, index).tolist() == [naive_permute(99, n, int(one)) for one in index]


@pytest.mark.parametrize("n", [1, 2, 3, 17, 256, 1000, 2**31 - 1, 2**53])
def test_the_way_back_leads_to_every_index(n):
    key = naive_key("some", n)
    for index in {0, n - 1, *np.random.default_rng(n).integers(0, n, 40).tolist()}:
        assert permute_back(key, n, naive_permute(key, n, index)) == index
    with pytest.raises(BlendingError, match=f"index {n} is not one of 0..{n - 1}"):
        permute_back(key, n, n)


def test_keys_and_sizes_may_differ_by_element_and_the_batch_size_does_not_matter(level):
    rng = np.random.default_rng(0)
    keys, sizes = rng.integers(0, 2**63, 500).astype(np.uint64), rng.integers(1, 300, 500)
    index = rng.integers(0, sizes)
    together = permute(keys, sizes, index)
    assert together.tolist() == [
        naive_permute(int(key), int(n), int(one)) for key, n, one in zip(keys, sizes, index, strict=True)
    ]
    for begin in range(0, 500, 7):  # arrays of few elements go another way through the code
        some = slice(begin, begin + 7)
        assert permute(keys[some], sizes[some], index[some]).tolist() == together[some].tolist()


def test_keys_part_by_part_differ():
    keys = {order_key(1234, "a", "train", *rest) for rest in [(), (0,), (1,), (0, 0), (0, 1), (0, 0, 0), (1, 0, 0)]}
    assert len(keys) == 7


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_is_refused(index, level):
    with pytest.raises(BlendingError, match=r"is not one of 0\.\.9"):
        permute(1, 10, [3, index])


def test_numbers_it_cannot_permute_are_refused(level):
    with pytest.raises(BlendingError, match="indices are float64"):
        permute(1, 10, [1.7])
    with pytest.raises(BlendingError, match="a permutation has at most 2\\^53 elements"):
        permute(1, 2**53 + 1, [3])


@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
@pytest.mark.parametrize(("n", "begin", "count"), [(1, 0, 1), (5, 0, 5), (3000, 0, 3000), (10**9, 77, 2050), (9, 4, 0)])
def test_a_range_is_its_numbers_one_by_one(n, begin, count, dtype, level):
    image = np.zeros(count, dtype=dtype)
    permute_range(31, n, begin, image)
    assert image.tolist() == naive_image(31, n, begin, count)


@pytest.mark.parametrize(
    ("n", "begin", "dtype"),
    [(10, 8, np.int64), (10, -1, np.int64), (2**32 + 1, 0, np.uint32), (2**53 + 1, 0, np.int64)],
)
def test_a_range_outside_is_refused(n, begin, dtype, level):
    with pytest.raises(BlendingError, match=f"of a permutation of {n} are asked in"):
        permute_range(1, n, begin, np.zeros(3, dtype=dtype))
