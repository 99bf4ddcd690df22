"""``get_batch`` end to end beside one sample at a time in plain Python: every order, option and level of kernels."""

import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from blending_helpers import EOD, NaiveLine, config, sequences_of

from sixfold.blending import BlendChange, BlendedDataset, BlendingError, GPTDataset, Split
from sixfold.blending.batches.reader import BatchReader
from sixfold.blending.numbers.kernels import Level, kernels
from sixfold.blending.source import ListSource

PAD = 77
ORDERS = ("stateless", "megatron", "apportioned")
OPTIONS = (
    {},
    {"reset_position_ids": True, "eod_mask_loss": True, "create_cu_seqlens": True, "create_document_ids": True},
    {"add_extra_token_to_sequence": False, "create_document_ids": True, "allow_ambiguous_pad_tokens": True},
    {"create_attention_mask": True, "reset_attention_mask": True, "create_cu_seqlens": True, "eod_mask_loss": True},
)
DTYPES = (np.uint16, np.int32, np.uint8, np.int64)


def data_of(order, seed=0, size=150, datasets=4, S=13, **options):
    """A blend of sources of several types, parts of which begin inside, and its lists of ids by dataset."""
    rng = np.random.default_rng(seed)
    tokenizer = SimpleNamespace(eod=EOD, pad=PAD)
    made = config(order=order, sequence_length=S, tokenizer=tokenizer, mid_level_dataset_surplus=0.5, **options)
    parts, lists = [], []
    for number in range(datasets):
        lengths = rng.integers(0, 40, int(rng.integers(5, 40))).tolist()
        lists.append(sequences_of(lengths, seed * 10 + number, eod_every=2))
        source = ListSource(lists[-1], DTYPES[number % len(DTYPES)])
        first = int(rng.integers(0, 3))
        asked = None if size is None else 0 if order == "stateless" else size
        parts.append(GPTDataset(source, f"data-{number}", range(first, len(lengths)), asked, Split.train, made))
    return BlendedDataset(parts, None if size is None else [0.4, 0.3, 0.2, 0.1], size, made), lists


def plain_sample(data, lists, n):
    """tokens, labels with padding as it is, and where documents begin, said slowly."""
    S, why = data.config.sequence_length, data.why(n)
    ids, begins = [], {0}
    for part in why.ranges:
        begins.add(len(ids))
        ids += lists[why.dataset_id][part.document][part.offset : part.offset + part.length]
    begins |= {place + 1 for place, id_ in enumerate(ids[:S]) if id_ == EOD}
    tokens = (ids + [PAD] * S)[:S]
    return tokens, sorted(begin for begin in begins if begin < S)


def check_arrays(data, lists, n, sample):
    """Everything of one sample but its last label, which is another sample's token."""
    S, options = data.config.sequence_length, data.config
    tokens, begins = plain_sample(data, lists, n)
    extra = options.add_extra_token_to_sequence
    labels = [*tokens[1:], sample["labels"][-1] if extra else PAD]
    assert sample["tokens"].tolist() == [0 if token == PAD else token for token in tokens]
    assert sample["labels"].tolist() == [0 if label == PAD else label for label in labels]
    starts = [0, *(place + 1 for place, token in enumerate(tokens[:-1]) if token == EOD)]
    since = [max(start for start in starts if start <= place) for place in range(S)]
    mask = [
        float(label != PAD and not (options.eod_mask_loss and token == EOD))
        for token, label in zip(tokens, labels, strict=True)
    ]
    assert sample["loss_mask"].tolist()[:-1] == mask[:-1]
    expected = [place - begin for place, begin in enumerate(since)] if options.reset_position_ids else list(range(S))
    assert sample["position_ids"].tolist() == expected
    if options.create_document_ids:
        assert sample["document_ids"].tolist() == [sum(b <= place for b in begins) - 1 for place in range(S)]
    if options.create_cu_seqlens:
        assert sample["cu_seqlens"].tolist() == [*begins, S]
    if options.create_attention_mask:
        seen = [[column <= row and since[column] == since[row] for column in range(S)] for row in range(S)]
        assert (~sample["attention_mask"][0]).tolist() == seen


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.slow
def test_every_sample_is_what_plain_loops_make_of_its_ranges(level, order, options):
    data, lists = data_of(order, **options)
    for n in range(0, len(data), 17):
        check_arrays(data, lists, n, data[n])


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_is_its_samples_stacked(level, order):
    data, _ = data_of(order, 1, **OPTIONS[1])
    positions = np.random.default_rng(1).integers(0, len(data), 23).tolist()
    batch, samples = data.get_batch(positions), [data[n] for n in positions]
    for name in ("tokens", "labels", "loss_mask", "position_ids", "document_ids", "dataset_id"):
        assert np.array_equal(batch[name], np.stack([sample[name] for sample in samples])), name
    S, ends = data.config.sequence_length, [0]
    for row, sample in enumerate(samples):
        ends += [row * S + end for end in sample["cu_seqlens"].tolist()[1:]]
    assert batch["cu_seqlens"].tolist() == ends


