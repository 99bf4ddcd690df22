"""``order="megatron"`` beside megatron-core 0.16.1: the same arrays, the same files, the same samples.

MEGATRON_CASES=1000 python -m pytest test_megatron.py -k identical        # as many random configs as asked for
"""

import os
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from megatron_peer import Tokenizer, build_peer, random_case, write_pairs

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.megatron.documents import EpochPlan, document_index, plan_epochs, shuffle_dtype, shuffle_index
from sixfold.blending.megatron.greedy import exhaustive, greedy
from sixfold.blending.megatron.index import IndexOrder, build_indices
from sixfold.blending.megatron.samples import sample_index
from sixfold.blending.megatron.weights import normalized
from sixfold.blending.source import ListSource

CASES = int(os.environ.get("MEGATRON_CASES", "10"))
GPT_ARRAYS = ("document_index", "sample_index", "shuffle_index")
BLEND_ARRAYS = ("dataset_index", "dataset_sample_index")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # it guards against a power cut, which no test makes


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"), np.random.default_rng(0))


def build(fields, sizes, **more):
    config = GPTDatasetConfig(tokenizer=Tokenizer(), order="megatron", **fields, **more)
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def arrays_of(data):
    """Every index of a dataset or blend by name; of a blend, its datasets' too."""
    if data is None:
        return {}
    if not hasattr(data, "datasets"):
        return {name: np.asarray(getattr(data, name)) for name in GPT_ARRAYS}
    found = {name: np.asarray(getattr(data, name)) for name in BLEND_ARRAYS}
    for number, dataset in enumerate(data.datasets):
        found |= {f"{number} {name}": array for name, array in arrays_of(dataset).items()}
    return found


def files_of(folder):
    """Content of every file that the peer knows, by name."""
    return {path.name: path.read_bytes() for path in Path(folder).glob("*") if not path.name.endswith("sixfold.json")}


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
        if "no tokens" in str(error) or "size 0 is 0" in str(error):
            return "refused, the peer would loop for ever"
        with pytest.raises((IndexError, AssertionError)):
            build_peer(fields | {"path_to_cache": str(folder / "theirs")}, sizes)
        return "refused by both"
    parts = [part for data in ours if data is not None for part in getattr(data, "datasets", [data])]
    if not all(part.part.tokens for part in parts):
        return "no samples are asked of a part without tokens, and the peer would loop for ever"
    try:
        theirs = build_peer(fields | {"path_to_cache": str(folder / "theirs")}, sizes)
    except AssertionError:
        return "refused by the peer"
    for mine, other in zip(ours, theirs, strict=True):
        got, expected = arrays_of(mine), arrays_of(other)
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            assert got[name].dtype == array.dtype, name
            assert np.array_equal(got[name], array), name
        if mine is not None and len(mine):
            assert len(mine) == len(other)
            assert_same_samples(mine, other, {0, len(mine) - 1, *rng.integers(0, len(mine), 3).tolist()})
    assert files_of(folder / "ours") == files_of(folder / "theirs")
    return "identical"


@pytest.mark.filterwarnings("ignore:.*more than once")
@pytest.mark.parametrize("first", range(0, CASES, 10))
def test_indices_cache_names_files_and_samples_are_identical_over_random_configs(first, prefixes, tmp_path):
    found = [compare_case(seed, prefixes, tmp_path / str(seed)) for seed in range(first, first + 10)]
    assert found.count("identical") >= 5, found


# The tables of the reference guide, with documents of its lengths.


def test_the_guides_document_index_has_every_document_once_per_epoch():
    source = ListSource([[0] * 4] * 10)
    config = GPTDatasetConfig(random_seed=1234, sequence_length=4, order="megatron", add_extra_token_to_sequence=False)
    data = GPTDataset(source, None, [5, 6, 7, 8, 9], 15, Split.train, config)
    assert data.document_index.dtype == np.int32
    assert data.document_index.size == 15, "E = 3 epochs of five documents"
    assert sorted(data.document_index.tolist()) == sorted([5, 6, 7, 8, 9] * 3)
    expected = np.array([5, 6, 7, 8, 9] * 3, dtype=np.int32)
    np.random.RandomState(1234).shuffle(expected)
    assert np.array_equal(data.document_index, expected)


def test_the_guides_sample_index():
    document_index = np.arange(7, dtype=np.int32)
    lengths = np.array([1536, 1536, 400, 200, 124, 1300, 2000])  # as its arrows say, and 300 tokens into document 5
    plan = EpochPlan(epochs=1, tokens=7096, sequence_length=1024, extra=1, samples=6, before_last=None)
    rows = sample_index(document_index, lengths, plan).tolist()
    assert rows[:4] == [[0, 0], [0, 1024], [1, 512], [2, 0]]
    assert rows[4] == [5, 300], "documents 2 to 4 are short"
    assert rows[5] == [6, 24], "document 5 has length 1300"


def test_the_guides_shuffle_index_is_a_permutation_by_the_seed():
    plan = EpochPlan(epochs=1, tokens=41, sequence_length=4, extra=1, samples=10, before_last=None)
    shuffle = shuffle_index(plan, np.random.RandomState(7))
    assert shuffle.dtype == np.uint32
    assert sorted(shuffle.tolist()) == list(range(10))
    expected = np.arange(10, dtype=np.uint32)
    np.random.RandomState(7).shuffle(expected)
    assert np.array_equal(shuffle, expected)


def test_the_guides_query_reads_the_documents_between_two_rows():
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


def test_the_guides_dataset_index_and_dataset_sample_index():
    dataset_index, dataset_sample_index = greedy([1 / 2, 1 / 4, 1 / 4], 4)
    assert dataset_index.tolist() == [0, 1, 2, 0]
    assert dataset_sample_index.tolist() == [0, 0, 0, 1]
    assert (dataset_index.dtype, dataset_sample_index.dtype) == (np.int16, np.int64)


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
        assert list(zip(*(array.tolist() for array in greedy(shares, 150)), strict=True)) == naive_greedy(shares, 150)
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
    with pytest.raises(BlendingError, match="document 2147483648 is asked"):
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
