"""Factories, DTensors and Stateful objects: leaves that are stored as something else.

state dict --> expand (this file) --> state dict of records and common data --> tree.py
loaded dict --> merge (this file) --> result, and what Stateful objects get in the end
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.dict_utils import dict_list_map_inplace
from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.geometry.integers import ReplicaId
from sixfold.dist_ckpt.state import module_names, parameter_names, per_rank, plain_types, stateful, tree
from sixfold.dist_ckpt.state.per_rank import PerRank
from sixfold.dist_ckpt.state.records import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
)
from sixfold.dist_ckpt.state.stateful import Saved, is_stateful
from sixfold.dist_ckpt.state.tensor_memory import is_dtensor

_MEGATRON = "megatron.core.dist_checkpointing.mapping"


@dataclass(eq=False)
class ShardedTensorFactory(ShardedBase):
    """A leaf that becomes a sub state dict when it is saved or loaded, and one value again after.

    For a tensor that is stored in parts, such as a fused weight, or for any object. An object of quantised blocks
    and scales has two ShardedTensors in its sub dict, ``data`` None, and a ``merge_fn`` that makes the object.

    Args:
        key: handed to ``build_fn``.
        data: the original tensor (a parameter), by which optimizer state finds its model record; else None.
        build_fn: ``build_fn(key, data, replica_id, flattened_range)`` -> sub state dict.
        merge_fn: ``merge_fn(loaded sub dict)`` -> what the result holds, the last step of load.
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
    is_factory: bool = False
    own_names: Mapping[str, str] = {}  # of a module: by those of the checkpoint, if a wrapper's prefix tells them apart


def expand(node: Any, rank: int = 0, ranks: int = 1, saved: Saved | None = None) -> tuple[Any, list[Merge]]:
    """A copy of the containers, factories replaced by what they build and DTensors by records; inner Merges first.

    A Stateful object is replaced by its state dict, and a PerRank by the object of this rank. The key of a DTensor is
    its path joined by dots, as torch's own distributed checkpoints flatten a state dict.

    Args:
        saved: the checkpoint of a load; None at a save.
    Raises:
        ShardingError: a leaf that belongs to one rank and would be lost: see ``check_leaf``.
        MismatchError: a PerRank of another number of ranks.
    """
    merges: list[Merge] = []
    states = dict[tree.KeyPath, tuple[Any, dict[str, str]]]()

    @cache
    def names() -> set[str] | None:
        return None if saved is None else {*saved.tensors, *tree.names_of_tensors(saved.common)}

    def state_of_module(path: tree.KeyPath, module: torch.nn.Module) -> tuple[Any, dict[str, str]]:
        if path not in states:
            states[path] = stateful.named_state_of(module, tree.key_text(path), names())
        return states[path]

    @cache
    def known() -> dict[int, list[parameter_names.Name]]:
        modules = parameter_names.modules_in(node)
        for path, module in modules:  # FSDP2's have other parameters after a forward, until a hook of state_dict()
            state_of_module(path, module)
        return parameter_names.names_in(modules)

    def changed(path: tree.KeyPath, part: Any) -> Any:
        return tree.mapped(part, change, path, same=tree.PLAIN | tree.BRANCHES | {ShardedTensor})

    def change(path: tree.KeyPath, leaf: Any) -> Any:
        if isinstance(leaf := _own(leaf), ShardedTensor):
            return leaf
        if isinstance(leaf, ShardedTensorFactory):
            built, merge = changed(path, leaf.build()), Merge(path, leaf.merge_fn, is_factory=True)
        elif (own := per_rank.of(leaf)) is not None:
            if saved is None:
                return per_rank.to_save(own, path, rank, ranks)
            built, merge_fn, owner = per_rank.to_load(own, path, rank, ranks, saved.objects)
            merge = Merge(path, merge_fn, owner)
        elif is_stateful(leaf):
            owner, own_names = module_names.inside(leaf), dict[str, str]()
            if isinstance(owner, torch.nn.Module):
                own, own_names = state_of_module(path, owner)
            else:
                own = stateful.given_state(owner, path) if saved is None else owner.state_dict()
            built = changed(path, stateful.state_of(owner, own, path, saved, known))
            merge = Merge(path, lambda _: leaf, owner, own_names=own_names)
        elif is_dtensor(leaf):  # a load gives the DTensor back, with the same memory
            records = ShardedTensor.all_of_dtensor(tree.key_text(path), leaf)
            whole = leaf.detach() if leaf.requires_grad else leaf  # each operation on a DTensor takes long
            if not records:  # a rank outside the mesh: there is nothing here
                return LocalNonpersistentObject(whole)
            built, merge = records[0] if len(records) == 1 else records, Merge(path, lambda _: whole)
        else:
            check_leaf(leaf, path)
            return leaf
        merges.append(merge)
        return built

    return changed((), node), merges


def _own(leaf: Any) -> Any:
    """A record of megatron-core, as its models give it, as one of ours with its data; other leaves as they are."""
    if type(leaf).__module__ != _MEGATRON:
        return leaf
    kinds = (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject)
    found = next((kind for kind in kinds if kind.__name__ == type(leaf).__name__), None)
    return leaf if found is None else found(**vars(leaf))


def check_leaf(leaf: Any, path: tree.KeyPath) -> None:
    """Refuse what would be saved as the first rank's alone, or be passed over by a load.

    Raises:
        ShardingError: torch's ShardedTensor; a record, a DTensor or a Stateful object inside a tuple, a set, a
            namespace or a dict or list of another class.
    """
    if isinstance(leaf, ShardedBase | LocalNonpersistentObject | type):
        return
    where = tree.path_text(path)
    if type(leaf).__name__ == "ShardedTensor" and hasattr(type(leaf), "local_shards"):
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


