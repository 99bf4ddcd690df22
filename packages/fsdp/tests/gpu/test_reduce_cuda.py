"""Reductions on one CUDA device: bits in pieces and other dtypes, and no allocation in a steady step."""

from __future__ import annotations

import pytest
import torch
from fsdp_helpers import Block, batch, loss_of, make_adamw, make_net, same
from torch import nn

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
BF16 = torch.bfloat16


def make(bucket, strategy="optim_grads_params", **precision):
    net = make_net(width=128).cuda()
    model = FullyShardedDataParallel(
        net,
        strategy=strategy,
        fsdp_unit_modules=[Block, nn.Embedding],
        mixed_precision=MixedPrecision(**precision),
        buffers=BufferConfig(bucket_bytes=bucket),
        initial="trust",
    )
    return model, fully_shard_optimizer(make_adamw(net.parameters()), model)


def step(model, optimizer, at, accumulate=2):
    for k in range(accumulate):
        with model.microbatch(last=k == accumulate - 1):
            loss_of(model(batch(at, k, 0).cuda()), batch(at, k, 0).cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("precision", [{}, {"reduce_dtype": BF16}, {"grad_dtype": BF16}], ids=str)
def test_pieces_have_the_bits_of_whole_units_on_the_device(precision):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        results = []
        for bucket in (None, 4096):
            model, optimizer = make(bucket, **precision)
            for at in range(3):
                step(model, optimizer, at)
            results.append(model.full_state_dict())
        assert same(*results) == []
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_a_steady_step_leaves_no_memory_and_no_gradient_behind(strategy):
    model, optimizer = make(4096, strategy=strategy, reduce_dtype=BF16)
    held = []
    for at in range(5):
        step(model, optimizer, at)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[2] == held[3] == held[4], "gradients that autograd made are let go of once compute has waited"
