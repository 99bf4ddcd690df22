"""A position and what fixed the past: it goes through JSON, and another past is refused."""

import json

import numpy as np
import pytest
from blending_helpers import blend, dataset, numbered

from sixfold.blending import BlendChange, BlendingError

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


def test_other_lengths_of_the_same_sum_are_seen_in_every_256th_pointer():
    lengths = [5] * 600
    state = blend({"a": numbered(lengths)}, [1]).state_dict(30)
    lengths[100], lengths[300] = 4, 6
    with pytest.raises(BlendingError, match=r"datasets\.0\.hash was"):
        blend({"a": numbered(lengths)}, [1]).load_state_dict(state)


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
