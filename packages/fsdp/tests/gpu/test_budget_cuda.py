"""A byte budget on one CUDA device: bits, and no allocation in steady state by the allocator's own count."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, fully_shard_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def stepper(gathered):
    net = make_net(layers=4).cuda()
    model = FullyShardedDataParallel(
        net, fsdp_unit_modules=[Block], buffers=BufferConfig(gathered_bytes=gathered), initial="trust"
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)

    def step(number):
        tokens = batch(number, 0, 0).cuda()
        loss_of(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def test_a_budget_gives_the_bits_of_all_resident_and_allocates_no_gathered_memory():
    reference, step = stepper("all")
    for number in range(5):
        step(number)
    sizes = {name: unit["gathered_bytes"] for name, unit in reference.report()["units"].items()}
    expected = reference.full_state_dict()
    counts = {}
    for budget in (sizes[""] + max(sizes.values()), sum(sizes.values()) - 1, sum(sizes.values())):
        model, step = stepper(budget)
        for number in range(4):
            step(number)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        held = torch.cuda.memory_allocated()
        step(4)
        torch.cuda.synchronize()
        counts[budget] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert torch.cuda.memory_allocated() <= held
        assert same(expected, model.full_state_dict()) == []
    assert len(set(counts.values())) == 1, f"a tighter budget allocates more: {counts}"
