"""Peers and models of the benchmarks: one place for how each wrapper is made.

make, overheads, step_times (this file) --> benchmarks/bench_fsdp.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, fully_shard_optimizer


class Block(nn.Module):
    """A feed-forward block with seven parameters, as a transformer block has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(torch.relu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """``layers`` blocks and a head."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


Step = Callable[[], None]
MERGED_BYTES = 8 << 20


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], Any], batch: Tensor) -> Step:
    def step() -> None:
        model(batch).sum().backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torch_step(model: nn.Module, batch: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters())
    return _stepper(model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), batch)


def make(kind: str, group: Any, width: int, layers: int, tokens: int, device: str = "cpu") -> Step:
    """One whole training step of ``kind`` ("plain", "sixfold", "merged", "fsdp2", "ddp"), as its users write it.

    Forward, backward, clip, AdamW step, zero_grad, in fp32, each wrapper at its own defaults (ZeRO-3; FSDP2 with
    ``reshard_after_forward`` as ``fully_shard`` chooses it: True for blocks, False for the root; implicit prefetch).
    "merged" is "sixfold" with units of up to 8 MiB. On a CUDA device "sixfold" goes through the back end in a group of
    one, too, as its peers do.
    """
    torch.manual_seed(0)
    net: nn.Module = Net(width, layers).to(device)
    batch = torch.randn(tokens, width, device=device)
    if kind == "plain":
        return _torch_step(net, batch)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)
        return _torch_step(wrapped, batch)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, device)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return _torch_step(net, batch)
    merge = MERGED_BYTES if kind == "merged" else None
    buffers = BufferConfig(merge_bytes=merge, always_communicate=device != "cpu")
    model = FullyShardedDataParallel(
        net, process_group=group, fsdp_unit_modules=[Block], initial="trust", buffers=buffers
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters()), model)
    return _stepper(model, optimizer, lambda: model.clip_grad_norm_(1.0), batch)


def overheads(rank: int, ranks: int, width: int, layers: int, turns: int) -> dict[str, float]:
    """Seconds of process CPU time per step, the minimum of ``turns``; kinds take turns. A fake group of two."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    kinds = ("plain", "sixfold", "fsdp2")
    steps = {kind: make(kind, dist.group.WORLD, width, layers, 4) for kind in kinds}
    best = dict.fromkeys(kinds, float("inf"))
    for turn in range(turns + 3):
        for kind, step in steps.items():
            began = time.process_time()
            step()
            if turn >= 3:
                best[kind] = min(best[kind], time.process_time() - began)
    return best


def host_times(width: int, layers: int, tokens: int, turns: int) -> dict[str, list[float]]:
    """Seconds until the host has enqueued a step on a CUDA device, NCCL with one rank; kinds take turns.

    The device is idle when a step begins, and nothing waits for it inside: what counts is how long it must outlast.
    """
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    kinds = ("plain", "sixfold", "fsdp2", "ddp")
    steps = {kind: make(kind, dist.group.WORLD, width, layers, tokens, "cuda") for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(turns + 3):
        for kind, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            if turn >= 3:
                times[kind].append(time.perf_counter() - began)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return times


Times = dict[str, list[tuple[float, float]]]  # by kind: wall and process CPU seconds of each step


def step_times(rank: int, ranks: int, width: int, layers: int, tokens: int, turns: int) -> Times:
    """Kinds take turns, all ranks start each step together; CPU time counts until all have ended it."""
    kinds = ("sixfold", "merged", "fsdp2", "ddp")
    return times_of({kind: make(kind, dist.group.WORLD, width, layers, tokens) for kind in kinds}, turns)


def times_of(steps: dict[str, Step], turns: int, warm_up: int = 2) -> Times:
    """The same of any steps; the first ``warm_up`` turns do not count."""
    times: Times = {kind: [] for kind in steps}
    for turn in range(turns + warm_up):
        for kind, step in steps.items():
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            step()
            wall = time.perf_counter() - began
            dist.barrier()
            if turn >= warm_up:
                times[kind].append((wall, time.process_time() - worked))
    return times


def ratios(by_rank: list[Times], kind: str, peer: str) -> dict[str, float]:
    """Medians over turns of ``kind``'s time by the peer's: wall of rank 0, and CPU of all ranks together."""
    found = {}
    for name, at, those in (("wall", 0, by_rank[:1]), ("cpu", 1, by_rank)):
        ours, theirs = (
            [sum(t[at] for t in turn) for turn in zip(*(r[k] for r in those), strict=True)] for k in (kind, peer)
        )
        found[name] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return found
