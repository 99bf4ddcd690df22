"""Sums of losses that are one number in any order, over any ranks.

    losses of microbatches and samples --> on_grids (this file) --> sums, over ranks too --> from_grids (this file)

[Note: losses on three grids] A loss is written as whole steps of 1, 2**-28 and 2**-56 nats, each of a grid; what is
left, at most 2**-57 nats, is dropped. Steps are a function of the loss alone. A float64 holds a sum of whole steps
exactly: up to 2**53 nats, and up to 2**26 losses on each finer grid. So partial sums may be added in any order. The end
is one rounding. A float32 loss of at least 2**-33 nats is exact on the grids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

STEPS = (1.0, 2.0**-28, 2.0**-56)


def on_grids(losses: Tensor) -> Tensor:
    """Float64, three of each loss along a new first dimension: whole steps; infinity and NaN are in the first."""
    left = losses.detach().double()
    parts = []
    for step in STEPS:
        parts.append((left / step).round() * step)
        left = (left - parts[-1]).nan_to_num(nan=0.0)
    return torch.stack(parts)


def sum_on_grids(losses: Iterable[Tensor], device: torch.device) -> Tensor:
    """(3,) float64: scalars added; 0 if there is none."""
    found = [loss.to(device) for loss in losses]
    return on_grids(torch.stack(found)).sum(1) if found else torch.zeros(3, dtype=torch.float64, device=device)


def from_grids(sums: Iterable[float]) -> float:
    """What three sums stand for, rounded once."""
    return math.fsum(sums)
