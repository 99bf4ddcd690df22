"""From a batch to microbatches.

inputs, targets, kwargs --> lists of m (this file) --> run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError

__all__ = [
    "Values",
    "alike",
    "as_tuple",
    "check_travels",
    "input_microbatches",
    "keyword_microbatches",
    "target_microbatches",
]

Values = tuple[Any, ...]  # what stages exchange: tensors, and None, ints, floats and truth values beside them

_ENTRIES = (Tensor, NoneType, int, float)  # a bool is an int


def as_tuple(value: Any, what: str) -> Values:
    """``value``, a tensor or a tuple or list of tensors, numbers and Nones, as a tuple.

    Raises:
        ScheduleError: it is something else; ``what`` names it.
    """
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, tuple | list):
        raise ScheduleError(f"{what} is a {type(value).__name__}; stages exchange a tensor or a tuple of tensors")
    for part in value:
        if not isinstance(part, _ENTRIES):
            form = "beside tensors stages exchange None, int, float and bool"
            raise ScheduleError(f"{what} holds a {type(part).__name__}; {form}")
    return tuple(value)


def check_travels(values: Values, what: str) -> None:
    """The tensors of a stage's output are memory of their own kind, which another stage can be sent.

    Raises:
        ScheduleError: one is sparse, nested, or wraps other tensors; the text says what to return.
    """
    for value in values:
        if isinstance(value, Tensor) and (type(value) is not Tensor or value.layout is not torch.strided):
            _check_travels(value, what)


def _check_travels(value: Tensor, what: str) -> None:
    if value.is_nested:
        raise ScheduleError(
            f"{what} is a nested tensor; stages exchange dense ones: return its values() and offsets(), "
            "and make it again in the next stage"
        )
    if hasattr(value, "to_local"):
        raise ScheduleError(
            f"{what} is a DTensor; stages exchange plain tensors: return x.to_local(), and DTensor.from_local there"
        )
    if value.layout is not torch.strided:
        raise ScheduleError(f"{what} is a {value.layout} tensor; stages exchange dense ones: return x.to_dense()")
    if hasattr(value, "__tensor_flatten__"):
        kind = type(value).__name__
        raise ScheduleError(f"{what} is a {kind}, which holds other tensors; stages exchange plain ones: return those")


def input_microbatches(inputs: Any, m: int, *, equal: bool) -> list[Values]:
    """The m inputs of stage 0: a tensor is cut along dim 0, a list is taken as it is.

    Args:
        equal: refuse a tensor whose rows m does not divide.
    Raises:
        ScheduleError: there are none, too few rows, or another number than m.
    """
    if inputs is None:
        raise ScheduleError("inputs is None on the rank of stage 0; give a tensor or a list of m microbatches")
    return [as_tuple(part, f"inputs[{k}]") for k, part in enumerate(_cut(inputs, m, "inputs", equal))]


def target_microbatches(targets: Any, m: int, *, equal: bool) -> list[Any]:
    """The m targets of the loss; None gives it None every time."""
    return [None] * m if targets is None else _cut(targets, m, "targets", equal)


def keyword_microbatches(kwargs: Sequence[Mapping[str, Any]] | None, m: int) -> list[Mapping[str, Any]]:
    """The keyword arguments of every local stage's module, per microbatch."""
    if kwargs is None:
        return [{}] * m
    if not isinstance(kwargs, list | tuple):
        form = f"give a list of {m} dicts, one per microbatch"
        raise ScheduleError(f"kwargs is a {type(kwargs).__name__}; {form}, and cut the tensors in them yourself")
    if len(kwargs) != m:
        raise ScheduleError(f"kwargs has {len(kwargs)} entries; the program has {m} microbatches")
    for k, each in enumerate(kwargs):
        if not isinstance(each, Mapping):
            raise ScheduleError(f"kwargs[{k}] is a {type(each).__name__}; it is a dict")
    return list(kwargs)


def alike(value: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """``parts`` in a list, tuple or NamedTuple such as ``value`` is."""
    make: Callable[[list[Any]], Any] = getattr(type(value), "_make", type(value))
    return make(parts)


def _cut(batch: Any, m: int, name: str, equal: bool) -> list[Any]:
    if isinstance(batch, Tensor):
        if batch.is_nested or batch.layout is not torch.strided:
            kind = "nested" if batch.is_nested else str(batch.layout)
            raise ScheduleError(f"{name} is a {kind} tensor; give a list of {m} microbatches")
        rows = batch.shape[0] if batch.dim() else 0
        if rows < m:
            raise ScheduleError(f"{name} has {rows} rows; the program cuts them into {m} microbatches")
        if equal and rows % m:
            raise ScheduleError(
                f"{name} has {rows} rows for {m} microbatches, which do not divide them; each loss counts 1/{m} with "
                "scale='mean', so the gradient would not be that of the mean over rows: give a list of microbatches "
                "if it should count so, or use scale='sum' or 'token'"
            )
        return list(torch.tensor_split(batch, m))
    if not isinstance(batch, list):
        raise ScheduleError(f"{name} is a {type(batch).__name__}; give a tensor, or a list of {m} microbatches")
    if len(batch) != m:
        raise ScheduleError(f"{name} has {len(batch)} microbatches; the program has {m}")
    return batch
