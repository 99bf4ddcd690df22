"""Factories, DTensors and Stateful objects: leaves that are stored as something else.

state dict --> expand (this file) --> state dict of records and common data --> tree.py
loaded dict --> merge (this file) --> result, and what stateful.py hands over in the end
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.state import plain, tree
from sixfold.dist_ckpt.state.dtensor import is_dtensor
from sixfold.dist_ckpt.state.records import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from sixfold.dist_ckpt.state.stateful import Handover, is_stateful


class Merge(NamedTuple):
    """Where a factory stood and how its sub dict becomes one tensor again; or where a Stateful ``owner`` stood."""

    path: tree.Path
    merge_fn: Callable[..., Any]
    owner: Any = None


def expand(node: Any, path: tree.Path = ()) -> tuple[Any, list[Merge]]:
    """A copy of the containers, factories replaced by what they build, outer ones first, and DTensors by records.

    A Stateful object is replaced by its state dict. The key of a DTensor is its path joined by dots, as torch's own
    distributed checkpoints flatten a state dict.

    Raises:
        ShardingError: a leaf that belongs to one rank and would be lost: see ``check_leaf``.
    """
    if isinstance(node, ShardedTensor):
        return node, []
    if isinstance(node, ShardedTensorFactory):
        built, inner = expand(node.build(), path)
        return built, [Merge(path, node.merge_fn), *inner]
    if is_dtensor(node):
        return _of_dtensor(node, path)
    if is_stateful(node):
        own, inner = expand(node.state_dict(), path)
        return own, [Merge(path, lambda _: node, node), *inner]
    if not tree.is_dict(node) and type(node) is not list:
        check_leaf(node, path)
        return node, []
    merges: list[Merge] = []
    copies: list[tuple[Any, Any]] = []
    for name, child in tree.children(node):
        if isinstance(name, torch.Tensor):
            raise ShardingError(
                f"{tree.path_text(path)} has tensors as keys, which no load can tell apart; pass a state_dict(), as "
                "optimizers have one"
            )
        copy, found = expand(child, (*path, name))
        copies.append((name, copy))
        merges += found
    return tree.rebuilt(node, copies), merges


def _of_dtensor(dtensor: Any, path: tree.Path) -> tuple[Any, list[Merge]]:
    """The records of a DTensor; a load gives the DTensor back, with the same memory."""
    records = ShardedTensor.all_of_dtensor(tree.key_text(path), dtensor)
    whole = dtensor.detach()
    if not records:  # a rank outside the mesh: there is nothing here
        return LocalNonpersistentObject(whole), []
    return (records[0] if len(records) == 1 else records), [Merge(path, lambda _: whole)]


def check_leaf(leaf: Any, path: tree.Path) -> None:
    """Refuse what would be saved as the first rank's alone, or be passed over by a load.

    Raises:
        ShardingError: torch's ShardedTensor; a record, a DTensor or a Stateful object inside a tuple, a set, a
            namespace or a dict or list of another class.
    """
    if type(leaf) in _PLAIN or isinstance(leaf, ShardedBase | LocalNonpersistentObject | type):
        return
    where = tree.path_text(path)
    if type(leaf).__name__ == "ShardedTensor" and hasattr(leaf, "local_shards"):
        raise ShardingError(
            f"{where} is torch's own ShardedTensor, which torch has deprecated; save DTensors (FSDP2's fully_shard, or "
            "FSDP with a device_mesh), or describe the local tensor by sixfold's ShardedTensor"
        )
    hidden = _hidden(leaf)
    if hidden is not None:
        raise ShardingError(
            f"{where} is a {type(leaf).__qualname__} that holds a {type(hidden).__qualname__}; records, DTensors and "
            "Stateful objects stand in dicts, OrderedDicts, defaultdicts and lists. Make it one of these"
        )


_PLAIN: frozenset[type] = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor, torch.nn.Parameter})


def _hidden(node: Any) -> Any:
    """The first record, DTensor, Stateful object or torch ShardedTensor below a container of any kind, or None."""
    for _, part in plain.parts_of(node):
        is_record = isinstance(part, ShardedBase | LocalNonpersistentObject) or is_dtensor(part) or is_stateful(part)
        found = part if is_record or hasattr(part, "local_shards") else _hidden(part)
        if found is not None:
            return found
    return None


def merge(result: Any, merges: Sequence[Merge], left_out: Collection[tree.Path]) -> list[Handover]:
    """Apply the merge functions to ``result``, inner ones first; what Stateful objects get comes back.

    A factory that lost a leaf to ``strict`` has nothing to merge: its sub dict stays as it is. One that lost all of
    them is left out as a record is. A Stateful object stands in the result as itself.
    """
    found: list[Handover] = []
    for path, merge_fn, owner in reversed(merges):
        sub_dict = tree.get(result, path)
        if sub_dict is tree.GONE:
            continue
        if not any(lost[: len(path)] == path for lost in left_out):
            if owner is not None:
                found.append(Handover(path, owner, sub_dict))
            tree.put(result, path, merge_fn(sub_dict))
        elif isinstance(sub_dict, dict | list) and not sub_dict:
            tree.drop(result, path)
    return found[::-1]


def owners_without_values(merges: Sequence[Merge], parts: tree.Split, common: Any) -> set[str]:
    """Names of Stateful objects of which nothing at all is asked for by records or saved as common data."""
    return {
        tree.key_text(path)
        for path, _, owner in merges
        if owner is not None and tree.get(common, path) is tree.GONE and not _below(path, parts.records)
    }


def keep_own(
    values: Mapping[tree.Path, Any], merges: Sequence[Merge], parts: tree.Split, common: Any
) -> dict[tree.Path, Any]:
    """``values``, and where ``strict`` has left out a part of a Stateful object's state, what the object has itself.

    An object of whose state nothing was found gets nothing.
    """
    kept = dict(values)
    for path, _, owner in merges:
        if owner is None:
            continue
        records = _below(path, parts.records)
        if tree.get(common, path) is not tree.GONE or any(at in values for at, _ in records):
            for at, record in records:
                if isinstance(record, ShardedTensor | ShardedObject):
                    kept.setdefault(at, record.data)
    return kept


def _below(path: tree.Path, records: Sequence[tuple[tree.Path, ShardedBase]]) -> list[tuple[tree.Path, ShardedBase]]:
    return [(at, record) for at, record in records if at[: len(path)] == path]
