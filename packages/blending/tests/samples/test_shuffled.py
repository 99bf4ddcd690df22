"""Documents shuffled as a whole, in parts that are large enough for it to differ; test_order.py has the small ones."""

import pickle

import numpy as np
import pytest
from blending_helpers import blend, config, dataset, naive_key, naive_permute, sequences_of

from sixfold.blending import BlendingError, GPTDataset, GPTDatasetConfig, Split
from sixfold.blending.batches.reader import BatchReader
from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import ListSource
from sixfold.blending.numbers.kernels import kernels
from sixfold.blending.samples import document_shuffle as shuffled

N = 2500
LENGTHS = np.random.default_rng(1).integers(0, 12, N).tolist()


def source(lengths=LENGTHS, dtype=np.uint16):
    made = ListSource([[0]], dtype)
    made.sequence_lengths = np.array(lengths, dtype=np.int32)
    made.sequence_pointers = (np.cumsum(lengths) - lengths) * made.dtype.itemsize
    made.tokens = (np.arange(sum(lengths)) % 251 + 1).astype(dtype)
    return made


def data(held=None, indices=None, **fields):
    made = config(**({"document_shuffle": "global"} | fields))
    held = held or source()
    indices = range(len(held.sequence_lengths)) if indices is None else indices
    return GPTDataset(held, "a", indices, 10**6, Split.train, made)


def naive_documents(epoch, members=range(N)):
    key = naive_key(1234, "a", "train", epoch)
    return [members[naive_permute(key, len(members), place)] for place in range(len(members))]


@pytest.mark.parametrize(
    "members", [range(N), range(17, N - 3), np.flatnonzero(np.arange(N) % 9)], ids=["all", "a range", "a list"]
)
@pytest.mark.slow
def test_places_hold_the_documents_of_one_permutation_and_every_token_comes_once(members, level):
    held = data(indices=members)
    for epoch in (0, 2):
        begin, tokens = epoch * held.part.tokens, held.part.tokens
        ranges = held.order.line.ranges(np.array([begin]), np.array([tokens]))
        documents = [number for number in naive_documents(epoch, members) if LENGTHS[number]]
        assert ranges.sequence.tolist() == documents
        assert ranges.length.tolist() == [LENGTHS[number] for number in documents]
    positions = np.random.default_rng(2).permutation(3 * held.samples_per_epoch)[:200]
    batch = held.get_batch(positions)
    for row in range(0, 200, 17):
        ids = [
            held.indexed_dataset.tokens[sum(LENGTHS[: part.document]) + part.offset + i]
            for part in held.why(int(positions[row])).ranges
            for i in range(part.length)
        ]
        assert batch["tokens"][row].tolist() == ids


