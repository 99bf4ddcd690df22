"""From a batch to microbatches.

inputs, targets, kwargs --> lists of m (this file) --> runner
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.microbatches.block_mask import block_mask_rows, cut_block_mask

__all__ = [
    "Values",
    "alike",
    "as_tuple",
    "check_travels",
    "cut",
    "input_microbatches",
    "joined",
    "keyword_microbatches",
    "rows_of",
    "target_microbatches",
]

Values = tuple[Any, ...]  # what stages exchange: tensors, and None, ints, floats and truth values beside them

_EQUAL = "each counts equally; scale_grads=False takes them"
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
    """The m inputs of stage 0: a tensor, and each of a tuple, is cut along dim 0, a list is taken as it is.

    Args:
        equal: refuse a tensor whose rows m does not divide.
    Raises:
        ScheduleError: there are none, too few rows, or another number than m.
    """
    if inputs is None:
        raise ScheduleError("inputs is None on the rank of stage 0; give a tensor or a list of m microbatches")
    return [as_tuple(part, f"inputs[{k}]") for k, part in enumerate(_cut(inputs, m, "inputs", equal))]


def target_microbatches(targets: Any, m: int, *, equal: bool) -> list[Any]:
    """The m targets of the loss, cut likewise, of a dict too; None gives it None every time."""
    return [None] * m if targets is None else _cut(targets, m, "targets", equal, mapping=True)


def rows_of(*batches: Any) -> int | None:
    """Rows of the first of these that is a tensor, or has one; None if none has."""
    for batch in batches:
        if not isinstance(batch, list):  # of microbatches
            for _, part in _with_rows(batch, ""):
                return part.shape[0]
    return None


def _with_rows(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in ``value`` that are cut, with their names."""
    if isinstance(value, Tensor):
        if value.dim():
            yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _with_rows(part, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for at, part in enumerate(value):
            yield from _with_rows(part, f"{name}[{at}]")


def keyword_microbatches(
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    m: int,
    *,
    equal: bool = False,
    rows: int | None = None,
) -> list[Any]:
    """The keyword arguments of every local stage's module, per microbatch; one dict is cut as a batch is.

    Args:
        rows: of the batch, where they are known here.
    Raises:
        ScheduleError: they are no dict and no list of m dicts; or of a dict a tensor has other rows than the batch.
    """
    if kwargs is None:
        return [{}] * m
    if isinstance(kwargs, Mapping):
        rows = rows_of(kwargs) if rows is None else rows
        for name, value in _with_rows(kwargs, "kwargs"):
            if value.shape[0] != rows:
                raise ScheduleError(
                    f"{name} has {value.shape[0]} rows, the batch {rows}; a dict is cut as the batch is: "
                    f"give a list of {m} dicts where a tensor is for all microbatches"
                )
        return cut(kwargs, m, "kwargs", equal=equal, rule=_mean_rule(m))
    if not isinstance(kwargs, list | tuple):
        raise ScheduleError(f"kwargs is a {type(kwargs).__name__}; it is a dict, or a list of {m} dicts")
    if len(kwargs) != m:
        raise ScheduleError(f"kwargs has {len(kwargs)} entries; the program has {m} microbatches")
    for k, each in enumerate(kwargs):
        if not isinstance(each, Mapping):
            raise ScheduleError(f"kwargs[{k}] is a {type(each).__name__}; it is a dict")
    return list(kwargs)


def cut(value: Any, m: int, name: str, *, equal: bool, rule: str = _EQUAL) -> list[Any]:
    """``value`` as m of its kind: tensors and flex_attention's masks in it cut along dim 0, other leaves in each.

    Args:
        equal: refuse rows that m does not divide; ``rule`` is the reason.
    Raises:
        ScheduleError: a tensor has fewer rows than m, or rows that m does not divide where ``equal``.
    """
    rows = block_mask_rows(value)
    if isinstance(value, Tensor):
        _check_cut(value, m, name)
        rows = value.shape[0] if value.dim() else 0
    elif rows == 1:
        return [value] * m
    if rows is not None:
        if rows < m or (equal and rows % m):
            words = rule if rows >= m else "each has one at least"
            raise ScheduleError(f"{name} has {rows} rows for {m} microbatches; {words}")
        if isinstance(value, Tensor):
            return list(torch.tensor_split(value, m))
        return cut_block_mask(value, [len(part) for part in torch.arange(rows).tensor_split(m)])
    if isinstance(value, Mapping):
        parts = {key: cut(each, m, f"{name}[{key!r}]", equal=equal, rule=rule) for key, each in value.items()}
        return [{key: part[k] for key, part in parts.items()} for k in range(m)]
    if isinstance(value, tuple | list):
        parts_of = [cut(each, m, f"{name}[{at}]", equal=equal, rule=rule) for at, each in enumerate(value)]
        return [alike(value, [part[k] for part in parts_of]) for k in range(m)]
    return [value] * m


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of m microbatches as one: tensors joined along dim 0, of other leaves the last."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return {key: joined([each[key] for each in outputs]) for key in first}
    if isinstance(first, tuple | list):
        return alike(first, [joined(part) for part in zip(*outputs, strict=True)])
    return outputs[-1]


def alike(value: tuple[Any, ...] | list[Any], parts: list[Any]) -> Any:
    """``parts`` in a list, tuple or NamedTuple such as ``value`` is."""
    make: Callable[[list[Any]], Any] = getattr(type(value), "_make", type(value))
    return make(parts)


def _cut(batch: Any, m: int, name: str, equal: bool, *, mapping: bool = False) -> list[Any]:
    if isinstance(batch, list):
        if len(batch) != m:
            raise ScheduleError(f"{name} has {len(batch)} microbatches; the program has {m}")
        return batch
    if isinstance(batch, Tensor):
        _check_cut(batch, m, name)
        rows = batch.shape[0] if batch.dim() else 0
        if rows < m:
            raise ScheduleError(f"{name} has {rows} rows; the program cuts them into {m} microbatches")
        if equal and rows % m:
            raise ScheduleError(
                f"{name} has {rows} rows for {m} microbatches, which do not divide them; {_mean_rule(m)}"
            )
        return list(torch.tensor_split(batch, m))
    if not (isinstance(batch, tuple) or (mapping and isinstance(batch, Mapping))):
        forms = "a tensor, a tuple of tensors" + (", a dict of them" if mapping else "")
        raise ScheduleError(f"{name} is a {type(batch).__name__}; give {forms}, or a list of {m} microbatches")
    of_first = rows_of(batch)
    for where, part in _with_rows(batch, name):
        if part.shape[0] != of_first:
            raise ScheduleError(
                f"{where} has {part.shape[0]} rows, the batch {of_first}; all of {name} is cut along dim 0: "
                f"give a list of {m} microbatches where a tensor is for all of them"
            )
    return cut(batch, m, name, equal=equal, rule=_mean_rule(m))


def _mean_rule(m: int) -> str:
    return (
        f"each loss counts 1/{m} with scale='mean', so the gradient would not be that of the mean over rows: "
        "give a list of microbatches if it should count so, or use scale='sum' or 'token'"
    )


def _check_cut(batch: Tensor, m: int, name: str) -> None:
    if batch.is_nested or batch.layout is not torch.strided:
        kind = "nested" if batch.is_nested else str(batch.layout)
        raise ScheduleError(f"{name} is a {kind} tensor; give a list of {m} microbatches")
