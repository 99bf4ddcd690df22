"""Tensors that nobody sharded, as those of a plain model: tensors of the checkpoint like all others.

    common data of a save --> take_out (this file) --> records of this rank's share + placeholders in common.pt
    common.pt of a load --> not_asked_for (this file) --> records of tensors that the state dict does not name

All ranks hold such a tensor, or some of them, as stages of a pipeline do; one of them writes it. Its name is its path,
joined by dots, as torch DCP gives it.

[Note: placeholders] The name alone does not tell keys of dicts from positions of lists. So a placeholder stands in
``common.pt`` where the tensor stood. By it a load gives a tensor back that the state dict does not have: the moments of
an optimizer that has made no step. Where a rank asks for shards it gets no large tensor that it has not asked for.

[Note: small tensors] megatron-core reads plain tensors from ``common.pt``. So the smallest ones, ``SMALL_BYTES`` in
all, lie there too. ``integrity.json`` names them, and for a load of this package they are placeholders like others.

[Note: equal on all ranks] Before anything is written, ranks compare common data, in which a placeholder stands for all
but the smallest tensors. Of those each rank hashes what others write. Who writes one has its CRC-32 for nothing: it is
that of the frame. The first rank compares them before it commits. So a call hashes nothing of what it copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from heapq import heapify, heapreplace
from typing import Any

import torch

from sixfold.dist_ckpt.collectives import consistency
from sixfold.dist_ckpt.collectives.consistency import Owners
from sixfold.dist_ckpt.errors import CorruptError, ShardingError
from sixfold.dist_ckpt.geometry.manifest import Stored
from sixfold.dist_ckpt.state import dcp_names, tree
from sixfold.dist_ckpt.state.factory import Merge
from sixfold.dist_ckpt.state.in_place import Leaves
from sixfold.dist_ckpt.state.placeholders import Placeholder, in_common, is_placeholder, placeholder, with_kind
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedTensor
from sixfold.dist_ckpt.state.stateful import is_extra_state

SMALL_BYTES = 1 << 16
CONTENT_METADATA = "content_metadata"  # is read before any tensor, and stays in common data with all that it holds


def take_out(
    common: dict[Any, Any],
    compared: Any,
    taken: Collection[str],
    rank: int,
    ranks: int,
    *,
    keep_values: bool,
    owners: Owners | None = None,
) -> tuple[list[ShardedTensor], dict[Any, Any], tuple[str, ...], dict[str, int | None]]:
    """The tensors of common data that ``rank`` writes, as records, common data with placeholders, which of them hold
    values, and of the others the CRC-32s: see [Note: equal on all ranks].

    A tensor stays in common data if another has its name, if it has no dense values, or if it is not compared.

    Args:
        compared: what of common data is the same on all ranks.
        taken: keys of the records beside it.
        keep_values: the values of all tensors stay in common data too. See [Note: small tensors].
        owners: who writes each of them, if not all ranks have the same.
    Raises:
        ShardingError: a tensor that only some ranks have has a name that another tensor has.
    """
    same = None if compared is common else {id(leaf) for _, leaf in tree.leaves(compared)}
    leaves = [
        (path, leaf)
        for path, leaf in tree.leaves(common)
        if consistency.is_tensor(leaf) and (same is None or id(leaf) in same) and path[0] != CONTENT_METADATA
    ]
    names = [tree.key_text(path) for path, _ in leaves]
    counts = Counter(names)
    fits = [counts[name] == 1 and name not in taken for name in names]
    named = {name: leaf for name, leaf, fit in zip(names, leaves, fits, strict=True) if fit}
    found = dict(named.values())
    if owners is not None:
        for path, _ in leaves:
            if path not in found and repr(path) in owners.of_some:
                raise ShardingError(
                    f"{tree.key_text(path)}: two tensors have this name, and not all ranks have them. Give one of them "
                    "another name"
                )
    if not found:
        common = _with_others(common, rank, owners)
        return [], common, in_common(common), {}
    left, stays = SMALL_BYTES, set[tree.KeyPath]()
    for path, leaf in sorted(found.items(), key=lambda item: item[1].nbytes):  # stable: as they stand in the state dict
        left -= leaf.nbytes
        if left < 0 and not keep_values:
            break
        stays.add(path)
    ordered = sorted(named)  # ranks may hold their keys in another order
    if owners is None:
        dealt = _dealt([named[name][1].nbytes for name in ordered], ranks)
    else:
        dealt = [owners.by_path[repr(named[name][0])] for name in ordered]
    own = [_whole(name, named[name][1]) for name, owner in zip(ordered, dealt, strict=True) if owner == rank]
    crcs = dict[str, int | None]()
    if ranks > 1 and same is None and owners is None:  # else they are compared with common data
        for name, owner in zip(ordered, dealt, strict=True):
            path, leaf = named[name]
            if path not in stays:
                crcs[name] = None if owner == rank else consistency.crc_of(leaf)

    def change(path: tree.KeyPath, leaf: Any) -> Any:
        if path not in found:
            return leaf
        return Placeholder(leaf) if path in stays else placeholder(leaf)

    left_out = _with_others(tree.mapped(common, change, same=tree.BRANCHES), rank, owners)
    return own, left_out, in_common(left_out), crcs


def _with_others(common: Any, rank: int, owners: Owners | None) -> Any:
    """Common data of the first rank with placeholders of the tensors that only others have."""
    more = () if rank or owners is None else owners.not_on_first
    return reduce(tree.with_more, (one for one in more if one is not tree.GONE), common)


def _dealt(sizes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each size, the largest first to who has least."""
    if ranks == 1:
        return [0] * len(sizes)
    owners, loads = [0] * len(sizes), [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, owners[index] = loads[0]
        heapreplace(loads, (load + sizes[index], owners[index]))
    return owners


def _whole(key: str, tensor: torch.Tensor) -> ShardedTensor:
    shape = tuple(tensor.shape)
    offset, fragments = (0,) * len(shape), (1,) * len(shape)
    return ShardedTensor(key, tensor.detach(), tensor.dtype, shape, shape, offset, fragments)


def not_asked_for(
    common: dict[Any, Any],
    own: Leaves,
    records: Sequence[tuple[tree.KeyPath, ShardedBase]],
    stored: Mapping[str, Stored],
    small: Collection[str],
    merges: Sequence[Merge] = (),
) -> dict[tree.KeyPath, ShardedTensor]:
    """Records of the tensors that placeholders of ``common`` stand for and that nothing asks for, by their places.

    Args:
        own: leaves of the state dict of the load, with the caller's own records alone.
        records: all that is asked for.
        small: names of tensors that are in ``common.pt`` too; they come back beside shards, as megatron-core expects.
        merges: an optimizer, and an object that has no shards, gets all that is stored of it, beside shards too. A
            module gets what its own state dict has, but for extra state: see [Note: state that grows].
    Raises:
        CorruptError: nothing is stored under the name of a placeholder.
    """
    places = [path for path, leaf in tree.leaves(common) if is_placeholder(leaf)]
    if not places:
        return {}
    if absent := [name for path in places if (name := tree.key_text(path)) not in stored]:
        raise CorruptError(f"common.pt says that {absent[0]} is a tensor of the checkpoint, and none has this name")
    asked, keys = {path for path, _ in records}, {record.key for _, record in records}
    shards = [path for path, leaf in own if isinstance(leaf, ShardedBase)]
    sharded, whole = {path[:1] for path in shards}, _get_all(merges, shards)
    modules = [step.path for step in merges if isinstance(step.owner, torch.nn.Module)]
    return {
        path: dcp_names.whole(name, stored[name])
        for path in places
        if path not in asked
        and (name := tree.key_text(path)) not in keys
        and (path[:1] not in sharded or name in small or any(path[: len(at)] == at for at in whole))
        and (is_extra_state(path) or not any(path[: len(at)] == at for at in modules))
    }


def _get_all(merges: Sequence[Merge], shards: Sequence[tree.KeyPath]) -> list[tree.KeyPath]:
    """Places of objects that get all that is stored of them."""
    places = [(step.path, step.owner) for step in merges if step.owner is not None]
    return [
        path
        for path, owner in places
        if isinstance(owner, torch.optim.Optimizer)
        or not (isinstance(owner, torch.nn.Module) or any(at[: len(path)] == path for at in shards))
    ]


def fill(common: dict[Any, Any], extra: Mapping[tree.KeyPath, ShardedTensor]) -> None:
    """Put the tensors that were read into common data, in place of their placeholders."""
    for path, record in extra.items():
        assert record.data is not None, f"{record} was allocated"
        tree.put(common, path, with_kind(record.data, tree.get(common, path)))
