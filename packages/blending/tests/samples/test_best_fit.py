"""Best fit decreasing: the rows of the naive loop, and as few as the lengths allow."""

import numpy as np
import pytest
from packed_helpers import naive_best_fit

from sixfold.blending.numbers.kernels import forced, levels
from sixfold.blending.samples.best_fit import best_fit, rows_of


def lengths_of(kind, documents, seed=0):
    """Lengths as of web pages, of code, and with a heavy tail."""
    rng = np.random.default_rng(seed)
    drawn = {
        "web": lambda: np.exp(rng.normal(6.1, 1.0, documents)),
        "code": lambda: np.exp(rng.normal(6.6, 1.4, documents)),
        "heavy": lambda: 100 * (1 + rng.pareto(1.1, documents)),
    }[kind]()
    return np.clip(drawn, 1, 5_000_000).astype(np.int64)


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_those_of_the_naive_loop(seed, level):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        capacity = int(rng.integers(1, 60))
        longest = int(rng.integers(1, capacity + 1))
        lengths = rng.integers(1, longest + 1, int(rng.integers(0, 80)))
        items, rows = best_fit(lengths, capacity)
        expected = naive_best_fit(lengths.tolist(), capacity)
        assert [items[rows == row].tolist() for row in range(len(expected))] == expected
        assert items.size == lengths.size
        assert rows_of(lengths, capacity) == len(expected)


@pytest.mark.parametrize("kind", ["web", "code", "heavy"])
def test_every_level_packs_a_whole_window_alike(kind):
    lengths = np.minimum(lengths_of(kind, 2**14), 8192)
    found = []
    for one in levels():
        with forced(one):
            found.append((*best_fit(lengths, 8192), rows_of(lengths, 8192)))
    items, rows, count = found[0]
    assert np.array_equal(np.sort(items), np.arange(lengths.size)), "each item stands in one row"
    assert np.bincount(rows, lengths[items], minlength=count).max() <= 8192 and rows[-1] + 1 == count
    for others in found[1:]:
        assert all(map(np.array_equal, others, found[0]))


def test_many_items_of_one_length_and_rows_of_one_item(level):
    for lengths, expected in (([3] * 1000, 500), ([7] * 10, 10), ([4, 3] * 50, 50), ([], 0)):
        items, rows = best_fit(np.array(lengths, dtype=np.int64), 7)
        assert items.size == rows.size == len(lengths)
        assert rows_of(np.array(lengths, dtype=np.int64), 7) == len(set(rows.tolist())) == expected


def test_a_capacity_that_16_bits_do_not_hold(level):
    lengths = np.random.default_rng(1).integers(1, 100_001, 300)
    items, rows = best_fit(lengths, 100_000 + 1)
    expected = naive_best_fit(lengths.tolist(), 100_001)
    assert [items[rows == row].tolist() for row in range(len(expected))] == expected


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [2048, 8192])
@pytest.mark.parametrize(("kind", "most"), [("web", 1.001), ("code", 1.02), ("heavy", 1.02)])
def test_hardly_more_rows_than_documents_end_to_end(kind, most, capacity):
    lengths, window, rows = lengths_of(kind, 8 * 2**14), 2**14, 0
    for begin in range(0, lengths.size, window):
        some = lengths[begin : begin + window]
        tails = some % capacity
        rows += int((some // capacity).sum()) + rows_of(tails[tails > 0], capacity)
    assert 1 <= rows / (lengths.sum() / capacity) <= most
