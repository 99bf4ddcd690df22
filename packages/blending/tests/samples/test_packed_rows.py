"""Packed documents: which rows, which arrays, and what a document's pieces are."""

import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import EOD, blend, config, dataset, numbered, sequences_of
from packed_helpers import NaiveRows

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.documents.part import Part
from sixfold.blending.samples import document_shuffle, packed_rows
from sixfold.blending.samples.packed_rows import Windows, window_size
from sixfold.blending.source import ListSource

GOLDEN = Path(__file__).parent.parent / "golden" / "packed-1.json"


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(packed_rows, "WINDOW_AT_LEAST", 16)


def packed(texts, num_samples=1000, **fields):
    return dataset(texts, num_samples, **({"packing": "best_fit"} | fields))


def random_lengths(rng, documents=100, longest=30):
    return rng.integers(0, longest, documents).tolist()


@pytest.mark.parametrize("seed", range(6))
def test_every_array_is_what_loops_over_lists_say(seed, level):
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, int(rng.integers(1, 90)), int(rng.integers(2, 40)))
    lengths[0] += 1
    texts = numbered(lengths)
    S = int(rng.integers(2, 13))
    naive = NaiveRows(lengths, S, window=16 if S <= 8 else 32)
    data = packed(texts, sequence_length=S, create_document_ids=True, create_cu_seqlens=True)
    positions = rng.permutation(3 * naive.per_epoch)[:60]
    batch = data.get_batch(positions)
    for at, position in enumerate(positions.tolist()):
        tokens, labels, loss, places, numbers = naive.arrays(position, texts)
        assert batch["tokens"][at].tolist() == tokens
        assert batch["labels"][at].tolist() == labels
        assert batch["loss_mask"][at].tolist() == loss
        assert batch["position_ids"][at].tolist() == places
        assert batch["document_ids"][at].tolist() == numbers
    ids = batch["document_ids"]
    begins = np.diff(ids, axis=1, prepend=-1) != 0
    assert batch["cu_seqlens"].tolist() == [*np.flatnonzero(begins), ids.size]


def test_a_row_is_the_same_read_first_again_alone_or_among_others():
    lengths, S = random_lengths(np.random.default_rng(5), 200), 8
    naive, texts = NaiveRows(lengths, S), numbered(lengths)
    samples = np.random.default_rng(6).permutation(naive.per_epoch).tolist()
    for size in (1, 2, 7):
        data = packed(texts)
        for begin in range(0, 3 * size, size):  # the same rows three times: ranges of their own, of all, kept
            for again in range(3):
                batch = data.get_batch(samples[begin : begin + size])
                expected = [naive.arrays(sample, texts)[0] for sample in samples[begin : begin + size]]
                assert batch["tokens"].tolist() == expected, (size, begin, again)


def test_blocks_of_neighbours_stay_in_one_window(monkeypatch):
    monkeypatch.setattr(document_shuffle, "GLOBAL_AT_MOST", 100)
    lengths = random_lengths(np.random.default_rng(3), 2500, 9)
    naive, data = NaiveRows(lengths, 8, shuffle="block"), packed(numbered(lengths))
    assert data.document_shuffle == "block"
    assert data.samples_per_epoch == naive.per_epoch
    for sample in (0, 1, 300, naive.per_epoch, naive.per_epoch + 17):
        assert [(r.document, r.offset, r.length) for r in data.why(sample).ranges] == naive.row(sample)


