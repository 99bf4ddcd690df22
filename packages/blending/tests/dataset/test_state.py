"""A position and what fixed the past: it goes through JSON, and another past is refused."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from blending_helpers import blend, dataset, numbered

from sixfold.blending import BlendChange, BlendingError
from sixfold.blending.documents.part import Part
from sixfold.blending.documents.source import ListSource

GOLDEN = Path(__file__).parents[1] / "golden"
STATES_0_1_0 = json.loads((GOLDEN / "states-0.1.0.json").read_text())
spec = importlib.util.spec_from_file_location("make_states", GOLDEN / "make_states_0_1_0.py")
make_states = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_states)

NAMED = {"a": numbered([20, 9, 31]), "b": numbered([40, 5]), "c": numbered([50])}
TWO = {name: NAMED[name] for name in ("a", "b")}
CHANGE = BlendChange(at=30, blend=(["a", "c"], [1, 2]))


def through_json(state):
    return json.loads(json.dumps(state))


def test_a_state_goes_through_json_and_gives_the_position_back():
    data = blend(NAMED, [1, 3], changes=[CHANGE])
    for position in (0, 1, 30, 31, 10**9):
        assert data.load_state_dict(through_json(data.state_dict(position))) == position
    alone = dataset(numbered([50]))
    assert alone.load_state_dict(through_json(alone.state_dict(77))) == 77
    epoch = blend(TWO, None, size=None)
    assert epoch.load_state_dict(through_json(epoch.state_dict(3))) == 3


@pytest.mark.parametrize("kind", [np.int64, np.uint32])
def test_a_state_whose_numbers_a_checkpoint_gives_back_as_numpys_is_the_same_state(kind):
    """torch.save and DCP keep Python's numbers; a user's own file of arrays gives numpy's."""
    data = blend(NAMED, [1, 3], changes=[CHANGE])
    state = data.state_dict(31)
    loaded = state | {"position": kind(31), "state_version": kind(state["state_version"]), "seed": kind(state["seed"])}
    assert (position := data.load_state_dict(loaded)) == 31 and type(position) is int
    assert dataset(numbered([50])).load_state_dict(dataset(numbered([50])).state_dict(7) | {"position": kind(7)}) == 7
    for wrong in (True, np.bool_(True), kind(31) / 1, "31", None, -1):
        with pytest.raises(BlendingError, match="no position"):
            data.load_state_dict(state | {"position": wrong})


def test_later_changes_datasets_and_sizes_may_differ():
    state = blend(TWO, [1, 3], size=50).state_dict(30)
    longer = blend(NAMED, [1, 3], size=10**9, changes=[CHANGE])
    assert longer.load_state_dict(through_json(state)) == 30
    other = blend(TWO, [1, 3], changes=[BlendChange(at=30, sequence_length=3)])
    assert other.load_state_dict(through_json(state)) == 30


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (lambda: blend(TWO, [1, 3], random_seed=5), "seed was 1234 and is 5"),
        (lambda: blend(TWO, [1, 2]), "segments"),
        (lambda: blend(TWO, [1, 3], changes=[BlendChange(at=29, sequence_length=4)]), "segments was"),
        (lambda: blend(TWO, [1, 3], sequence_length=9), r"segments\[0\].sequence_length was 8 and is 9"),
        (lambda: blend({"a": NAMED["a"], "z": NAMED["b"]}, [1, 3]), 'datasets.1.name was "b" and is "z"'),
        (lambda: blend({"b": NAMED["b"], "a": NAMED["a"]}, [3, 1]), 'datasets.0.name was "a" and is "b"'),
        (lambda: blend(TWO | {"b": numbered([39, 5])}, [1, 3]), "datasets.1.tokens was 45 and is 44"),
        (lambda: blend(TWO | {"b": numbered([45])}, [1, 3]), "datasets.1.sequences was 2 and is 1"),
        (lambda: blend(NAMED, [1, 3, 1]), "datasets.2 was null"),
        (lambda: blend(TWO, None, size=None), "segments"),
    ],
)
def test_another_past_is_refused_with_what_it_was_and_what_it_is(other, problem):
    state = through_json(blend(TWO, [1, 3]).state_dict(30))
    with pytest.raises(BlendingError, match=problem):
        other().load_state_dict(state)


def test_other_lengths_of_the_same_sum_are_seen():
    lengths = [5] * 600
    state = blend({"a": numbered(lengths)}, [1]).state_dict(30)
    lengths[100], lengths[101] = 4, 6
    with pytest.raises(BlendingError, match=r"datasets\.0\.sample was"):
        blend({"a": numbered(lengths)}, [1]).load_state_dict(state)


