"""The caller's tensors as a load leaves them: filled, and known to autograd as changed.

    result of a load + state dict that was asked for --> in_place.py (this file) --> loading.py

[Note: autograd hears of a load] Bytes are put where tensors lie, past torch. A backward pass that needs the values
from before the load must fail as after ``copy_``, so the version of each tensor is raised.

[Note: plain tensors are filled too] A DTensor is filled in place, so the plain tensors beside it are: buffers of an
FSDP2 model, whole models. Older saves keep plain tensors as common data. Of those, one of another shape or dtype stays
as it is, and the result holds what was saved; the log tells.

[Note: tied weights] One tensor under two names, as a tied embedding and head, takes one value. Where the checkpoint
holds two that differ, one would be lost; threads that fill both at a time would mix them. So the second name is read
into memory of its own and compared. Numbers in lists are no weights. A new schedule with milestones, whose learning
rate is a tensor, holds the rates of its parts as one tensor. Each comes back as it was saved.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from sixfold.dist_ckpt.errors import MismatchError
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import (
    PLAIN_TENSORS,
    check_writable,
    has_values,
    is_dtensor,
    is_writable,
    memory_of,
    place_of,
    same_bits,
    share_memory,
)

_MOST_SHOWN = 10
_log = logging.getLogger("sixfold.dist_ckpt")
Leaves = Sequence[tuple[tree.KeyPath, Any]]  # as of ``tree.leaves``


def raise_versions(tensors: Iterable[torch.Tensor]) -> None:
    """See [Note: autograd hears of a load]."""
    increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def written_by(records: Iterable[ShardedBase], leaves: Leaves) -> list[torch.Tensor]:
    """What a load of these records into a state dict writes: their data, and the DTensors around it."""
    data = [record.data for record in records if isinstance(record, ShardedTensor) and record.data is not None]
    return data + [leaf for _, leaf in leaves if type(leaf) not in tree.PLAIN and is_dtensor(leaf)]


def fill_plain(asked: Any, leaves: Leaves, result: Any, is_first: bool) -> None:
    """Put what was saved as common data into the caller's plain tensors, which ``result`` then holds.

    See [Note: plain tensors are filled too]. ``leaves`` are those of ``asked``. ``is_first``: this rank writes the log.
    """
    left, numbers = list[str](), dict[Any, torch.Tensor]()
    for path, target in leaves:
        if type(target) not in PLAIN_TENSORS or target.is_meta:  # which ``assign=True`` replaces
            continue
        found = tree.get(result, path)
        if not isinstance(found, torch.Tensor) or share_memory(found, target):
            continue
        is_dense = is_writable(target) and has_values(found)  # a nested tensor has no shape to compare
        if is_dense and found.shape == target.shape and found.dtype == target.dtype:
            if is_number(asked, path, target) and not same_bits(numbers.setdefault(memory_of(target), found), found):
                continue  # [Note: tied weights]
            own = target.detach()
            own.copy_(found)
            tree.put(result, path, own)
        else:
            left.append(tree.key_text(path))
    if left and is_first:
        shown = ", ".join(left[:_MOST_SHOWN]) + (", ..." if len(left) > _MOST_SHOWN else "")
        what = "Saved with another shape or dtype, or yours cannot be written"
        _log.warning("%s: the result holds them, your tensors do not: %s", what, shown)


class _Second(NamedTuple):
    """A record whose tensor another record, with the key ``first``, fills too, and the copy that is filled for it."""

    place: tree.KeyPath
    record: ShardedTensor
    copy: ShardedTensor
    first: str


@dataclass(slots=True)
class Tied:
    """Records of a load that have one tensor. See [Note: tied weights]."""

    first: dict[Any, str] = field(default_factory=dict)
    seconds: list[_Second] = field(default_factory=list)

    def apart(self, place: tree.KeyPath, record: ShardedTensor) -> ShardedTensor:
        """The record, with memory of its own if one of another key fills the same tensor.

        Raises:
            ShardingError: values cannot be put into its tensor.
        """
        assert record.data is not None, f"{record} has a tensor"
        check_writable(record, record.data)
        if (memory := place_of(record.data)) is None:
            return record
        first = self.first.setdefault(memory, record.key)
        if first == record.key:
            return record
        copy = replace(record, data=fresh_like(record.data))
        self.seconds.append(_Second(place, record, copy, first))
        return copy

    def settle(self, values: MutableMapping[tree.KeyPath, Any]) -> None:
        """Compare when all is read; ``values`` then hold the caller's tensors.

        Raises:
            MismatchError: two stored values differ.
        """
        for place, record, copy, first in self.seconds:
            assert record.data is not None and copy.data is not None, f"{record} was given a copy"
            if place in values:
                if not same_bits(record.data, copy.data):
                    raise MismatchError(two_values(record.key, first))
                values[place] = record.data.detach()


def unlike_plain(expanded: Any, leaves: Leaves, common: Any) -> list[str]:
    """What is wrong where plain tensors of a state dict are one and those that were saved are unlike."""
    places, problems = defaultdict[Any, list[tuple[tree.KeyPath, torch.Tensor]]](list), list[str]()
    for path, leaf in leaves:
        if type(leaf) in PLAIN_TENSORS and has_values(leaf) and (memory := memory_of(leaf)) is not None:
            places[memory].append((path, leaf))
    for tied in (same for same in places.values() if len(same) > 1):
        found = list[tuple[str, torch.Tensor]]()
        for path, leaf in tied:
            value = tree.get(common, path)
            if not isinstance(value, torch.Tensor) or not has_values(value) or is_number(expanded, path, leaf):
                continue
            if (value.shape, value.dtype) == (leaf.shape, leaf.dtype):
                found.append((tree.key_text(path), value))
        problems += [two_values(name, found[0][0]) for name, value in found[1:] if not same_bits(found[0][1], value)]
    return problems


def is_number(state: Any, path: tree.KeyPath, leaf: torch.Tensor) -> bool:
    """Whether this is one number in a list, such as a learning rate. See [Note: tied weights]."""
    return leaf.dim() == 0 and type(tree.get(state, path[:-1])) is list


def two_values(second: str, first: str) -> str:
    """What an error says of two names of one tensor."""
    return (
        f"{second}: the state dict has one tensor for it and for {first} (tied weights), and the checkpoint holds "
        "two that differ. Untie them, or ask for one of the two"
    )


def fresh_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for the values of a tensor, in row-major order."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
