"""What the wrapper costs: CPU time per unit, and the step of two gloo ranks, beside FSDP2 and DDP in one run.

Two gloo ranks on two cores say nothing of a network. Ratios are medians over turns (A B C A B C), of wall time, which
wants a quiet machine, and of the CPU time of both ranks, which is nearly the same on a busy one.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from fsdp_bench_helpers import host_times, overheads, ratios, step_times

from ranktest import run_ranks
from sixfold.fsdp.fp8.quantized import Scratch, dequantize, quantize
from sixfold.fsdp.layout import TensorSpec, plan_layout

LAYERS = 32


def test_cpu_time_per_unit_over_plain(benchmark: Any) -> None:
    """Fake group of two, 33 units, whole training steps less the plain module's: what the wrapper adds or saves."""
    best = benchmark.pedantic(lambda: run_ranks(overheads, 1, 16, LAYERS, 20, timeout=120.0)[0], rounds=1)
    per_unit = {kind: (best[kind] - best["plain"]) / (LAYERS + 1) * 1e6 for kind in ("sixfold", "fsdp2")}
    benchmark.extra_info.update(
        units=LAYERS + 1, us_per_unit=per_unit, against_fsdp2=per_unit["sixfold"] / per_unit["fsdp2"]
    )


@pytest.mark.parametrize(("width", "layers", "tokens"), [(256, 8, 64), (512, 8, 128)])
def test_step_of_two_gloo_ranks(benchmark: Any, width: int, layers: int, tokens: int) -> None:
    """About 20 s each. ZeRO-3 forward, backward, clip, AdamW and zero_grad; "merged" has units of up to 8 MiB."""
    times = benchmark.pedantic(lambda: run_ranks(step_times, 2, width, layers, tokens, 9, timeout=120.0), rounds=1)
    found = {f"{kind}/{peer}": ratios(times, kind, peer) for kind in ("sixfold", "merged") for peer in ("fsdp2", "ddp")}
    benchmark.extra_info.update(width=width, layers=layers, tokens=tokens, **found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_host_time_per_unit_on_a_device(benchmark: Any) -> None:
    """NCCL with one rank, 33 units, whole steps less the plain module's: medians of what the host takes to enqueue."""
    times = benchmark.pedantic(lambda: host_times(256, LAYERS, 64, 30), rounds=1)
    host = {kind: statistics.median(taken) for kind, taken in times.items()}
    per_unit = {kind: (host[kind] - host["plain"]) / (LAYERS + 1) * 1e6 for kind in ("sixfold", "fsdp2", "ddp")}
    benchmark.extra_info.update(
        units=LAYERS + 1, us_per_unit=per_unit, against_fsdp2=per_unit["sixfold"] / per_unit["fsdp2"]
    )


def test_plan_a_thousand_tensors_over_4096_ranks(benchmark: Any) -> None:
    """The layout search alone; the floor is one pass over the tensors."""
    specs = [TensorSpec(f"t{i}", (1000 + i, 64 * (1 + i % 3)), granularity="row") for i in range(1000)]
    benchmark.extra_info.update(tensors=1000, ranks=4096)
    benchmark(plan_layout, specs, 4096)


@pytest.mark.parametrize("direction", ["main to bytes", "bytes to bf16", "floor: fp32 to bf16"])
def test_fp8_conversions(benchmark: Any, direction: str) -> None:
    """4 M elements, one thread; the floor is the cast that a bf16 parameter needs."""
    numel = 4 << 20
    main, scale = torch.randn(numel), torch.tensor(0.01)
    q, weights = torch.empty(numel, dtype=torch.uint8), torch.empty(numel, dtype=torch.bfloat16)
    scratch = Scratch(numel, torch.device("cpu"))
    runs = {
        "main to bytes": lambda: quantize(main, scale, q, scratch),
        "bytes to bf16": lambda: dequantize(q, scale, weights, scratch),
        "floor: fp32 to bf16": lambda: weights.copy_(main),
    }
    benchmark.extra_info.update(elements=numel)
    benchmark(runs[direction])
