"""``order="apportioned"``: exact counts, one shuffle of all that nobody waits for, indices as megatron-core's."""

import os
import pickle
import select
import signal
import threading
from collections import Counter
from fractions import Fraction
from threading import Event

import numpy as np
import pytest
from blending_helpers import ListDataset, config, naive_key, naive_permute, numbered, sequences_of

from sixfold.blending import BlendedDataset, BlendedMegatronDatasetBuilder, BlendingError
from sixfold.blending.blend import position_shuffle as shuffle
from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.source import ListSource


@pytest.fixture(autouse=True)
def pairs(monkeypatch):
    held = {
        "a": ListSource(numbered([20] * 50)),
        "b": ListSource(sequences_of([7] * 31)),
        "c": ListSource(sequences_of([40] * 3)),
        "empty": ListSource([[], []]),
    }
    monkeypatch.setattr(ListDataset, "pairs", held)
    return held


def build(size, blend, order="apportioned", cls=ListDataset, **fields):
    made = config(**({"order": order, "blend": blend, "split": "1"} | fields))
    return BlendedMegatronDatasetBuilder(cls, [size, 0, 0], lambda: True, made).build()[0]


def naive_counts(weights, total):
    exact = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    counts = [int(share) for share in exact]
    for number in sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))[: total - sum(counts)]:
        counts[number] += 1
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_every_position_is_the_naive_blend_shuffled_by_the_naive_permutation(seed):
    rng = np.random.default_rng(seed)
    weights, size = (rng.random(3) + 0.01).tolist(), int(rng.integers(1, 200))
    data = build(size, (["a", "b", "c"], weights), random_seed=seed)
    assert len(data) == size, "exactly"
    counts = naive_counts(weights, size)
    assert data.counts(size).tolist() == counts
    plain = [(dataset, sample) for dataset, count in enumerate(counts) for sample in range(count)]
    key = naive_key("apportioned", seed, size)
    expected = [plain[naive_permute(key, size, position)] for position in range(size)]
    dataset, sample = data.locate(range(size))
    assert list(zip(dataset.tolist(), sample.tolist(), strict=True)) == expected
    assert list(zip(data.dataset_index.tolist(), data.dataset_sample_index.tolist(), strict=True)) == expected
    assert (data.dataset_index.dtype, data.dataset_sample_index.dtype) == (np.int16, np.int64)
    assert [data.find(*pair) for pair in expected] == list(range(size))
    assert Counter(dataset for dataset, _ in expected[: size // 2]) == Counter(
        {number: count for number, count in enumerate(data.counts(size // 2).tolist()) if count}
    )


def test_each_dataset_has_the_indices_of_megatron_core_for_exactly_its_count():
    data = build(300, (["a", "b"], [0.7, 0.3]))
    assert [dataset.num_samples for dataset in data.datasets] == [210, 90]
    for prefix, dataset in zip("ab", data.datasets, strict=True):
        alone = build(dataset.num_samples, ([prefix], None), order="megatron")
        for name in ("document_index", "sample_index", "shuffle_index"):
            assert np.array_equal(getattr(dataset, name), getattr(alone, name))


def test_without_a_size_every_sample_of_every_dataset_comes_once():
    data = build(None, (["a", "b", "c"], None))
    assert len(data) == sum(map(len, data.datasets)) == (999 // 8) + (216 // 8) + (119 // 8)
    pairs = list(zip(*(array.tolist() for array in data.locate(range(len(data)))), strict=True))
    assert sorted(pairs) == [(number, sample) for number in range(3) for sample in range(len(data.datasets[number]))]


def test_weights_left_out_are_the_tokens():
    assert build(100, (["a", "b"], None)).counts(100).tolist() == naive_counts([1000, 217], 100)


def test_weight_0_gives_no_sample_and_needs_no_token():
    assert build(10, (["a", "empty"], [1, 0])).counts(10).tolist() == [10, 0]


def test_a_batch_holds_the_samples_of_its_positions():
    data = build(60, (["a", "b"], [1, 1]), create_cu_seqlens=True)
    batch = data.get_batch([5, 59, 0, 5])
    for row, position in enumerate([5, 59, 0, 5]):
        assert np.array_equal(batch["tokens"][row], data[position]["tokens"])
        dataset, sample = (int(array[0]) for array in data.locate([position]))
        assert np.array_equal(data[position]["tokens"], data.datasets[dataset][sample]["tokens"])
        assert data.why(position).dataset_id == dataset
        assert sum(part.length for part in data.why(position).ranges) == 8
    with pytest.raises(IndexError):
        data.get_batch([60])
    assert data.get_batch([])["tokens"].shape == (0, 8)


def test_the_shuffle_is_begun_before_any_dataset_is_opened_and_no_batch_waits_for_it(monkeypatch):
    story, finish = [], Event()
    make = Shuffle._make

    def slow(self):
        story.append("shuffle begins")
        assert finish.wait(30), "nobody asked for the table"
        return make(self)

    class Opened(ListDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            story.append("a dataset opens")
            return ListDataset.pairs[dataset_path]

    monkeypatch.setattr(shuffle.Shuffle, "_make", slow)
    started = monkeypatch.setattr(shuffle.Thread, "start", _recording_start(story, shuffle.Thread.start)) or story
    data = build(60, (["a", "b"], [1, 1]), cls=Opened)
    assert started.index("thread starts") < started.index("a dataset opens")
    batch = data.get_batch(range(60))
    finish.set()
    assert np.array_equal(data.dataset_index, batch["dataset_id"])


def _recording_start(story, start):
    def recording(self):
        story.append("thread starts")
        start(self)

    return recording


def test_an_error_of_the_shuffle_is_raised_where_it_is_awaited(monkeypatch):
    def failing(self):
        raise MemoryError("no room for the table")

    monkeypatch.setattr(shuffle.Shuffle, "_make", failing)
    data = build(60, (["a", "b"], [1, 1]))
    with pytest.raises(MemoryError, match="no room for the table"):
        _ = data.dataset_index


def test_a_process_forked_while_the_table_is_made_makes_its_own(monkeypatch):
    begun, go_on, make = threading.Event(), threading.Event(), Shuffle._make

    def slow(self):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert go_on.wait(60)
        return make(self)

    monkeypatch.setattr(Shuffle, "_make", slow)
    started = Shuffle(7, 1000).start()
    assert begun.wait(60)
    mine, childs = os.pipe()
    child = os.fork()
    if child == 0:  # waits for a thread that only the parent has, if it waits
        os.write(childs, started.table.astype(np.uint32).tobytes())
        os._exit(0)
    try:
        assert select.select([mine], [], [], 20)[0], "the child waits for ever"
        assert np.array_equal(np.frombuffer(os.read(mine, 8000), dtype=np.uint32), Shuffle(7, 1000).table)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(mine), os.close(childs)
        go_on.set()
    assert started.table.size == 1000


def test_a_table_that_is_not_made_in_time_is_an_error_and_not_a_wait(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(shuffle, "_DEADLINE_S", 0.05)
    monkeypatch.setattr(Shuffle, "_make", lambda self: go_on.wait(60))
    with pytest.raises(BlendingError, match=r"the table of 1000 positions was not made in 0\.05 s"):
        _ = Shuffle(7, 1000).start().table
    go_on.set()


def test_the_shuffle_depends_on_seed_and_size_alone():
    def table(seed, size, weights):
        data = build(size, (["a", "b"], weights), random_seed=seed)
        ends = np.cumsum(data.counts(size))
        return (data.dataset_sample_index + (ends - data.counts(size))[data.dataset_index]).tolist()

    assert table(1, 50, [1, 1]) == table(1, 50, [1, 9])
    assert table(1, 50, [1, 1]) != table(2, 50, [1, 1])
    assert sorted(table(1, 50, [1, 1])) == list(range(50))


def test_it_is_saved_and_pickled():
    data = build(60, (["a", "b"], [1, 1]))
    assert build(60, (["a", "b"], [2, 2])).load_state_dict(data.state_dict(30)) == 30
    with pytest.raises(BlendingError, match=r"index\.size was 60 and is 61"):
        build(61, (["a", "b"], [1, 1])).load_state_dict(data.state_dict(30))
    with pytest.raises(BlendingError, match=r"order was \"apportioned\" and is \"megatron\""):
        build(60, (["a", "b"], [1, 1]), order="megatron").load_state_dict(data.state_dict(30))
    again = pickle.loads(pickle.dumps(data))
    assert np.array_equal(again.dataset_index, data.dataset_index)


def test_its_cache_files_have_other_names_than_the_peers_and_name_the_data(tmp_path, pairs):
    def names():
        found = {path.name for path in tmp_path.iterdir() if path.name.endswith("document_index.npy")}
        known, seen[:] = set(seen), [*found]
        return len(found - known)

    seen: list[str] = []
    fields = {"path_to_cache": str(tmp_path)}
    build(10, (["a", "b"], [1, 1]), **fields, mid_level_dataset_surplus=0.0, order="megatron")
    assert names() == 2
    first = build(10, (["a", "b"], [1, 1]), **fields)
    assert names() == 2, "the same counts, but other names"
    build(10, (["a", "b"], [1, 1]), **fields, add_extra_token_to_sequence=False)
    assert names() == 2, "options are in the name"
    pairs["a"] = ListSource(numbered([20] * 51))
    build(10, (["a", "b"], [1, 1]), **fields)
    assert names() == 1, "the data is in the name"
    pairs["a"] = ListSource(numbered([25, 15] * 25))  # as many sequences and tokens, other rows
    stale = build(10, (["a", "b"], [1, 1]), **fields)
    assert names() == 1, "every length is in the name"
    assert not np.array_equal(stale.datasets[0].sample_index, first.datasets[0].sample_index)
    fresh = build(10, (["a", "b"], [1, 1]))
    assert np.array_equal(stale.datasets[0].sample_index, fresh.datasets[0].sample_index)


@pytest.mark.parametrize(
    ("size", "blend", "problem"),
    [
        (10, (["a", "a"], [1, 1]), "'a' more than once; give it one entry with the sum"),
        (10, (["a", "empty"], [1, 1]), "the train part of 'empty' has 2 sequences and no tokens"),
        (None, (["c", "c2"], None), "one epoch of 2 datasets gives no sample"),
        (10, (["a"] , [float("nan")]), "weight 0 is nan"),
    ],
    ids=range(4),
)  # fmt: skip
def test_a_blend_that_cannot_work_is_refused(size, blend, problem, pairs):
    pairs["c2"] = pairs["c"]
    with pytest.raises(BlendingError, match=problem):
        build(size, blend, sequence_length=500 if size is None else 8)


def test_a_blend_by_hand_needs_datasets_that_are_long_enough():
    made = config(order="apportioned")
    parts = [
        ListDataset(ListDataset.pairs[name], name, range(3), 1, build(5, ([name], None)).index_split, made)
        for name in "ab"
    ]
    assert len(BlendedDataset(parts, [1, 1], 2, made)) == 2
    with pytest.raises(BlendingError, match="needs 50 samples of dataset 0"):
        BlendedDataset(parts, [1, 1], 100, made)
