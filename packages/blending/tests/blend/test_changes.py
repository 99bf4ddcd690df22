"""Changes of weights, datasets and sequence lengths, one by one; test_elastic_histories.py has them at random."""

import numpy as np
import pytest
from blending_helpers import NaiveLine, blend, config, dataset, naive_quotas, numbered, sequences_of

from sixfold.blending import BlendChange, BlendedDataset, BlendingError, GPTDataset, Split
from sixfold.blending.order import QuotaTree
from sixfold.blending.source import ListSource


def test_each_dataset_goes_on_from_its_own_count_and_the_past_stays():
    named = {"a": numbered([50, 60]), "b": numbered([40]), "c": numbered([70])}
    changes = [BlendChange(at=100, blend=(["a", "c"], [0.4, 0.6])), BlendChange(at=150, blend=(["b", "a"], [3, 1]))]
    data = blend(named, [0.7, 0.3], changes=changes)
    plain = blend({"a": named["a"], "b": named["b"]}, [0.7, 0.3])
    number, sample = data.locate(range(300))
    old_number, old_sample = plain.locate(range(300))
    assert number[:100].tolist() == old_number[:100].tolist()
    assert sample[:100].tolist() == old_sample[:100].tolist()
    assert number[100:].tolist() != old_number[100:].tolist()
    for one in range(3):
        assert sample[number == one].tolist() == list(range((number == one).sum()))
    fresh = QuotaTree([0.4, 0, 0.6]).locate(range(50))[0]
    assert number[100:150].tolist() == fresh.tolist(), "a change plants a tree of its own"
    assert not set(number[100:150].tolist()) & {1}
    assert set(number[150:].tolist()) == {0, 1}, "one that left comes back"
    for position in range(0, 300, 7):
        assert data.find(int(number[position]), int(sample[position])) == position
        assert data.counts(position).tolist() == np.bincount(number[:position], minlength=3).tolist()
    with pytest.raises(BlendingError, match="comes at no position"):
        data.find(2, int(data.counts(300)[2]))


def test_prefix_counts_stay_within_1_75_of_the_quotas_of_each_segment():
    named = {name: numbered([30]) for name in "abcd"}
    changes = [BlendChange(at=77, blend=(list("dab"), [5, 1, 1])), BlendChange(at=400, blend=(list("c"), [1]))]
    data = blend(named, [1, 1, 1, 1], changes=changes)
    quotas = np.array(naive_quotas([1, 1, 0, 5])) / 2**31
    for n in range(77, 400):
        assert np.abs(data.counts(n) - data.counts(77) - (n - 77) * quotas).max() < 1.75


def test_a_change_at_position_0_or_behind_the_end_is_harmless():
    named = {"a": numbered([50]), "b": numbered([40])}
    first = blend(named, [1], changes=[BlendChange(at=0, blend=(["b"], [1]), sequence_length=4)])
    assert set(first.locate(range(50))[0].tolist()) == {1}
    assert first[0]["tokens"].shape == (4,)
    late = blend(named, [1, 1], size=100, changes=[BlendChange(at=10**9, blend=(["b"], [1]))])
    assert np.array_equal(late.get_batch(range(100))["tokens"], blend(named, [1, 1]).get_batch(range(100))["tokens"])


def test_a_sequence_length_that_stays_the_same_begins_no_new_grid():
    named = {"a": numbered([50, 33])}
    same = blend(named, [1], changes=[BlendChange(at=7, sequence_length=8)])
    assert np.array_equal(same.get_batch(range(60))["tokens"], blend(named, [1]).get_batch(range(60))["tokens"])


def test_a_batch_over_two_sequence_lengths_is_refused_and_one_on_each_side_is_not():
    data = blend({"a": numbered([50]), "b": numbered([9])}, [1, 1], changes=[BlendChange(at=10, sequence_length=3)])
    with pytest.raises(BlendingError, match="positions 6 and 10 have sequence lengths 8 and 3"):
        data.get_batch(range(6, 12))
    assert data.get_batch(range(10))["tokens"].shape == (10, 8)
    assert data.get_batch(range(10, 14))["tokens"].shape == (4, 3)


def test_pieces_of_the_left_over_begin_documents_for_masks():
    lengths = [400]
    data = blend({"a": numbered(lengths)}, [1], changes=[BlendChange(at=5, sequence_length=20)], create_cu_seqlens=True)
    oracle = NaiveLine(lengths, 8)
    for _ in range(5):
        oracle.take()
    oracle.change(20)
    for position in range(5, 20):
        pieces = oracle.take()
        begins = np.cumsum([0, *(len(piece) for piece in pieces)]).tolist()
        documents = [data.why(position).ranges[i].offset for i in range(len(pieces))]
        assert data[position]["cu_seqlens"].tolist() == begins
        assert documents == [piece[0] for piece in pieces], "one document: the offset is the place on the line"


def test_changes_may_name_only_datasets_that_are_there():
    made = config(changes=[BlendChange(at=5, blend=(["z"], [1]))])
    part = GPTDataset(ListSource([[1, 2, 3]]), "a", range(1), 10, Split.train, made)
    with pytest.raises(BlendingError, match="the change at 5 names 'z'"):
        BlendedDataset([part], [1], 10, made)


def test_validation_keeps_the_first_blend():
    made = config(changes=[BlendChange(at=5, blend=(["b"], [1]))])
    parts = [GPTDataset(ListSource([[1, 2, 3]]), name, range(1), 0, Split.valid, made) for name in "ab"]
    data = BlendedDataset(parts, [1], 10, made)
    assert set(data.locate(range(50))[0].tolist()) == {0}


def test_changes_do_not_touch_the_datasets_given():
    part = dataset(sequences_of([40, 9]), changes=[BlendChange(at=3, sequence_length=4)])
    before = part.get_batch(range(20))["tokens"]
    BlendedDataset([part], [1], 100, part.config)
    assert np.array_equal(part.get_batch(range(20))["tokens"], before)
