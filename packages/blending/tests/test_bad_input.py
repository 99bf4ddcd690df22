"""Bad input, row by row of the spec's table: one typed error that says the thing, its value, the rule and what to do.

Rows that need files or ranks are elsewhere: pairs that are missing, cut or do not fit in test_pairs.py; caches that are
cut, stale, of other options or pickled in test_index_cache.py; an error on one rank in ranks/; states in test_state.py.
"""

import os

import numpy as np
import pytest
from blending_helpers import ListDataset, config, numbered

from sixfold.blending import (
    BlendChange,
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    BlendingError,
    GPTDataset,
    Split,
)
from sixfold.blending.order import QuotaTree, apportion, exhaustive, greedy
from sixfold.blending.source import ListSource

ORDERS = ("stateless", "apportioned", "megatron")
AB = (["a", "b"], [1, 1])
NAN, INF = float("nan"), float("inf")


class Corpus(dict):
    """Sources by prefix; any other prefix is a small one."""

    def __missing__(self, prefix):
        return self["b"]


@pytest.fixture(autouse=True)
def corpus(monkeypatch):
    lists = {"a": [20] * 50, "b": [7] * 31, "one": [5], "empty": [0, 0], "none": []}
    held = Corpus({name: ListSource(numbered(lengths)) for name, lengths in lists.items()})
    monkeypatch.setattr(ListDataset, "pairs", held)
    return held


def build(blend=AB, sizes=(10, 0, 0), split="1", **fields):
    made = config(**({"blend": blend, "split": split} | fields))
    return BlendedMegatronDatasetBuilder(ListDataset, list(sizes), lambda: True, made).build()


def refused(problem, *words):
    """Exactly one typed error, which has every one of ``words``."""
    with pytest.raises(BlendingError) as caught:
        problem()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    return str(caught.value)


in_every_order = pytest.mark.parametrize("order", ORDERS)


# Splits: not one to three numbers, or none above 0.


@pytest.mark.parametrize(
    "split", ["-1,5,5", "+-1", "abc", "-1,abc5,5", "1,2,3,4", "0,0,0", "0", "", ",", "nan", "inf,1"]
)
def test_a_split_that_is_none_is_refused_with_the_string_and_the_rule(split):
    refused(lambda: config(blend=AB, split=split), repr(split), "one to three numbers >= 0", "not all 0", '"98,2,0"')


# Weights


WEIGHTS = {
    "nan": ([1, NAN], ["weight 1", "nan", "finite numbers >= 0"]),
    "infinite": ([INF, 1], ["weight 0", "inf", "finite numbers >= 0"]),
    "negative": ([1, -0.5], ["weight 1", "-0.5", "finite numbers >= 0"]),
    "negative infinity": ([1, -INF], ["weight 1", "-inf", "finite numbers >= 0"]),
    "all zero": ([0, 0.0], ["all 2 weights are 0", "at least one is positive"]),
    "too few": ([1], ["2 prefixes and 1 weights", "one weight for each"]),
    "too many": ([1, 2, 3], ["2 prefixes and 3 weights", "one weight for each"]),
}


@in_every_order
@pytest.mark.parametrize("kind", WEIGHTS)
def test_unfit_weights_are_refused_with_index_value_and_place_when_the_config_is_made(kind, order):
    weights, words = WEIGHTS[kind]
    refused(lambda: config(blend=(["a", "b"], weights), split="1", order=order), *words, "blend")
    per_split = [AB, (["a", "b"], weights), None]
    refused(lambda: config(blend_per_split=per_split, order=order), *words, "blend_per_split[1] (valid)")


@pytest.mark.parametrize("kind", list(WEIGHTS)[:5])
def test_unfit_weights_of_a_change_and_of_the_pure_functions_are_refused_alike(kind):
    weights, words = WEIGHTS[kind]
    change = BlendChange(at=7, blend=(["a", "b"], weights))
    refused(lambda: config(blend=AB, split="1", changes=[change]), *words, "changes[0].blend")
    for function in (QuotaTree, lambda w: apportion(w, 10)):
        refused(lambda call=function: call(weights), *words)
    if kind != "all zero":
        refused(lambda: greedy(weights, 10), *words)


def test_weight_0_removes_a_dataset_but_is_refused_in_the_peers_order():
    refused(lambda: build((["a", "b"], [1, 0.0]), order="megatron"), "weight 1", "0.0", "> 0", "leave the dataset out")
    refused(lambda: greedy([1, 0], 10), "weight 1", "0", "> 0", "leave the dataset out")
    for order in ("stateless", "apportioned"):
        assert build((["a", "b"], [1, 0.0]), order=order)[0].counts(10).tolist() == [10, 0]


