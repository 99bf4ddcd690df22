"""Lazy saves: the copy beside the trainer, the fence, and what changes before it."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from forked_worker import fork_workers
from memory_tier_helpers import restores, state_of, tier_of

from ranktest import run_ranks
from sixfold import dist_ckpt
from sixfold.dist_ckpt import CheckpointError
from sixfold.dist_ckpt.background.arena import Arena


@pytest.fixture(autouse=True)
def forked():
    fork_workers()


@pytest.fixture
def slow(monkeypatch):
    """The copy takes a while; the event lets it go on."""
    go, inner = threading.Event(), Arena._fill

    def fill(self, *arguments):
        assert go.wait(30)
        inner(self, *arguments)

    monkeypatch.setattr(Arena, "_fill", fill)
    return go


def tensors():
    return {"large": torch.arange(300_000.0), "small": torch.ones(5), "more": torch.ones(3, 4, dtype=torch.bfloat16)}


def test_it_returns_before_the_copy_and_is_written_behind_the_fence(tmp_path, slow):
    state = tensors()
    handle = dist_ckpt.async_save(state, tmp_path / "a", group=None, lazy=True)
    assert not handle.done()
    slow.set()
    handle.fence()
    for tensor in state.values():
        tensor.zero_()  # the optimizer
    handle.fence()  # as often as one likes
    handle.wait()
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dist_ckpt.load(loaded, tmp_path / "a", group=None)
    for name, tensor in tensors().items():
        assert torch.equal(loaded[name], tensor), name


def test_all_is_written_beside_the_trainer_and_nothing_committed_before_the_fence(tmp_path):
    handle = dist_ckpt.async_save(tensors(), tmp_path / "a", group=None, lazy=True)
    deadline = time.monotonic() + 30
    while handle.progress() < 0.9 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert not handle.done() and handle.progress() > 0.9 and not (tmp_path / "a").exists()
    handle.wait()  # has the fence in it
    assert dist_ckpt.tools.verify(tmp_path / "a")["ok"]


@pytest.mark.parametrize("when", ["before the copy", "behind the copy"])
@pytest.mark.parametrize("change", ["in place", "through a view", "by an optimizer"])
def test_a_tensor_that_changes_before_the_fence_is_named_and_nothing_is_committed(tmp_path, slow, when, change):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    model(torch.ones(2, 300)).sum().backward()
    state = {"weight": model.weight.detach(), "other": torch.ones(7)}
    handle = dist_ckpt.async_save(state, tmp_path / "a", group=None, lazy=True)
    if when == "behind the copy":
        slow.set()
        assert handle._lazy._copied.wait(30)
    if change == "in place":
        state["weight"].add_(1)
    elif change == "through a view":
        state["weight"][3:4].zero_()
    else:
        optimizer.step()
    slow.set()
    with pytest.raises(CheckpointError, match=r"weight changed before fence\(\) of a lazy save"):
        handle.fence()
    with pytest.raises(CheckpointError, match=r"a tensor of rank 0 changed before fence\(\) of a lazy save; the error"):
        handle.wait()
    assert not (tmp_path / "a").exists()
    dist_ckpt.async_save(state, tmp_path / "a", group=None, lazy=True).wait()  # the next one is whole
    assert dist_ckpt.tools.verify(tmp_path / "a")["ok"]


def test_the_next_save_and_a_load_have_the_fence_in_them(tmp_path):
    state = tensors()
    first = dist_ckpt.async_save(state, tmp_path / "a", group=None, lazy=True)
    second = dist_ckpt.async_save(state, tmp_path / "b", group=None, lazy=True)
    assert first.done()
    loaded = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    dist_ckpt.load(loaded, tmp_path / "b", group=None)
    assert second.done() and torch.equal(loaded["large"], state["large"])


def test_without_a_fence_the_save_fails_at_its_deadline(tmp_path):
    handle = dist_ckpt.async_save(tensors(), tmp_path / "a", group=None, lazy=True, timeout_s=1.0)
    assert handle._ended.wait(20)
    handle.fence()
    with pytest.raises(CheckpointError, match=r"rank 0 has not called fence\(\) within timeout_s=1"):
        handle.wait()
    assert not (tmp_path / "a").exists()


def test_tensors_of_inference_mode_and_a_copy_that_fails(tmp_path, monkeypatch):
    with torch.inference_mode():
        state = {"a": torch.ones(300_000)}
    dist_ckpt.async_save(state, tmp_path / "a", group=None, lazy=True).wait()

    def fails(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(Arena, "_fill", fails)
    handle = dist_ckpt.async_save(tensors(), tmp_path / "b", group=None, lazy=True)
    with pytest.raises(Exception, match="no memory"):
        handle.fence()
    with pytest.raises(CheckpointError, match="no memory"):
        handle.wait()


def one_changes(rank, ranks, folder):
    fork_workers()
    state = state_of(rank, ranks, 1)
    handle = dist_ckpt.async_save(state, folder, lazy=True, timeout_s=30)
    told = ""
    if rank == 1:
        next(one for one in state["model"].parameters()).data.add_(0)
        state["plain"]["half"].add_(1)
    try:
        handle.fence()
    except CheckpointError as error:
        told = str(error)
    with pytest.raises(CheckpointError) as error:
        handle.wait()
    return told, str(error.value)


def test_a_change_on_one_rank_is_an_error_of_all(tmp_path):
    (told_0, end_0), (told_1, end_1) = run_ranks(one_changes, 2, tmp_path / "a")
    assert told_0 == "" and "changed before fence() of a lazy save" in told_1
    assert end_0 == end_1 and "changed before fence()" in end_0
    assert not (tmp_path / "a").exists()


def lazy_steps(rank, ranks, shm):
    state = state_of(rank, ranks, 1)
    with tier_of(shm, rank, ranks, ranks) as tier:
        for step in (1, 2, 3):
            for new, old in zip(_tensors(state_of(rank, ranks, step)), _tensors(state), strict=True):
                old.copy_(new)
            state["step"] = step
            snapshot = tier.save(step, state, lazy=True)
            snapshot.fence()
        dist.barrier()
    return


def _tensors(state):
    found = []
    for value in state.values():
        if isinstance(value, torch.nn.Module):
            found += [one.detach() for one in value.parameters()]
        elif isinstance(value, dict):
            found += list(value.values())
        elif hasattr(value, "to_local"):
            found.append(value.to_local())
        elif hasattr(value, "data") and isinstance(value.data, torch.Tensor):
            found.append(value.data)
    return found


def test_lazy_snapshots_hold_each_step(tmp_path):
    run_ranks(lazy_steps, 2, tmp_path)
    assert {one.step for one in run_ranks(restores, 2, tmp_path, 2)} == {3}
