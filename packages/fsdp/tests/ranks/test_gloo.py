"""What goes over gloo: right for every size, dtype and number of ranks, and by the calls that cost the least there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_count_helpers import Calls
from torch import Tensor

from ranktest import run_ranks
from sixfold.fsdp.buffers.reduction_sizes import exchanged_numel
from sixfold.fsdp.collectives.comm import GlooComm
from sixfold.fsdp.collectives.gradient_sums import grad_sum_of

SIZES = (0, 1, 5_000)  # of a shard
WIRES = (torch.float32, torch.bfloat16, torch.float64)
NAMES = ("backend", "rank_order")


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).mul(10.0**rank).to(dtype)


def gather_all(comm: GlooComm, size: int, dtype: torch.dtype) -> list[Tensor]:
    """From memory of its own, in place, and as a part of a reduction."""
    full = [torch.zeros(comm.size * size, dtype=dtype) for _ in range(3)]
    part = values(comm.rank, size, dtype)
    inside = full[1].view(comm.size, -1)[comm.rank]
    inside.copy_(part)
    for work in (comm.all_gather(full[0], part), comm.all_gather(full[1], inside), comm.spread(full[2], part)):
        work.wait()
    return full


def sum_all(comm: GlooComm, size: int, name: str, wire: torch.dtype, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """This rank's shard of the sum, and the whole of it."""
    sums, wait = grad_sum_of(name, comm), lambda work: work.wait()
    found = []
    for everywhere in (False, True):
        sent = values(comm.rank, comm.size * size, wire)
        place = sent if everywhere else sent.view(comm.size, -1)[comm.rank]
        result = place if in_place else torch.full_like(place, torch.nan, dtype=torch.float32)
        exchanges = sums.exchanges_whole if everywhere else sums.exchanges_shards
        scratch = torch.full((exchanges * exchanged_numel(sent.numel(), comm.size),), torch.nan, dtype=wire)
        start = sums.all_reduce if everywhere else sums.reduce_scatter
        found.append(start(comm, sent, result, scratch, None)(wait).clone())
    return found[0], found[1]


def talk(rank: int, ranks: int) -> dict[tuple[Any, ...], Any]:
    comm = GlooComm(dist.group.WORLD, dist.group.WORLD)
    found: dict[tuple[Any, ...], Any] = {}
    for size in SIZES:
        for wire in (*WIRES, torch.uint8):
            with Calls() as calls:
                found["gather", size, wire] = gather_all(comm, size, wire)
            found["gather", size, wire] += [calls.names]
            for name in NAMES if wire != torch.uint8 else ():
                for in_place in (False, True):
                    found[name, size, wire, in_place] = sum_all(comm, size, name, wire, in_place=in_place)
    return found


def added_up(ranks: int, numel: int, name: str, wire: torch.dtype, *, in_place: bool) -> Tensor:
    """Left to right: in the dtype that travels for ``"backend"``, in the result's for ``"rank_order"``."""
    result = wire if in_place else torch.float32
    total = values(0, numel, wire).to(result if name == "rank_order" else wire)
    for rank in range(1, ranks):
        total += values(rank, numel, wire)
    return total.to(result)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.slow
def test_gathers_and_sums_are_those_of_the_naive_loop(ranks: int) -> None:
    for rank, found in enumerate(run_ranks(talk, ranks)):
        for what, (*tensors, last) in found.items():
            kind, size, wire = what[:3]
            if kind == "gather":
                right = torch.cat([values(one, size, wire) for one in range(ranks)])
                assert all(torch.equal(right, one) for one in tensors), what
                assert last == ["alltoall_base" if ranks == 2 else "allgather_base"] * 3, what
                continue
            right = added_up(ranks, ranks * size, kind, wire, in_place=what[3])
            assert torch.equal(right.view(ranks, -1)[rank], tensors[0]), what
            if kind == "rank_order" or ranks == 2:  # else a whole sum has the back end's own order
                assert torch.equal(right, last), what
