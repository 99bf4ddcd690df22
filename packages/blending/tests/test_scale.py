"""Sizes that no array of this machine would hold: what is computed, and what is refused before memory is asked for."""

import tracemalloc

import numpy as np
import pytest
from blending_helpers import config, naive_key, naive_permute, numbered

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, Split
from sixfold.blending.blend import position_shuffle as shuffle
from sixfold.blending.blend.exact_counts import ApportionedBlend
from sixfold.blending.blend.position_shuffle import Shuffle
from sixfold.blending.builder import builder
from sixfold.blending.numbers.largest_remainder import apportion
from sixfold.blending.samples import document_shuffle as shuffled
from sixfold.blending.samples import token_line as line
from sixfold.blending.source import ListSource

LENGTHS = np.array([3, 40, 0, 21])  # of four documents, and again of the next four


class Computed:
    """An array that is a function of the index."""

    def __init__(self, size, dtype, function):
        self.size, self.dtype, self._function = size, np.dtype(dtype), function

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        if isinstance(key, slice):
            key = np.arange(*key.indices(self.size))
        return np.asarray(self._function(np.asarray(key, dtype=np.int64))).astype(self.dtype)[()]


class Endless:
    """So many documents of ``LENGTHS`` tokens in turn, none of them stored."""

    dtype = np.dtype(np.uint16)
    tokens = None

    def __init__(self, documents):
        before = np.cumsum(LENGTHS) - LENGTHS
        total = int(LENGTHS.sum())
        self.sequence_lengths = Computed(documents, np.int32, lambda i: LENGTHS[i % 4])
        self.sequence_pointers = Computed(documents, np.int64, lambda i: 2 * (i // 4 * total + before[i % 4]))

    def get(self, idx, offset=0, length=None):
        count = int(self.sequence_lengths[idx]) - offset if length is None else length
        return ((idx + offset + np.arange(count)) % 251).astype(np.uint16)


class EndlessDataset(GPTDataset):
    documents = 2**31 + 8

    @classmethod
    def build_low_level_dataset(cls, dataset_path, config):
        return Endless(EndlessDataset.documents)


def build(size, **fields):
    made = config(**({"blend": (["a", "b"], [3, 1]), "split": "1"} | fields))
    return BlendedMegatronDatasetBuilder(EndlessDataset, [size, 0, 0], lambda: True, made).build()[0]


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_more_documents_than_int32_numbers_are_refused_before_memory_is_asked_for(order):
    tracemalloc.start()
    with pytest.raises(BlendingError, match=r"has a document 2147483655; .* up to 2147483647: use order=\"stateless\""):
        build(10, order=order)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_corpus_of_five_billion_documents_starts_at_once_in_little_memory(monkeypatch):
    monkeypatch.setattr(EndlessDataset, "documents", 5_000_000_000)
    tracemalloc.start()
    data = build(10**9, blend=(["a"], None), sequence_length=512)
    batch = data.get_batch(range(4))
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    assert batch["tokens"].shape == (4, 512)
    for position in range(4):
        ranges = data.why(position).ranges
        assert max(part.document for part in ranges) > 2**31 - 1
        expected = [(part.document + part.offset + i) % 251 for part in ranges for i in range(part.length)]
        assert batch["tokens"][position].tolist() == expected


@pytest.mark.parametrize("document_shuffle", ["block", "global"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.slow
def test_an_epoch_that_grows_gives_the_samples_of_one_that_is_known_at_once(
    scattered, document_shuffle, level, monkeypatch
):
    lengths = np.random.default_rng(3).integers(0, 9, 4_100)  # blocks of 4 sequences
    members = np.flatnonzero(np.arange(4_100) % 7) if scattered else range(13, 4_100)
    source = ListSource(numbered(lengths), np.int32)

    def data():
        return GPTDataset(source, "a", members, 10**6, Split.train, config(document_shuffle=document_shuffle))

    whole = data()
    for kind in (line.TokenLine, shuffled.GloballyShuffledLine):
        monkeypatch.setattr(kind, "_slots_at_least", 1)
    monkeypatch.setattr(line, "_SLOTS_AT_A_TIME", 5)
    growing = data()
    per_epoch = whole.samples_per_epoch
    for positions in ([0], [5, 1], range(per_epoch - 4, per_epoch + 4), [3 * per_epoch], range(0, 2 * per_epoch, 97)):
        batch = growing.get_batch(positions)
        for name, array in whole.get_batch(positions).items():
            assert np.array_equal(batch[name], array), (list(positions), name)
        assert growing.why(positions[0]) == whole.why(positions[0])
    fresh = data()
    fresh.why(0)
    known, blocks = fresh.order.line._epochs[0][1].size, fresh.order.line.blocks
    if document_shuffle == "block":  # of a part shuffled as a whole test_shuffled.py has it
        assert known == blocks if scattered else known < blocks


@pytest.fixture
def no_table(monkeypatch):
    def fail(self):
        raise AssertionError("the table of the shuffle was made")

    monkeypatch.setattr(shuffle.Shuffle, "_make", fail)


def test_two_billion_apportioned_samples_of_a_thousand_datasets_are_located_and_found_without_a_table(no_table):
    size, weights = 2_000_000_000, np.random.default_rng(0).random(1000).tolist()
    counts_D = apportion(weights, size)
    blend = ApportionedBlend(counts_D, Shuffle(7, size), 8)
    ends_D, key = np.cumsum(counts_D), naive_key("apportioned", 7, size)
    for position in [0, 1, 123_456_789, size - 1]:
        number = naive_permute(key, size, position)
        dataset, sample = (int(array[0]) for array in blend.locate(np.array([position])))
        assert 0 <= sample < counts_D[dataset]
        assert ends_D[dataset] - counts_D[dataset] + sample == number
        assert blend.find(dataset, sample) == position
    assert blend.counts(size).tolist() == counts_D.tolist()


@pytest.mark.parametrize(("ahead", "begun"), [(60, True), (59, False)])
def test_only_a_table_that_costs_little_is_begun_in_advance(ahead, begun, monkeypatch):
    started = []
    monkeypatch.setattr(builder, "_TABLE_AHEAD", ahead)
    monkeypatch.setattr(shuffle.Shuffle, "start", lambda self: started.append(self.size) or self)
    monkeypatch.setattr(EndlessDataset, "documents", 40)
    data = build(60, order="apportioned")
    assert started == [60] * begun
    assert sorted(zip(*(array.tolist() for array in data.locate(range(60))), strict=True)) == sorted(
        zip(data.dataset_index.tolist(), data.dataset_sample_index.tolist(), strict=True)
    )
