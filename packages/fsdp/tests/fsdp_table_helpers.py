"""What each row of the comparison measures; every function runs inside a job of ranks.

    fsdp_peers_helpers.make --> counts and times of a steady step (this file) --> benchmarks/bench_table.py

Counts (bytes, allocations, collectives, gathers) do not depend on the machine's load; times do.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from fsdp_bench_helpers import Block, Net
from fsdp_count_helpers import Traffic, fake_world
from fsdp_peers_helpers import make
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

LEAST_BYTES = 16_384  # of an allocation that counts
WARM = 3


def made(kind: str, width: int, layers: int, tokens: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return make(kind, Net(width, layers), Block, torch.randn(tokens, width), dist.group.WORLD, **options)


def cpu_seconds(rank: int, ranks: int, kinds: list[str], width: int, layers: int, turns: int) -> dict[str, list[float]]:
    """Least process CPU seconds of a whole step and of forward and backward; a fake group of two, kinds take turns."""
    fake_world(2)
    sides = {kind: made(kind, width, layers, 4) for kind in kinds}
    best = {kind: [float("inf"), float("inf")] for kind in kinds}
    for turn in range(turns + WARM):
        for kind, side in sides.items():
            began = time.process_time()
            side.forward_backward()
            middle = time.process_time()
            side.clip()
            side.optimizer_step()
            if turn >= WARM:
                best[kind] = [
                    min(best[kind][0], time.process_time() - began),
                    min(best[kind][1], middle - began),
                ]
    return best


class Written(TorchDispatchMode):
    """Bytes that local operators write: new tensors, and those changed in place or through ``out=``."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves
        if any(type(leaf).__name__ == "DTensor" for leaf in leaves((args, kwargs))):
            return NotImplemented  # its own dispatch comes back here with local tensors
        result = func(*args, **(kwargs or {}))
        if str(func).startswith(("c10d.", "_c10d_functional.")):
            return result
        given = {tensor.untyped_storage().data_ptr() for tensor in leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        changed: list[Tensor] = []
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[at] if at < len(args) else (kwargs or {}).get(argument.name)
                changed += [tensor for tensor in leaves(value) if isinstance(tensor, Tensor)]
        new = [t for t in leaves(result) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given]
        if not str(func).startswith(("aten.empty", "aten.new_empty", "aten.detach")):
            self.nbytes += sum(tensor.nbytes for tensor in (*changed, *new))
        return result


def counts(rank: int, ranks: int, kind: str, width: int, layers: int, world: int) -> dict[str, Any]:
    """Of a steady step on a fake group: written bytes, allocations, collectives and their bytes, the model's bytes."""
    fake_world(world)
    side = made(kind, width, layers, 4)
    for _ in range(WARM):
        side.step(clipped=False)
    traffic, written = Traffic(), Written()
    with traffic:
        side.step(clipped=False)
    with written:
        side.forward_backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        side.forward_backward()
    events = seen.profiler.kineto_results.events()
    kinds = sorted({sent.kind for sent in traffic.sent})
    return {
        "written_bytes": written.nbytes,
        "allocations": sum(e.nbytes() >= LEAST_BYTES for e in events if e.name() == "[memory]"),
        "collectives": {name: (traffic.calls(name), traffic.nbytes(name)) for name in kinds},
        "model_bytes": 4 * sum(p.numel() for p in Net(width, layers).parameters()),
    }


def step_seconds(
    rank: int, ranks: int, kinds: list[str], width: int, layers: int, tokens: int, turns: int, clipped: bool
) -> dict[str, list[float]]:
    """Wall seconds of each step by kind; kinds take turns, all ranks start each step together."""
    sides = {kind: made(kind, width, layers, tokens) for kind in kinds}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(turns + WARM):
        for kind, side in sides.items():
            dist.barrier()
            began = time.perf_counter()
            side.step(clipped=clipped)
            if turn >= WARM:
                times[kind].append(time.perf_counter() - began)
    return times


def final_weights(rank: int, ranks: int, kind: str, steps: int) -> dict[str, Tensor]:
    """Whole weights after some steps without clipping; each rank has its own batch."""
    torch.manual_seed(0)
    net = Net(16, 2)
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    side = make(kind, net, Block, batch, dist.group.WORLD)
    for _ in range(steps):
        side.forward_backward()
        side.optimizer_step()
    if kind == "sixfold":
        return side.model.full_state_dict()
    if kind.startswith("megatron"):  # its own gather of uneven shards asks for NCCL
        return {name.removeprefix("module."): _rows(value) for name, value in side.model.state_dict().items()}
    state = side.model.state_dict()
    return {
        name.removeprefix("module."): value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in state.items()
    }


def _rows(value: Any) -> Tensor:
    """A tensor of which each rank has some rows."""
    parts: list[Tensor] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(parts, value._local_tensor.detach())
    return torch.cat(parts) if parts[0].shape != value.shape else parts[0]


def emulated_weights(ranks: int, steps: int) -> dict[str, Tensor]:
    """The same in one process: gradients of the ranks added from left to right, divided once."""
    torch.manual_seed(0)
    net = Net(16, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    batches = [torch.randn(4, 16, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    for _ in range(steps):
        sums: list[Tensor] = []
        for batch in batches:
            gradients = torch.autograd.grad(net(batch).sum(), list(net.parameters()))
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else list(gradients)
        for parameter, total in zip(net.parameters(), sums, strict=True):
            parameter.grad = total / ranks
        optimizer.step()
    return dict(net.state_dict())


# ---- gathers under a pipeline's order


def one_f_one_b(warm: int, microbatches: int) -> list[tuple[str, int]]:
    """Forwards and backwards of a stage that runs ``warm`` microbatches ahead."""
    order = [("F", k) for k in range(min(warm, microbatches))]
    for k in range(microbatches):
        order.append(("B", k))
        if k + warm < microbatches:
            order.append(("F", k + warm))
    return order


def gathers(
    rank: int, ranks: int, kind: str, units: int, microbatches: int, options: dict[str, Any]
) -> tuple[int, object]:
    """All-gathers in the fourth step of a 1F1B order, two microbatches ahead; and what our report says of its plan."""
    fake_world(2)
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(16) for _ in range(units)))
    side = make(kind, net, Block, torch.randn(4, 16), dist.group.WORLD, **options)
    count = 0
    for _ in range(4):
        outputs: dict[int, Tensor] = {}
        with Traffic() as traffic:
            for what, k in one_f_one_b(2, microbatches):
                if what == "F":
                    outputs[k] = side.model(torch.randn(4, 16)).sum()
                else:
                    outputs.pop(k).backward()
            side.optimizer_step()
        count = traffic.calls("all_gather")
    return count, side.model.report().get("plan") if kind == "sixfold" else None


def unit_bytes(rank: int, ranks: int, units: int) -> list[int]:
    """Gathered bytes of each unit of the net that ``gathers`` runs, the root's first."""
    fake_world(2)
    net = nn.Sequential(*(Block(16) for _ in range(units)))
    side = make("sixfold", net, Block, torch.randn(4, 16), dist.group.WORLD)
    return [unit["gathered_bytes"] for unit in side.model.report()["units"].values()]


# ---- Muon


class Matrices(nn.Module):
    """Square and wide matrices without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.mix(x)))


def muon_step(rank: int, ranks: int, kind: str, world: int, options: dict[str, Any]) -> dict[str, Any]:
    """Collectives inside ``optimizer.step()`` and its least CPU seconds; a fake group if ``world`` is not ``ranks``.

    The fake group knows no all-to-all to which a rank gives nothing.
    """
    if world != ranks:
        fake_world(world)
    torch.manual_seed(0)
    net = nn.Sequential(*(Matrices(64) for _ in range(8)))
    cut = options.get("cut")
    options = {} if cut is None else {"granularity": lambda name, parameter: cut}
    side = make(kind, net, Matrices, torch.randn(4, 64), dist.group.WORLD, lambda p: torch.optim.Muon(p), **options)
    best, traffic = float("inf"), Traffic()
    for _ in range(6):
        side.forward_backward()
        if kind == "sixfold":
            side.model.finish_grad_sync()
        began = time.process_time()
        traffic = Traffic()
        with traffic:
            side.optimizer.step()
        best = min(best, time.process_time() - began)
        side.optimizer.zero_grad()
    kinds = sorted({sent.kind for sent in traffic.sent})
    return {"seconds": best, "collectives": {name: (traffic.calls(name), traffic.nbytes(name)) for name in kinds}}
