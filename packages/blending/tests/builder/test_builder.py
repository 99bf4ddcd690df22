"""What the builder returns for which config, and that every bad input is one typed error."""

import numpy as np
import pytest
from blending_helpers import ListDataset, config, numbered, sequences_of

from sixfold.blending import (
    BlendChange,
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    BlendedMegatronDatasetConfig,
    BlendingError,
    GPTDataset,
    Split,
)
from sixfold.blending.builder.builder import Built
from sixfold.blending.documents import idx_bin as prefixes
from sixfold.blending.source import ListSource


@pytest.fixture(autouse=True)
def pairs(monkeypatch):
    held = {
        "data/a": ListSource(numbered([20] * 50)),
        "data/b": ListSource(sequences_of([7] * 31)),
        "data/c": ListSource(sequences_of([40] * 3)),
        "data/d": ListSource(sequences_of([11] * 3)),
        "data/empty": ListSource([[], []]),
    }
    monkeypatch.setattr(ListDataset, "pairs", held)
    return held


def build(sizes, **fields) -> list[Built]:
    return BlendedMegatronDatasetBuilder(ListDataset, sizes, lambda: True, config(**fields)).build()


def test_a_blend_of_two_gives_three_parts_that_share_no_sequence():
    train, valid, test = build([100, 20, 10], blend=(["data/a", "data/b"], [0.7, 0.3]), split="80,10,10")
    assert [type(part) for part in (train, valid, test)] == [BlendedDataset] * 3
    assert [len(part) for part in (train, valid, test)] == [100, 20, 10]
    assert train.names == ["a", "b"]
    for number, total in enumerate([50, 31]):
        parts = [set(part.datasets[number].indices) for part in (train, valid, test)]
        assert sorted(index for part in parts for index in part) == list(range(total))
    assert [len(data) for data in train.datasets] == train.counts(100).tolist()


def test_an_absent_part_is_none():
    train, valid, test = build([100, 10, 0], blend=(["data/a", "data/b"], None), split="98,2,0")
    assert isinstance(train, BlendedDataset)
    assert isinstance(valid, BlendedDataset)
    assert test is None


def test_one_prefix_without_weights_is_no_blend_and_one_with_weights_or_changes_is():
    (alone, *_) = build([10, 0, 0], blend=(["data/a"], None), split="1")
    assert isinstance(alone, GPTDataset)
    (weighted, *_) = build([10, 0, 0], blend=(["data/a"], [1.0]), split="1")
    assert isinstance(weighted, BlendedDataset)
    (changing, *_) = build(
        [10, 0, 0], blend=(["data/a"], None), split="1", changes=[BlendChange(5, (["data/b"], None))]
    )
    assert changing.names == ["a", "b"]
    assert [len(data) for data in changing.datasets] == [5, 5]
    parts = build([10, 5, 5], blend=(["data/a"], None), split="2,1,1", changes=[BlendChange(5, (["data/b"], None))])
    assert [type(part) for part in parts] == [BlendedDataset] * 3
    for data in (weighted, changing):
        assert np.array_equal(data.get_batch(range(5))["tokens"], alone.get_batch(range(5))["tokens"])


def test_a_blend_per_split_takes_all_sequences_of_each():
    blends = [(["data/a", "data/b"], [1, 2]), (["data/c"], [1]), None]
    train, valid, test = build([50, 8, None], blend_per_split=blends)
    assert list(train.datasets[0].indices) == list(range(50))
    assert isinstance(valid, GPTDataset)
    assert list(valid.indices) == [0, 1, 2]
    assert test is None


def test_size_none_is_one_epoch_of_everything():
    train, valid, _ = build([None, None, None], blend=(["data/a", "data/b"], None), split="90,10")
    assert len(train) == (45 * 20 - 1) // 8 + (28 * 7 - 1) // 8
    seen = np.sort(train.get_batch(np.flatnonzero(train.locate(range(len(train)))[0] == 0))["tokens"].ravel())
    assert np.unique(seen).size == seen.size
    assert len(valid) == (5 * 20 - 1) // 8 + (3 * 7 - 1) // 8