class Watched:
    """So many pointers, 12 bytes apart, that count which of their pages are read."""

    def __init__(self, size):
        self.size, self.pages = size, set()

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        numbers = np.arange(*key.indices(self.size)) if isinstance(key, slice) else np.asarray(key)
        self.pages.update((numbers * 8 // 4096).reshape(-1).tolist())
        return numbers * 12


def part_of(documents):
    source = ListSource([[1]])
    source.sequence_pointers = Watched(documents)
    source.sequence_lengths = np.broadcast_to(np.int32(3), documents)
    source.dtype = np.dtype(np.int32)
    return Part(source, range(documents))


@pytest.mark.parametrize("documents", [131_072, 131_073, 5_000_000_000])
def test_a_fingerprint_reads_a_mebibyte_whatever_the_size_and_sees_a_length_that_moves_the_rest(documents):
    part = part_of(documents)
    first = part.fingerprint["sample"]
    pages = part.source.sequence_pointers.pages
    assert len(pages) <= 400
    assert {0, (documents - 1) * 8 // 4096} <= pages, "from the first pointer to the last"
    other = part_of(documents)
    other.source.sequence_pointers.__class__ = type(
        "Moved", (Watched,), {"__getitem__": lambda self, key: Watched.__getitem__(self, key) + 4 * (key != 0)}
    )
    assert other.fingerprint["sample"] != first


@pytest.mark.parametrize("order", ["stateless", "megatron", "apportioned"])
def test_states_of_release_0_1_0_are_read_and_their_hashes_verified(order):
    state = STATES_0_1_0[order]
    assert make_states.stream(order).load_state_dict(state) == 30
    with pytest.raises(BlendingError, match=r"datasets\.1\.sequences was 600 and is 599"):
        make_states.stream(order, 599).load_state_dict(state)
    with pytest.raises(BlendingError, match="seed was 1234 and is 5"):
        make_states.stream(order, seed=5).load_state_dict(state)
    changed = through_json(state)
    changed["datasets"]["0"]["hash"] = "0" * 16
    with pytest.raises(BlendingError, match=r"datasets\.0\.hash was"):
        make_states.stream(order).load_state_dict(changed)


def test_another_document_shuffle_is_refused_by_name_and_the_error_says_how_to_go_on():
    old, now = STATES_0_1_0["of 3000 documents"], make_states.stream("stateless", 3000)
    with pytest.raises(BlendingError, match=r'document_shuffle was "block" and is "global".*document_shuffle="block"'):
        now.load_state_dict(old)
    block = make_states.stream("stateless", 3000, document_shuffle="block")
    assert block.load_state_dict(old) == block.load_state_dict(block.state_dict(30)) == 30
    with pytest.raises(BlendingError, match=r'document_shuffle was "global" and is "block".*document_shuffle="global"'):
        block.load_state_dict(now.state_dict(30))
    few = make_states.stream("stateless", document_shuffle="global")
    assert few.load_state_dict(STATES_0_1_0["stateless"]) == 30, "below 2,048 documents they are one order"


def test_a_state_that_is_none_is_refused():
    data = blend(TWO, [1, 3])
    for wrong in ({}, {"position": -1}, {"position": "3"}, None):
        with pytest.raises(BlendingError, match="has no position"):
            data.load_state_dict(wrong)
    with pytest.raises(BlendingError, match="version 99"):
        data.load_state_dict(data.state_dict(3) | {"state_version": 99})
    with pytest.raises(BlendingError, match="position is -1"):
        data.state_dict(-1)
    with pytest.raises(BlendingError, match=r"position is 5\.5"):
        data.state_dict(5.5)


def test_the_first_of_many_changes_is_still_part_of_the_past():
    def changed(first):
        weights = [first, *range(2, 40)]
        changes = [BlendChange(10 * at, (["a", "c"], [1, weight])) for at, weight in enumerate(weights, 1)]
        return blend(NAMED, [1, 3], changes=changes)

    state = through_json(changed(1).state_dict(1000))
    assert len(json.dumps(state)) <= 1000 + 400 * 3
    assert changed(1).load_state_dict(state) == 1000
    with pytest.raises(BlendingError, match=r"earlier_segments\.hash was"):
        changed(1.5).load_state_dict(state)


def test_a_state_is_at_most_1_kb_and_400_bytes_per_dataset():
    many = {f"dataset-{number:04}": [[1, 2, 3]] for number in range(300)}
    weights = np.random.default_rng(0).random(300) + 0.01
    changes = [BlendChange(at=100 * at, blend=(list(many), np.roll(weights, at).tolist())) for at in range(1, 13)]
    state = blend(many, weights.tolist(), changes=changes).state_dict(10**12)
    assert len(json.dumps(state)) <= 1000 + 400 * 300
    assert len(json.dumps(blend(TWO, [1, 3]).state_dict(10**12))) <= 1000 + 400 * 2
