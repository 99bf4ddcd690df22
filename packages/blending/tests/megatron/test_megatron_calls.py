"""Calls as Megatron's users and its own tests write them: the peer's config fields, mock data, a blend by hand."""

import logging

import numpy as np
import pytest
from blending_helpers import Tokenizer, numbered
from megatron_peer import as_rank_0, peer

from sixfold.blending import (
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    BlendingError,
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
    Split,
)
from sixfold.blending.source import ListSource

FIELDS = {"random_seed": 7, "sequence_length": 64, "tokenizer": Tokenizer(), "reset_position_ids": False}
FIELDS |= {"reset_attention_mask": False, "eod_mask_loss": False}

IGNORED = {
    "object_storage_cache_path": "/tmp/idx",
    "data_parallel_size": 8,
    "sequence_parallel_size": 2,
    "context_parallel_size": 1,
    "fast_cache_load": True,
    "defer_npy_index_mmap": True,
    "sequences_per_dataset": {"a": (10, 10)},
    "hybrid_context_parallel": False,
}


def test_every_field_of_the_peers_config_is_known_here():
    theirs = peer("gpt_dataset").GPTDatasetConfig
    names = {name for name, field in theirs.__dataclass_fields__.items() if field.init}
    assert names - {name for name, field in GPTDatasetConfig.__dataclass_fields__.items() if field.init} == set()


@pytest.mark.parametrize("name", IGNORED)
def test_fields_that_need_nothing_here_are_taken_with_one_line_for_who_debugs(name, caplog):
    value = IGNORED[name]
    with caplog.at_level(logging.DEBUG, "sixfold.blending"):
        assert getattr(GPTDatasetConfig(**FIELDS, **{name: value}), name) == value
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([] if value is False else [f"{name}={value!r} is taken and has no effect here"])


def test_fields_that_change_what_a_sample_is_are_refused_by_name_with_a_remedy():
    with pytest.raises(BlendingError, match=r"hybrid_context_parallel is True.*leave it out.*cu_seqlens"):
        GPTDatasetConfig(**FIELDS, hybrid_context_parallel=True)
    for wrong in ({"data_parallel_size": 0}, {"context_parallel_size": -1}, {"sequence_parallel_size": 1.5}):
        with pytest.raises(BlendingError, match=next(iter(wrong))):
            GPTDatasetConfig(**FIELDS, **wrong)


@pytest.mark.parametrize("order", ["megatron", "stateless", "apportioned"])
@pytest.mark.parametrize("sizes", [[100, 30, 5], [None, None, None]], ids=str)
def test_a_config_without_a_blend_gives_mock_data(order, sizes):
    made = GPTDatasetConfig(**FIELDS, order=order)
    assert made.mock
    assert made.split == "1,1,1"
    parts = BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, made).build()
    for part, size in zip(parts, sizes, strict=True):
        assert isinstance(part, MockGPTDataset)
        assert len(part) >= (size or 400_000)
        tokens = part[3]["tokens"]
        follows = (tokens[1:] == (tokens[:-1] + 1) % 256) | (tokens[:-1] == 0) | (tokens[1:] == 0)
        assert follows.all(), "numbers count up to the end of a document"
    with pytest.raises(BlendingError, match=r"GPTDataset reads prefixes.*MockGPTDataset"):
        BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, made)
    given = GPTDatasetConfig(**FIELDS, blend=(["a"], None), split="1")
    with pytest.raises(BlendingError, match=r"MockGPTDataset.*without blend"):
        BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, given)


