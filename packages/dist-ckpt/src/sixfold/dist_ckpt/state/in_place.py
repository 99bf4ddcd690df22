"""The caller's tensors as a load leaves them: filled, and known to autograd as changed.

    result of a load + state dict that was asked for --> in_place.py (this file) --> loading.py

[Note: autograd hears of a load] Bytes are put where tensors lie, past torch. A backward pass that needs the values
from before the load must fail as after ``copy_``, so the version of each tensor is raised.

[Note: plain tensors are filled too] A DTensor is filled in place, so the plain tensors beside it are: buffers of an
FSDP2 model, whole models. Older saves keep plain tensors as common data. Of those, one of another shape or dtype stays
as it is, and the result holds what was saved; the log tells.

[Note: wrapped tensors are filled too] A quantised weight, as of torchao, is a tensor of a subclass around others. It
is common data. What is filled are the tensors within, by their names: what ``copy_`` of the subclass does is its own
affair. Where parts differ, or the checkpoint holds no such tensor, no rank loads.

[Note: tied weights] One tensor under two names, as a tied embedding and head, takes one value. Where the checkpoint
holds two that differ, one would be lost; threads that fill both at a time would mix them. So the second name is read
into memory of its own and compared. So are views of one tensor that have some elements in common. Numbers in lists are
no weights. A new schedule with milestones, whose learning rate is a tensor, holds the rates of its parts as one tensor.
Each comes back as it was saved.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
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
        if not (type(target) in PLAIN_TENSORS or _is_subclass(target)) or target.is_meta:
            continue  # ``assign=True`` replaces what is on the meta device
        found = tree.get(result, path)
        if not isinstance(found, torch.Tensor) or found is target or share_memory(found, target):
            continue
        pairs = _pairs(target, found)
        if not pairs:
            left.append(tree.key_text(path))
            continue
        if is_number(asked, path, target) and not same_bits(numbers.setdefault(memory_of(target), found), found):
            continue  # [Note: tied weights]
        for own, value in pairs:
            own.detach().copy_(value)
        if pairs[0][0] is not target:
            raise_versions([target])
        tree.put(result, path, target.detach())
    if left and is_first:
        shown = ", ".join(left[:_MOST_SHOWN]) + (", ..." if len(left) > _MOST_SHOWN else "")
        what = "Saved with another shape or dtype, or yours cannot be written"
        _log.warning("%s: the result holds them, your tensors do not: %s", what, shown)


def _is_subclass(leaf: Any) -> bool:
    """Whether a leaf is a tensor of a subclass that no record fills."""
    return isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN_TENSORS and not (leaf.is_meta or is_dtensor(leaf))


def _pairs(target: torch.Tensor, found: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tensors with memory that a tensor is or wraps, each with that of ``found``; none if the two are not alike."""
    if type(target) in PLAIN_TENSORS or has_values(target):
        is_dense = is_writable(target) and has_values(found)  # a nested tensor has no shape to compare
        return [(target, found)] * (is_dense and found.shape == target.shape and found.dtype == target.dtype)
    if type(found) is not type(target) or not hasattr(target, "__tensor_flatten__"):
        return []
    (names, about), (theirs, wanted) = target.__tensor_flatten__(), found.__tensor_flatten__()  # type: ignore[attr-defined]
    if names != theirs or about != wanted:
        return []
    inner = [_pairs(getattr(target, name), getattr(found, name)) for name in names]
    return [pair for pairs in inner for pair in pairs] if all(inner) else []


def _unlike_wrapped(leaves: Leaves, common: Any, stored: Collection[str]) -> list[str]:
    """What is wrong where a tensor of a subclass cannot be filled. See [Note: wrapped tensors are filled too]."""
    problems = list[str]()
    for path, leaf in leaves:
        if not _is_subclass(leaf) or not hasattr(leaf, "__tensor_flatten__"):
            continue
        found, key = tree.get(common, path), tree.key_text(path)
        is_plain = key in stored or type(found) in PLAIN_TENSORS
        if is_plain or (isinstance(found, torch.Tensor) and not _pairs(leaf, found)):
            kind, other = (torch.Tensor if is_plain else type(found)).__qualname__, type(leaf).__qualname__
            problems.append(
                f"{key}: asked for into a {other} of shape {tuple(leaf.shape)}, saved as a {kind} of another form. "
                "Pass the module, which converts it, or None here and take what the result holds"
            )
    return problems


class _Target(NamedTuple):
    """A record that is asked for, and where."""

    place: tree.KeyPath
    record: ShardedTensor

    @property
    def data(self) -> torch.Tensor:
        """Which is filled."""
        assert self.record.data is not None, f"{self.record} has a tensor"
        return self.record.data


class _Second(NamedTuple):
    """A record whose tensor another record, with the key ``first``, fills too, and the copy that is filled for it.

    ``parts``: records that fill some of its elements, if none fills them all.
    """

    place: tree.KeyPath
    record: ShardedTensor
    copy: ShardedTensor
    first: str
    parts: Sequence[_Target] = ()


