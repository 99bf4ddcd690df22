"""Whether a stage's output has memory of its own: what others may still change is copied before it is handed on.

    output of F --> alone, or a copy (this file) --> compute hands it on

[Note: memory that changes hands] A message is read later than its F: a peer asks late, gloo and NCCL send behind the
host's back, a stage of this rank runs when its turn comes. By then a batch buffer is filled again, a running statistic
has gone on, an optimizer has stepped. So an output is handed on as it is where nobody else can reach its memory,
and else as a copy. Python and the memory count who holds them: the module's dict that has a buffer, the list of inputs,
a view. What autograd saved of an output for its own backward changes nothing, and is no reason for a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.microbatches.cut_batch import alike, mapping_alike

__all__ = ["ONE", "copied", "detached_for_caller", "owns_memory", "with_own_memory"]

_uses: Callable[[int], int] = torch._C._storage_Use_Count
_ALONE = 2  # the tensor, and the object that is asked
_saves_its_result: dict[type, bool] = {}  # by class of autograd's node


def _references(_: int, value: Any) -> int:
    return getrefcount(value)


def _references_of_parts(_: int, values: tuple[Any, ...]) -> list[int]:
    return [getrefcount(value) for value in values]


def _references_of_base(view: Tensor) -> int:
    return getrefcount(view._base)


# What Python counts where nobody else holds a value: an argument that was made in the call itself, the tensors of such
# a tuple, and what a view of a tensor that is otherwise gone is a view of.
ONE = _references(0, torch.empty(0))
_PART = max(_references_of_parts(0, (torch.empty(0), torch.empty(0))))
_BASE = _references_of_base((torch.empty(2) + 0)[:1])


def owns_memory(tensor: Tensor, node: Any) -> bool:
    """Nobody but ``tensor`` and the graph that ends in ``node`` holds its memory; who holds ``tensor`` is not asked."""
    uses = _uses(tensor.untyped_storage()._cdata)
    if uses == _ALONE:
        return True
    if uses != _ALONE + 1:
        return False
    if tensor._is_view():
        return getrefcount(tensor._base) <= _BASE
    kind = type(node)
    if (saves := _saves_its_result.get(kind)) is None:
        saves = _saves_its_result[kind] = hasattr(kind, "_raw_saved_result")
    return saves and _is_saved(node, tensor)


def _is_saved(node: Any, tensor: Tensor) -> bool:
    """Autograd saved ``tensor`` itself, not what a hook made of it; no hook is called to find out."""
    try:
        saved = node._raw_saved_result.data
    except RuntimeError:  # a backward has dropped it
        return False
    return isinstance(saved, Tensor) and saved.data_ptr() == tensor.data_ptr()


def with_own_memory(outputs: Tensor | tuple[Any, ...] | list[Any], *, held: bool = False) -> tuple[Any, ...]:
    """``outputs`` in memory that nobody else can reach. [Note: memory that changes hands]

    Args:
        outputs: a tensor, or a tuple or list of what stages exchange.
        held: something besides the caller holds the tensor, or the tuple.
    """
    if isinstance(outputs, Tensor):
        return (_copy(outputs) if held or not _is_plainly_alone(outputs) else outputs,)
    counts = [getrefcount(value) for value in outputs]
    return tuple([_own(value, held or count > _PART) for value, count in zip(outputs, counts, strict=True)])


def detached_for_caller(outputs: Any, held: bool) -> Any:
    """What a caller gets of the last stage's output: detached, in memory that no later forward changes.

    Tuples, lists, mappings and dataclasses are made anew, each of its own class.

    Raises:
        ScheduleError: no copy of it can hold other tensors.
    """
    if isinstance(outputs, Tensor):
        return outputs.detach().clone() if held or not _is_plainly_alone(outputs) else outputs.detach()
    if isinstance(outputs, tuple | list):
        counts = [getrefcount(value) for value in outputs]
        parts = [_detached_part(*each, held) for each in zip(outputs, counts, strict=True)]
        return alike(outputs, parts)
    if isinstance(outputs, Mapping):
        counts = [getrefcount(value) for value in outputs.values()]
        entries = zip(outputs.items(), counts, strict=True)
        own = {key: _detached_part(value, count, held) for (key, value), count in entries}
        return mapping_alike(outputs, own, "the output of the last stage", "return a dict")
    if is_dataclass(outputs) and not isinstance(outputs, type):
        return _record_alike(outputs)
    return outputs


def _detached_part(value: Any, count: int, held: bool) -> Any:
    return detached_for_caller(value, held or count > _PART)


def _record_alike(record: Any) -> Any:
    made = copy(record)
    for field in fields(record):
        value = getattr(record, field.name, None)
        if (own := detached_for_caller(value, True)) is not value:
            object.__setattr__(made, field.name, own)  # of a frozen one too
    return made


def copied(given: Any) -> Any:
    """What the caller gave, as it is now: tensors that ask for no gradient are copied, in containers too."""
    if isinstance(given, Tensor):
        return given if given.requires_grad else given.clone()
    if isinstance(given, Mapping):
        return {key: copied(value) for key, value in given.items()}
    if type(given) in (tuple, list):
        return type(given)(copied(value) for value in given)
    return given


def _own(value: Any, held: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _copy(value) if held or not _is_plainly_alone(value) else value


def _is_plainly_alone(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return owns_memory(tensor, tensor.grad_fn) and tensor.untyped_storage().resizable()  # numpy's memory is not


def _copy(tensor: Tensor) -> Tensor:
    """Without history; it asks for a gradient where ``tensor`` does."""
    copy = tensor.detach().clone()
    return copy.requires_grad_() if tensor.requires_grad else copy