def test_documents_are_cut_only_where_they_are_longer_than_a_row_and_no_token_is_lost():
    S, lengths = 8, [1, 7, 8, 9, 16, 17, 30, 3, 0, 2]
    data = packed(numbered(lengths))
    for epoch in range(3):
        rows = range(epoch * data.samples_per_epoch, (epoch + 1) * data.samples_per_epoch)
        ranges = [r for row in rows for r in data.why(row).ranges]
        assert {r.epoch for r in ranges} == {epoch}
        pieces = Counter(r.document for r in ranges)
        assert pieces == {number: -(-length // S) for number, length in enumerate(lengths) if length}
        batch = data.get_batch(rows)
        seen = batch["tokens"][batch["tokens"] > 0]
        assert sorted(seen.tolist()) == list(range(1, sum(lengths) + 1))


def test_each_token_but_the_last_of_a_document_has_its_successor_as_label():
    lengths = [1, 7, 8, 9, 16, 17, 30, 3]
    data = packed(numbered(lengths))
    batch = data.get_batch(range(data.samples_per_epoch))
    pairs = np.stack([batch["tokens"], batch["labels"]], axis=-1)[batch["loss_mask"] > 0]
    last = set(np.cumsum(lengths).tolist())
    assert sorted(map(tuple, pairs.tolist())) == [(t, t + 1) for t in range(1, sum(lengths) + 1) if t not in last]


def test_documents_that_end_with_eod_and_documents_that_have_one_inside(level):
    texts = [[5, 6, EOD], [7, 8, EOD, 9, EOD], [4, EOD]]
    batch = packed(texts, sequence_length=10, create_document_ids=True).get_batch([0])
    assert batch["tokens"][0].tolist() == [7, 8, 0, 9, 0, 5, 6, 0, 4, 0]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1]
    assert batch["document_ids"][0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert batch["loss_mask"][0].tolist() == [1, 1, 1, 1, 0, 1, 1, 0, 1, 0]


def test_the_dense_mask_has_a_block_per_document():
    batch = packed([[1, 2, 3], [4, 5]], sequence_length=6, create_attention_mask=True).get_batch([0])
    number = [0, 0, 0, 1, 1, 2]
    hidden = [[number[i] != number[j] or j > i for j in range(6)] for i in range(6)]
    assert batch["attention_mask"][0, 0].tolist() == hidden


def test_without_the_extra_token_only_the_last_column_loses_its_label():
    texts = numbered([20, 3])
    one, other = packed(texts), packed(texts, add_extra_token_to_sequence=False)
    assert one.samples_per_epoch == other.samples_per_epoch
    rows = range(one.samples_per_epoch)
    first, second = one.get_batch(rows), other.get_batch(rows)
    assert np.array_equal(first["labels"][:, :-1], second["labels"][:, :-1])
    assert not second["loss_mask"][:, -1].any()


def test_one_epoch_ends_with_its_rows():
    data = packed(numbered([5, 9, 3]), None)
    assert len(data) == data.samples_per_epoch
    assert data.epochs(len(data)).tolist() == [1.0]
    with pytest.raises(IndexError):
        data.get_batch([len(data)])
    with pytest.raises(BlendingError, match="made for one epoch of"):
        data.order.table(np.array([len(data)]))


def test_a_part_without_tokens_and_a_damaged_index():
    with pytest.raises(BlendingError, match="no tokens, but samples of it are asked"):
        packed([[], []])
    source = ListSource(numbered([5, 9, 3]))
    source.sequence_lengths = source.sequence_lengths[::-1].copy()
    with pytest.raises(BlendingError, match="the index is damaged"):
        GPTDataset(source, "a", range(3), 10, Split.train, config(packing="best_fit"))


def test_lengths_that_change_after_they_were_counted_are_an_error(monkeypatch):
    data = packed(numbered([5] * 40))
    monkeypatch.setattr(data.order, "_rows_W", data.order._rows_W + 1)
    data.order.rows = int(data.order._rows_W.sum())
    with pytest.raises(BlendingError, match="the data changed since"):
        data.get_batch([0])


def test_a_pickled_dataset_gives_the_same_rows():
    data = packed(sequences_of([5, 9, 30, 3]))
    before = data.get_batch(range(20))
    after = pickle.loads(pickle.dumps(data)).get_batch(range(20))
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing": "first_fit"}, 'packing is \'first_fit\'; it is one of "concatenate", "best_fit"'),
        ({"packing": "best_fit", "order": "megatron"}, 'packing is "best_fit" with order "megatron"'),
        ({"order": "best_fit"}, 'it is one of "stateless", "megatron", "apportioned"'),
        ({"packing": "best_fit", "blend_unit": "words"}, 'blend_unit is \'words\'; it is one of "rows", "tokens"'),
    ],
)
def test_what_does_not_fit_is_refused_when_the_config_is_made(fields, message):
    with pytest.raises(BlendingError) as raised:
        config(**fields)
    assert message in str(raised.value)


def test_a_blend_of_tokens_gives_tokens_in_proportion():
    # Documents of 5 tokens fill 5 of 8 columns, those of 4 tokens all.
    texts = {"half": sequences_of([5] * 160), "full": sequences_of([4] * 160)}
    made = blend(texts, [1, 1], packing="best_fit", blend_unit="tokens")
    batch = made.get_batch(range(1000))
    tokens = [int((batch["tokens"][batch["dataset_id"] == number] > 0).sum()) for number in (0, 1)]
    assert abs(tokens[0] - tokens[1]) <= 2 * 8
    rows = blend(texts, [1, 1], packing="best_fit").counts(1000)
    assert rows.tolist() == [500, 500]


def test_without_weights_all_epochs_end_together():
    texts = {"half": sequences_of([5] * 160), "full": sequences_of([4] * 320)}
    for unit in ("rows", "tokens"):
        made = blend(texts, None, packing="best_fit", blend_unit=unit)
        assert np.abs(made.counts(320) - 160).max() <= 1
        assert made.epochs(320).round(2).tolist() == [1.0, 1.0]


def test_window_sizes():
    assert window_size(8) == 16
    packed_rows.WINDOW_AT_LEAST = 2**14
    assert [window_size(S) for S in (8, 2048, 8192, 8193, 131072)] == [2**14, 2**14, 2**14, 2**15, 2**18]


def test_the_order_is_frozen():
    golden = json.loads(GOLDEN.read_text())
    for case in golden:
        part = Part(ListSource([[1] * length for length in case["lengths"]]), range(len(case["lengths"])))
        windows = Windows(part, (1234, "a", "train"), case["sequence_length"], case["shuffle"])
        assert windows.rows(range(len(windows))).tolist() == case["rows_of_windows"]
        data = packed_rows.PackedRows(windows, windows.rows(range(len(windows))))
        for sample, pieces in case["rows"]:
            ranges = data.ranges_of(sample)
            found = zip(ranges.sequence.tolist(), ranges.offset.tolist(), ranges.length.tolist(), strict=True)
            assert [*map(list, found)] == pieces


def test_an_own_dataset_class_packs_what_it_opens():
    class Letters(GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path, config):
            return ListSource([[*word.encode(), 0] for word in ("zebra", "quartz", "lazy", "maze") * 20])

    made = GPTDatasetConfig(
        random_seed=1, sequence_length=12, blend=(["words"], None), split="1,0,0", packing="best_fit"
    )
    train, _, _ = BlendedMegatronDatasetBuilder(Letters, [None, 0, 0], lambda: True, made).build()
    rows = [bytes(row.tolist()).replace(b"\0", b"|").decode() for row in train.get_batch(range(len(train)))["tokens"]]
    words = Counter(word for row in rows for word in row.split("|") if word)
    assert words == {"zebra": 20, "quartz": 20, "lazy": 20, "maze": 20}
