"""``order="megatron"`` beside megatron-core 0.16.1: the same arrays, the same files, the same samples.

``--megatron-cases 1000`` puts that many random configs to both, each at one level of the compiled kernels.
"""

import os
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
from megatron_peer import (
    arrays_of,
    assert_same_indices,
    build,
    build_peer,
    files_of,
    parts_of,
    random_case,
    would_loop_for_ever,
    write_pairs,
)

from sixfold.blending import BlendingError, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.megatron.document_index import EpochPlan, document_index, plan_epochs, shuffle_dtype
from sixfold.blending.megatron.greedy import exhaustive, greedy
from sixfold.blending.megatron.index_order import IndexOrder, build_indices
from sixfold.blending.megatron.sample_counts import normalized
from sixfold.blending.megatron.sample_index import sample_index
from sixfold.blending.numbers.kernels import forced, levels
from sixfold.blending.source import ListSource


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # it guards against a power cut, which no test makes


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"), np.random.default_rng(0))


def assert_same_samples(ours, theirs, positions):
    for dataset in getattr(theirs, "datasets", [theirs]):
        dataset.masks_and_position_ids_are_cacheable = False  # it hands a first padded sample's mask to all others
    for position in positions:
        got, expected = ours[position], theirs[position]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(got[name], expected[name].numpy()), f"{name} of position {position}"
        assert int(got.get("dataset_id", 0)) == int(expected.get("dataset_id", 0))


