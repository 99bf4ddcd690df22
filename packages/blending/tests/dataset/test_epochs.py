"""How often each dataset is read is counted, ``why`` and ``draw`` tell it, and a small one repeats with a word."""

import pickle
import warnings

import numpy as np
import pytest
from blending_helpers import ListDataset, blend, config, dataset, numbered

from sixfold.blending import BlendChange, BlendedMegatronDatasetBuilder, BlendingError, GPTDatasetConfig
from sixfold.blending.source import ListSource

NAMED = {"large": numbered([500] * 8), "small": numbered([7, 3, 14])}


def epochs_met(data, number, n):
    """Tokens of dataset ``number`` in the first ``n`` positions, counted one by one, over those it has."""
    given = sum(part.length for p in range(n) if (why := data.why(p)).dataset_id == number for part in why.ranges)
    return given / data.datasets[number].part.tokens


@pytest.mark.parametrize("order", ["stateless", "megatron", "apportioned"])
def test_epochs_are_the_tokens_given_over_the_tokens_there_are(order):
    data = blend(NAMED, [3, 1], size=40, order=order, max_epochs=None) if order == "stateless" else built(order)
    for n in (0, 1, 17, 40):
        assert data.epochs(n).tolist() == pytest.approx([epochs_met(data, number, n) for number in range(2)])
    why = data.why(23)
    assert why.epochs == pytest.approx(why.sample * 8 / data.datasets[why.dataset_id].part.tokens)
    assert f"after {why.epochs:.2f} epochs of it" in str(why)


def built(order, sizes=(40, 0, 0), named=NAMED, weights=(3, 1), **fields):
    held = {name: ListSource(sequences) for name, sequences in named.items()}
    ListDataset.pairs = held
    made = config(**({"blend": (list(named), weights), "split": "1", "order": order, "max_epochs": None} | fields))
    return BlendedMegatronDatasetBuilder(ListDataset, list(sizes), lambda: True, made).build()[0]


def test_epochs_are_counted_through_changes_of_weights_and_length():
    changes = [BlendChange(20, sequence_length=3), BlendChange(31, (["small"], [1])), BlendChange(40, None, 11)]
    data = blend(NAMED, [3, 1], changes=changes, max_epochs=None)
    assert data.epochs(60).tolist() == pytest.approx([epochs_met(data, number, 60) for number in range(2)])
    alone = dataset(NAMED["small"], max_epochs=None)
    assert alone.epochs(9).tolist() == pytest.approx([72 / 24])


def first_beyond(data, number, epochs):
    """The first position whose sample has a token behind so many epochs of a dataset."""
    given, whole = 0, data.datasets[number].part.tokens
    for position in range(10_000):
        why = data.why(position)
        if why.dataset_id == number:
            given += sum(part.length for part in why.ranges)
            if given > epochs * whole:
                return position
    raise AssertionError("never")


@pytest.mark.parametrize("changes", [[], [BlendChange(20, sequence_length=3), BlendChange(31, (["small"], [1]))]])
@pytest.mark.parametrize("limit", [1, 2.5, 4])
def test_a_dataset_read_more_often_than_max_epochs_is_told_once_with_its_name_and_position(limit, changes):
    with pytest.warns(UserWarning, match="more often") as caught:
        data = blend(NAMED, [3, 1], size=200, max_epochs=limit, changes=changes)
    position = first_beyond(data, 1, limit)
    (told,) = [str(one.message) for one in caught]
    assert f"'small' from position {position} on" in told
    assert "'large'" not in told
    assert f"{data.epochs(200)[1]:.4g} epochs" in told
    assert f"max_epochs is {limit}" in told
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.get_batch(range(190, 200))
        pickle.loads(pickle.dumps(data)).get_batch([3])


def test_a_stream_that_is_read_behind_its_size_is_told_where_it_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = blend(NAMED, [3, 1], size=10, max_epochs=4)
        position = first_beyond(data, 1, 4)
        data.get_batch(range(position))
    with pytest.warns(UserWarning, match=f"'small' from position {position} on"):
        data.get_batch([position])


def test_the_default_is_four_and_an_error_on_request():
    assert GPTDatasetConfig(random_seed=1, sequence_length=8).max_epochs == 4
    with pytest.raises(BlendingError, match=r"'small' from position \d+ on.*max_epochs is 4"):
        blend(NAMED, [3, 1], size=200, max_epochs=4, max_epochs_error=True)
    data = blend(NAMED, [3, 1], size=10, max_epochs=4, max_epochs_error=True)
    for _ in range(2):  # who goes on after an error meets it again
        with pytest.raises(BlendingError, match="'small' from position"):
            data.get_batch([199])
    assert data.get_batch([9])["tokens"].shape == (1, 8)
    alone = dataset(NAMED["small"], max_epochs=np.int64(4), max_epochs_error=True)
    for _ in range(2):
        with pytest.raises(BlendingError, match="from position 12 on"):
            alone.get_batch([50])
    for wrong in (0, -1, float("nan"), "four", True):
        with pytest.raises(BlendingError, match="max_epochs is"):
            config(max_epochs=wrong)


@pytest.mark.parametrize("order", ["megatron", "apportioned"])
def test_orders_with_indices_tell_it_too(order):
    with pytest.warns(UserWarning, match="'small'") as caught:
        data = built(order, max_epochs=2)
    assert len(caught) == 1, "the datasets of a blend do not speak for themselves"
    told = str(caught[0].message)
    assert ("over all positions" if order == "apportioned" else f"position {first_beyond(data, 1, 2)} on") in told


def test_a_dataset_alone_tells_it_and_validation_may_repeat():
    with pytest.warns(UserWarning, match="'small' from position 12 on"):
        built("stateless", blend=(["small"], None), max_epochs=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built("stateless", (0, 100, 0), split="0,1,0", max_epochs=1)
        built("stateless", (None, 0, 0), blend=(["small", "large"], None), max_epochs=1)


def test_a_thousand_datasets_are_looked_at_without_a_search_each():
    named = {f"d{number}": [[1] * 50] for number in range(300)}
    with pytest.warns(UserWarning, match=r"and 292 more"):
        data = blend(named, np.ones(300).tolist(), size=30_000, max_epochs=4)
    assert data.epochs(30_000).shape == (300,)
