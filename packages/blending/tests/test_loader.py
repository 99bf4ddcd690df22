"""A plain DataLoader over positions: any number of workers and ranks, the same samples. Others are in tests/ranks."""

import pickle
from itertools import product

import numpy as np
import pytest
from blending_helpers import blend, numbered

from sixfold.blending import BlendingError

torch = pytest.importorskip("torch", reason="needs torch, the extra 'distributed'")


@pytest.fixture(scope="module")
def data():
    options = {"create_cu_seqlens": True, "create_document_ids": True}
    return blend({"a": numbered([50, 7]), "b": numbered([33])}, [1, 2], **options)


def sampler(*args, **more):
    from sixfold.blending.torch import PositionSampler

    return PositionSampler(*args, **more)


def lists(batch):
    return {name: array.tolist() for name, array in batch.items()}


def first(loader, steps):
    """Its first batches; the workers of an endless sampler end with the iterator."""
    return [lists(batch) for _, batch in zip(range(steps), loader, strict=False)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_loader_are_get_batch_of_the_positions(data, workers):
    data.get_batch(range(3))  # its handles are open when workers are forked
    # Loaders with workers are read to their end here: see ranks/test_loader_workers.py.
    loader = torch.utils.data.DataLoader(
        data, sampler=sampler(5, 4, 0, 1, end=21), batch_size=None, num_workers=workers
    )
    batches = list(loader)
    assert all(isinstance(batch["tokens"], torch.Tensor) for batch in batches)
    expected = [lists(data.get_batch(range(5 + 4 * step, 9 + 4 * step))) for step in range(4)]
    assert [lists(batch) for batch in batches] == expected


def test_workers_that_persist_begin_again_at_the_begin(data):
    loader = torch.utils.data.DataLoader(
        data, sampler=sampler(8, 4, 0, 1, end=20), batch_size=None, num_workers=2, persistent_workers=True
    )
    expected = [lists(data.get_batch(range(8 + 4 * step, 12 + 4 * step))) for step in range(3)]
    assert [[lists(batch) for batch in loader] for _ in range(2)] == [expected, expected]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_may_stack_samples_itself(workers):
    data = blend({"a": numbered([50, 7])}, [1], create_document_ids=True)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler(0, 3, 0, 1, end=9), num_workers=workers)
    expected = [lists(data.get_batch(range(3 * step, 3 * step + 3))) for step in range(3)]
    assert [lists(batch) for batch in loader] == expected


def test_a_whole_batch_is_read_at_once_where_a_loader_stacks_samples(data, monkeypatch):
    asked, get_batch = [], data.get_batch
    monkeypatch.setattr(type(data), "get_batch", lambda _, positions, **more: asked.append(1) or get_batch(positions))
    samples = data.__getitems__([4, 9, 2])
    assert len(asked) == 1
    monkeypatch.undo()
    assert [lists(sample) for sample in samples] == [lists(data[n]) for n in (4, 9, 2)]


def test_a_loader_that_stacks_samples_goes_on_behind_the_length_as_one_of_whole_batches_does():
    data = blend({"a": numbered([50, 7]), "b": numbered([33])}, [1, 2])
    begin = len(data) - 2
    with pytest.raises(IndexError):  # where `for sample in data` ends
        data[len(data)]
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler(begin, 4))
    expected = [lists(data.get_batch(range(at, at + 4))) for at in (begin, begin + 4)]
    assert first(loader, 2) == expected
    epoch = blend({"a": numbered([50, 7])}, None, None)
    with pytest.raises(IndexError, match=f"position {len(epoch)} is not in"):
        epoch.__getitems__([0, len(epoch)])


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