def compare_case(seed, prefixes, folder):
    """What came of one random config: "identical", or why there was nothing to compare."""
    rng = np.random.default_rng(seed)
    fields, sizes = random_case(rng, prefixes)
    try:
        ours = build(fields, sizes, path_to_cache=str(folder / "ours"))
    except BlendingError as error:
        if would_loop_for_ever(str(error)):
            return "refused, the peer would loop for ever"
        with pytest.raises((IndexError, AssertionError)):
            build_peer(fields | {"path_to_cache": str(folder / "theirs")}, sizes)
        return "refused by both"
    if not all(part.part.tokens for part in parts_of(ours)):
        return "no samples are asked of a part without tokens, and the peer would loop for ever"
    try:
        theirs = build_peer(fields | {"path_to_cache": str(folder / "theirs")}, sizes)
    except AssertionError:
        return "refused by the peer"
    assert_same_indices(map(arrays_of, ours), map(arrays_of, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and len(mine):
            assert len(mine) == len(other)
            assert_same_samples(mine, other, {0, len(mine) - 1, *rng.integers(0, len(mine), 3).tolist()})
    assert files_of(folder / "ours") == files_of(folder / "theirs")
    return "identical"


@pytest.mark.filterwarnings("ignore:.*more than once")
@pytest.mark.slow
def test_indices_cache_names_files_and_samples_are_identical_over_random_configs(
    megatron_chunk, prefixes, tmp_path, record_property
):
    found = []
    for seed in megatron_chunk:
        with forced(levels()[seed % len(levels())]):
            found.append(compare_case(seed, prefixes, tmp_path / str(seed)))
    record_property("megatron_chunk", Counter(found))
    assert 4 * found.count("identical") >= len(found), found


def test_a_sample_reads_the_documents_between_two_rows_and_why_tells_the_same():
    documents = [[d * 100 + i for i in range(length)] for d, length in enumerate([30, 3, 0, 4, 50, 11])]
    config = GPTDatasetConfig(random_seed=3, sequence_length=8, order="megatron", token_dtype=np.int64)
    data = GPTDataset(ListSource(documents), None, range(6), 20, Split.train, config)
    for k in range(len(data)):
        j = data.shuffle_index[k]
        (i, offset), (i_next, offset_next) = data.sample_index[j].tolist(), data.sample_index[j + 1].tolist()
        if i == i_next:
            sample = documents[data.document_index[i]][offset : offset_next + 1]
        else:
            sample = documents[data.document_index[i]][offset:]
            for d in data.document_index[i + 1 : i_next]:
                sample = sample + documents[d]
            sample = sample + documents[data.document_index[i_next]][: offset_next + 1]
        got = data[k]
        assert (got["tokens"].tolist(), got["labels"].tolist()) == (sample[:-1], sample[1:])
        told = [documents[part.document][part.offset : part.offset + part.length] for part in data.why(k).ranges]
        assert list(chain(*told)) == sample[:-1]
        assert all(part.epoch is None for part in data.why(k).ranges)


def naive_greedy(weights, size, sizes=None):
    """The largest lag by fractions, each step rounded to float64 as the definition says."""
    given, found = [0] * len(weights), []
    for n in range(size):
        lags = [
            (float(Fraction(float(Fraction(w) * max(n, 1))) - given[i]), -i)
            for i, w in enumerate(weights)
            if sizes is None or given[i] < sizes[i]
        ]
        best = -max(lags)[1]
        found.append((best, given[best]))
        given[best] += 1
    return found


@pytest.mark.parametrize("datasets", [1, 2, 7, 31, 32, 60])
def test_greedy_and_exhaustive_are_the_two_roundings_of_their_definition(datasets):
    rng = np.random.default_rng(datasets)
    for weights in ((rng.random(datasets) + 0.001).tolist(), rng.integers(1, 4, datasets).astype(float).tolist()):
        shares = normalized(weights)
        assert list(zip(*(array.tolist() for array in greedy(shares, 80)), strict=True)) == naive_greedy(shares, 80)
    sizes = rng.integers(1, 6, datasets).tolist()
    shares = [size / sum(sizes) for size in sizes]
    found = list(zip(*(array.tolist() for array in exhaustive(sizes)), strict=True))
    assert found == naive_greedy(shares, sum(sizes), sizes)


@pytest.mark.parametrize(("tokens", "sequence_length", "rows"), [(2**24 + 3, 1, 2**24 + 4), (2**25 + 1, 2**20, 32)])
def test_the_number_of_rows_is_rounded_in_float32_as_the_peers_is(tokens, sequence_length, rows):
    assert plan_epochs(tokens, None, sequence_length, 0, keep_partial=True).samples == rows
    assert -(-tokens // sequence_length) == rows + (1 if sequence_length > 1 else -1), (
        "exact numbers have one more or less"
    )


def test_rows_behind_the_last_token_are_padding():
    documents = [list(range(1, 12)), [], [20, 21, 22]]
    config = GPTDatasetConfig(random_seed=3, sequence_length=4, order="megatron")
    data = GPTDataset(ListSource(documents), None, range(3), None, Split.train, config)
    longer = replace(data.order.plan, samples=6)  # 14 tokens: samples 3 and 4 of 4 begin behind or near the end
    order = IndexOrder(data.part, longer, build_indices(data.part, longer, 3))
    data.__dict__["order"] = order
    line = [token for d in data.document_index for token in documents[d]]
    for k, j in enumerate(data.shuffle_index.tolist()):
        expected = (line[j * 4 : j * 4 + 5] or line[-1:]) + [-1] * 5
        got = data[k]
        assert got["tokens"].tolist() == [max(0, token) for token in expected[:4]]
        assert got["loss_mask"].tolist() == [float(token != -1) for token in expected[1:5]]


@pytest.mark.parametrize(("documents", "dtype"), [(2**31 - 1, np.int32), (2**31, np.int64)])
def test_more_places_than_int32_counts_make_an_int64_sample_index(documents, dtype):
    class Long:  # stands for a document index of that many places
        size = documents

    plan = EpochPlan(epochs=1, tokens=0, sequence_length=4, extra=1, samples=0, before_last=None)
    assert sample_index(Long(), np.zeros(0, dtype=np.int64), plan).dtype == dtype


def test_a_shuffle_index_is_uint32_up_to_2_to_the_32_less_3_samples():
    assert shuffle_dtype(2**32 - 3) == np.uint32
    assert shuffle_dtype(2**32 - 2) == np.int64


def test_documents_beyond_int32_are_refused():
    plan = EpochPlan(epochs=1, tokens=5, sequence_length=4, extra=1, samples=1, before_last=None)
    with pytest.raises(BlendingError, match="has a document 2147483648"):
        document_index(np.array([5, 2**31]), plan, np.random.RandomState(0))


@pytest.mark.filterwarnings("ignore:.*more than once")
def test_several_validation_sets_are_those_of_the_peer_also_a_prefix_twice(prefixes, tmp_path):
    fields = {"random_seed": 3, "sequence_length": 16, "multiple_validation_sets": True}
    fields["blend_per_split"] = [(prefixes[:2], [1, 2]), ([*prefixes[:2], prefixes[0]], None), None]
    ours = build(fields, [50, 9, 0], path_to_cache=str(tmp_path / "ours"))[1]
    theirs = build_peer(fields | {"path_to_cache": str(tmp_path / "theirs")}, [50, 9, 0])[1]
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs, strict=True):
        expected = arrays_of(other)
        assert all(np.array_equal(array, expected[name]) for name, array in arrays_of(mine).items())
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
