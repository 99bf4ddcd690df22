"""A plain DataLoader over positions: any number of workers and ranks, the same samples."""

import pickle

import numpy as np
import pytest
from blending_helpers import blend, numbered

from sixfold.blending import BlendingError

torch = pytest.importorskip("torch", reason="needs torch, the extra 'distributed'")


@pytest.fixture(scope="module")
def data():
    return blend({"a": numbered([50, 7]), "b": numbered([33])}, [1, 2], create_cu_seqlens=True)


def sampler(*args):
    from sixfold.blending.torch import PositionSampler

    return PositionSampler(*args)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_loader_are_get_batch_of_the_positions(data, workers):
    loader = torch.utils.data.DataLoader(data, sampler=sampler(5, 4, 0, 1), batch_size=None, num_workers=workers)
    for step, batch in zip(range(4), loader, strict=False):
        expected = data.get_batch(range(5 + 4 * step, 9 + 4 * step))
        assert isinstance(batch["tokens"], torch.Tensor)
        assert {name: array.tolist() for name, array in batch.items()} == {
            name: array.tolist() for name, array in expected.items()
        }


def test_a_loader_may_stack_samples_itself():
    data = blend({"a": numbered([50, 7])}, [1])
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler(0, 3, 0, 1))
    batch = next(iter(loader))
    assert np.array_equal(batch["tokens"].numpy(), data.get_batch(range(3))["tokens"])


def test_ranks_together_read_every_position_once_and_continue_with_another_number_of_ranks():
    read = []
    for rank in range(3):
        batches = [batch for _, batch in zip(range(4), sampler(0, 2, rank, 3), strict=False)]
        read += [position for batch in batches for position in batch]
    assert sorted(read) == list(range(24))
    after = [position for rank in range(2) for position in next(iter(sampler(24, 3, rank, 2)))]
    assert sorted(after) == list(range(24, 30))


@pytest.mark.parametrize("wrong", [(-1, 1, 0, 1), (0, 0, 0, 1), (0, 1, 1, 1), (0, 1, -1, 2)])
def test_a_sampler_that_cannot_work_is_refused(wrong):
    with pytest.raises(BlendingError, match="0 <= rank < ranks"):
        sampler(*wrong)


def test_a_pickled_blend_gives_the_same_samples_and_carries_no_caches(data):
    data.get_batch(range(50))
    again = pickle.loads(pickle.dumps(data))
    assert np.array_equal(again.get_batch(range(50))["labels"], data.get_batch(range(50))["labels"])
    assert not pickle.loads(pickle.dumps(data)).datasets[0].order.line._epochs