def test_an_epoch_is_known_up_to_where_it_is_read_and_then_in_one_pass_the_same(level, monkeypatch):
    monkeypatch.setattr(shuffled.GloballyShuffledLine, "_slots_at_least", 1)
    line, whole = data().order.line, data().order.line
    whole._epoch(1, slots=whole.blocks)
    known = []
    for inside in (0, line.tokens // 30, line.tokens // 15, line.tokens // 2, line.tokens - 1):
        begin = np.array([line.tokens + inside])
        assert line.ranges(begin, np.array([1])) == whole.ranges(begin, np.array([1]))
        known.append(line._epochs[1][1].size)
    assert known[0] < known[2] < known[-1] == line.blocks
    before, block = line._epochs[1]
    assert np.array_equal(before, whole._epochs[1][0])
    assert np.array_equal(block, np.arange(line.blocks))


@pytest.mark.skipif(kernels() is None, reason="the compiled kernels are not here")
@pytest.mark.parametrize("changed", [{}, {"members": 1}], ids=["a range", "a list"])
def test_the_kernels_search_it_alone(monkeypatch, changed):
    held = data(indices=np.flatnonzero(np.arange(N) % 9) if changed else None)
    monkeypatch.setattr(BatchReader, "_by_numpy", lambda *_: pytest.fail("numpy had to search"))
    if not changed:
        monkeypatch.setattr(Part, "lengths", lambda *_: pytest.fail("numpy had to sum"))
    held.get_batch(range(0, 3 * held.samples_per_epoch, 5))
    pickle.loads(pickle.dumps(held)).get_batch([3])


def test_auto_shuffles_as_a_whole_up_to_a_number_of_documents_and_small_parts_have_one_order(monkeypatch):
    assert GPTDatasetConfig(random_seed=1, sequence_length=8).document_shuffle == "auto"
    assert data(document_shuffle="auto").document_shuffle == "global"
    assert np.array_equal(
        data().get_batch(range(50))["tokens"], data(document_shuffle="auto").get_batch(range(50))["tokens"]
    )
    monkeypatch.setattr(shuffled, "GLOBAL_AT_MOST", N - 1)
    assert data(document_shuffle="auto").document_shuffle == "block"
    block = data(document_shuffle="block").get_batch(range(50))["tokens"]
    assert np.array_equal(data(document_shuffle="auto").get_batch(range(50))["tokens"], block)
    assert not np.array_equal(data().get_batch(range(50))["tokens"], block)
    few = [dataset(sequences_of([9] * 2047), document_shuffle=kind) for kind in ("block", "global")]
    assert np.array_equal(*(part.get_batch(range(50))["tokens"] for part in few))


def test_a_shuffle_that_is_none_or_not_the_orders_is_refused():
    with pytest.raises(BlendingError, match='document_shuffle is \'local\'; it is one of "auto", "global", "block"'):
        config(document_shuffle="local")
    for order in ("megatron", "apportioned"):
        assert config(order=order, document_shuffle="global").order == order
        with pytest.raises(BlendingError, match=f'"block" with order "{order}"'):
            config(order=order, document_shuffle="block")


@pytest.mark.parametrize("place", [0, 700, N - 1])
@pytest.mark.slow
def test_a_length_that_does_not_fit_its_pointer_raises_and_never_gives_other_tokens(place, level):
    """Also of a document that is not read: the sums that place the others would be wrong."""
    held = source()
    number = naive_documents(0)[place]
    held.sequence_lengths[number] += 1
    part = data(held, max_epochs=None)
    assert number != N - 1, "the last has no pointer behind it; its reader checks it when it is opened"
    with pytest.raises(BlendingError, match=f"sequence {number} has length"):
        part.get_batch(range(part.samples_per_epoch - 20, part.samples_per_epoch))


def test_group_sums_are_sums_and_wrong_arguments_raise():
    native = kernels()
    if native is None:
        pytest.skip("the compiled kernels are not here")
    held, key = source(), naive_key(1234, "a", "train", 0)
    numbers, out = np.array([N, 2, 64, 0, 2]), np.empty(N // 64 - 1, dtype=np.int64)
    arguments = (held.sequence_lengths, held.sequence_pointers)
    assert native.group_sums(key, numbers, *arguments, out) == out.size
    lengths = np.array([LENGTHS[number] for number in naive_documents(0)])
    assert out.tolist() == np.add.reduceat(lengths, np.arange(0, N, 64))[2:].tolist()
    whole = np.empty(-(-N // 64), dtype=np.int64)
    assert native.group_sums(key, np.array([N, 0, 64, 0, 2]), *arguments, whole) == whole.size
    assert whole.tolist() == np.add.reduceat(lengths, np.arange(0, N, 64)).tolist()
    for wrong in (
        [N + 1, 2, 64, 0, 2], [N, 3, 64, 0, 2], [N, -1, 64, 0, 2], [N, 2, 0, 0, 2], [N, 2, 512, 0, 2], [N, 2, 48, 0, 2],
        [N, 2, 64, 1, 2], [N, 2, 64, -1, 2], [N, 2, 64, 0, 3], [N, 2, 64, 0], [0, 2, 64, 0, 2],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="group_sums"):
            native.group_sums(key, np.array(wrong), *arguments, out)
    with pytest.raises(TypeError, match="lengths has items"):
        native.group_sums(key, numbers, held.sequence_pointers, held.sequence_pointers, out)
    with pytest.raises(ValueError):
        native.group_sums(key, numbers, held.sequence_lengths[:-1], held.sequence_pointers, out)


def test_a_sample_is_made_of_documents_from_everywhere_and_in_blocks_of_neighbours():
    """What docs/guide/blending-document-shuffle.md says with figures, in small: 20,000 documents, 30 to a sample."""
    held = source([30] * 20_000)
    spread = {}
    for kind in ("block", "global"):
        part = data(held, document_shuffle=kind, sequence_length=900)
        runs = [[r.document // (20_000 // 1024) for r in part.why(p).ranges] for p in range(40)]
        spread[kind] = np.mean([max(map(run.count, set(run))) / len(run) for run in runs])
    assert spread["block"] > 0.4
    assert spread["global"] < 0.1


def test_shuffles_of_a_blend_are_each_datasets_own():
    named = {"few": sequences_of([5] * 20), "many": sequences_of([3] * 2100)}
    state = blend(named, [1, 1]).state_dict(50)
    assert [one["document_shuffle"] for one in state["datasets"].values()] == ["block", "global"]
