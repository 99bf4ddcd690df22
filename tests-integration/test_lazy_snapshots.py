"""Lazy snapshots of a model that sixfold.fsdp shards: its optimizer's step waits for their copy, by one line."""

import time

import torch
from torch import nn

from ranktest import run_ranks
from sixfold.dist_ckpt import CheckpointError, MemoryTier, ShardedTensor
from sixfold.dist_ckpt.background.arena import Arena
from sixfold.fsdp import FullyShardedDataParallel, fully_shard_optimizer


def state_of(model, optimizer, step):
    """Live shards of this rank."""
    state = {"step": step}
    for record in model.state_records(optimizer):
        name = f"{record.key}.{record.name}"
        state[name] = ShardedTensor.from_rank_offsets_flat(
            name, record.tensor, record.global_shape,
            flattened_range=slice(record.start, record.stop), replica_id=record.replica,
        )  # fmt: skip
    return state


def copied(state):
    return {name: value.data.clone() for name, value in state.items() if isinstance(value, ShardedTensor)}


def trained(rank, ranks, folder, waits):
    """Steps beside a copy that takes its time. Returns what was wrong."""
    inner = Arena._fill

    def slow(*arguments):
        time.sleep(0.05)
        inner(*arguments)

    Arena._fill = slow
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    model = FullyShardedDataParallel(net, process_group="world", fsdp_unit_modules=[nn.Linear])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), model)

    def update():
        (model(torch.eye(256) + rank) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    update()  # there are moments from here on
    tier = MemoryTier(folder, "run", replicas=0, timeout_s=30)
    if waits:
        tier.fence_before(optimizer)
    try:
        for step in (1, 2, 3):
            expected = copied(state_of(model, optimizer, step))
            tier.save(step, state_of(model, optimizer, step), lazy=True)
            update()
            tier.wait()
        changed = copied(state_of(model, optimizer, 0))
        found = tier.restore(state_of(model, optimizer, 0))
    except CheckpointError as error:
        tier.__exit__(CheckpointError, error, None)
        return str(error)
    assert found.step == 3
    loaded = copied(state_of(model, optimizer, 0))
    assert any(name.startswith("exp_avg.") for name in loaded)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name
        assert tensor.numel() == 0 or not torch.equal(changed[name], tensor), "the step behind the snapshot"
    tier.discard()
    return ""


def test_each_step_of_a_sharded_optimizer_waits_for_the_copy_of_the_snapshot_before_it(tmp_path):
    assert run_ranks(trained, 2, tmp_path, True) == ["", ""]


def test_without_that_line_a_step_that_comes_too_early_is_an_error_of_all_ranks(tmp_path):
    told = run_ranks(trained, 2, tmp_path, False)
    assert all("changed before fence() of a lazy save" in text for text in told), told
