"""One process that emulates the ranks of a Cell: the oracle of the matrix.

    Cell --> emulate (this file) --> the weights that are right --> tests/ranks/test_matrix_bits.py

Written from the specification: local fp32 sums, cast, ranks 0, 1, 2 ... from left to right, replicas after shards, one
true division, add. Imports nothing of sixfold.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from fsdp_matrix_helpers import PRECISIONS, Cell, Driven, Net, Sums, drive, make_adamw, make_net, rounds
from torch import Tensor, nn


class PlainStage:
    """The calls of a stage handle on a plain module."""

    def __init__(self, module: nn.Module, accumulate: Callable[[nn.Parameter, Tensor], None]) -> None:
        self.call, self.accumulate = module, accumulate

    def after_backward(self, microbatch: int) -> None:
        """Nothing: gradients were harvested."""

    def before_last_backward(self) -> None:
        """Nothing overlaps here."""

    def reduce_grad(self) -> None:
        """``emulate`` reduces."""


def emulate(cell: Cell) -> list[Sums]:
    """For each expert-parallel rank, final weights; a parameter that no rank of its mesh used has no gradient."""
    low = PRECISIONS[cell.precision].get("param_dtype")
    nets = [make_net(cell, rank).to(low or torch.float32) for rank in range(cell.ranks)]
    mains = [make_net(cell, expert) for expert in range(cell.ep)]
    optimizers = [make_adamw(net.parameters()) for net in mains]
    for step in range(cell.steps):
        locals_RG = [_local_sums(cell, mains[rank % cell.ep], nets[rank], step, rank) for rank in range(cell.ranks)]
        totals = [_reduce(cell, locals_RG, expert) for expert in range(cell.ep)]
        _clip(cell, totals)
        for total, net, optimizer in zip(totals, mains, optimizers, strict=True):
            for name, parameter in net.named_parameters():
                parameter.grad = total.get(name)
            optimizer.step()
    return [{name: value.clone() for name, value in net.state_dict().items()} for net in mains]


def _reduce(cell: Cell, locals_RG: list[list[Sums]], expert: int) -> Sums:
    """Main gradients of a step, as expert-parallel rank ``expert`` has them."""
    rest = PRECISIONS[cell.precision].get("grad_dtype", torch.float32)
    total: Sums = {}
    for sums_R in zip(*locals_RG, strict=True):
        for name in set().union(*sums_R):
            owned = cell.ep > 1 and ".extra." in name
            given = [sums.get(name) for sums in (sums_R[expert :: cell.ep] if owned else sums_R)]
            reduced = _sum_over_ranks(cell, given, replicas=1 if owned else cell.replicas)
            total[name] = (total[name].float() + reduced if name in total else reduced).to(rest)
    return {name: value.float() for name, value in total.items()}


def _clip(cell: Cell, totals: list[Sums]) -> None:
    """Each element once: what expert-parallel ranks share, and the experts of each."""
    if cell.clip is None:
        return
    once = [value for name, value in totals[0].items() if cell.ep == 1 or ".extra." not in name]
    once += [value for total in totals for name, value in total.items() if cell.ep > 1 and ".extra." in name]
    norm = torch.stack([value.double().square().sum() for value in once]).sum().sqrt().float()
    coefficient = torch.clamp(cell.clip / (norm + 1e-6), max=1.0)
    for total in totals:
        for value in total.values():
            value *= coefficient


def _local_sums(cell: Cell, main: Net, compute: Net, step: int, rank: int) -> list[Sums]:
    """Of one rank, per round: fp32 sums of what autograd and deferral gave."""
    with torch.no_grad():
        chosen = PRECISIONS[cell.precision].get("fp8", lambda name: False)
        for low, (name, high) in zip(compute.parameters(), main.named_parameters(), strict=True):
            low.copy_(_through_fp8(high) if chosen(name) else high)
            low.grad = None
    sums: Sums = {}
    done: list[Sums] = []
    names = {id(p): name for name, p in compute.named_parameters()}

    def add(parameter: nn.Parameter, gradient: Tensor) -> None:
        name, wide = names[id(parameter)], gradient.detach().to(torch.float32)
        sums[name] = sums[name] + wide if name in sums else wide.clone()

    def harvest() -> None:
        for parameter in compute.parameters():
            if parameter.grad is not None:
                add(parameter, parameter.grad)
                parameter.grad = None

    def reduced() -> None:
        done.append(dict(sums))
        sums.clear()

    stages = [PlainStage(stage, add) for stage in compute.stages.values()]
    drive(cell, compute, Driven(compute, stages, lambda last: nullcontext(), nullcontext, harvest, reduced), step, rank)
    assert not sums and len(done) == len(rounds(cell)), f"{cell}: {len(done)} rounds"
    return done


def _through_fp8(main: Tensor) -> Tensor:
    """What a layer reads of a quantised weight: ``q * scale`` with one scale for the whole tensor."""
    amax = main.abs().max()
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / torch.full_like(amax, 448.0))
    return (main / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _sum_over_ranks(cell: Cell, gradients_R: list[Tensor | None], *, replicas: int) -> Tensor:
    """Shards first, then replicas, left to right; a rank without a gradient gives zeros; one true division."""
    wire = PRECISIONS[cell.precision].get("reduce_dtype") or torch.float32
    like = next(g for g in gradients_R if g is not None)
    given = [(torch.zeros_like(like) if g is None else g).to(wire) for g in gradients_R]
    if cell.grad_sum == "rank_order":  # travels in reduce_dtype, is summed in fp32
        given = [g.float() for g in given]
    shards = len(given) // replicas
    parts = []
    for replica in range(replicas):
        part = given[replica * shards].clone()
        for other in given[replica * shards + 1 : (replica + 1) * shards]:
            part += other
        parts.append(part.float())
    for other in parts[1:]:
        parts[0] += other
    return parts[0] / cell.ranks


def wrong(expected: Sums, found: Sums) -> list[str]:
    """Names whose bits differ."""
    assert expected.keys() == found.keys(), f"{sorted(expected)} against {sorted(found)}"
    return [name for name in found if not torch.equal(expected[name], found[name])]
