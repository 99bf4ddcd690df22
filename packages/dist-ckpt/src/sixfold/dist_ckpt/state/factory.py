"""Factories and DTensors: leaves that are stored as something else.

state dict --> expand (this file) --> state dict of records and common data --> tree.py
loaded dict --> merge (this file) --> result
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.state import plain, tree
from sixfold.dist_ckpt.state.dtensor import is_dtensor
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase, ShardedTensor, ShardedTensorFactory


class Merge(NamedTuple):
    """Where a factory stood and how its sub dict becomes one tensor again."""

    path: tree.Path
    merge_fn: Callable[..., Any]


def expand(node: Any, path: tree.Path = ()) -> tuple[Any, list[Merge]]:
    """A copy of the containers, factories replaced by what they build, outer ones first, and DTensors by records.

    The key of a DTensor is its path joined by dots, as torch's own distributed checkpoints flatten a state dict.

    Raises:
        ShardingError: a leaf that belongs to one rank and would be lost: see ``check_leaf``.
    """
    if isinstance(node, ShardedTensorFactory):
        built, inner = expand(node.build(), path)
        return built, [Merge(path, node.merge_fn), *inner]
    if is_dtensor(node):
        return _of_dtensor(node, path)
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
        ShardingError: torch's ShardedTensor, an object that has a state dict of its own, a record or a DTensor inside a
            tuple, a set, a namespace or a dict or list of another class.
    """
    if type(leaf) in _PLAIN or isinstance(leaf, ShardedBase | LocalNonpersistentObject | type):
        return
    where = tree.path_text(path)
    if type(leaf).__name__ == "ShardedTensor" and hasattr(leaf, "local_shards"):
        raise ShardingError(
            f"{where} is torch's own ShardedTensor, which torch has deprecated; save DTensors (FSDP2's fully_shard, or "
            "FSDP with a device_mesh), or describe the local tensor by sixfold's ShardedTensor"
        )
    if callable(getattr(leaf, "state_dict", None)) and callable(getattr(leaf, "load_state_dict", None)):
        raise ShardingError(
            f"{where} is a {type(leaf).__module__}.{type(leaf).__qualname__}, an object with a state dict of its own; "
            "pass its .state_dict(), and hand what is loaded to its load_state_dict"
        )
    hidden = _hidden(leaf)
    if hidden is not None:
        raise ShardingError(
            f"{where} is a {type(leaf).__qualname__} that holds a {type(hidden).__qualname__}; records and "
            "DTensors stand in dicts, OrderedDicts, defaultdicts and lists. Make it one of these"
        )


_PLAIN: frozenset[type] = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor, torch.nn.Parameter})


def _hidden(node: Any) -> Any:
    """The first record, DTensor or torch ShardedTensor below a container of any kind; None if there is none."""
    for _, part in plain.parts_of(node):
        is_record = isinstance(part, ShardedBase | LocalNonpersistentObject) or is_dtensor(part)
        found = part if is_record or hasattr(part, "local_shards") else _hidden(part)
        if found is not None:
            return found
    return None


def merge(result: Any, merges: Sequence[Merge], left_out: Collection[tree.Path]) -> None:
    """Apply the merge functions to ``result``, inner ones first.

    A factory that lost a leaf to ``strict`` has nothing to merge: its sub dict stays as it is. One that lost all of
    them is left out as a record is.
    """
    for path, merge_fn in reversed(merges):
        sub_dict = tree.get(result, path)
        if sub_dict is tree.GONE:
            continue
        if not any(lost[: len(path)] == path for lost in left_out):
            tree.put(result, path, merge_fn(sub_dict))
        elif isinstance(sub_dict, dict | list) and not sub_dict:
            tree.drop(result, path)
