"""Clipping by the norm of all stages' gradients, as of one model in one process.

gradients of a rank's stages --> one number per rank --> the norm, on all ranks (this file) --> runner
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from struct import pack, unpack

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError, number

__all__ = ["check_norm", "clip"]

Gather = Callable[[int], Sequence[int]]  # a number of each rank, below 2**63


def check_norm(max_norm: float, norm_type: float) -> tuple[float, float]:
    """Both as floats.

    Raises:
        ScheduleError: one is no number from 0 on.
    """
    found = number("max_norm", max_norm), number("norm_type", norm_type)
    for name, value in zip(("max_norm", "norm_type"), found, strict=True):
        if not value > 0:
            raise ScheduleError(f"{name} is {value:g}; it is > 0")
    return found


def clip(
    counted: Iterable[Tensor], parameters: Iterable[Tensor], max_norm: float, norm_type: float, gather: Gather | None
) -> Tensor:
    """Divide gradients so that their norm over all ranks is at most ``max_norm``.

    Args:
        counted: this rank's, without copies that another stage counts.
        parameters: all of this rank's.
        gather: None: this process has all.
    Returns:
        the norm as it was.
    """
    gradients = [p.grad for p in counted if p.grad is not None]
    found_here = [float(torch.nn.utils.get_total_norm(part, norm_type)) for part in _by_mesh(gradients)]
    mine = found_here[0] if len(found_here) == 1 else _total(found_here, norm_type)
    norms = [mine]
    if gather is not None:
        norms = [unpack("<d", pack("<q", bits))[0] for bits in gather(unpack("<q", pack("<d", mine))[0])]
    every = [p for p in parameters if p.grad is not None]
    double = any(p.dtype in (torch.float64, torch.complex128) for p in every)
    found = torch.tensor(_total(norms, norm_type), dtype=torch.float64 if double else torch.float32)
    for part in _by_mesh(every):
        torch.nn.utils.clip_grads_with_norm_(part, max_norm, found)
    return found


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Apart by the mesh over which they are sharded; torch's functions take one sort at a time."""
    parts: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(parts.values())


def _total(norms: Sequence[float], norm_type: float) -> float:
    if any(map(math.isnan, norms)):
        return math.nan
    largest = max(norms, default=0.0)
    if math.isinf(norm_type) or largest == math.inf:
        return largest
    total: float = math.fsum(norm**norm_type for norm in norms) ** (1.0 / norm_type)
    return total