def _hidden(node: Any) -> Any:
    """The first record, DTensor, Stateful object or torch ShardedTensor below a container of any kind, or None."""
    for _, part in plain_types.parts_of(node):
        if type(part) in tree.PLAIN:
            continue
        is_record = isinstance(_own(part), ShardedBase | LocalNonpersistentObject | PerRank)
        is_record = is_record or is_dtensor(part) or is_stateful(part)
        found = part if is_record or hasattr(type(part), "local_shards") else _hidden(part)
        if found is not None:
            return found
    return None


def merge(result: Any, merges: Sequence[Merge], left_out: Collection[tree.KeyPath]) -> list[tuple[Any, Any]]:
    """Apply the merge functions to ``result``; Stateful objects and what their ``load_state_dict`` gets come back.

    A factory that lost a leaf to ``strict`` has nothing to merge: its sub dict stays as it is. One that lost all of
    them is left out as a record is. A Stateful object stands in the result as itself.
    """
    found: list[tuple[Any, Any]] = []
    for path, merge_fn, owner, _, own_names in merges:
        sub_dict = tree.get(result, path)
        if sub_dict is tree.GONE:
            continue
        if not any(lost[: len(path)] == path for lost in left_out):
            if owner is not None:
                found.append((owner, module_names.renamed(sub_dict, own_names)))
            tree.put(result, path, merge_fn(sub_dict))
        elif isinstance(sub_dict, dict | list) and not sub_dict:
            tree.drop(result, path)
    return found


def owners_without_values(merges: Sequence[Merge], parts: tree.Split, common: Any) -> set[str]:
    """Names of Stateful objects of which nothing at all is asked for by records or saved as common data."""
    found = _of_owners(merges, parts, common)
    return {tree.key_text(path) for path, below, is_common in found if not below and not is_common}


def keep_own(
    values: Mapping[tree.KeyPath, Any], merges: Sequence[Merge], parts: tree.Split, common: Any
) -> dict[tree.KeyPath, Any]:
    """``values``, and where ``strict`` has left out a part of a Stateful object's state, what the object has itself.

    An object of whose state nothing was found gets nothing.
    """
    kept = dict(values)
    for _, below, is_common in _of_owners(merges, parts, common):
        if is_common or any(at in values for at, _ in below):
            for at, record in below:
                if isinstance(record, ShardedTensor | ShardedObject):
                    kept.setdefault(at, record.data)
    return kept


def names_in_common(merges: Sequence[Merge], expanded: Any, common: Any) -> tuple[set[str], set[str], set[str]]:
    """Names directly below modules whose values are common data, such as extra state: those that are stored and asked
    for, those that are stored alone, those that are asked for alone.
    """
    both, stored_alone, asked_alone = set[str](), set[str](), set[str]()
    for path, asked, found in _of_modules(merges, expanded, common):
        both |= {tree.key_text((*path, name)) for name in asked.keys() & found.keys()}
        stored_alone |= {tree.key_text((*path, name)) for name in found.keys() - asked.keys()}
        lacking = [name for name in asked.keys() - found.keys() if not tree.holds_record(asked[name])]
        asked_alone |= {tree.key_text((*path, name)) for name in lacking}
    return both, stored_alone, asked_alone


def fit_modules(result: Any, merges: Sequence[Merge], expanded: Any) -> None:
    """Give modules what their own state dict has, and nothing that other ranks have: torch refuses all else."""
    for _, asked, found in _of_modules(merges, expanded, result):
        for name in found.keys() - asked.keys():
            del found[name]
        for name in asked.keys() - found.keys():
            if isinstance(asked[name], torch.Tensor):
                found[name] = asked[name].detach()


def restore_attributes(
    result: Any, saved: Mapping[tree.KeyPath, Mapping[str, Any]], merges: Sequence[Merge], expanded: Any
) -> None:
    """Give OrderedDicts of the result what those of the checkpoint held: a module migrates from the versions of then.

    Versions stand under names of modules, which wrappers of now or then may have changed.
    """
    modules = {path: asked for path, asked, _ in _of_modules(merges, expanded, result)}
    for path, attributes in saved.items():
        if type(found := tree.get(result, path)) is OrderedDict:
            own = getattr(modules.get(path), module_names.VERSIONS, {})
            vars(found).update(attributes)
            if own and isinstance(then := attributes.get(module_names.VERSIONS), dict):
                setattr(found, module_names.VERSIONS, module_names.versions_of_then(own, then))


def _of_modules(
    merges: Sequence[Merge], expanded: Any, other: Any
) -> Iterator[tuple[tree.KeyPath, dict[Any, Any], dict[Any, Any]]]:
    """Where each module stands, its own state dict, and what another state dict has there."""
    for path, _, owner, _, _ in merges:
        asked, found = tree.get(expanded, path), tree.get(other, path)
        if isinstance(owner, torch.nn.Module) and tree.is_dict(asked):
            yield path, asked, found if tree.is_dict(found) else {}


def _of_owners(
    merges: Sequence[Merge], parts: tree.Split, common: Any
) -> Iterator[tuple[tree.KeyPath, list[tuple[tree.KeyPath, ShardedBase]], bool]]:
    """Where each Stateful object stands, its records, and whether common data is saved for it."""
    for path, _, owner, _, _ in merges:
        if owner is not None:
            below = [(at, record) for at, record in parts.records if at[: len(path)] == path]
            yield path, below, tree.get(common, path) is not tree.GONE