def test_a_weight_too_small_for_one_sample_of_a_period_is_refused_with_the_datasets_name():
    refused(lambda: build((["a", "b"], [1, 1e-13])), "weight 1", "1e-13", "rounds to 0", "give it more, or 0", "a, b")


# Prefixes and blends


@in_every_order
@pytest.mark.parametrize("blend", [([], None), ([], [])], ids=str)
def test_a_blend_without_a_dataset_is_refused(order, blend):
    refused(lambda: config(blend=blend, split="1", order=order), "blend", "no dataset", "at least one prefix")


@pytest.mark.parametrize("order", ["stateless", "apportioned"])
def test_the_same_prefix_twice_is_refused_and_the_error_says_to_give_the_sum(order):
    words = "'a'", "more than once", "one entry with the sum"
    refused(lambda: build((["a", "b", "a"], [1, 2, 3]), order=order), *words, "blend")
    if order == "stateless":
        change = BlendChange(at=7, blend=(["a", "a"], [1, 2]))
        refused(lambda: build(changes=[change]), *words, "changes[0].blend")


def test_the_same_prefix_twice_is_allowed_with_a_warning_in_the_peers_order():
    with pytest.warns(UserWarning, match="'a' more than once"):
        assert len(build((["a", "a"], [1, 2]), order="megatron")[0].datasets) == 2


def test_a_missing_prefix_is_named():
    pytest.importorskip("sixfold.indexed_data", reason="needs sixfold-indexed-data, which reads prefixes")
    made = config(blend=(["no/where"], None), split="1")
    refused(BlendedMegatronDatasetBuilder(GPTDataset, [5, 0, 0], lambda: True, made).build, "no/where")


@pytest.mark.parametrize(("order", "weighted"), [("apportioned", True), ("apportioned", False), ("megatron", False)])
@pytest.mark.slow
def test_too_many_datasets_for_int16_are_refused_when_the_config_is_made(order, weighted):
    def made(datasets):
        weights = np.full(datasets, 0.5) if weighted else None
        return config(blend=([f"d{number}" for number in range(datasets)], weights), split="1", order=order)

    refused(lambda: made(32_767), "32767 datasets", "int16", "fewer than 32767", 'order="stateless"')
    if order == "megatron":
        assert len(made(32_766).blend[0]) == 32_766


def test_the_pure_orders_refuse_too_many_datasets_for_int16_too():
    for function in (lambda: greedy([1] * 32_767, 5), lambda: exhaustive([1] * 32_767)):
        refused(function, "32767 datasets", "int16", 'order="stateless"')


def test_the_stateless_order_takes_more_datasets_than_int16_counts():
    tree = QuotaTree.from_counts([1] * 40_000)
    assert np.array_equal(np.sort(tree.locate(np.arange(40_000))[0]), np.arange(40_000))


# Configs that contradict themselves


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sequence_length": 0}, ["sequence_length", "0", ">= 1"]),
        ({"sequence_length": -8}, ["sequence_length", "-8", ">= 1"]),
        ({"order": "random"}, ["order", "'random'", '"stateless", "megatron", "apportioned"']),
        ({"blend_per_split": [AB, None, None]}, ["blend and blend_per_split", "give one"]),
        ({"split": None}, ["blend", "without split", '"98,2,0"']),
        ({"changes": [BlendChange(-1, AB)]}, ["changes[0].at", "-1", ">= 0"]),
        ({"changes": [BlendChange(5, AB), BlendChange(4, AB)]}, ["changes", "5 and 4", "sort changes"]),
        ({"changes": [BlendChange(5, AB), BlendChange(5, AB)]}, ["changes", "5 and 5", "sort changes"]),
        ({"changes": [BlendChange(5, sequence_length=0)]}, ["changes[0].sequence_length", "0", ">= 1"]),
        ({"changes": [BlendChange(5, AB)], "order": "megatron"}, ["changes", '"megatron"', 'order="stateless"']),
        ({"changes": [BlendChange(5, AB)], "order": "apportioned"}, ["changes", '"apportioned"', 'order="stateless"']),
    ],
    ids=str,
)
def test_a_config_that_contradicts_itself_is_refused_when_it_is_made(fields, words):
    refused(lambda: config(**({"blend": AB, "split": "1"} | fields)), *words)


