"""The comparison table, each row by its own command: `pytest benchmarks/bench_table.py -k written`, and so on.

Equal work on all sides: forward, backward, clipping, AdamW, zero_grad in fp32 by the calls that users write. Peers are
FSDP2 and DDP of torch, and megatron-fsdp where it is installed (pip install --no-deps megatron-fsdp==0.6.1). Counts
hold on a busy machine; `cpu` and `step` want a quiet one, `OMP_NUM_THREADS=1`, and say nothing of a network.
"""

from __future__ import annotations

import importlib.util
import statistics
from typing import Any

import pytest
import torch
from fsdp_table_helpers import (
    counts,
    cpu_seconds,
    emulated_weights,
    final_weights,
    gathers,
    muon_step,
    one_f_one_b,
    step_seconds,
    unit_bytes,
)

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, residency

MEGATRON = importlib.util.find_spec("megatron_fsdp") is not None
PEERS = ["fsdp2", *(["megatron"] if MEGATRON else [])]
LAYERS, WIDTH = 32, 16


def once(benchmark: Any, call: Any) -> Any:
    return benchmark.pedantic(call, rounds=1)


def test_cpu_per_unit(benchmark: Any) -> None:
    """About 30 s. Microseconds of process CPU per unit over the plain step: whole, and forward and backward alone."""
    kinds = ["plain", "sixfold", *PEERS]
    best = once(benchmark, lambda: run_ranks(cpu_seconds, 1, kinds, WIDTH, LAYERS, 20, timeout=300.0)[0])
    units = LAYERS + 1
    for at, name in enumerate(("whole_step", "forward_backward")):
        over = {kind: (best[kind][at] - best["plain"][at]) / units * 1e6 for kind in kinds[1:]}
        benchmark.extra_info[name] = over | {f"against_{peer}": over["sixfold"] / over[peer] for peer in PEERS}


@pytest.mark.parametrize("kind", ["sixfold", *PEERS])
def test_written_allocated_sent(benchmark: Any, kind: str) -> None:
    """About 5 s each. Forward and backward of 8 blocks on 8 fake ranks, less the plain module's; in models of bytes."""
    found = once(benchmark, lambda: run_ranks(counts, 1, kind, 256, 8, 8, timeout=120.0)[0])
    plain = run_ranks(counts, 1, "plain", 256, 8, 8, timeout=120.0)[0]
    model = found["model_bytes"]
    benchmark.extra_info.update(
        written_models=(found["written_bytes"] - plain["written_bytes"]) / model,
        allocations_beyond_plain=found["allocations"] - plain["allocations"],
        collectives={name: {"calls": c, "models": b / model} for name, (c, b) in found["collectives"].items()},
    )


@pytest.mark.parametrize(("width", "layers", "tokens"), [(256, 8, 64), (512, 8, 128)])
@pytest.mark.parametrize("clipped", [True, False])
def test_step_of_two_gloo_ranks(benchmark: Any, clipped: bool, width: int, layers: int, tokens: int) -> None:
    """About 20 s each. Median over turns of our wall time by the peer's.

    megatron-fsdp only without clipping: torch's ``clip_grad_norm_`` over its parameters aborts the process.
    """
    kinds = ["sixfold", "fsdp2", "ddp"] if clipped else ["sixfold", *PEERS, "ddp"]
    args = (kinds, width, layers, tokens, 15, clipped)
    times = once(benchmark, lambda: run_ranks(step_seconds, 2, *args, timeout=300.0)[0])
    for peer in kinds[1:]:
        pairs = zip(times["sixfold"], times[peer], strict=True)
        benchmark.extra_info[f"against_{peer}"] = statistics.median(ours / theirs for ours, theirs in pairs)


@pytest.mark.parametrize("kind", ["sixfold", *PEERS, *(["megatron repaired"] if MEGATRON else []), "ddp"])
def test_bits(benchmark: Any, kind: str) -> None:
    """About 2 s each. Tensors whose bits differ from one process that emulates two ranks, after three AdamW steps."""
    found = once(benchmark, lambda: run_ranks(final_weights, 2, kind, 3, timeout=60.0)[0])
    right = emulated_weights(2, 3)
    wrong = [name for name in right if not torch.equal(right[name], found[name])]
    benchmark.extra_info.update(tensors=len(right), differ=len(wrong))


@pytest.mark.parametrize("resident", [2, 3, 4, 5])
def test_gathers_in_1f1b_under_a_budget(benchmark: Any, resident: int) -> None:
    """About 2 s each. Five units, six microbatches; as many units as ``resident`` fit, beside the fewest possible."""
    units, microbatches = 5, 6
    root, *sizes = run_ranks(unit_bytes, 1, units)[0]
    budget = root + resident * max(sizes)
    options = {"buffers": BufferConfig(gathered_bytes=budget)}
    found, stated = once(benchmark, lambda: run_ranks(gathers, 1, "sixfold", units, microbatches, options)[0])
    uses = []
    for what, _ in one_f_one_b(2, microbatches):
        uses += [f"u{at}" for at in (range(units) if what == "F" else reversed(range(units)))]
    plan = residency.plan(uses, dict.fromkeys(set(uses), 1), budget_bytes=resident)
    benchmark.extra_info.update(
        sixfold=found,
        report=str(stated),
        least=sum(action.kind == "gather" for action in plan),
        budget_bytes=budget,
        unplanned=2 * units * 6,
    )


@pytest.mark.parametrize("reshard", [True, False])
def test_gathers_in_1f1b_of_fsdp2(benchmark: Any, reshard: bool) -> None:
    """About 2 s. FSDP2 with and without ``reshard_after_forward``."""
    options = {"reshard_after_forward": reshard}
    benchmark.extra_info["gathers"] = once(benchmark, lambda: run_ranks(gathers, 1, "fsdp2", 5, 6, options)[0][0])


@pytest.mark.parametrize(("kind", "cut"), [("sixfold", "tensor"), ("sixfold", "element"), ("fsdp2", None)])
@pytest.mark.parametrize("world", [2, 4])
def test_muon_step(benchmark: Any, kind: str, cut: str | None, world: int) -> None:
    """About 3 s each. Collectives inside ``optimizer.step()`` of 24 matrices; element layout on real ranks."""
    options = {} if cut is None else {"cut": cut}
    ranks = world if cut == "element" else 1
    benchmark.extra_info.update(once(benchmark, lambda: run_ranks(muon_step, ranks, kind, world, options)[0]))