def test_several_validation_sets_are_a_list():
    fields = {"blend": (["data/a", "data/b"], [1, 1]), "split": "80,20", "multiple_validation_sets": True}
    _, valid, _ = build([10, 5, 0], **fields)
    assert [type(part).__mro__[1] for part in valid] == [GPTDataset, GPTDataset]
    assert [len(part) for part in valid] == [5, 5]
    _, valid, _ = build([10, None, 0], **fields, full_validation=True)
    assert [len(part) for part in valid] == [(10 * 20 - 1) // 8, (6 * 7 - 1) // 8]
    with pytest.raises(BlendingError, match="valid size is 5 with full_validation"):
        build([10, 5, 0], **fields, full_validation=True)


def test_names_keep_the_order_when_a_folder_moves(pairs):
    pairs["moved/a"], pairs["moved/b"] = pairs["data/a"], pairs["data/b"]
    here, there = (
        build([50, 0, 0], blend=([f"{folder}/a", f"{folder}/b"], [1, 3]), split="1", dataset_names=names)[0]
        for folder, names in [
            ("data", {"data/a": "x", "data/b": "y"}),
            ("moved", {"moved/a": "x", "moved/b": "y"}),
        ]
    )
    assert np.array_equal(here.get_batch(range(50))["tokens"], there.get_batch(range(50))["tokens"])


UNFIT_SPLITS = ("-1,5,5", "abc", "-1,abc5,5", "1,2,3,4", "0,0,0", "", "1,,2", "nan", "1e400")
BLEND = (["data/a", "data/b"], [1.0, 2.0])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        *(({"blend": BLEND, "split": text}, f"split is '{text}'") for text in UNFIT_SPLITS),
        ({"blend": BLEND}, "blend is given without split"),
        ({"blend": BLEND, "split": "1", "blend_per_split": [BLEND, None, None]}, "both blend and blend_per_split"),
        ({"blend_per_split": [BLEND, None, None], "split": "1"}, "both split and blend_per_split"),
        ({"blend_per_split": [BLEND]}, "has 1 entries; it has three"),
        ({"blend": ([], []), "split": "1"}, "blend has no dataset"),
        ({"blend": (["x"], [float("nan")]), "split": "1"}, "blend: weight 0 is nan"),
        ({"blend": (["x", "y"], [1, float("inf")]), "split": "1"}, "blend: weight 1 is inf"),
        ({"blend": (["x", "y"], [1, -1]), "split": "1"}, "blend: weight 1 is -1"),
        ({"blend": (["x", "y"], [0, 0]), "split": "1"}, "all 2 weights are 0"),
        ({"blend": (["x", "y"], [1]), "split": "1"}, "2 prefixes and 1 weights"),
        ({"blend": (["x", "y", "x"], None), "split": "1"}, "'x' more than once"),
        ({"blend": ["x", "y"], "split": "1"}, "it is a pair"),
        ({"sequence_length": 0}, "sequence_length is 0"),
        ({"sequence_length": 2.0}, "sequence_length is 2.0"),
        ({"random_seed": "one"}, "random_seed is 'one'"),
        ({"order": "sorted"}, "order is 'sorted'; it is one of"),
        ({"changes": [BlendChange(-1, BLEND)]}, r"changes\[0\].at is -1"),
        ({"changes": [BlendChange(5, BLEND), BlendChange(5, BLEND)]}, "changes at 5 and 5 are out of order"),
        ({"changes": [BlendChange(5, BLEND), BlendChange(4, BLEND)]}, "changes at 5 and 4 are out of order"),
        ({"changes": [BlendChange(5)]}, "changes nothing"),
        ({"changes": [BlendChange(5, sequence_length=0)]}, r"changes\[0\].sequence_length is 0"),
        ({"changes": [BlendChange(5, (["x"], [0]))]}, r"changes\[0\].blend: all 1 weights are 0"),
        ({"blend": BLEND, "split": "1", "dataset_names": {"data/a": "n", "data/b": "n"}}, "are both named 'n'"),
        ({"blend": (["a\x1fb"], None), "split": "1"}, "control character"),
        ({"token_dtype": np.uint16}, "token_dtype is .*uint16"),
        ({"token_dtype": "wide"}, "token_dtype is 'wide'"),
        ({"blend": ([5], None), "split": "1"}, "it is a pair"),
        ({"blend": (["x"], 5), "split": "1"}, "it is a pair"),
        ({"changes": [(5, BLEND)]}, r"changes\[0\] is \(5, .*; it is a BlendChange"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_config_that_cannot_work_is_refused_when_it_is_made(fields, problem):
    with pytest.raises(BlendingError, match=problem):
        config(**fields)


@pytest.mark.parametrize(
    ("sizes", "fields", "problem"),
    [
        ([None, 0, 0], {"blend": BLEND, "split": "1"}, "train has weights but no size"),
        ([None, 0, 0], {"blend": (["x"], None), "split": "1", "changes": [BlendChange(5, BLEND)]}, "train has changes"),
        ([10, 0], {"blend": BLEND, "split": "1"}, "it is three counts"),
        ([10, -1, 0], {"blend": BLEND, "split": "1"}, r"sizes\[1\] \(valid\) is -1"),
        ([10, 0, 2.5], {"blend": BLEND, "split": "1"}, r"sizes\[2\] \(test\) is 2.5"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_builder_that_cannot_work_is_refused_when_it_is_made(sizes, fields, problem):
    with pytest.raises(BlendingError, match=problem):
        BlendedMegatronDatasetBuilder(ListDataset, sizes, lambda: True, config(**fields))


@pytest.mark.parametrize("size", [5, None])
def test_samples_of_a_part_without_tokens_are_refused(size):
    for blend in ((["data/empty"], None), (["data/a", "data/empty"], None if size is None else [1, 1])):
        with pytest.raises(BlendingError, match="the train part of 'empty' has 2 sequences and no tokens"):
            build([size, 0, 0], blend=blend, split="1")
    (train, *_) = build([5, 0, 0], blend=(["data/a", "data/empty"], [1, 0]), split="1")
    assert len(train) == 5, "weight 0 asks for no samples"
    absent = build([5, 0, 0], blend=(["data/c", "data/d"], None), split="98,2")[1]
    assert absent is None, "three sequences leave none for 2 percent, and none are asked"
    (_, valid, _) = build([5, 0, 0], blend=(["data/a", "data/c"], [1, 1]), split="98,2")
    assert len(valid) == 0, "an empty part among others, and no samples are asked"
    with pytest.raises(BlendingError, match="the valid part of 'c' has 0 sequences and no tokens"):
        build([5, 1, 0], blend=(["data/a", "data/c"], [1, 1]), split="98,2")
    with pytest.raises(BlendingError, match=r"2 datasets gives no sample.*the datasets, from 0: data/c, data/d"):
        build([None, 0, 0], blend=(["data/c", "data/d"], None), split="1", sequence_length=500)


def test_a_config_without_a_blend_is_refused_for_a_class_that_reads_prefixes():
    with pytest.raises(BlendingError, match="neither blend nor blend_per_split, and GPTDataset reads prefixes"):
        BlendedMegatronDatasetBuilder(GPTDataset, [10, 0, 0], lambda: True, config())
    with pytest.raises(BlendingError, match=r"without a prefix ListDataset\.build_low_level_dataset fails: KeyError"):
        build([10, 0, 0])


def test_a_blend_by_hand_is_checked_too():
    made, kinds = config(), [("a", Split.train), ("b", Split.valid)]
    parts = [GPTDataset(ListSource([[1, 2, 3]]), name, range(1), 0, split, made) for name, split in kinds]
    with pytest.raises(BlendingError, match="several kinds"):
        BlendedDataset(parts, [1, 1], 10, made)
    with pytest.raises(BlendingError, match="no datasets"):
        BlendedDataset([], None, 10, made)
    with pytest.raises(BlendingError, match=r"weight 0 is 0\.5; without a size weights are whole numbers of samples"):
        BlendedDataset(parts[:1], [0.5], None, made)
    with pytest.raises(BlendingError, match="2 weights for 1 datasets"):
        BlendedDataset(parts[:1], [1, 2], 10, made)
    same = [GPTDataset(ListSource([[1, 2, 3]]), name, range(1), 0, Split.train, made) for name in "aab"]
    with pytest.raises(BlendingError, match="two datasets are named 'a'; name them apart by dataset_names"):
        BlendedDataset(same[:2], [1, 1], 10, made)
    with pytest.raises(BlendingError, match="1 weights for 2 datasets"):
        BlendedDataset(same[1:], [1], 10, made)
    with pytest.raises(BlendingError, match="size is -1"):
        BlendedDataset(parts[:1], [1], -1, made)
    with pytest.raises(BlendingError, match="num_samples is -1"):
        GPTDataset(ListSource([[1, 2, 3]]), "a", range(1), -1, Split.train, made)
    with pytest.raises(BlendingError, match=r"weight 0 is -1.*the datasets, from 0: a"):
        BlendedDataset(parts[:1], [-1], 10, made)
    with pytest.raises(BlendingError, match=r"sequences 0\.\.4 are asked of the 1 it has"):
        GPTDataset(ListSource([[1]]), "a", range(5), 1, parts[0].index_split, made)


def test_the_config_of_every_kind_of_dataset_needs_no_tokenizer():
    plain = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=4, blend=(["x"], None), split="9,1")
    assert plain.split_matrix == [(0.0, 0.9), (0.9, 1.0), None]


def test_without_the_extra_that_reads_prefixes_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(prefixes, "find_spec", lambda name: None)
    made = config(blend=(["data/a"], None), split="1")
    with pytest.raises(BlendingError, match=r"data/a: .* pip install 'sixfold-blending\[indexed\]'"):
        BlendedMegatronDatasetBuilder(GPTDataset, [5, 0, 0], lambda: True, made).build()
