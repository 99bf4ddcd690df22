"""From a batch to microbatches.

inputs, targets, kwargs --> lists of m (this file) --> runner
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import is_dataclass
from itertools import chain
from types import NoneType
from typing import Any, cast

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
    "cut_beside",
    "input_microbatches",
    "joined",
    "keyword_microbatches",
    "mapping_alike",
    "target_microbatches",
    "tensors_in",
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


def target_microbatches(targets: Any, m: int, *, equal: bool, rows: int | None = None) -> list[Any]:
    """The m targets of the loss, cut likewise, of a dict too; None gives it None every time.

    Args:
        rows: of the batch, where they are known here.
    """
    return [None] * m if targets is None else _cut(targets, m, "targets", equal, mapping=True, rows=rows)


def _rows_of(*batches: Any) -> int | None:
    """Rows of the first of these that is a tensor, or has one; None if none has."""
    for batch in batches:
        if not isinstance(batch, list):  # of microbatches
            for _, part in _with_rows(batch, ""):
                return part.shape[0]
    return None


def _total_of(*batches: Any) -> int | None:
    """Rows of all parts of the first of these that is a list of microbatches; None where a part has none."""
    for batch in batches:
        if isinstance(batch, list):
            rows = _rows_of_parts(batch)
            return None if rows is None else sum(rows)
    return None


def _rows_told(inputs: Any) -> int | None:
    """Rows of the inputs, as other ranks hear of them; None where they have none.

    Those of a list of microbatches are added up. The number is below zero if a tensor of so many rows would be cut
    otherwise.
    """
    if not isinstance(inputs, list):
        return _rows_of(inputs)
    rows = _rows_of_parts(inputs)
    if rows is None:
        return None
    total, m = sum(rows), len(rows)
    return total if rows == [total // m + (k < total % m) for k in range(m)] else -total


def _rows_of_parts(batch: list[Any]) -> list[int] | None:
    rows = [_rows_of(tuple(part) if isinstance(part, list) else part) for part in batch]
    known = [number for number in rows if number is not None]
    return known if len(known) == len(rows) else None


def _check_target_rows(targets: Any, m: int, rows: int | None) -> None:
    """Each microbatch's targets are those of its inputs: a tensor of labels has rows, or some for each row, of these.

    Args:
        rows: as ``_rows_told`` tells them.
    Raises:
        ScheduleError: the targets would be cut otherwise than the inputs.
    """
    own = _rows_of(targets)
    if own is None or not rows:
        return
    if rows < 0:
        raise ScheduleError(
            f"targets has {own} rows to be cut evenly, but the microbatches in the list of inputs have unequal rows; "
            f"give a list of {m} microbatches"
        )
    if own % rows:
        raise ScheduleError(
            f"targets has {own} rows, the inputs {rows}; targets have as many, or some for each row of the inputs: "
            f"give lists of {m} microbatches where they belong together otherwise"
        )


def _with_rows(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in ``value`` that are cut, with their names."""
    return ((where, part) for where, part in tensors_in(value, name) if part.dim())


def tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in ``value`` and in its tuples, lists and mappings, with their names."""
    return ((where, leaf) for where, leaf in _leaves_in(value, name) if isinstance(leaf, Tensor))


def _leaves_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves_in(part, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list):
        for at, part in enumerate(value):
            yield from _leaves_in(part, f"{name}[{at}]")
    else:
        yield name, value


def keyword_microbatches(
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    m: int,
    *,
    equal: bool = False,
    rows: int | None = None,
    total: int | None = None,
) -> list[Any]:
    """The keyword arguments of every local stage's module, per microbatch; one dict is cut as a batch is.

    Args:
        rows: of the batch, where they are known here, as ``_rows_told`` tells them.
        total: of a batch that is given as a list.
    Raises:
        ScheduleError: they are no dict and no list of m dicts; or of a dict a tensor has other rows than the batch, or
            something that is not cut has its rows.
    """
    if kwargs is None:
        return [{}] * m
    if isinstance(kwargs, Mapping):
        rows = _rows_of(kwargs) if rows is None else rows
        for name, leaf in _leaves_in(kwargs, "kwargs"):
            masks = block_mask_rows(leaf)
            own = leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else None if masks == 1 else masks
            if own is None or (rows is None and masks is not None):
                continue
            if rows is not None and rows < 0:
                raise ScheduleError(
                    f"{name} has {own} rows to be cut evenly, but the microbatches in the list of inputs "
                    f"have unequal rows; give a list of {m} dicts"
                )
            if own != rows:
                raise ScheduleError(
                    f"{name} has {own} rows, the batch {rows}; a dict is cut as the batch is: "
                    f"give a list of {m} dicts where a tensor is for all microbatches"
                )
        return cut(dict(kwargs), m, "kwargs", equal=equal, rule=_mean_rule(m), rows_of_batch=abs(rows or 0) or total)
    if not isinstance(kwargs, list | tuple):
        raise ScheduleError(f"kwargs is a {type(kwargs).__name__}; it is a dict, or a list of {m} dicts")
    if len(kwargs) != m:
        raise ScheduleError(f"kwargs has {len(kwargs)} entries; the program has {m} microbatches")
    for k, each in enumerate(kwargs):
        if not isinstance(each, Mapping):
            raise ScheduleError(f"kwargs[{k}] is a {type(each).__name__}; it is a dict")
    return list(kwargs)


def cut_beside(
    inputs: Any,
    targets: Any,
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    m: int,
    *,
    equal: bool,
    tail: bool,
) -> tuple[list[Any], list[Any], int | None, Callable[[int], None] | None]:
    """What goes with the inputs, each microbatch's rows with the inputs' of the same.

    Args:
        tail: the last stage is here; elsewhere targets are not used.
    Returns:
        m targets, or [] elsewhere; m keyword arguments; the rows of the batch, as ``_rows_told`` tells them, those of
        the targets where there are no inputs; what refuses the rows that another rank tells.
    Raises:
        ScheduleError: as ``keyword_microbatches`` says, and of targets that would be cut otherwise than the inputs.
    """
    rows = _rows_told(inputs)
    of_batch = _rows_of(targets) if rows is None else rows
    total = _total_of(inputs, targets)
    keywords = keyword_microbatches(kwargs, m, equal=equal, rows=of_batch, total=total)
    cut_targets = []
    if tail:
        known = None if of_batch is None else abs(of_batch)
        cut_targets = target_microbatches(targets, m, equal=equal, rows=known)
        _check_target_rows(targets, m, rows)

    def check(rows: int) -> None:
        if tail:
            _check_target_rows(targets, m, rows)
        if of_batch is None and isinstance(kwargs, Mapping):
            keyword_microbatches(kwargs, m, equal=equal, rows=rows)

    return cut_targets, keywords, of_batch, check if rows is None else None


def cut(
    value: Any, m: int, name: str, *, equal: bool, rule: str = _EQUAL, rows_of_batch: int | None = None
) -> list[Any]:
    """``value`` as m of its kind: tensors and flex_attention's masks in it cut along dim 0, other leaves in each.

    Args:
        equal: refuse rows that m does not divide; ``rule`` is the reason.
        rows_of_batch: refuse another leaf that has or holds so many rows, any with -1, and a list or tuple without
            tensors of so many entries; None looks into none.
    Raises:
        ScheduleError: a tensor has fewer rows than m, or rows that m does not divide where ``equal``.
    """
    rows = block_mask_rows(value)
    if isinstance(value, Tensor):
        _check_cut(value, m, name)
        rows = value.shape[0]
    elif rows == 1:
        return [value] * m
    if rows is not None:
        if rows < m or (equal and rows % m):
            words = rule if rows >= m else "each has one at least"
            raise ScheduleError(f"{name} has {rows} rows for {m} microbatches; {words}")
        if isinstance(value, Tensor):
            return list(torch.tensor_split(value, m))
        return cut_block_mask(value, [len(part) for part in torch.arange(rows).tensor_split(m)])
    parted = isinstance(value, Mapping | tuple | list)
    held = None
    if rows_of_batch is not None:
        held = _entry_per_row(value, m, rows_of_batch) if parted else _held_rows(value, rows_of_batch)
    if held is not None:
        raise ScheduleError(
            f"{name} is a {type(value).__name__} {held} rows, which are not cut; tensors are, also those in a tuple, "
            f"list or dict: give tensors, or {_a_list(m, name)}"
        )
    if parted:
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        parts = {
            key: cut(each, m, f"{name}[{key!r}]", equal=equal, rule=rule, rows_of_batch=rows_of_batch)
            for key, each in entries
        }
        if isinstance(value, Mapping):
            remedy = f"give a dict, or {_a_list(m, name)}"
            of_each = [{key: part[k] for key, part in parts.items()} for k in range(m)]
            return [mapping_alike(value, each, name, remedy) for each in of_each]
        return [alike(value, [part[k] for part in parts.values()]) for k in range(m)]
    return [value] * m


def _entry_per_row(value: Any, m: int, rows: int) -> str | None:
    """How ``value``, if it is a list or plain tuple without tensors, has ``rows`` (-1: any that m can cut) entries."""
    if m == 1 or not (isinstance(value, list) or type(value) is tuple):
        return None
    long = len(value) == rows or (rows == -1 and len(value) >= m)
    told = long and any(part is not None for part in value) and not any(map(_has_cut, value))
    return f"of {len(value)}" if told else None


def _has_cut(value: Any) -> bool:
    """Whether something in ``value`` is cut, or refused as a tensor."""
    if isinstance(value, Mapping | tuple | list):
        return any(map(_has_cut, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor) or block_mask_rows(value) is not None


def _held_rows(value: Any, rows: int, depth: int = 3) -> str | None:
    """How ``value``, which is not cut, has ``rows`` (-1: any) rows: as an array, or a few attributes deep."""
    if isinstance(value, str | int | float | None):
        return None
    shape = () if isinstance(value, type) else getattr(value, "shape", ())
    if isinstance(shape, tuple) and shape and rows in (-1, shape[0]):
        return f"of {shape[0]}"
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, tuple | list | set | frozenset):
        parts = value
    elif callable(value) and not is_dataclass(value):  # a module, a function
        return None
    else:
        parts = (getattr(value, name, None) for name in _attributes_of(value))
    found = (_held_rows(part, rows, depth - 1) for part in parts) if depth else ()
    held = next(filter(None, found), None)
    return held and (held if held.startswith("that") else f"that holds a tensor or array {held}")


def _attributes_of(value: Any) -> Iterable[str]:
    slots = (getattr(one, "__slots__", ()) for one in type(value).__mro__)
    return chain(getattr(value, "__dict__", ()), *((one,) if isinstance(one, str) else one for one in slots))


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


def mapping_alike(value: Mapping[Any, Any], parts: dict[Any, Any], name: str, remedy: str) -> Mapping[Any, Any]:
    """``parts`` in a mapping such as ``value`` is, with what else it has: an OrderedDict, a Hugging Face output.

    Raises:
        ScheduleError: there is no such copy of it.
    """
    if type(value) is dict:
        return parts
    try:
        made: Any = copy(value)
        for key, part in parts.items():
            made[key] = part
        if not all(made[key] is part for key, part in parts.items()):
            raise TypeError("it holds other values than it was given")
    except Exception as error:
        raise ScheduleError(
            f"{name} is a {type(value).__name__}, of which no copy with parts of its tensors can be made "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from error
    return cast("Mapping[Any, Any]", made)


def _a_list(m: int, name: str) -> str:
    return f"a list of {m} {'dicts' if name.startswith('kwargs') else 'microbatches'}"


def _cut(batch: Any, m: int, name: str, equal: bool, *, mapping: bool = False, rows: int | None = None) -> list[Any]:
    if isinstance(batch, list):
        if len(batch) != m:
            raise ScheduleError(f"{name} has {len(batch)} microbatches; the program has {m}")
        return batch
    if isinstance(batch, Tensor):
        _check_cut(batch, m, name)
        rows = batch.shape[0]
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
    of_first = _rows_of(batch)
    for where, part in _with_rows(batch, name):
        if part.shape[0] != of_first:
            raise ScheduleError(
                f"{where} has {part.shape[0]} rows, the batch {of_first}; all of {name} is cut along dim 0: "
                f"give a list of {m} microbatches where a tensor is for all of them"
            )
    return cut(
        batch,
        m,
        name,
        equal=equal,
        rule=_mean_rule(m),
        rows_of_batch=next((n for n in (of_first, rows) if n is not None), -1),
    )


def _mean_rule(m: int) -> str:
    return (
        f"each loss counts 1/{m} with scale='mean', so the gradient would not be that of the mean over rows: "
        "give a list of microbatches if it should count so, or use scale='sum' or 'token'"
    )


def _check_cut(batch: Tensor, m: int, name: str) -> None:
    if batch.is_nested or batch.layout is not torch.strided:
        kind = "nested" if batch.is_nested else str(batch.layout)
        raise ScheduleError(f"{name} is a {kind} tensor; give a list of {m} microbatches")
    if not batch.dim():
        raise ScheduleError(
            f"{name} is a tensor of no dimension, which has no rows to cut; give its number (x.item()), or "
            f"{_a_list(m, name)}"
        )
