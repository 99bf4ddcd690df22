"""A plain DataLoader over positions: any number of workers and ranks, the same samples. Others are in tests/ranks."""

import pickle

import numpy as np
import pytest
from blending_helpers import blend, numbered

from sixfold.blending import BlendingError

torch = pytest.importorskip("torch", reason="needs torch, the extra 'distributed'")


@pytest.fixture(scope="module")
def data():
    options = {"create_cu_seqlens": True, "create_document_ids": True}
    return blend({"a": numbered([50, 7]), "b": numbered([33])}, [1, 2], **options)


def sampler(*args):
    from sixfold.blending.torch import PositionSampler

    return PositionSampler(*args)


def lists(batch):
    return {name: array.tolist() for name, array in batch.items()}


def first(loader, steps):
    """Its first batches; the workers of an endless sampler end with the iterator."""
    return [lists(batch) for _, batch in zip(range(steps), loader, strict=False)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_loader_are_get_batch_of_the_positions(data, workers):
    data.get_batch(range(3))  # its handles are open when workers are forked
    loader = torch.utils.data.DataLoader(data, sampler=sampler(5, 4, 0, 1), batch_size=None, num_workers=workers)
    assert isinstance(next(iter(loader))["tokens"], torch.Tensor)
    assert first(loader, 4) == [lists(data.get_batch(range(5 + 4 * step, 9 + 4 * step))) for step in range(4)]


def test_workers_that_persist_begin_again_at_the_begin(data):
    loader = torch.utils.data.DataLoader(
        data, sampler=sampler(8, 4, 0, 1), batch_size=None, num_workers=2, persistent_workers=True
    )
    expected = [lists(data.get_batch(range(8 + 4 * step, 12 + 4 * step))) for step in range(3)]
    assert [first(loader, 3) for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_may_stack_samples_itself(workers):
    data = blend({"a": numbered([50, 7])}, [1], create_document_ids=True)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler(0, 3, 0, 1), num_workers=workers)
    assert first(loader, 3) == [lists(data.get_batch(range(3 * step, 3 * step + 3))) for step in range(3)]


def test_a_whole_batch_is_read_at_once_where_a_loader_stacks_samples(data, monkeypatch):
    asked, get_batch = [], data.get_batch
    monkeypatch.setattr(type(data), "get_batch", lambda _, positions, **more: asked.append(1) or get_batch(positions))
    samples = data.__getitems__([4, 9, 2])
    assert len(asked) == 1
    monkeypatch.undo()
    assert [lists(sample) for sample in samples] == [lists(data[n]) for n in (4, 9, 2)]
    with pytest.raises(IndexError):
        data.__getitems__([0, len(data)])


def test_the_error_of_a_worker_is_raised_by_the_loader(data):
    few = blend({"a": numbered([50, 7])}, None, None)  # one epoch
    loader = torch.utils.data.DataLoader(few, sampler=sampler(0, len(few) + 1, 0, 1), batch_size=None, num_workers=1)
    with pytest.raises(IndexError, match=f"position {len(few)} is not in"):
        next(iter(loader))


def test_ranks_together_read_every_position_once_and_continue_with_another_number_of_ranks():
    read = []
    for rank in range(3):
        batches = [batch for _, batch in zip(range(4), sampler(0, 2, rank, 3), strict=False)]
        read += [position for batch in batches for position in batch]
    assert sorted(read) == list(range(24))
    after = [position for rank in range(2) for position in next(iter(sampler(24, 3, rank, 2)))]
    assert sorted(after) == list(range(24, 30))


WRONG = {
    "begin is -1": (-1, 1, 0, 1),
    "begin is 1.5": (1.5, 1, 0, 1),
    "batch_size is 0": (0, 0, 0, 1),
    r"rank is 1 of 1 ranks; it is 0\.\.0": (0, 1, 1, 1),
    "rank is -1": (0, 1, -1, 2),
}


@pytest.mark.parametrize("problem", WRONG)
def test_a_sampler_that_cannot_work_is_refused(problem):
    with pytest.raises(BlendingError, match=problem):
        sampler(*WRONG[problem])


def test_a_pickled_blend_gives_the_same_samples_and_carries_no_caches(data):
    data.get_batch(range(50))
    again = pickle.loads(pickle.dumps(data))
    assert np.array_equal(again.get_batch(range(50))["labels"], data.get_batch(range(50))["labels"])
    assert not pickle.loads(pickle.dumps(data)).datasets[0].order.line._epochs
