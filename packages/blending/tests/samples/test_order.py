"""Which tokens: the line, its grid and windows, against lists that are walked one by one."""

import json
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import (
    NaiveLine,
    blend,
    dataset,
    naive_blend,
    naive_quotas,
    numbered,
    sequences_of,
    shuffle_as_a_whole,
)

from sixfold.blending import Split
from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import ListSource
from sixfold.blending.samples import chunk_grid as grid
from sixfold.blending.samples import token_line as line_module
from sixfold.blending.samples.chunk_grid import SampleOrder
from sixfold.blending.samples.token_line import TokenLine, block_size

GOLDEN, GLOBAL = (
    json.loads((Path(__file__).parents[1] / "golden" / f"{name}.json").read_text())
    for name in ("order-1", "order-1-global")
)
EMPTY_ONES_TOO = [3, 0, 11, 5, 0, 0, 8, 1, 20, 2, 9, 4]


@pytest.fixture(autouse=True, params=["block", "global"])
def document_shuffle(request, monkeypatch):
    """Every test, for both: small parts have one order under both, told by the code of either."""
    if request.param == "global":
        shuffle_as_a_whole(monkeypatch)
    return request.param


def where(data, samples):
    """[(epoch, sequence, offset)] of every token of each sample, from ``why``."""
    return [
        [(r.epoch, r.document, r.offset + i) for r in data.token_ranges(sample) for i in range(r.length)]
        for sample in samples
    ]


def naive_where(line, samples):
    return [[line.token(t) for piece in line.take() for t in piece] for _ in range(samples)]


def test_the_order_is_that_of_version_1(document_shuffle):
    assert (
        blend({"a": [[1] * 99], "b": [[1] * 99], "c": [[1] * 99]}, [0.7, 0.2, 0.1]).locate(range(200))[0].tolist()
        == (GOLDEN["datasets_of_0.7_0.2_0.1"])
    )
    data = dataset(sequences_of(GOLDEN["line_lengths"]))
    assert data.order.pieces(np.arange(60)).begin.tolist() == GOLDEN["begins_of_samples"]
    assert [list(sample[0]) for sample in where(data, range(60))] == GOLDEN["first_tokens_of_samples"]
    lengths = [1 + i * i % 7 for i in range(2100)]
    assert block_size(len(lengths)) == 2
    fields = {"split": Split.valid, "random_seed": 7, "sequence_length": 100, "document_shuffle": document_shuffle}
    many = dataset(sequences_of(lengths), name="b", **fields)
    expected = {"block": GOLDEN["first_tokens_in_blocks_of_2"], "global": GLOBAL["first_tokens_of_2100_documents"]}
    assert [list(sample[0]) for sample in where(many, range(20))] == expected[document_shuffle]


