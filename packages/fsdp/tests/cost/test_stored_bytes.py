"""``stored_bytes`` against the layout that a model plans, and against ``report()`` of a model that was made."""

from __future__ import annotations

import random

import pytest
import torch
from fsdp_helpers import make_adamw
from torch import nn

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, ShardingStrategy, fully_shard_optimizer
from sixfold.fsdp.buffers.layout import TensorSpec, plan_layout
from sixfold.fsdp.cost_model import BufferFormats, StreamSizes, stored_bytes


@pytest.mark.parametrize("seed", range(20))
def test_a_shard_is_as_large_as_the_planned_layout_and_shards_hold_each_element_once(seed):
    rng = random.Random(seed)
    sizes = tuple(rng.choice((1, 7, 64, 96, 1000, 4096, 50_000)) for _ in range(rng.randint(1, 8)))
    ranks, align = rng.choice((1, 2, 3, 8)), rng.choice((128, 256))
    formats = BufferFormats(
        strategy=ShardingStrategy("optim_grads_params"), compute=2, main=4, grad=4, reduce=4, align=align
    )
    planned = StreamSizes(sizes, formats, ranks)
    specs = [TensorSpec(f"t{at}", (numel,), torch.bfloat16) for at, numel in enumerate(sizes)]
    assert planned.shard_numel * 2 == plan_layout(specs, ranks, align_bytes=align).shard_bytes
    held = [planned.held_numel(rank) for rank in range(ranks)]
    assert [sum(one) for one in zip(*held, strict=True)] == list(sizes)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_the_sum_is_that_of_a_models_report_and_of_its_optimizer(strategy):
    class Layer(nn.Linear):
        pass

    net = nn.Sequential(nn.Linear(5, 16), *(Layer(16, 16) for _ in range(3)), nn.Linear(16, 5))
    model = FullyShardedDataParallel(
        net,
        strategy=strategy,
        fsdp_unit_modules=[Layer],
        buffers=BufferConfig(gathered_bytes="double", merge_bytes=None, fill_freed=False),  # it counts slots
    )
    optimizer = fully_shard_optimizer(make_adamw(net.parameters()), model)
    model(torch.randn(2, 5)).square().sum().backward()
    optimizer.step()
    state = sum(value.nbytes for of in optimizer.state.values() for value in of.values() if value.numel() > 1)
    formats = BufferFormats(
        strategy=ShardingStrategy(strategy), compute=4, main=4, grad=4, reduce=4, gathered_bytes="double"
    )
    root, layer = (80, 16, 80, 5), (256, 16)
    found = stored_bytes(
        [(None, [StreamSizes(root, formats, 1)]), *[("Layer", [StreamSizes(layer, formats, 1)])] * 3],
        formats,
        per_microbatch=strategy in ("optim_grads", "optim_grads_params"),
    )
    assert state == 2 * 4 * (sum(root) + 3 * sum(layer))
    assert found.total == sum(model.report()["bytes"].values())


@pytest.mark.parametrize(
    ("strategy", "trained", "fp32"),
    [
        ("no_shard", 18, 16),
        ("optim", 6 + 12 / 8, 8 + 8 / 8),
        ("optim_grads", 2 + 16 / 8, 4 + 12 / 8),
        ("optim_grads_params", 18 / 8, 16 / 8),
    ],
)
def test_eight_ranks_with_adam_keep_the_bytes_per_parameter_that_the_guide_names(strategy, trained, fp32):
    for compute, expected in ((2, trained), (4, fp32)):
        formats = BufferFormats(strategy=ShardingStrategy(strategy), compute=compute, main=4, grad=4, reduce=4)
        flat_buffers = [
            (None, [StreamSizes((8 * 4096,), formats, 8)]),
            *[("Layer", [StreamSizes((65536,), formats, 8)])] * 4,
        ]
        numel = 8 * 4096 + 4 * 65536
        adam = 2 * 4 * numel // (1 if strategy == "no_shard" else 8)
        found = stored_bytes(
            flat_buffers, formats, per_microbatch=strategy in ("optim_grads", "optim_grads_params"), state_bytes=adam
        )
        assert found.parameters + found.gradients + found.optimizer == expected * numel