@in_every_order
def test_weights_without_a_size_are_refused_when_the_builder_is_made(order):
    made = config(blend=AB, split="50,50", order=order)
    for sizes, part in (([None, 5, 0], "train"), ([5, None, 0], "valid")):
        problem = lambda s=sizes: BlendedMegatronDatasetBuilder(ListDataset, s, lambda: True, made)  # noqa: E731
        refused(problem, part, "weights but no size", "give a size, or None for the weights")


# Parts that have too little


@in_every_order
@pytest.mark.parametrize("prefix", ["empty", "none"])
def test_a_part_without_tokens_of_which_samples_are_asked_is_refused(order, prefix):
    words = "train part", repr(prefix), "no tokens", "larger share of the split or leave the dataset out"
    refused(lambda: build((["a", prefix], [1, 1]), order=order), *words)
    refused(lambda: build(([prefix], None), order=order), *words)


@in_every_order
def test_a_split_that_leaves_a_dataset_without_documents_is_refused(order):
    words = "'one'", "0 sequences and no tokens", "larger share of the split or leave the dataset out"
    refused(lambda: build((["a", "one"], [1, 1]), (10, 5, 0), "50,50", order=order), *words)


@in_every_order
def test_a_sequence_longer_than_the_data_takes_as_many_epochs_as_it_needs(order):
    (data, *_) = build((["one"], None), (6, 0, 0), order=order, sequence_length=12)
    text = "".join(map(chr, data.get_batch(range(6))["tokens"].ravel().tolist()))
    assert len(text) == 72
    for row in data.get_batch(range(6))["tokens"]:
        assert np.array_equal(np.diff(row) % 5, np.ones(11)), "1 2 3 4 5 1 2 ... of one document of five tokens"


@pytest.mark.parametrize("order", ["stateless", "apportioned"])
def test_a_sequence_longer_than_one_epoch_of_every_dataset_is_refused(order):
    words = "no sample", "sequence_length 500", "one, b", "shorter sequence_length or a size"
    refused(lambda: build((["one", "b"], None), (None, 0, 0), order=order, sequence_length=500), *words)


@in_every_order
def test_one_epoch_that_is_shorter_than_a_sample_has_no_sample(order):
    data = build((["one"], None), (None, 0, 0), order=order, sequence_length=500)[0]
    assert len(data) == 0
    with pytest.raises(IndexError, match="position 0"):
        data.get_batch([0])


def test_a_blend_that_exhausts_a_dataset_is_refused_with_dataset_asked_and_has():
    made = config(order="apportioned")
    parts = [GPTDataset(ListDataset.pairs[name], name, range(3), 2, Split.train, made) for name in "ab"]
    refused(lambda: BlendedDataset(parts, [1, 1], 100, made), "50 samples", "dataset 0 (a)", "built with 7")
    # The same in the peer's order, with the surplus in the message: test_index_cache.py.


# Types


class Pointers:
    """Pointers of sequences of four uint16 ids, computed where they are asked for."""

    def __init__(self, sequences, scale):
        self.sequences, self.scale = sequences, scale

    def __len__(self):
        return self.sequences

    def __getitem__(self, index):
        if isinstance(index, slice):
            index = np.arange(*index.indices(self.sequences))
        return np.int64(1) * index * self.scale if self.scale else np.zeros_like(index) + 4


class Endless:
    """A corpus of more than 2^31 documents, none of which is stored; a document's ids tell its number."""

    dtype = np.dtype(np.uint16)

    def __init__(self, sequences):
        self.sequence_lengths, self.sequence_pointers = Pointers(sequences, 0), Pointers(sequences, 8)

    def get(self, idx, offset=0, length=None):
        digits = np.array([idx >> 24, idx >> 16 & 255, idx >> 8 & 255, idx & 255], dtype=np.uint16)
        return digits[offset:][:length]


BEYOND = range(2**31 - 3, 2**31 + 1000)


def test_more_than_2_to_31_documents_are_read_exactly_in_the_stateless_order():
    made = config(sequence_length=4)
    data = GPTDataset(Endless(BEYOND.stop), "a", BEYOND, len(BEYOND), Split.train, made)
    digits = data.get_batch(range(len(BEYOND)))["tokens"]
    numbers = digits @ np.array([2**24, 2**16, 2**8, 1])
    assert np.array_equal(np.sort(numbers), np.array(BEYOND)), "each of them once"
    assert data.why(5).ranges[0].document == numbers[5]


