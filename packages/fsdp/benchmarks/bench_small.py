"""Small models, where starting a collective costs more than its bytes; and one process beside a plain loop.

CPU time of all ranks together, medians over turns of kinds that take turns: it is nearly the same on a busy machine.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from fsdp_bench_helpers import MERGED_BYTES, Block, Net, Step, Times, ratios, times_of
from torch import nn

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, MixedPrecision, fully_shard_optimizer

KINDS: dict[str, tuple[list[type | str | nn.Module], int | str | None]] = {
    "linear units": ([nn.Linear, nn.LayerNorm], "auto"),
    "linear units, apart": ([nn.Linear, nn.LayerNorm], None),
    "linear units, merged": ([nn.Linear, nn.LayerNorm], MERGED_BYTES),
    "block units": ([Block], "auto"),
}


def stepper(call: Any, net: Net, optimizer: torch.optim.Optimizer, tokens: int) -> Step:
    batch = torch.randn(tokens, net.head.out_features)

    def step() -> None:
        call(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def made(kind: str, width: int, layers: int) -> Step:
    torch.manual_seed(0)
    net = Net(width, layers)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
        return stepper(wrapped, net, torch.optim.AdamW(net.parameters()), 64)
    units, merge_bytes = KINDS[kind]
    model = FullyShardedDataParallel(net, fsdp_unit_modules=units, buffers=BufferConfig(merge_bytes=merge_bytes))
    return stepper(model, net, fully_shard_optimizer(torch.optim.AdamW(net.parameters()), model), 64)


def rank_times(rank: int, ranks: int, width: int, layers: int, turns: int) -> Times:
    return times_of({kind: made(kind, width, layers) for kind in (*KINDS, "ddp")}, turns)


@pytest.mark.parametrize("layers", [4, 16])
def test_small_models_on_two_gloo_ranks(benchmark: Any, layers: int) -> None:
    """About 10 s each. 64 wide, 64 tokens, ZeRO-3 without clipping, over DDP."""
    times = benchmark.pedantic(lambda: run_ranks(rank_times, 2, 64, layers, 15, timeout=240.0), rounds=1)
    benchmark.extra_info.update(layers=layers, **{kind: ratios(times, kind, "ddp") for kind in KINDS})


def one_process(kind: str, width: int, layers: int, tokens: int) -> Step:
    torch.manual_seed(0)
    net = Net(width, layers)
    if kind == "plain":
        plain = stepper(net, net, torch.optim.AdamW(net.parameters()), tokens)

        def autocast() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                plain()

        return autocast
    model = FullyShardedDataParallel(
        net,
        process_group=None,
        strategy="no_shard" if kind == "no_shard" else "optim_grads_params",
        fsdp_unit_modules=[Block],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        buffers=BufferConfig(gathered_bytes="all" if kind == "all" else "double"),
    )
    return stepper(model, net, fully_shard_optimizer(torch.optim.AdamW(net.parameters()), model), tokens)


@pytest.mark.parametrize(("width", "layers", "tokens"), [(256, 4, 16)])
def test_one_process_over_a_plain_loop(benchmark: Any, width: int, layers: int, tokens: int) -> None:
    """bfloat16 compute weights over float32 main weights, beside autocast: how many times faster, by CPU time."""
    steps = {kind: one_process(kind, width, layers, tokens) for kind in ("plain", "no_shard", "all", "double")}
    taken: dict[str, list[float]] = {kind: [] for kind in steps}

    def turns() -> None:
        for turn in range(17):
            for kind, step in steps.items():
                began = time.process_time()
                step()
                if turn >= 2:
                    taken[kind].append(time.process_time() - began)

    benchmark.pedantic(turns, rounds=1)
    faster = {
        kind: statistics.median(a / b for a, b in zip(taken["plain"], those, strict=True))
        for kind, those in taken.items()
    }
    benchmark.extra_info.update(width=width, layers=layers, tokens=tokens, **faster)