def steps_of(ranks, *args, **more):
    """Positions of every rank by step: all ranks have as many steps."""
    return list(zip(*(list(sampler(*args, rank, ranks, **more)) for rank in range(ranks)), strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("samples", [0, 1, 7, 12, 33, 103])
def test_a_sampler_with_an_end_gives_every_sample_once_and_no_rank_an_empty_batch(samples, ranks):
    whole = steps_of(ranks, 5, 4, end=5 + samples, drop_last=True)
    assert [p for step in whole for batch in step for p in batch] == list(range(5, 5 + samples - samples % (4 * ranks)))
    assert len(sampler(5, 4, 0, ranks, end=5 + samples, drop_last=True)) == len(whole)
    if 0 < samples < ranks:
        with pytest.raises(BlendingError, match=rf"has {samples} samples for {ranks} ranks.*drop_last=True"):
            sampler(5, 4, 0, ranks, end=5 + samples)
        return
    steps = steps_of(ranks, 5, 4, end=5 + samples)
    assert [p for step in steps for batch in step for p in batch] == list(range(5, 5 + samples))
    assert all(len(batch) == 4 for step in steps[:-2] for batch in step)
    for batches in steps[-2:]:
        assert max(map(len, batches)) - min(map(len, batches)) <= 1, "the rest is shared evenly"
        assert min(map(len, batches)) >= 1
    assert len(sampler(5, 4, 0, ranks, end=5 + samples)) == len(steps) == -(-samples // (4 * ranks))


@pytest.mark.parametrize("ramp", [(), ((16, 1),), ((10, 3), (18, 2))])
@pytest.mark.slow
def test_whatever_its_end_a_sampler_has_no_empty_batch_or_is_refused_before_its_first_step(ramp):
    refused = 0
    for begin, batch_size, ranks, end in product((0, 3), (1, 2), (2, 3, 5), range(3, 41)):
        try:
            steps = steps_of(ranks, begin, batch_size, end=end, ramp=ramp)
        except BlendingError:
            refused += 1
            assert end - begin < ranks or 1 in (batch_size, *(size for _, size in ramp)), "one a rank cannot leave more"
            continue
        assert [p for step in steps for batch in step for p in batch] == list(range(begin, end))
        assert all(batch for step in steps for batch in step)
        assert len(sampler(begin, batch_size, 0, ranks, end=end, ramp=ramp)) == len(steps)
        for number, step in enumerate(steps):  # a restart meets the same steps
            assert steps_of(ranks, step[0][0], batch_size, end=end, ramp=ramp) == steps[number:]
    assert refused


def test_a_state_behind_which_too_few_samples_are_left_is_refused_on_every_rank():
    for rank in range(4):
        one = sampler(0, 2, rank, 4, end=16)
        one.load_state_dict({"position": 13})
        with pytest.raises(BlendingError, match="the last step, from 13 on, has 3 samples for 4 ranks"):
            iter(one)
        with pytest.raises(BlendingError, match="the last step, from 13 on, has 3 samples for 4 ranks"):
            iter(sampler(0, 2, rank, 4, end=16)).load_state_dict({"position": 13})


def test_one_validation_epoch_is_read_to_its_last_sample_also_on_more_ranks_than_are_left():
    few = blend({"a": numbered([50, 7]), "b": numbered([33])}, None, None)
    read = []
    for rank in range(3):
        loader = torch.utils.data.DataLoader(
            few, sampler=sampler(0, 3, rank, 3, end=len(few)), batch_size=None, num_workers=int(rank == 0)
        )
        read += [tokens.tolist() for batch in loader for tokens in batch["tokens"]]
        assert len(loader) == -(-len(few) // 9)
    assert sorted(read) == sorted(few.get_batch(range(len(few)))["tokens"].tolist())


def test_a_ramp_grows_the_batch_from_its_positions_on():
    ramp = [(10, 3), (25, 4)]
    steps = steps_of(2, 0, 1, end=60, ramp=ramp)
    assert [p for step in steps for batch in step for p in batch] == list(range(60))
    begins = [step[0][0] for step in steps]
    assert [len(step[0]) for step in steps[:-1]] == [1 if b < 10 else 3 if b < 25 else 4 for b in begins[:-1]]
    assert len(sampler(0, 1, 0, 2, end=60, ramp=ramp)) == len(steps)
    assert steps_of(2, begins[7], 1, end=60, ramp=ramp) == steps[7:], "a restart meets the same steps"


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 3), (3, 2), (1, 4)])
def test_the_state_of_a_sampler_goes_on_with_other_ranks_and_batches(ranks, batch_size):
    first = [sampler(4, 3, rank, 2, end=100) for rank in range(2)]
    read = []
    for one in first:
        batches = iter(one)
        read += [p for _ in range(5) for p in next(batches)]
        assert one.state_dict() == batches.state_dict() == {"position": 34}
    for rank in range(ranks):
        other = sampler(4, batch_size, rank, ranks, end=100)
        other.load_state_dict({"position": 34})
        assert other.state_dict() == {"position": 34}
        read += [p for batch in other for p in batch]
        assert next(iter(other))[0] == 4 + rank * batch_size, "the next time it begins where it was told to"
    assert sorted(read) == list(range(4, 100))


def test_what_a_stateful_loader_holds_has_a_state_if_it_can_be_asked_for_without_a_position(data):
    """torchdata's loader calls ``state_dict()`` of all that has one: of the sampler, its iterator, the dataset."""
    from sixfold.blending.torch import LoaderDataset

    held = LoaderDataset(data)
    assert not hasattr(held, "state_dict")
    loader = torch.utils.data.DataLoader(held, sampler=sampler(5, 4), batch_size=None)
    assert first(loader, 2) == [lists(data.get_batch(range(5 + 4 * step, 9 + 4 * step))) for step in range(2)]
    assert len(held) == len(data)
    assert sampler(5, 4).state_dict() == iter(sampler(5, 4)).state_dict() == {"position": 5}


def test_a_position_of_numpy_is_a_position_and_a_bool_is_none():
    one = sampler(0, 4)
    one.load_state_dict({"position": np.int64(8)})
    assert next(iter(one)) == [8, 9, 10, 11]
    with pytest.raises(BlendingError, match="no position"):
        one.load_state_dict({"position": True})


def test_a_state_that_is_none_is_refused():
    for wrong in ({}, {"position": -1}, None, {"position": "5"}):
        with pytest.raises(BlendingError, match="position"):
            sampler(0, 1).load_state_dict(wrong)


WRONG = {
    "begin is -1": (-1, 1, 0, 1),
    "begin is 1.5": (1.5, 1, 0, 1),
    "batch_size is 0": (0, 0, 0, 1),
    r"rank is 1 of 1 ranks; it is 0\.\.0": (0, 1, 1, 1),
    "rank is -1": (0, 1, -1, 2),
}


WRONG_MORE = {
    "end is 3; the sampler begins at 5": {"end": 3},
    r"ramp\[1\] at 7 is not behind the one at 7": {"ramp": [(7, 2), (7, 3)]},
    r"ramp\[0\] batch_size is 0": {"ramp": [(7, 0)]},
    "drop_last is given without an end": {"drop_last": True},
}


@pytest.mark.parametrize("problem", [*WRONG, *WRONG_MORE])
def test_a_sampler_that_cannot_work_is_refused(problem):
    with pytest.raises(BlendingError, match=problem):
        sampler(*WRONG.get(problem, (5, 1)), **WRONG_MORE.get(problem, {}))


def test_a_pickled_blend_gives_the_same_samples_and_carries_no_caches(data):
    data.get_batch(range(50))
    again = pickle.loads(pickle.dumps(data))
    assert np.array_equal(again.get_batch(range(50))["labels"], data.get_batch(range(50))["labels"])
    assert not pickle.loads(pickle.dumps(data)).datasets[0].order.line._epochs
