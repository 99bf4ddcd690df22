"""Lazy saves: the copy beside the trainer, the fence, and what changes before it."""

import gc
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from forked_worker import fork_workers
from memory_tier_helpers import mesh_of, restores, state_of, tier_of
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import _global_optimizer_post_hooks

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
    yield go
    go.set()


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


def stepping():
    model = torch.nn.Linear(300, 300)
    model(torch.ones(2, 300)).sum().backward()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), model.weight.detach().clone()


def test_a_step_of_an_optimizer_has_the_fence_in_it_once_it_is_told_so(tmp_path, slow):
    model, optimizer, before = stepping()
    handle = dist_ckpt.async_save({"weight": model.weight.detach()}, tmp_path / "a", group=None, lazy=True)
    handle.fence_before(optimizer)
    threading.Timer(0.3, slow.set).start()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    handle.wait()
    assert not optimizer._optimizer_step_pre_hooks, "it is asked once"
    loaded = {"weight": torch.empty_like(before)}
    dist_ckpt.load(loaded, tmp_path / "a", group=None)
    assert torch.equal(loaded["weight"], before)


def test_a_tier_is_told_once_of_an_optimizer_and_each_snapshot_is_of_its_own_step(tmp_path):
    model, optimizer, before = stepping()
    with dist_ckpt.MemoryTier(tmp_path, "run", replicas=0, group=None) as tier:
        tier.fence_before(optimizer)
        optimizer.step()  # there is no snapshot yet
        for step in (1, 2, 3):
            before = model.weight.detach().clone()
            tier.save(step, {"weight": model.weight.detach()}, lazy=True)
            optimizer.step()
            tier.wait()
            loaded = {"weight": torch.empty_like(before)}
            assert tier.restore(loaded).step == step
            assert torch.equal(loaded["weight"], before) and not torch.equal(loaded["weight"], model.weight)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_step_before_the_fence_is_named_though_torch_counts_no_change(tmp_path, slow, kind):
    model = torch.nn.Linear(300, 300)
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(2, 300)).sum().backward()
    count, before = model.weight._version, model.weight.detach().clone()
    handle = dist_ckpt.async_save({"model": model}, tmp_path / "a", group=None, lazy=True)
    optimizer.step()
    assert model.weight._version == count, "torch counts it: this test shows nothing"
    assert not torch.equal(model.weight, before)
    slow.set()
    with pytest.raises(CheckpointError, match=r"model\.weight changed before fence\(\) of a lazy save"):
        handle.fence()
    with pytest.raises(CheckpointError, match="changed before fence"):
        handle.wait()
    assert not (tmp_path / "a").exists()
    handle = dist_ckpt.async_save({"model": model}, tmp_path / "a", group=None, lazy=True)
    handle.fence()
    optimizer.step()
    handle.wait()


def fused_steps_of_shards(rank, ranks, folder):
    fork_workers()
    model = torch.nn.Linear(300, 300)
    fully_shard(model, mesh=mesh_of(ranks))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 300)).sum().backward()
    handle = dist_ckpt.async_save({"model": model}, folder, lazy=True, timeout_s=30)
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"model\.weight changed before fence"):
        handle.fence()
    with pytest.raises(CheckpointError) as error:
        handle.wait()
    return str(error.value)


def test_a_fused_step_of_fsdp2_shards_before_the_fence_is_an_error_of_all(tmp_path):
    errors = run_ranks(fused_steps_of_shards, 2, tmp_path / "a")
    assert len({*errors}) == 1 and "changed before fence()" in errors[0]
    assert not (tmp_path / "a").exists()


def test_steps_of_other_optimizers_before_the_fence_harm_nothing_and_no_hook_is_left(tmp_path, slow):
    model, other = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, fused=True)
    other(torch.ones(2, 300)).sum().backward()
    gc.collect()  # copies of tests that failed
    hooks = dict(_global_optimizer_post_hooks)
    handle = dist_ckpt.async_save({"model": model}, tmp_path / "a", group=None, lazy=True)
    assert len(_global_optimizer_post_hooks) == len(hooks) + 1
    optimizer.step()
    slow.set()
    handle.wait()
    assert _global_optimizer_post_hooks == hooks


class Normed(torch.nn.Module):
    """Running statistics that ``F.batch_norm`` changes, of which torch counts no change."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x):
        return torch.nn.functional.batch_norm(x, self.mean, self.var, training=True)


@pytest.mark.parametrize(
    ("form", "norm", "channels"),
    [
        ("module", torch.nn.BatchNorm1d, 8),
        ("module", torch.nn.BatchNorm1d, 200_000),
        ("module", Normed, 8),
        ("module", Normed, 200_000),
        ("module", partial(torch.nn.InstanceNorm1d, track_running_stats=True), 200_000),
        ("state dict", torch.nn.BatchNorm1d, 8),  # a larger one is not known for a buffer there
        ("state dict", Normed, 8),
    ],
)
def test_what_a_forward_changes_is_saved_as_it_was_at_the_call(tmp_path, slow, form, norm, channels):
    module = norm(channels)
    before = {name: buffer.clone() for name, buffer in module.state_dict().items()}
    state = {"model": module if form == "module" else module.state_dict(), "large": torch.ones(300_000)}
    handle = dist_ckpt.async_save(state, tmp_path / "a", group=None, lazy=True)
    module(torch.arange(4.0 * channels).reshape(2, channels, -1))
    assert any(not torch.equal(buffer, before[name]) for name, buffer in module.state_dict().items())
    slow.set()
    handle.fence()
    handle.wait()
    loaded = dist_ckpt.load({}, tmp_path / "a", group=None)["model"]
    for name, buffer in before.items():
        assert torch.equal(loaded[name], buffer), name


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
    with pytest.raises(CheckpointError, match="the copy of a lazy save failed: MemoryError: no memory"):
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
        state["large"].data.add_(1)
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


def test_a_manager_with_lazy_is_told_once_of_an_optimizer_and_each_checkpoint_is_of_its_own_step(tmp_path):
    model, optimizer, _ = stepping()
    weights = {}
    with dist_ckpt.CheckpointManager(tmp_path, every=2, lazy=True, group=None) as manager:
        manager.fence_before(optimizer)
        optimizer.step()  # there is no save yet
        for step in range(1, 7):
            weights[step] = model.weight.detach().clone()
            manager.save(step, {"weight": model.weight.detach()})
            optimizer.step()
    assert manager.steps() == [2, 4, 6]
    for step in manager.steps():
        loaded = {"weight": torch.empty_like(weights[step])}
        assert manager.restore(loaded, step).step == step
        assert torch.equal(loaded["weight"], weights[step]) and not torch.equal(loaded["weight"], model.weight)


def test_a_manager_that_saves_at_once_takes_no_lazy(tmp_path):
    with pytest.raises(CheckpointError, match="lazy is True and background False: nothing is copied"):
        dist_ckpt.CheckpointManager(tmp_path, background=False, lazy=True, group=None)
    dist_ckpt.CheckpointManager(tmp_path, background=False, lazy=False, group=None).save(1, {"x": 1})