@pytest.mark.slow
def test_mock_data_in_megatrons_order_is_the_peers(tmp_path):
    gpt = peer("gpt_dataset")
    with as_rank_0():
        made = gpt.GPTDatasetConfig(**FIELDS, path_to_cache=str(tmp_path / "peer"))
        builder = peer("blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
        theirs = builder(gpt.MockGPTDataset, [100, 30, 5], lambda: True, made).build()
    made = GPTDatasetConfig(**FIELDS, order="megatron", path_to_cache=str(tmp_path / "ours"))
    ours = BlendedMegatronDatasetBuilder(MockGPTDataset, [100, 30, 5], lambda: True, made).build()
    for part, expected in zip(ours, theirs, strict=True):
        assert len(part) == len(expected)
        for number in (0, 7, len(part) - 1):
            for name in ("tokens", "labels", "loss_mask", "position_ids"):
                assert np.array_equal(part[number][name], expected[number][name].numpy()), (number, name)
    names = [{path.name for path in (tmp_path / who).iterdir() if path.suffix != ".json"} for who in ("ours", "peer")]
    assert names[0] == names[1]


def by_hand(weights, order, size=None):
    made = GPTDatasetConfig(**FIELDS | {"sequence_length": 8}, order=order)
    parts = [
        GPTDataset(ListSource(numbered([9] * documents)), name, range(documents), None, Split.train, made)
        for name, documents in (("a", 40), ("b", 30), ("c", 20))
    ]
    return BlendedDataset(parts, weights, size, made)


@pytest.mark.parametrize("order", ["megatron", "stateless", "apportioned"])
def test_weights_without_a_size_are_counts_of_samples_as_the_peer_takes_them(order):
    """Its ``BlendedDataset(datasets, weights, None, config)`` gives so many samples of each, all of them once."""
    data = by_hand([44, 12, 7], order)
    assert len(data) == 63
    dataset_N, sample_N = data.locate(range(63))
    assert np.bincount(dataset_N).tolist() == [44, 12, 7]
    for number, count in enumerate([44, 12, 7]):
        assert sorted(sample_N[dataset_N == number].tolist()) == list(range(count))
    if order == "megatron":
        expected = [np.zeros(63, dtype=np.int16), np.zeros(63, dtype=np.int64)]
        helpers = peer("helpers")
        helpers.build_exhaustive_blending_indices(*expected, [44, 12, 7], 3)
        assert data.dataset_index.tolist() == expected[0].tolist()
        assert data.dataset_sample_index.tolist() == expected[1].tolist()
    whole = by_hand(None, order)
    exact = by_hand([len(part) for part in whole.datasets], order)
    for array, other in zip(whole.locate(range(len(whole))), exact.locate(range(len(exact))), strict=True):
        assert np.array_equal(array, other)
    floats = by_hand([44.0, 12.0, 7.0], order)
    assert all(map(np.array_equal, floats.locate(range(63)), data.locate(range(63)))), "whole floats, as the peer"
    for wrong, problem in (
        ([44, 99, 7], r"99 samples of dataset 1 \(b\), which has \d+"),
        ([0.5, 0.3, 0.2], "weight 0 is 0.5.*without a size weights are whole numbers of samples"),
        ([1, 2], "2 weights for 3 datasets"),
    ):
        with pytest.raises(BlendingError, match=problem):
            by_hand(wrong, order)


def test_ids_that_are_text_are_said_to_be_text():
    class Words:
        sequence_lengths = np.array([4, 3], dtype=np.int32)
        dtype = np.dtype("<U4")

        def get(self, idx, offset=0, length=None):
            return np.array(["1", "2", "3", "4"])[offset : None if length is None else offset + length]

    made = GPTDatasetConfig(**FIELDS | {"sequence_length": 2})
    with pytest.raises(BlendingError, match=r"Words: its ids are text.*<U.*tokenize"):
        GPTDataset(Words(), "a", range(2), 10, Split.train, made).get_batch([0])
    with pytest.raises(BlendingError, match=r"text '17'.*whole numbers"):
        ListSource([[1, 2], ["17", 3]])


@pytest.mark.parametrize(
    ("ids", "dtype", "told"),
    [
        ([70_000], np.uint16, "id 70000; ids of uint16 are whole numbers 0..65535"),
        ([3, -1], np.uint16, "id -1;"),
        ([200], np.int8, "id 200; ids of int8 are whole numbers -128..127"),
        (np.array([5, -20_000], dtype=np.int16), np.uint16, "id np.int16.-20000.;"),
        ([2**63], np.uint64, "id 9223372036854775808;"),
        ([2**63, -1], np.int64, "id 9223372036854775808;"),
        ([1.0], np.int64, "id 1.0;"),
        ([None], np.int64, "id None;"),
    ],
)
def test_ids_that_a_list_source_cannot_hold_are_refused_and_not_made_others(ids, dtype, told):
    with pytest.raises(BlendingError, match=told):
        ListSource([[1, 2], ids], dtype)
    kept = ListSource([[1, 2], [np.uint64(7), np.int8(3)]], dtype)
    assert kept.tokens.tolist() == [1, 2, 7, 3]
    assert kept.tokens.dtype == dtype