@pytest.mark.parametrize("order", ["apportioned", "megatron"])
def test_documents_beyond_int32_are_refused_in_the_orders_whose_document_index_is_int32(order):
    made = config(sequence_length=4, order=order)

    def problem():
        return GPTDataset(Endless(BEYOND.stop), "a", BEYOND, 100, Split.train, made).document_index

    refused(problem, "2147484647", "up to 2147483647", 'order="stateless"', "split the dataset")


@in_every_order
def test_integer_types_may_differ_within_a_blend(order):
    made = config(order=order)
    ids = {"a": ([300] * 90, np.uint16), "b": ([70_000] * 90, np.int32), "c": ([7] * 90, np.uint8)}
    parts = [
        GPTDataset(ListSource([sequence], dtype), name, range(1), 20, Split.train, made)
        for name, (sequence, dtype) in ids.items()
    ]
    batch = BlendedDataset(parts, [1, 1, 1], 30, made).get_batch(range(30))
    assert batch["tokens"].dtype == np.int64
    assert np.array_equal(batch["tokens"][:, 0], np.array([300, 70_000, 7])[batch["dataset_id"]])


@in_every_order
@pytest.mark.parametrize(
    ("ids", "dtype", "token_dtype", "words"),
    [
        ([2.5] * 90, np.float32, np.int64, ["2.5", "float32", "whole numbers"]),
        ([70_000] * 90, np.int32, np.int16, ["70000", "int32", "int16", "token_dtype"]),
        ([2**40] * 90, np.int64, np.int32, ["1099511627776", "int64", "int32", "token_dtype"]),
    ],
    ids=["float", "int32 in int16", "int64 in int32"],
)
def test_a_blend_with_ids_that_the_batch_does_not_hold_is_refused_with_the_dataset(
    order, ids, dtype, token_dtype, words, tmp_path
):
    made = config(order=order, token_dtype=token_dtype)
    sources = [ListSource([[5] * 90], np.uint8), ListSource([ids], dtype)]
    for source, prefix in zip(sources, [f"{tmp_path}/narrow", f"{tmp_path}/wide"], strict=True):
        source.path_prefix = prefix
    parts = [
        GPTDataset(source, name, range(1), 20, Split.train, made)
        for source, name in zip(sources, ["a", "wide"], strict=True)
    ]
    data = BlendedDataset(parts, [1, 1], 20, made)
    refused(lambda: data.get_batch(range(10)), *words, f"{tmp_path}/wide")


# Caches of both orders that have one, for sources that have no files


@pytest.mark.parametrize("order", ["apportioned", "megatron"])
def test_a_cut_cache_and_one_of_other_data_are_built_anew(order, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    fields = {"order": order, "path_to_cache": str(tmp_path)}

    def arrays(**more):
        data = build(**({"order": order} | more))[0]
        names = ("document_index", "sample_index", "shuffle_index")
        return [getattr(part, name).tolist() for part in data.datasets for name in names]

    whole = arrays(**fields)
    for path in sorted(tmp_path.glob("*.npy")):
        os.truncate(path, path.stat().st_size - 4)
        assert arrays(**fields) == whole
    corpus["a"] = ListSource(numbered([15, 25] * 25))  # as many documents and tokens
    assert arrays(**fields) == arrays() != whole


def one_epoch_each(size, **fields):
    made = config(**fields)
    parts = [
        GPTDataset(ListSource(numbered([40] * 50)), name, range(50), None, Split.train, made)
        for name in ("wiki", "code")
    ]
    return BlendedDataset(parts, [0.5, 0.5], size, made)


def test_a_blend_of_a_size_behind_the_one_epoch_of_a_dataset_says_which_and_what_to_do():
    epoch = (50 * 40 - 1) // 8
    assert one_epoch_each(2 * epoch).get_batch(range(2 * epoch))["tokens"].shape == (2 * epoch, 8)
    told = rf"needs {epoch + 1} samples of dataset 1 \(code\).*one epoch of {epoch} samples; make it with num_samples=0"
    with pytest.raises(BlendingError, match=told):
        one_epoch_each(2 * epoch + 1)
    with pytest.raises(BlendingError, match="a second sequence length of dataset 0"):
        one_epoch_each(100, changes=[BlendChange(at=50, sequence_length=16)])
    with pytest.raises(BlendingError, match=rf"sample {epoch} of '(wiki|code)' is asked.*one epoch of {epoch} samples"):
        one_epoch_each(10).get_batch([2 * epoch + 1])  # behind its size a blend goes on, but not these
