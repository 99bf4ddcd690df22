"""Merged units on two ranks: the bits of one process that emulates them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fsdp_helpers import Block, emulate, make_adamw, make_net, same, train_steps
from torch import nn

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


@pytest.mark.slow
def test_merged_units_have_the_bits_of_the_emulation() -> None:
    results = run_ranks(train_all, 2)
    cases = [(strategy, options) for strategy in STRATEGIES for options in NETS]
    for at, (strategy, options) in enumerate(cases):
        shards = strategy in ("optim_grads", "optim_grads_params")
        expected = emulate(ranks=2, steps=2, accumulate=2, net_options=options, per_microbatch=shards)
        for rank in range(2):
            assert same(expected, results[rank][at]) == [], (strategy, options)


def use_one_of_two(rank: int, ranks: int) -> list[tuple[float | None, bool, int]]:
    """Of the module that no rank uses: the largest gradient, and whether AdamW left the weights; apart and merged."""
    found = []
    for strategy in STRATEGIES:
        for buffers in (BufferConfig(), BufferConfig(merge_bytes=10**6)):
            net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
            net.forward = lambda x, used=net[0]: used(x)
            model = FullyShardedDataParallel(
                net,
                process_group=dist.group.WORLD,
                strategy=strategy,
                fsdp_unit_modules=[nn.Linear],
                buffers=buffers,
            )
            optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=0.1), model)
            model(torch.ones(2, 3)).sum().backward()
            mains = [main for name, main in model.main_parameters() if name == "1.weight" and main.numel()]
            before = [main.detach().clone() for main in mains]
            sums = [float(main.grad.abs().max()) for main in mains if main.grad is not None]
            optimizer.step()
            kept = all(torch.equal(one, main) for one, main in zip(before, mains, strict=True))
            found.append((sums[0] if sums else None, kept, len(mains)))
    return found


def test_a_module_that_no_rank_uses_has_no_gradient_in_a_merged_unit_as_apart() -> None:
    results = run_ranks(use_one_of_two, 2)
    for at, strategy in enumerate(STRATEGIES):
        apart, together = ([one[2 * at + way] for one in results if one[2 * at + way][2]] for way in (0, 1))
        assert apart and all(one[:2] == (None, True) for one in apart), strategy
        assert together and all(one[:2] == (None, True) for one in together), strategy
