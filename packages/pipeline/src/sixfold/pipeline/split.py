"""From a batch to microbatches.

inputs, targets, kwargs --> lists of m (this file) --> run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError

__all__ = ["as_tuple", "input_microbatches", "keyword_microbatches", "target_microbatches"]


def as_tuple(value: Any, what: str) -> tuple[Tensor, ...]:
    """``value``, a tensor or a tuple of tensors, as a tuple.

    Raises:
        ScheduleError: it is something else; ``what`` names it.
    """
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value):
        return tuple(value)
    raise ScheduleError(f"{what} is a {type(value).__name__}; stages exchange a tensor or a tuple of tensors")


def input_microbatches(inputs: Any, m: int) -> list[tuple[Tensor, ...]]:
    """The m inputs of stage 0: a tensor is cut along dim 0, a list is taken as it is.

    Raises:
        ScheduleError: there are none, too few rows, or another number than m.
    """
    if inputs is None:
        raise ScheduleError("inputs is None on the rank of stage 0; give a tensor or a list of m microbatches")
    return [as_tuple(part, f"inputs[{k}]") for k, part in enumerate(_cut(inputs, m, "inputs"))]


def target_microbatches(targets: Any, m: int) -> list[Any]:
    """The m targets of the loss; None gives it None every time."""
    return [None] * m if targets is None else _cut(targets, m, "targets")


def keyword_microbatches(kwargs: Sequence[Mapping[str, Any]] | None, m: int) -> list[Mapping[str, Any]]:
    """The keyword arguments of every local stage's module, per microbatch."""
    if kwargs is None:
        return [{}] * m
    if len(kwargs) != m:
        raise ScheduleError(f"kwargs has {len(kwargs)} entries; the program has {m} microbatches")
    return list(kwargs)


def _cut(batch: Any, m: int, name: str) -> list[Any]:
    if isinstance(batch, Tensor):
        rows = batch.shape[0] if batch.dim() else 0
        if rows < m:
            raise ScheduleError(f"{name} has {rows} rows; the program cuts them into {m} microbatches")
        return list(torch.tensor_split(batch, m))
    if not isinstance(batch, list):
        raise ScheduleError(f"{name} is a {type(batch).__name__}; give a tensor, or a list of {m} microbatches")
    if len(batch) != m:
        raise ScheduleError(f"{name} has {len(batch)} microbatches; the program has {m}")
    return batch