@pytest.mark.parametrize("S", [1, 3, 8, 64, 200])
@pytest.mark.parametrize("lengths", [[5], EMPTY_ONES_TOO, [1] * 30], ids=["one", "mixed", "ones"])
@pytest.mark.slow
def test_samples_are_those_of_the_plain_statement(lengths, S):
    data = dataset(sequences_of(lengths), sequence_length=S)
    samples = min(40, 1000 // S)
    assert where(data, range(samples)) == naive_where(NaiveLine(lengths, S), samples)


@pytest.mark.parametrize("window", [1, 2, 7])
def test_windows_are_permuted_each_by_its_own_key(monkeypatch, window):
    monkeypatch.setattr(grid, "WINDOW", window)
    data = dataset(sequences_of(EMPTY_ONES_TOO), sequence_length=3)
    assert where(data, range(60)) == naive_where(NaiveLine(EMPTY_ONES_TOO, 3, window=window), 60)


def test_blocks_of_256_are_permuted_and_their_sequences_too():
    lengths = [1] * (256 * 1100 + 17)
    assert block_size(len(lengths)) == 256
    source = ListSource([[0]])
    source.sequence_lengths = np.ones(len(lengths), dtype=np.int32)
    source.sequence_pointers = np.arange(len(lengths)) * 8
    line = TokenLine(Part(source, range(len(lengths))), 1234, "a", "train")
    ranges = line.ranges(np.array([0]), np.array([2 * len(lengths)]))
    first = ranges.sequence[: len(lengths)]
    assert np.array_equal(np.sort(first), np.arange(len(lengths))), "an epoch has every sequence once"
    assert np.array_equal(np.sort(ranges.sequence[len(lengths) :]), np.arange(len(lengths)))
    assert not np.array_equal(first, ranges.sequence[len(lengths) :])
    changes_of_block = np.flatnonzero(np.diff(first // 256)).size
    assert changes_of_block == 1100, "a block is read as a whole"
    assert np.abs(np.diff(first)).mean() > 40, "and not in order"


def test_two_real_windows_hold_every_chunk_once():
    T = 140_001
    part = Part(ListSource([[0] * T]), range(1))
    order = SampleOrder(TokenLine(part, 5, "a", "train"), ((0, 1),))
    begins = order.pieces(np.arange(2 * T)).begin
    for first, stop in [(0, 65_536), (65_536, 131_072), (131_072, T), (T, T + 65_536)]:
        assert np.array_equal(np.sort(begins[first:stop]), np.arange(first, stop))
    assert np.corrcoef(begins[:65_536], np.arange(65_536))[0, 1] < 0.05


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_no_token_of_an_epoch_twice_and_none_missing_once_epoch_e_plus_2_begins(seed):
    rng = np.random.default_rng(seed)
    lengths, S = rng.integers(0, 30, rng.integers(1, 60)).tolist(), int(rng.integers(1, 40))
    lengths[0] += 1
    T = sum(lengths)
    data = dataset(numbered(lengths), sequence_length=S)
    seen = set()
    for sample, tokens in enumerate(where(data, range(4 * T // S + 2))):
        if tokens[0][0] >= 2:
            whole = {token for token in seen if token[0] == tokens[0][0] - 2}
            assert len(whole) == T, f"epoch {tokens[0][0] - 2} is not whole when sample {sample} begins"
        assert not seen & set(tokens), f"sample {sample} repeats"
        assert len(set(tokens)) == S
        seen |= set(tokens)


def test_labels_are_the_successors_on_the_line_also_at_the_end():
    lengths = [7, 3, 12, 1, 30]
    line = NaiveLine(lengths, 8)
    ids = numbered(lengths)
    batch = dataset(ids).get_batch(range(30))
    for row in range(30):
        begin = line.take()[0][0]
        text = [ids[s][o] for _, s, o in (line.token(begin + i) for i in range(9))]
        assert batch["tokens"][row].tolist() == text[:-1]
        assert batch["labels"][row].tolist() == text[1:]


def test_one_epoch_is_epoch_0_alone_cut_into_its_samples():
    lengths = EMPTY_ONES_TOO
    T = sum(lengths)
    data = dataset(numbered(lengths), num_samples=None, sequence_length=5)
    assert len(data) == (T - 1) // 5
    tokens = [token for sample in where(data, range(len(data))) for token in sample]
    assert len(set(tokens)) == len(tokens) == 5 * len(data)
    assert {epoch for epoch, _, _ in tokens} == {0}
    kept = dataset(
        numbered(lengths),
        num_samples=None,
        sequence_length=5,
        split=Split.valid,
        drop_last_partial_validation_sequence=False,
    )
    assert len(kept) == -(-(T - 1) // 5)
    tokens = sorted(token for sample in where(kept, range(len(kept))) for token in sample)
    assert len(tokens) == len(set(tokens)) in (T - 1, T)
    with pytest.raises(IndexError):
        data.get_batch([len(data)])


def test_a_subset_of_the_sequences_may_be_any_list_of_numbers():
    lengths = [4, 9, 2, 7, 5, 3]
    chosen = [5, 0, 3, 2]
    sequences = numbered(lengths)
    part = Part(ListSource(sequences), chosen)
    assert part.tokens == 3 + 4 + 7 + 2
    ranges = TokenLine(part, 1, "a", "train").ranges(np.array([0]), np.array([16]))
    assert sorted(ranges.sequence.tolist()) == sorted(chosen)
    assert ranges.length.tolist() == [lengths[number] for number in ranges.sequence]


def test_a_source_without_pointers_or_flat_tokens_gives_the_same():
    class Bare:
        def __init__(self, sequences):
            self.sequences = sequences
            self.sequence_lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
            self.dtype = np.dtype(np.uint16)

        def get(self, idx, offset=0, length=None):
            end = None if length is None else offset + length
            return np.array(self.sequences[idx][offset:end], dtype=self.dtype)

    sequences = sequences_of(EMPTY_ONES_TOO)
    plain = dataset(sequences)
    bare = type(plain)(Bare(sequences), "a", range(len(sequences)), 1000, Split.train, plain.config)
    for name, array in plain.get_batch(range(50)).items():
        assert np.array_equal(array, bare.get_batch(range(50))[name])
    assert bare.why(3).ranges[0].path is None
    assert bare.part.fingerprint["tokens"] == plain.part.fingerprint["tokens"]


def test_samples_do_not_depend_on_size_batches_or_the_order_of_access():
    named = {"a": sequences_of(EMPTY_ONES_TOO, 1), "b": sequences_of([50, 3, 4], 2)}
    short, long = blend(named, [0.3, 0.7], size=10), blend(named, [0.3, 0.7], size=10**12)
    whole = long.get_batch(range(200))
    assert np.array_equal(short.get_batch(range(200))["tokens"], whole["tokens"])
    shuffled = np.random.default_rng(0).permutation(200)
    some = short.get_batch(shuffled)
    assert np.array_equal(some["tokens"], whole["tokens"][shuffled])
    assert np.array_equal(some["dataset_id"], whole["dataset_id"][shuffled])
    ranks = [long.get_batch(range(rank, 200, 3))["labels"] for rank in range(3)]
    for rank in range(3):
        assert np.array_equal(ranks[rank], whole["labels"][rank::3])
    far = long.get_batch([10**11])["tokens"]
    assert np.array_equal(far, short.get_batch([10**11])["tokens"])


@pytest.mark.slow
def test_a_batch_of_more_epochs_than_are_kept_makes_each_epoch_a_few_times_at_most(level, monkeypatch):
    sequences, made = sequences_of([5, 4]), []
    permute = line_module.permute
    monkeypatch.setattr(line_module, "permute", lambda key, n, index: made.append(key) or permute(key, n, index))
    data = dataset(sequences, sequence_length=3)
    positions = np.random.default_rng(0).permutation(150)  # 50 epochs
    batch = data.get_batch(positions)["tokens"]
    assert len(made) < 5 * 50
    for position, tokens in zip(positions, batch, strict=True):
        assert np.array_equal(data.get_batch([position])["tokens"][0], tokens)


def test_a_blend_gives_each_dataset_its_samples_in_their_own_order():
    named = {"a": sequences_of(EMPTY_ONES_TOO, 1), "b": sequences_of([50, 3, 4], 2)}
    data = blend(named, [0.3, 0.7])
    expected = naive_blend(naive_quotas([0.3, 0.7]), 100)
    batch = data.get_batch(range(100))
    assert batch["dataset_id"].tolist() == [number for number, _ in expected]
    for position, (number, sample) in enumerate(expected):
        assert np.array_equal(batch["tokens"][position], data.datasets[number].get_batch([sample])["tokens"][0])
        assert data.find(number, sample) == position
    assert data.counts(100).tolist() == np.bincount(batch["dataset_id"]).tolist()


def test_weights_none_are_the_tokens_and_the_stream_goes_on_behind_the_first_epoch():
    named = {"a": sequences_of([30, 30]), "b": sequences_of([20])}
    data = blend(named, None, size=8)
    assert len(data) == 8
    assert data.counts(8000).tolist() == [6000, 2000]
    for position in (100, 500, 7000):
        why = data.why(position)
        assert why.ranges[0].epoch == why.sample * 8 // (60, 20)[why.dataset_id] > 0


def test_one_epoch_of_a_blend_gives_every_sample_of_every_dataset_once():
    named = {"a": sequences_of([30, 31, 2]), "b": sequences_of([20]), "c": sequences_of([3])}
    data = blend(named, None, size=None)
    assert len(data) == (63 - 1) // 8 + (20 - 1) // 8
    pairs = list(zip(*(array.tolist() for array in data.locate(range(len(data)))), strict=True))
    assert sorted(pairs) == [(0, i) for i in range(7)] + [(1, i) for i in range(2)]
    with pytest.raises(IndexError):
        data.get_batch([len(data)])


def test_name_seed_and_part_make_other_orders():
    sequences = sequences_of([9] * 40)
    base = dataset(sequences).get_batch(range(20))["tokens"]
    others = [
        dataset(sequences, name="b"),
        dataset(sequences, random_seed=1235),
        dataset(sequences, split=Split.test),
        dataset(sequences, dataset_names={"a": "z"}),
    ]
    assert all(not np.array_equal(base, other.get_batch(range(20))["tokens"]) for other in others)
    moved = dataset(sequences, name="other/folder/a", dataset_names={"other/folder/a": "a"})
    assert np.array_equal(base, moved.get_batch(range(20))["tokens"])
