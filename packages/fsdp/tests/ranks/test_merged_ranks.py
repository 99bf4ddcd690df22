"""Merged units on two ranks: the bits of one process that emulates them."""

from __future__ import annotations

import torch.distributed as dist
from fsdp_helpers import Block, emulate, make_adamw, make_net, same, train_steps

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, fully_shard_optimizer

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
NETS = [{"layers": 4, "tied": True, "frozen": True, "unused": True}, {"layers": 4, "recompute": "reentrant"}]


def train_all(rank: int, ranks: int) -> list[dict]:
    found = []
    for strategy in STRATEGIES:
        for options in NETS:
            net = make_net(**options)
            model = FullyShardedDataParallel(
                net,
                process_group=dist.group.WORLD,
                strategy=strategy,
                fsdp_unit_modules=[Block],
                buffers=BufferConfig(merge_bytes=7000),
                checks="unit",
            )
            assert len(model.units) == 3, model.units
            optimizer = fully_shard_optimizer(make_adamw([p for p in net.parameters() if p.requires_grad]), model)
            train_steps(model, optimizer, rank, steps=2, accumulate=2)
            found.append(model.full_state_dict())
    return found


def test_merged_units_have_the_bits_of_the_emulation() -> None:
    results = run_ranks(train_all, 2)
    cases = [(strategy, options) for strategy in STRATEGIES for options in NETS]
    for at, (strategy, options) in enumerate(cases):
        shards = strategy in ("optim_grads", "optim_grads_params")
        expected = emulate(ranks=2, steps=2, accumulate=2, net_options=options, per_microbatch=shards)
        for rank in range(2):
            assert same(expected, results[rank][at]) == [], (strategy, options)
