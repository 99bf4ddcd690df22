"""Factories, DTensors and Stateful objects: leaves that are stored as something else.

state dict --> expand (this file) --> state dict of records and common data --> tree.py
loaded dict --> merge (this file) --> result, and what stateful.py hands over in the end
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.dict_utils import dict_list_map_inplace
from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.geometry.integers import ReplicaId
from sixfold.dist_ckpt.state import plain, tree
from sixfold.dist_ckpt.state.dtensor import is_dtensor
from sixfold.dist_ckpt.state.records import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
)
from sixfold.dist_ckpt.state.stateful import Handover, is_stateful


@dataclass(eq=False)
class ShardedTensorFactory(ShardedBase):
    """A tensor that becomes a sub state dict when it is saved or loaded, and one tensor again after.

    Args:
        key: handed to ``build_fn``.
        data: the original tensor (a parameter), by which optimizer state finds its model record.
        build_fn: ``build_fn(key, data, replica_id, flattened_range)`` -> sub state dict.
        merge_fn: ``merge_fn(loaded sub dict)`` -> tensor, the last step of load.
        replica_id, flattened_range: handed to ``build_fn``. Factories may nest.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    build_fn: Callable[..., Any]
    merge_fn: Callable[..., Any]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """The sub state dict."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


def apply_factories(sharded_state_dict: dict[Any, Any]) -> None:
    """Replace each factory by what it builds, in place; ``save`` and ``load`` do so by themselves, on copies."""
    dict_list_map_inplace(
        lambda leaf: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf, sharded_state_dict
    )


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """``x1`` with the parts that the factories in ``x2`` have built merged again, in place.

    Args:
        x1: loaded values. x2: factories in the same structure; lists may be {position: value}.
    Raises:
        ShardingError: ``x2`` has a factory where ``x1`` has nothing.
    """
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if not isinstance(x2, dict | list):
        raise ShardingError(f"factories are a {type(x2).__name__} at {key}; dicts and lists of factories are merged")
    for name, child in x2.items() if isinstance(x2, dict) else enumerate(x2):
        try:
            x1[name] = apply_factory_merges(x1[name], child, (*key, name))
        except (KeyError, IndexError, TypeError):
            raise ShardingError(f"there is a factory at {(*key, name)} and no loaded value") from None
    return x1


class Merge(NamedTuple):
    """Where a factory stood and how its sub dict becomes one tensor again; or where a Stateful ``owner`` stood.

    ``merge_fn`` gets a sub dict whose common data is the file's, never the request's. It is not called where ``strict``
    has left out a part. A further kind of leaf is expanded in ``expand``, into records, common data and a Merge; what
    holds one unseen is refused by ``check_leaf``.
    """

    path: tree.KeyPath
    merge_fn: Callable[..., Any]
    owner: Any = None


def expand(node: Any, path: tree.KeyPath = ()) -> tuple[Any, list[Merge]]:
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


def _of_dtensor(dtensor: Any, path: tree.KeyPath) -> tuple[Any, list[Merge]]:
    """The records of a DTensor; a load gives the DTensor back, with the same memory."""
    records = ShardedTensor.all_of_dtensor(tree.key_text(path), dtensor)
    whole = dtensor.detach()
    if not records:  # a rank outside the mesh: there is nothing here
        return LocalNonpersistentObject(whole), []
    return (records[0] if len(records) == 1 else records), [Merge(path, lambda _: whole)]


def check_leaf(leaf: Any, path: tree.KeyPath) -> None:
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


def merge(result: Any, merges: Sequence[Merge], left_out: Collection[tree.KeyPath]) -> list[Handover]:
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
    values: Mapping[tree.KeyPath, Any], merges: Sequence[Merge], parts: tree.Split, common: Any
) -> dict[tree.KeyPath, Any]:
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


def _below(
    path: tree.KeyPath, records: Sequence[tuple[tree.KeyPath, ShardedBase]]
) -> list[tuple[tree.KeyPath, ShardedBase]]:
    return [(at, record) for at, record in records if at[: len(path)] == path]
