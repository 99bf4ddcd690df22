"""Arithmetic on all main gradients: squares, scaling, true division.

    engine.py --> square_sum, scale, divide (this file) --> shard.py

No host reads a device value here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sixfold.fsdp.engine import Engine


def square_sum(engine: Engine, include: Callable[[str], bool]) -> Tensor:
    """Float64 scalar over the main mesh, each element once (no_shard: every rank has all; replicas are equal)."""
    records = [record for record in engine.records.values() if record.main is not None and include(record.name)]
    gradients = [record.main.grad for record in records if record.main is not None and record.main.grad is not None]
    device = engine.units[0].device
    if gradients:
        total = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float64)).square().sum()
    else:
        total = torch.zeros((), dtype=torch.float64, device=device)
    if engine.strategy.shards_optimizer:
        engine.wait(engine.ranks.shard.all_reduce(total), None, "reduce")
    return total


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
