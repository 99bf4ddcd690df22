"""Optimizers on one CUDA device: state in host memory, Muon over pieces, fused steps; the bits of plain training."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_net, same

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, fully_shard_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.ndim == 2], lr=1e-2),
}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(make, offload=None, steps=3):
    net = make_net().cuda()
    optimizer = make(list(net.parameters()))
    model = net
    if offload is not None:
        model = FullyShardedDataParallel(net, fsdp_unit_modules=[Block], buffers=BufferConfig(offload=offload))
        fully_shard_optimizer(optimizer, model)
    for step in range(steps):
        tokens = batch(step, 0, 0).cuda()
        loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return (net.state_dict() if offload is None else model.full_state_dict()), model, optimizer


@pytest.mark.parametrize("name", MAKERS)
def test_shards_give_the_plain_bits(name):
    assert same(train(MAKERS[name])[0], train(MAKERS[name], offload=False)[0]) == []


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_state_in_host_memory_is_pinned_and_gives_the_plain_bits(name):
    weights, model, optimizer = train(MAKERS[name], offload=True)
    assert same(train(MAKERS[name])[0], weights) == []
    moments = [r.tensor for r in model.state_records(optimizer) if r.key != "param"]
    assert moments and all(one.device.type == "cpu" and one.is_pinned() for one in moments)
    (report,) = model.report()["offload"]
    for step in range(2):
        tokens = batch(step, 0, 0).cuda()
        loss_of(model(tokens), tokens).backward()
        model.finish_grad_sync()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        optimizer.step()
        optimizer.zero_grad()
    assert report["device_bytes"] < report["host_bytes"]
    assert torch.cuda.max_memory_allocated() - held <= report["device_bytes"] + 2**20
