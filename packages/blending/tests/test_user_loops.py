"""Samplers and ranks as users have them: lengths that are told, changes inside a step, ranks that differ."""

import itertools

import numpy as np
import pytest
from blending_helpers import blend, numbered

from sixfold.blending import BlendChange, BlendingError

torch = pytest.importorskip("torch", reason="needs torch, the extra 'distributed'")


def sampler(*args, **more):
    from sixfold.blending.torch import PositionSampler

    return PositionSampler(*args, **more)


def test_the_length_of_a_sampler_is_the_number_of_its_steps():
    """Every begin, end, batch, number of ranks, ramp and drop_last of a small range, beside a walk through it."""
    checked = 0
    ramps = ((), ((49, 5),), ((4, 3), (9, 1)), ((2, 4), (50, 2)))
    for begin, end, batch, ranks, drop, ramp in itertools.product(
        (0, 3, 48), (50, 51, 64, 77), (1, 3, 4), (1, 2, 4), (False, True), ramps
    ):
        try:
            one = sampler(begin, batch, ranks - 1, ranks, end=end, drop_last=drop, ramp=ramp)
        except BlendingError:
            continue
        assert len(one) == sum(1 for _ in one), (begin, end, batch, ranks, drop, ramp)
        checked += 1
    assert checked > 500


def test_the_length_after_a_state_is_of_what_is_left():
    one = sampler(0, 2, 0, 2, end=40)
    assert len(one) == 10
    one.load_state_dict({"position": 28})
    assert len(one) == 3, "before the iterator is made, as a progress bar asks"
    steps = iter(one)
    assert len(one) == 3 and len(list(steps)) == 3
    assert len(one) == 10, "the next epoch begins at the begin"


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_change_of_the_length_inside_a_step_is_refused_by_every_rank_and_the_places_that_it_names_work(wrapped):
    from sixfold.blending.torch import LoaderDataset

    def data(at):
        changes = [BlendChange(at, sequence_length=4), BlendChange(at + 64, (["a"], [1]))]
        stream = blend({"a": numbered([50] * 9), "b": numbered([33] * 9)}, [1, 2], changes=changes)
        return LoaderDataset(stream) if wrapped else stream

    for rank in range(4):
        with pytest.raises(BlendingError, match=r"at 101, inside the step of positions 96\.\.103.*at 96 or at 104"):
            sampler(0, 2, rank, 4, data=data(101))
    for at in (96, 104):
        for rank in range(4):
            stream = data(at)
            for positions in itertools.islice(sampler(0, 2, rank, 4, data=stream), 20):
                stream[positions]
    sampler(0, 2, 0, 4, data=data(101), end=100)  # behind the end
    sampler(101, 2, 0, 4, data=data(101))
    resumed = sampler(101, 2, 0, 4, data=data(101))
    resumed.load_state_dict({"position": 90})
    with pytest.raises(BlendingError, match="changes at 101, inside the step"):
        iter(resumed)
    with pytest.raises(BlendingError, match=r"inside the step of positions 100\.\."):
        sampler(0, 2, 0, 4, data=data(101), ramp=[(48, 1)])


def test_what_a_worker_of_torch_samplers_asks_for_is_get_batch_of_it():
    """torch's own samplers over a stream of a size, in batches and alone."""
    stream = blend({"a": numbered([50] * 9)}, [1], size=20)
    utils = torch.utils.data
    for one in (
        utils.SequentialSampler(stream),
        utils.RandomSampler(stream),
        utils.SubsetRandomSampler(range(0, 20, 3)),
    ):
        for batch_size in (None, 4):
            seen = [batch["tokens"].numpy() for batch in utils.DataLoader(stream, sampler=one, batch_size=batch_size)]
            width = np.concatenate([rows.reshape(-1, 8) for rows in seen])
            assert len(width) == len(one)
    distributed = utils.DistributedSampler(stream, num_replicas=3, rank=2, shuffle=False)
    rows = np.concatenate([batch["tokens"].numpy() for batch in utils.DataLoader(stream, sampler=distributed)])
    assert np.array_equal(rows, stream.get_batch(list(distributed))["tokens"])
