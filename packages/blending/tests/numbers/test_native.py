"""The extension: what it refuses, and what happens where it is not."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from sixfold.blending.numbers import kernels as native

WITHOUT = """
import sys, warnings
sys.modules["sixfold.blending._native"] = None
from sixfold.blending.order import permute
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    images = [permute(7, 1000, [i]).tolist() for i in range(3)]
print(images, [str(warning.category.__name__) for warning in told])
"""


@pytest.mark.slow
def test_without_the_extension_numpy_gives_the_same_after_one_warning():
    from sixfold.blending.order import permute

    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[permute(7, 1000, [i]).tolist() for i in range(3)]} ['RuntimeWarning']"


@pytest.fixture
def kernels():
    loaded = native.kernels()
    if loaded is None:
        pytest.skip("the extension is not installed")
    return loaded


def arrays(**changed):
    made = {
        "key": np.ones(1, dtype=np.uint64),
        "size": np.full(1, 10),
        "index": np.arange(10),
        "out": np.zeros(10, dtype=np.int64),
    }
    return list((made | changed).values())


@pytest.mark.parametrize(
    ("changed", "error", "problem"),
    [
        ({"key": np.ones(1, dtype=np.int64)}, TypeError, "key has items"),
        ({"size": np.ones(1, dtype=np.int32)}, TypeError, "size has items"),
        ({"index": np.arange(10.0)}, TypeError, "index has items"),
        ({"index": np.arange(10, dtype=">i8")}, TypeError, "index has items '>q'"),
        ({"index": np.arange(20)[::2]}, ValueError, "contiguous"),
        ({"index": np.frombuffer(bytes(81), dtype=np.uint8)[1:].view(np.int64)}, ValueError, "not aligned"),
        ({"index": None}, TypeError, "bytes-like"),
        ({"out": np.zeros(9, dtype=np.int64)}, ValueError, "out has as many"),
        ({"size": np.ones(3, dtype=np.int64)}, ValueError, "one item or as many"),
        ({"out": np.frombuffer(bytes(80), dtype=np.int64)}, ValueError, "read-only"),
    ],
    ids=str,
)
def test_a_wrong_array_raises_and_nothing_is_written(kernels, changed, error, problem):
    args = arrays(**changed)
    with pytest.raises((error, BufferError), match=problem):
        kernels.permute(*args)
    assert not np.any(args[3])


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((1, 10, 0), TypeError),
        ((-1, 10, 0, np.zeros(1, dtype=np.int64)), OverflowError),
        ((2**64, 10, 0, np.zeros(1, dtype=np.int64)), OverflowError),
        ((1, 2**53 + 1, 0, np.zeros(1, dtype=np.int64)), ValueError),
        ((1, 10, 8, np.zeros(3, dtype=np.int64)), ValueError),
        ((1, 10, -1, np.zeros(3, dtype=np.int64)), ValueError),
        ((1, 2**32 + 1, 0, np.zeros(3, dtype=np.uint32)), ValueError),
        ((1.5, 10, 0, np.zeros(3, dtype=np.int64)), TypeError),
    ],
    ids=str,
)
def test_wrong_numbers_raise(kernels, args, error):
    with pytest.raises(error):
        kernels.permute_range(*args)


def test_a_level_that_this_processor_does_not_have_is_refused(kernels):
    with pytest.raises(ValueError, match="level is"):
        kernels.use_level(kernels.level() + 1)


@pytest.mark.parametrize("quotas", [[], [0, 0], [3, -1], [2**62, 1]], ids=str)
def test_quotas_of_which_there_is_no_tree_are_refused(kernels, quotas):
    with pytest.raises(ValueError, match="tree"):
        kernels.tree(np.array(quotas, dtype=np.int64))


def test_what_is_no_tree_is_refused(kernels):
    three = [np.zeros(3, dtype=np.int64) for _ in range(3)]
    with pytest.raises(ValueError, match="PyCapsule"):
        kernels.tree_locate(None, *three)
    with pytest.raises(ValueError, match="as many items"):
        kernels.tree_locate(kernels.tree(np.ones(2, dtype=np.int64)), *three[:2], np.zeros(4, dtype=np.int64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": []},
        {"weight": [1.0, float("nan")]},
        {"weight": [1.0, -1.0]},
        {"left": [3]},
        {"left": [3, 3]},
        {"left": [4, 0]},
        {"sample": np.zeros(5, dtype=np.int64)},
    ],
    ids=str,
)
def test_wrong_blends_are_refused(kernels, wrong):
    given = {
        "weight": [1.0, 2.0],
        "left": [1, 3],
        "dataset": np.zeros(4, dtype=np.int16),
        "sample": np.zeros(4, dtype=np.int64),
    }
    given |= wrong
    with pytest.raises(ValueError, match="greedy"):
        kernels.greedy(np.array(given["weight"]), np.array(given["left"]), given["dataset"], given["sample"])


@pytest.mark.parametrize(
    "args",
    [
        (np.zeros(623, dtype=np.uint32), 0, np.arange(4), 1),
        (np.zeros(624, dtype=np.uint32), 625, np.arange(4), 1),
        (np.zeros(624, dtype=np.uint32), 0, np.arange(4), 0),
    ],
    ids=["words", "place", "lowest"],
)
def test_wrong_shuffles_are_refused(kernels, args):
    with pytest.raises(ValueError, match=r"key has|next is|lowest is"):
        kernels.shuffle(*args)


@pytest.mark.parametrize(("documents", "low"), [([0, 3], 0), ([0, -1], 0), ([6, 8], 5), ([6, 4], 5)])
def test_a_document_without_a_length_is_told_by_its_place(kernels, documents, low):
    args = np.array([low, *documents], dtype=np.int32), np.full(3, 2), low, 3, 1
    assert kernels.sample_rows(*args, np.zeros((4, 2), dtype=np.int32)) == next(
        place for place, one in enumerate([low, *documents]) if one - low not in range(3)
    )


@pytest.mark.parametrize(("documents", "numbers"), [([0, 1], 3), ([], 4), ([0, 1], 0)])
def test_wrong_rows_are_refused(kernels, documents, numbers):
    with pytest.raises(ValueError, match="sample_rows: there are"):
        kernels.sample_rows(
            np.array(documents, dtype=np.int32), np.full(3, 2), 0, 3, 1, np.zeros(numbers, dtype=np.int32)
        )


@pytest.mark.parametrize(
    ("lengths", "capacity", "listed", "problem"),
    [
        ([0, 3], 5, (2, 2), "lengths lie in"),
        ([6, 3], 5, (2, 2), "lengths lie in"),
        ([-(2**40)], 5, (0, 0), "lengths lie in"),
        ([1, 2], 5, (1, 1), "as many items"),
        ([1, 2], 5, (2, 0), "as many items"),
        ([1, 2], 5, (0, 2), "as many items"),
        ([1, 2], 0, (2, 2), "capacity is 0"),
        ([1, 2], 2**31, (2, 2), "capacity is"),
    ],
)
def test_lengths_that_fit_no_row_are_refused(kernels, lengths, capacity, listed, problem):
    item, row = (np.zeros(items, dtype=np.int64) for items in listed)
    with pytest.raises(ValueError, match=problem):
        kernels.best_fit(np.array(lengths, dtype=np.int64), capacity, item, row)
    assert not item.any() and not row.any()


def long_calls(kernels):
    items, samples = np.zeros(3_000_000, dtype=np.int64), np.zeros(3_000_000, dtype=np.int64)
    tree, numbers = kernels.tree(np.arange(1, 500)), np.random.default_rng(0).integers(0, 2**40, 1_000_000)
    weights, datasets = np.random.default_rng(0).random(500) / 500, np.zeros(1_000_000, dtype=np.int16)
    key, documents = np.arange(624, dtype=np.uint32), np.zeros(3_000_000, dtype=np.int32)
    return {
        "permute": lambda: kernels.permute(np.ones(1, dtype=np.uint64), np.full(1, 2**41), numbers, items[:1_000_000]),
        "permute_range": lambda: kernels.permute_range(1, 2**33, 0, items),
        "greedy": lambda: kernels.greedy(weights, items[:0], datasets, samples[:1_000_000]),
        "tree_locate": lambda: kernels.tree_locate(tree, numbers, items[:1_000_000], samples[:1_000_000]),
        "shuffle": lambda: kernels.shuffle(key, 0, items, 1),
        "sample_rows": lambda: kernels.sample_rows(documents, np.full(1, 7), 0, 5, 1, items.reshape(-1, 2)),
        "best_fit": lambda: kernels.best_fit(numbers % 8192 + 1, 8192, items[:1_000_000], samples[:1_000_000]),
    }


@pytest.mark.parametrize(
    "name", ["permute", "permute_range", "greedy", "tree_locate", "shuffle", "sample_rows", "best_fit"]
)
@pytest.mark.slow
def test_other_threads_run_while_a_kernel_does(kernels, name):
    def gap_and_duration():
        """The longest pause of this thread while another one is in the kernel, and how long that one is."""
        call, span = long_calls(kernels)[name], []
        thread = threading.Thread(
            target=lambda: [span.append(time.perf_counter()), call(), span.append(time.perf_counter())]
        )
        gap, last = 0.0, time.perf_counter()
        thread.start()
        while thread.is_alive():
            time.sleep(0)
            now = time.perf_counter()
            gap, last = max(gap, now - last), now
        return gap, span[1] - span[0]

    # A busy machine pauses a thread too; a kernel that held the lock would do so every time.
    assert any(gap < duration / 2 for gap, duration in (gap_and_duration() for _ in range(20)))
