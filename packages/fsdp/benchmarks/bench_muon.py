"""A step of Muon on two gloo ranks, and what travels in it, beside FSDP2's; and what planning it costs on 512.

Two gloo ranks on two cores say nothing of a network: bytes and calls do. Ratios are medians over turns (A B C A B C).
The floor is torch's Muon on half of the matrices in the same process: the arithmetic alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ranktest import run_ranks
from sixfold.fsdp import FullyShardedDataParallel, fully_shard_optimizer
from sixfold.fsdp.layout import TensorSpec, plan_layout
from sixfold.fsdp.optimizers.muon import plan_groups, spread_owners

WIDTH, LAYERS, TURNS = 256, 4, 5
LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)] * 32


class Sent(TorchDispatchMode):
    """Calls, and bytes of their larger side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one.__name__ == "DTensor" for one in types):
            return NotImplemented  # its own operators come by on plain tensors
        if str(func).startswith(("c10d.", "_c10d_functional.")) and "wait" not in str(func):
            tensors = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.calls += 1
            self.nbytes += max((one.nbytes for one in tensors), default=0)
        return func(*args, **(kwargs or {}))


def make_net(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)) for _ in range(layers)]
    return nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))


def muon(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(list(net.parameters()), lr=1e-3)


def steppers(rank: int) -> dict[str, Callable[[], Any]]:
    """Optimizer steps over gradients that are there."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    x = torch.ones(2, WIDTH)
    found: dict[str, Callable[[], Any]] = {}
    for name, grain in (("pieces", "element"), ("whole", "tensor")):
        net = make_net()
        model = FullyShardedDataParallel(
            net,
            process_group=dist.group.WORLD,
            fsdp_unit_modules=list(net),
            granularity=lambda _, p, grain=grain: grain,  # type: ignore[misc]
        )
        optimizer = fully_shard_optimizer(muon(net), model)
        model(x).sum().backward()
        found[name] = optimizer.step
    theirs = make_net()
    mesh = init_device_mesh("cpu", (2,))
    for block in theirs:
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    optimizer = muon(theirs)
    theirs(x).sum().backward()
    found["fsdp2"] = optimizer.step
    half = make_net(LAYERS // 2)
    optimizer = muon(half)
    half(x).sum().backward()
    found["floor"] = optimizer.step
    return found


def measure(rank: int, ranks: int) -> tuple[dict[str, list[float]], dict[str, tuple[int, int]]]:
    steps = steppers(rank)
    sent = {}
    for name, step in steps.items():
        step()
        with Sent() as count:
            step()
        sent[name] = count.calls, count.nbytes
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - began)
    return times, sent


def test_step_of_two_gloo_ranks(benchmark: Any) -> None:
    times, sent = benchmark.pedantic(lambda: run_ranks(measure, 2, timeout=300.0)[0], rounds=1)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["fsdp2"], strict=True))
        for name in ("pieces", "whole", "floor")
    }
    model_bytes = 4 * sum(p.numel() for p in make_net().parameters())
    models = {name: (calls, nbytes / model_bytes) for name, (calls, nbytes) in sent.items()}
    benchmark.extra_info.update(
        width=WIDTH, layers=LAYERS, against_fsdp2=ratios, calls_and_models_of_fp32_bytes_by_this_rank=models
    )


def test_plan_a_llama_8b_on_512_ranks(benchmark: Any) -> None:
    """Owners and this rank's exchanges; the floor is one pass over 224 matrices and their pieces."""
    names = [str(at) for at in range(len(LLAMA_8B))]
    layouts = [
        plan_layout([TensorSpec(names[at], LLAMA_8B[at]) for at in range(first, first + 7)], 512)
        for first in range(0, len(LLAMA_8B), 7)
    ]
    benchmark.extra_info.update(matrices=len(LLAMA_8B), ranks=512)

    def plan() -> Any:
        parts = [layouts[at // 7].parts(name) for at, name in enumerate(names)]
        return plan_groups(LLAMA_8B, parts, spread_owners(LLAMA_8B, 512), 100, 512)

    benchmark(plan)