@pytest.mark.parametrize("S", [1, 3, 30])
def test_labels_are_the_successors_on_the_line_through_many_epochs(level, S):
    lengths = [3, 0, 7, 1, 5]
    lists = sequences_of(lengths, 4)
    made = config(sequence_length=S)
    data = GPTDataset(ListSource(lists, np.uint16), "a", range(5), 40, Split.train, made)
    line = NaiveLine(lengths, S)
    batch = data.get_batch(range(40))
    for row in range(40):
        (places,) = line.take()
        text = [lists[sequence][offset] for _, sequence, offset in map(line.token, [*places, places[-1] + 1])]
        assert batch["tokens"][row].tolist() == text[:-1]
        assert batch["labels"][row].tolist() == text[1:]


@pytest.mark.slow
def test_blocks_of_many_sequences_are_searched_as_numpy_does(level):
    """65,000 sequences: blocks of 63, permutations on 6 bits; 265,000: of 256 on 8."""
    for sequences in (5_000, 65_000, 265_000):
        rng = np.random.default_rng(sequences)
        source = Lengths(rng.integers(0, 4, sequences))
        data = GPTDataset(source, "a", range(3, sequences - 5), 10**6, Split.train, config(sequence_length=16))
        scattered = np.sort(rng.choice(sequences, sequences // 2, replace=False))
        other = GPTDataset(source, "a", scattered, 10**6, Split.train, config(sequence_length=16))
        for some in (data, other):
            positions = rng.integers(0, 30_000, 8)
            batch = some.get_batch(positions)
            for row, n in enumerate(positions.tolist()):
                ids = [source.tokens[source.begins[r.document] + r.offset :][: r.length] for r in some.why(n).ranges]
                assert np.array_equal(batch["tokens"][row], np.concatenate(ids))


class Lengths:
    """Sequences of given lengths whose ids count through all tokens; ``begins`` says where each begins."""

    dtype = np.dtype(np.int32)

    def __init__(self, lengths):
        self.sequence_lengths = np.asarray(lengths, dtype=np.int32)
        self.begins = np.cumsum(lengths) - lengths
        self.sequence_pointers = self.begins * 4
        self.tokens = np.arange(int(np.sum(lengths)), dtype=np.int32)

    def get(self, idx, offset=0, length=None):
        return self.tokens[self.begins[idx] + offset :][:length]


def test_changes_of_the_sequence_length_are_read_alike_at_every_level(level):
    changes = [BlendChange(at=40, sequence_length=5), BlendChange(at=90, sequence_length=13)]
    data, lists = data_of("stateless", 3, changes=changes)
    for low, high in pairwise([0, 40, 90, 150]):
        batch = data.get_batch(range(low, high))
        for n in range(low, high):
            why = data.why(n)
            ids = [i for r in why.ranges for i in lists[why.dataset_id][r.document][r.offset : r.offset + r.length]]
            assert batch["tokens"][n - low].tolist() == [0 if id_ == PAD else id_ for id_ in ids]


def test_samples_that_a_change_left_over_are_found_by_the_kernels_too(level, monkeypatch):
    """Two changes, the second while tokens of the first window are left; a window of 65,536 holds all of the data."""
    lengths = [9, 0, 30, 4, 17, 1] * 6
    lists, line = sequences_of(lengths, 4), NaiveLine(lengths, 8)
    made = config(changes=[BlendChange(at=10, sequence_length=5), BlendChange(at=30, sequence_length=7)])
    part = GPTDataset(ListSource(lists, np.uint16), "a", range(len(lists)), 0, Split.train, made)
    data = BlendedDataset([part], [1], 120, made)
    asked = []
    by_numpy = BatchReader._by_numpy
    monkeypatch.setattr(BatchReader, "_by_numpy", lambda *all_: asked.append(all_) or by_numpy(*all_))
    for low, high in pairwise([0, 10, 30, 120]):
        if low:
            line.change({10: 5, 30: 7}[low])
        batch = data.get_batch(range(low, high))
        for row in range(high - low):
            pieces = [[line.token(place) for place in [*piece, piece[-1] + 1]] for piece in line.take()]
            ids = [[lists[sequence][offset] for _, sequence, offset in piece] for piece in pieces]
            assert batch["tokens"][row].tolist() == [id_ for piece in ids for id_ in piece[:-1]]
            assert batch["labels"][row].tolist() == [id_ for piece in ids for id_ in piece[1:]]
    assert bool(asked) == (level == Level.NUMPY)


@pytest.mark.skipif(kernels() is None, reason="the compiled kernels are not here")
def test_a_string_that_is_none_is_refused():
    native = kernels()
    grids = np.array([[0, 0, 8, 0, 0], [4, 1, 5, 43, 2]])
    numbers = np.array([2, 0, 10, 50, 1, 65_536, -1, 0])
    lengths, none, names = np.full(10, 5, np.int32), np.empty(0, np.int64), np.zeros(3, np.uint8)
    finder = native.open_line(lengths, np.arange(10) * 10, none, names, numbers, grids)
    native.add_string(finder, 1, np.array([[0, 8], [4, 40]]))
    for grid, string in (
        (0, [[0, 8]]),  # it has no left-over samples
        (1, [[0, 8], [10, 40]]),  # two samples of 5 end there
        (1, [[1, 8]]),
        (1, [[0, 8], [0, 40]]),
        (1, [[0, -1]]),
        (1, [0, 8, 4]),
        (1, []),
        (2, [[0, 8]]),
        (-1, [[0, 8]]),
    ):
        with pytest.raises(ValueError):
            native.add_string(finder, grid, np.array(string, dtype=np.int64))
    with pytest.raises(TypeError):
        native.add_string(finder, 1, np.array([[0, 8]], dtype=np.int32))
    with pytest.raises(ValueError):
        native.add_string(native.open_map(lengths), 1, np.array([[0, 8]]))


class Damaged(ListSource):
    """An index that does not fit its data, as a cut or patched pair."""

    def __init__(self, sequences, harm):
        super().__init__(sequences, np.uint16)
        self.sequence_pointers = self.sequence_pointers.copy()
        harm(self)


def cut(source):
    source.tokens = source.tokens[:-30]


def shifted(source):
    source.sequence_pointers[9] += 4


def longer(source):
    source.sequence_lengths[7] += 1


def negative(source):
    source.sequence_lengths[7] = -3


def before_the_data(source):
    source.sequence_pointers[0] = -2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("harm", [cut, shifted, longer, negative, before_the_data])
@pytest.mark.slow
def test_a_damaged_source_raises_and_never_gives_other_tokens(level, harm, order):
    sequences = sequences_of([11] * 20, 1)
    try:
        source = Damaged(sequences, harm)
        data = GPTDataset(source, "a", range(20), 60, Split.train, config(order=order))
    except BlendingError:
        return
    refused = 0
    for n in range(30):  # an epoch and a bit
        try:
            batch = data.get_batch([n])
        except BlendingError:
            refused += 1
            continue
        ids = [i for r in data.why(n).ranges for i in sequences[r.document][r.offset : r.offset + r.length]]
        assert batch["tokens"][0].tolist() == ids
    assert refused


def shorter_at_the_end(source):
    source.sequence_lengths[19] = 0


def empty_no_more(source):
    source.sequence_lengths[3] = 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("harm", [cut, shifted, longer, negative, shorter_at_the_end, empty_no_more])
@pytest.mark.slow
def test_data_that_changes_while_it_is_open_raises_or_is_read_as_before(level, harm, order):
    sequences = sequences_of([11, 12, 0, 0, 13] * 4, 1)
    source = Damaged(sequences, lambda source: None)
    data = GPTDataset(source, "a", range(20), 60, Split.train, config(order=order))
    before = data.get_batch(range(24))["labels"].copy()  # an epoch and a bit
    harm(source)
    refused = 0
    for n in range(24):
        try:
            batch = data.get_batch([n])
        except BlendingError:
            refused += 1
        else:
            assert batch["labels"][0].tolist() == before[n].tolist()
    assert refused or harm is cut  # an open map still has what the source let go


def test_a_source_that_gives_too_few_tokens_is_refused(level):
    sequences = sequences_of([11] * 20, 1)
    source = ListSource(sequences)
    source.tokens = None
    source.get = lambda idx, offset=0, length=None: np.array(sequences[idx][offset:][:length])[:-1]
    data = GPTDataset(source, "a", range(20), 60, Split.train, config())
    with pytest.raises(BlendingError, match=r"gave \d+ tokens of \d+ asked"):
        data.get_batch([0])


@pytest.mark.parametrize("missing", ["tokens", "sequence_pointers", "both", "narrow", "lengths as int64"])
def test_sources_that_offer_less_give_the_same_samples(level, missing):
    sequences = sequences_of([9, 4, 0, 17, 3] * 4, 2)

    def made(lacking):
        source = ListSource(sequences, np.uint16)
        held = source.tokens
        source.get = lambda idx, offset=0, length=None: np.array(sequences[idx][offset:][:length], dtype=held.dtype)
        if lacking in ("tokens", "both"):
            source.tokens = None
        if lacking in ("sequence_pointers", "both"):
            del source.sequence_pointers
        if lacking == "lengths as int64":
            source.sequence_lengths = source.sequence_lengths.astype(np.int64)
        dtype = np.int16 if lacking == "narrow" else np.int64
        return GPTDataset(source, "a", range(20), 90, Split.train, config(token_dtype=dtype))

    assert np.array_equal(made(missing).get_batch(range(90))["labels"], made(None).get_batch(range(90))["labels"])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.slow
def test_threads_read_the_same_batches_at_once(level, order):
    data, _ = data_of(order, 5, size=160)
    batches = [range(at, at + 8) for at in range(0, 160, 8)]
    expected = [data.get_batch(some)["tokens"].copy() for some in batches]
    fresh, _ = data_of(order, 5, size=160)  # whose handles are made while all read
    wrong = []

    def read(seed):
        for at in np.random.default_rng(seed).permutation(len(batches)).tolist():
            if not np.array_equal(fresh.get_batch(batches[at])["tokens"], expected[at]):
                wrong.append(at)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert not wrong


def test_out_must_be_writable_contiguous_arrays(level):
    data, _ = data_of("stateless")
    for out, problem in (
        ({"tokens": np.zeros((13, 6), np.int64).T}, "not C-contiguous"),
        ({"labels": np.zeros((6, 26), np.int64)[:, ::2]}, "not C-contiguous"),
        ({"loss_mask": np.broadcast_to(np.float32(0), (6, 13))}, "not writable"),
        ({"tokens": np.zeros(6 * 13 * 8 + 1, np.uint8)[1:].view(np.int64).reshape(6, 13)}, "not C-contiguous"),
        ({"position_ids": [[0] * 13] * 6}, "is a list; it is a numpy array"),
        ({"dataset_id": np.zeros(6, np.int32)}, r"int32 \(6,\); this batch needs int64 \(6,\)"),
    ):
        with pytest.raises(BlendingError, match=f"out\\['{next(iter(out))}'\\].*{problem}|{problem}"):
            data.get_batch(range(6), out=out)


def test_out_has_an_array_for_each_name(level):
    data, _ = data_of("stateless")
    one = np.zeros((6, 13), np.int64)
    with pytest.raises(BlendingError, match="out\\['tokens'\\] and out\\['labels'\\] are one array"):
        data.get_batch(range(6), out=dict.fromkeys(("tokens", "labels"), one))
    out = {"tokens": one}
    assert data.get_batch(range(6), out=data.get_batch(range(6), out=out)) is out  # which has all of them by then


def test_more_tokens_than_int32_counts_have_no_cu_seqlens():
    from sixfold.blending.batches.gpt_arrays import _boundaries

    huge = np.broadcast_to(np.True_, (2**20, 2**11))
    with pytest.raises(BlendingError, match="up to 2147483648; they are int32"):
        _boundaries(huge, 1)


def test_a_level_is_forced_where_the_tests_say_so(level):
    assert (kernels() is None) == (level == Level.NUMPY)
