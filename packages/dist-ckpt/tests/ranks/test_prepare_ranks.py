"""``prepare_async_save``: worker and shared memory are there before the first background save."""

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointManager, ShardingError
from sixfold.dist_ckpt.background import AsyncSaver


def state_of(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    plain = {f"p{number}": torch.full((30_000 + number,), float(number)) for number in range(5)}
    sharded = DTensor.from_local(torch.full((100, 1000), float(rank)), mesh, [Shard(0)], run_check=False)
    return {"plain": plain, "sharded": sharded, "replica": torch.ones(3), "step": 7}


def prepared(rank, ranks, folder):
    state = state_of(rank, ranks)
    with AsyncSaver() as saver:
        saver.prepare(state)
        worker = saver._worker.process.pid
        saver._preparing.join()
        size = saver._arena.nbytes
        handle = saver.save(state, folder / "c")
        handle.wait()
        assert (handle.worker_pid, saver._arena.nbytes) == (worker, size), "it was all there"
        saver.prepare(state)  # again: nothing is left to do
        saver.save(state | {"more": torch.ones(10**6)}, folder / "d").wait()  # what is larger than said grows
    found = dist_ckpt.load(state_of(rank, ranks), folder / "d")
    assert all(map(torch.equal, found["plain"].values(), state["plain"].values())) and int(found["more"].sum()) == 10**6
    return size


def test_the_first_save_finds_worker_and_memory_ready_on_each_rank(tmp_path):
    sizes = run_ranks(prepared, 2, tmp_path)
    assert all(2**19 < size < 3 * 2**20 for size in sizes)  # of 0.4 MB of its shards and half of 0.6 MB


def refused_on_one(rank, ranks, folder):
    state = (
        {"a": torch.ones(3)} if rank else {"a": (torch.ones(3), dist_ckpt.ShardedTensorFactory("a", None, None, None))}
    )
    with pytest.raises(ShardingError) as told:
        dist_ckpt.prepare_async_save(state)
    return str(told.value)


def test_a_state_dict_that_one_rank_cannot_save_is_an_error_on_all(tmp_path):
    first, second = run_ranks(refused_on_one, 2, tmp_path)
    assert first == second and "that holds a ShardedTensorFactory" in first


def test_a_manager_prepares_at_the_first_step_that_is_not_saved(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("sixfold.dist_ckpt.manager.prepare_async_save", lambda state, **_: calls.append(state))
    for background in (True, False):
        with CheckpointManager(tmp_path / str(background), every=3, background=background, group=None) as manager:
            for step in range(1, 5):
                manager.save(step, {"step": step})
    assert calls == [{"step": 1}]


def test_a_saver_that_is_closed_or_of_another_process_prepares_nothing(tmp_path):
    saver = AsyncSaver(group=None)
    saver.prepare({"a": torch.ones(10**6)})
    saver.close()  # waits for the thread that gets memory
    with pytest.raises(dist_ckpt.CheckpointError, match="is closed; make a new one"):
        saver.prepare({"a": torch.ones(3)})


def test_memory_that_is_not_there_is_an_error_of_the_save(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    with AsyncSaver(group=None) as saver:
        monkeypatch.setattr("sixfold.dist_ckpt.background.arena.os.posix_fallocate", full)
        saver.prepare({"a": torch.ones(10**6)})
        handle = saver.save({"a": torch.ones(10**6)}, tmp_path / "c")
        with pytest.raises(dist_ckpt.StorageError, match="no shared memory"):
            handle.wait()
        monkeypatch.undo()
        saver.save({"a": torch.ones(10**6)}, tmp_path / "c").wait()
