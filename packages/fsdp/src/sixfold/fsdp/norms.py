"""Arithmetic on all main gradients: squares, scaling, true division.

    engine.py --> square_sum, scale, divide (this file) --> shard.py

No host reads a device value here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sixfold.fsdp.engine import Engine
from sixfold.fsdp.flat import ParamRecord


def square_sum(engine: Engine, include: Callable[[str], bool]) -> Tensor:
    """Float64 scalar over the main mesh, each element once.

    On the main mesh every rank has all (no_shard), or replicas are equal. What is on a mesh of its own is counted by
    its shards, or by its first rank, and added over the whole main mesh: its expert-parallel peers are there.
    """
    records = [record for record in engine.records.values() if record.main is not None and include(record.name)]
    on_main = [record for record in records if record.buffer.ranks is engine.ranks]
    elsewhere = [record for record in records if record.buffer.ranks is not engine.ranks and _counts(record)]
    device = engine.units[0].device
    sums = torch.stack([_squares(on_main, device), _squares(elsewhere, device)])
    if engine.strategy.shards_optimizer:
        engine.wait(engine.ranks.shard.all_reduce(sums if engine.elsewhere else sums[:1]), None, "reduce")
    elif engine.elsewhere:
        engine.wait(engine.ranks.shard.all_reduce(sums[1:]), None, "reduce")
    if engine.elsewhere:
        engine.wait(engine.ranks.outer.all_reduce(sums[1:]), None, "reduce")
    return sums.sum()


def _counts(record: ParamRecord) -> bool:
    return record.buffer.cut.parts > 1 or record.buffer.ranks.rank == 0


def _squares(records: Sequence[ParamRecord], device: torch.device) -> Tensor:
    gradients = [record.main.grad for record in records if record.main is not None and record.main.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()


def _gradients(engine: Engine) -> list[Tensor]:
    mains = [record.main for record in engine.records.values()]
    return [main.grad for main in mains if main is not None and main.grad is not None]


def _on_device(engine: Engine, value: float | Tensor, like: Tensor) -> Tensor:
    # A host number would be turned into a product with its reciprocal on CUDA.
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def scale(engine: Engine, factor: float | Tensor) -> None:
    """Multiply."""
    gradients = _gradients(engine)
    if gradients:
        torch._foreach_mul_(gradients, _on_device(engine, factor, gradients[0]))


def divide(engine: Engine, count: float | Tensor) -> None:
    """Divide, truly."""
    gradients = _gradients(engine)
    if gradients:
        torch._foreach_div_(gradients, _on_device(engine, count, gradients[0]))
