"""Every rank builds alone and alike; an error of one is raised on all."""

import os
import signal

import pytest
from blending_helpers import ListDataset, blend, config, numbered

from sixfold.blending import BlendedMegatronDatasetBuilder, BlendingError
from sixfold.blending.source import ListSource

ranktest = pytest.importorskip("ranktest", reason="needs tools/ranktest")


def build(rank: int, ranks: int, broken: int | None):
    import torch.distributed as dist

    ListDataset.pairs = {"a": ListSource(numbered([30] * 9)), "b": ListSource(numbered([20] * 5))}
    if rank == broken:
        del ListDataset.pairs["b"]
    made = config(blend=(["a", "b"], [1, 2]), split="1")
    builder = BlendedMegatronDatasetBuilder(ListDataset, [40, 0, 0], lambda: rank != 1, made, group=dist.group.WORLD)
    try:
        train, valid, test = builder.build()
    except BlendingError as error:
        return str(error)
    assert valid is None
    assert test is None
    return None if train is None else train.get_batch(range(40))["tokens"].tolist()


@pytest.mark.slow
def test_ranks_build_the_same_and_one_that_is_not_built_on_gets_nones():
    first, second, third = ranktest.run_ranks(build, 3, None)
    assert first == third
    assert second is None


def test_an_error_on_one_rank_is_raised_on_every_rank():
    errors = ranktest.run_ranks(build, 3, 2)
    assert len(set(errors)) == 1
    assert errors[0].startswith("rank 2: 'b' (while b was opened)")


def build_beside_a_stopped_rank(rank: int, ranks: int):
    import datetime

    import torch.distributed as dist

    group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
    store = ranktest.store()
    if rank == 1:
        store.set("stopped", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    stopped = int(store.get("stopped"))
    ListDataset.pairs = {"a": ListSource(numbered([30] * 9))}
    made = config(blend=(["a"], None), split="1")
    try:
        BlendedMegatronDatasetBuilder(ListDataset, [40, 0, 0], lambda: True, made, group=group).build()
    except BlendingError as error:
        return str(error)
    finally:
        os.kill(stopped, signal.SIGKILL)
    return None


def test_a_stopped_rank_ends_the_others_within_the_timeout_of_the_group():
    first, _ = ranktest.run_ranks(build_beside_a_stopped_rank, 2, allow_exit=[1])
    assert first.startswith("rank 0 of 2 waited for the others, after a step of the build, and one did not come")


def read_by_sampler(rank: int, ranks: int, steps: int):
    from sixfold.blending.torch import PositionSampler

    sampler = PositionSampler(begin=10, batch_size=3, rank=rank, ranks=ranks)
    data = blend({"a": numbered([30] * 9), "b": numbered([20] * 5)}, [1, 2])
    return [(batch, data[batch]["tokens"].tolist()) for _, batch in zip(range(steps), sampler, strict=False)]


def test_processes_of_any_number_read_the_samples_of_one_process():
    alone = blend({"a": numbered([30] * 9), "b": numbered([20] * 5)}, [1, 2]).get_batch(range(34))["tokens"].tolist()
    read = [part for parts in ranktest.run_ranks(read_by_sampler, 2, 4) for part in parts]
    assert sorted(position for batch, _ in read for position in batch) == list(range(10, 34))
    for batch, tokens in read:
        assert tokens == [alone[position] for position in batch]
