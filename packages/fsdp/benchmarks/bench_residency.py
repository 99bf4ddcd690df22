"""Gathers in 1F1B order under a byte budget beside FSDP2, and what planning them costs.

Counts are of all-gathers that the dispatcher sees on a fake group of two; they do not depend on the machine. Planning
has as its floor one pass over the uses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ranktest import run_ranks
from sixfold.fsdp import BufferConfig, FullyShardedDataParallel, fully_shard_optimizer
from sixfold.fsdp.placement.address_assignment import assign_addresses
from sixfold.fsdp.residency import solve

UNITS, MICROBATCHES, AHEAD, WIDTH = 5, 6, 3, 64


class Gathers(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d") and "allgather" in name:
            leaves = [one for one in torch.utils._pytree.tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.calls += leaves[0].dtype != torch.int64
        return func(*args, **(kwargs or {}))


def one_f_one_b(run: Any) -> None:
    """F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5."""
    x = torch.ones(2, WIDTH)
    waiting = [run(x.requires_grad_()) for _ in range(AHEAD)]
    for k in range(MICROBATCHES):
        waiting.pop(0).sum().backward()
        if AHEAD + k < MICROBATCHES:
            waiting.append(run(x))


def counts(rank: int, ranks: int) -> dict[str, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    found = {}
    size = 0
    for resident in (0, 1, 2, 3, 4, 5):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
        model = FullyShardedDataParallel(
            net,
            process_group=dist.group.WORLD,
            fsdp_unit_modules=[nn.Linear],
            buffers=BufferConfig(gathered_bytes=resident * size or "all"),
            initial="trust",
            grad_reduce="last",
        )
        size = model.report()["units"]["0"]["gathered_bytes"]
        optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.0), model)
        for _ in range(3):
            with Gathers() as gathers:
                one_f_one_b(model)
            optimizer.step()
            optimizer.zero_grad()
        name = f"{resident} resident" if resident else "all"
        found[name] = gathers.calls
        if resident:
            found[f"{name}, by bytes alone"] = model.report()["plan"]["least_gathers"]
    mesh = init_device_mesh("cpu", (2,))
    for again in (True, False):
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
        for part in net:
            fully_shard(part, mesh=mesh, reshard_after_forward=again)
        fully_shard(net, mesh=mesh, reshard_after_forward=again)
        for _ in range(2):
            with Gathers() as gathers:
                one_f_one_b(net)
            net.zero_grad()
        found["fsdp2" if again else "fsdp2, reshard_after_forward=False"] = gathers.calls
    return found


def test_gathers_of_five_units_and_six_microbatches(benchmark: Any) -> None:
    """All-gathers of a step: ours by units that the budget holds, FSDP2's as shipped with and without resharding."""
    found = benchmark.pedantic(lambda: run_ranks(counts, 1, timeout=120.0)[0], rounds=1)
    benchmark.extra_info.update(found)


@pytest.mark.parametrize("sizes", ["equal", "mixed"])
def test_plan_ten_thousand_uses_of_two_hundred_units(benchmark: Any, sizes: str) -> None:
    names = [f"blocks.{i}" for i in range(200)]
    bytes_of = {name: 100 if sizes == "equal" else (90, 100, 110, 2000)[i % 4] for i, name in enumerate(names)}
    uses = (names + names[::-1]) * 25
    benchmark.extra_info.update(uses=len(uses), units=len(names))
    benchmark.pedantic(lambda: solve(uses, bytes_of, budget_bytes=sum(bytes_of.values()) // 3), rounds=3)


def test_colour_ten_thousand_uses_of_two_hundred_units(benchmark: Any) -> None:
    names = [f"blocks.{i}" for i in range(200)]
    uses = (names + names[::-1]) * 25
    benchmark.extra_info.update(uses=len(uses), units=len(names))
    benchmark.pedantic(lambda: assign_addresses(uses, dict.fromkeys(names, 100), arena_bytes=5000), rounds=3)
