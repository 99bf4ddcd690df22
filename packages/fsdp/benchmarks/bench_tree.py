"""``grad_sum="tree"`` beside the default: a step of eight microbatches on two gloo ranks.

CPU time of all ranks together, and wall time of rank 0: medians of ratios over turns, in which kinds take turns.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_bench_helpers import Block, Net, Step, Times, ratios, times_of

from ranktest import run_ranks
from sixfold.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

MICROBATCHES = 8  # of a rank


def made(strategy: str, grad_sum: str, width: int, layers: int, tokens: int) -> Step:
    torch.manual_seed(0)
    net = Net(width, layers)
    model = FullyShardedDataParallel(
        net,
        process_group=dist.group.WORLD,
        strategy=strategy,
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(grad_sum=grad_sum),
        initial="trust",
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters()), model)
    batch = torch.randn(tokens, width)

    def step() -> None:
        for k in range(MICROBATCHES):
            with model.microbatch(last=k == MICROBATCHES - 1):
                model(batch).square().mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rank_times(rank: int, ranks: int, strategy: str, width: int, layers: int, tokens: int, turns: int) -> Times:
    return times_of(
        {kind: made(strategy, kind, width, layers, tokens) for kind in ("tree", "backend")}, turns, warm_up=1
    )


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize(("width", "layers", "tokens"), [(512, 8, 256)])
def test_a_step_over_the_default(benchmark: Any, strategy: str, width: int, layers: int, tokens: int) -> None:
    """12.9 M parameters, 256 tokens in a microbatch; a minute each."""
    run = lambda: run_ranks(rank_times, 2, strategy, width, layers, tokens, 6, timeout=580.0)  # noqa: E731
    times = benchmark.pedantic(run, rounds=1)
    found = ratios(times, "tree", "backend")
    benchmark.extra_info.update(strategy=strategy, width=width, layers=layers, tokens=tokens, tree=found)
    print(f"{strategy}: {found}")