@dataclass(slots=True)
class Tied:
    """Records of a load that have one tensor. See [Note: tied weights]."""

    first: dict[Any, str] = field(default_factory=dict)
    seconds: list[_Second] = field(default_factory=list)
    overlapping: Mapping[int, Sequence[_Target]] = field(default_factory=dict)  # by id of the later record

    @classmethod
    def of(cls, records: Iterable[tuple[tree.KeyPath, ShardedBase]]) -> Tied:
        """For these records, those that share some elements with earlier ones among them."""
        by_storage = defaultdict[int, list[_Target]](list)
        for place, record in records:
            if not isinstance(record, ShardedTensor) or type(data := record.data) not in PLAIN_TENSORS or data is None:
                continue
            if data.layout is torch.strided and not data.is_meta and data.numel():
                by_storage[data.untyped_storage().data_ptr()].append(_Target(place, record))
        by_storage.pop(0, None)
        found = dict[int, Sequence[_Target]]()
        for targets in by_storage.values():
            if len(targets) > 1:
                found |= _overlapping(targets)
        return cls(overlapping=found)

    def apart(self, place: tree.KeyPath, record: ShardedTensor) -> ShardedTensor:
        """The record, with memory of its own if one of another key fills the same tensor.

        Raises:
            ShardingError: values cannot be put into its tensor.
        """
        assert record.data is not None, f"{record} has a tensor"
        check_writable(record, record.data)
        if (memory := place_of(record.data)) is None:
            return record
        first, parts = self.first.setdefault(memory, record.key), self.overlapping.get(id(record), ())
        if first == record.key and not parts:
            return record
        copy = replace(record, data=fresh_like(record.data))
        self.seconds.append(_Second(place, record, copy, first, parts))
        return copy

    def settle(self, values: MutableMapping[tree.KeyPath, Any]) -> None:
        """Compare when all is read; ``values`` then hold the caller's tensors.

        Raises:
            MismatchError: two stored values differ.
        """
        for place, record, copy, first, parts in self.seconds:
            assert record.data is not None and copy.data is not None, f"{record} was given a copy"
            if place not in values:
                continue
            before = [(part, part.data.clone()) for part in parts if part.place in values]
            if parts:
                record.data.detach().copy_(copy.data)
            elif not same_bits(record.data, copy.data):
                raise MismatchError(two_values(record.key, first))
            if other := next((part for part, data in before if not same_bits(part.data, data)), None):
                raise MismatchError(
                    f"{record.key}: its tensor and that of {other.record.key} are views with elements in common, and "
                    "the checkpoint holds two values of them that differ. Ask for one of the two, or for copies"
                )
            values[place] = record.data.detach()


def _overlapping(targets: Sequence[_Target]) -> dict[int, Sequence[_Target]]:
    """By id of a record in one storage, the earlier ones with which it shares some elements and not all.

    Where ranges of memory overlap, each element is marked: columns of one matrix lie among each other.
    """
    distinct = {place_of(target.data): target for target in reversed(targets)}
    spans = sorted(map(_span, distinct.values()), key=lambda span: span[:2])
    found = dict[int, Sequence[_Target]]()
    at, order = 0, {id(target.record): number for number, target in enumerate(targets)}
    while at < len(spans):
        first, (start, stop, _) = at, spans[at]
        while (at := at + 1) < len(spans) and spans[at][0] < stop:
            stop = max(stop, spans[at][1])
        cluster = sorted((target for _, _, target in spans[first:at]), key=lambda target: order[id(target.record)])
        if len(cluster) == 1:
            continue
        unit = gcd(*(number for t in cluster for number in (t.data.data_ptr() - start, t.data.element_size())))
        marks = torch.zeros((stop - start) // unit, dtype=torch.uint8, device="cpu")
        for number, target in enumerate(cluster):
            if bool((own := _marked(marks, target.data, start, unit)).any()):
                mask = torch.zeros_like(marks)
                _marked(mask, target.data, start, unit).fill_(1)
                shared = [one for one in cluster[:number] if bool(_marked(mask, one.data, start, unit).any())]
                found[id(target.record)] = shared
            own.fill_(1)
    return found


def _span(target: _Target) -> tuple[int, int, _Target]:
    """The first byte of a tensor, and the byte after its last."""
    data = target.data
    reach = sum((length - 1) * stride for length, stride in zip(data.shape, data.stride(), strict=True)) + 1
    return data.data_ptr(), data.data_ptr() + reach * data.element_size(), target


def _marked(marks: torch.Tensor, data: torch.Tensor, start: int, unit: int) -> torch.Tensor:
    """The marks of the elements of a tensor; the first mark stands for ``unit`` bytes at ``start``."""
    wide = data.element_size() // unit
    strides = [stride * wide for stride in data.stride()]
    return marks.as_strided((*data.shape, wide), (*strides, 1), (data.data_ptr() - start) // unit)


def unlike(expanded: Any, leaves: Leaves, common: Any, asked: Leaves, stored: Collection[str]) -> list[str]:
    """What is wrong where tensors of a state dict that are no records cannot be filled: tied and wrapped ones.

    Args:
        leaves: of ``expanded``. asked: of the caller's state dict. stored: names of tensors.
    """
    places, problems = defaultdict[Any, list[tuple[tree.KeyPath, torch.Tensor]]](list), list[str]()
    problems += _unlike_wrapped(asked, common, stored)
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
