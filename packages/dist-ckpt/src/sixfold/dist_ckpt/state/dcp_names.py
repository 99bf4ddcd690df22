"""What a checkpoint of plain DCP is asked for: tensors and objects by the names that DCP gives them.

    state dict of a load + names of the checkpoint --> ask (this file) --> records

DCP knows no common data: each leaf is stored under its path joined by dots, tensors as tensors, all else as bytes of
``torch.save``. No files, no ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.geometry.manifest import Stored
from sixfold.dist_ckpt.state import in_place, tree
from sixfold.dist_ckpt.state.placeholders import is_placeholder
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import PLAIN_TENSORS


@dataclass(eq=False)
class PlainObject(ShardedObject):
    """An object that is stored under its bare key, as plain DCP does, and not under a cell of a grid."""

    @classmethod
    def named(cls, key: str, replica_id: Any = 0) -> PlainObject:
        """The record of a stored key, without data."""
        return cls(key, None, (1,), (0,), replica_id)

    @property
    def unique_key(self) -> str:
        """Stored key: the key itself."""
        return self.key

    @property
    def payload(self) -> Any:
        """What is written: the object itself, as DCP writes it."""
        return self.data

    def without_data(self) -> PlainObject:
        """A copy with ``data=None``."""
        return PlainObject.named(self.key, self.replica_id)


def record_of(stored_key: str) -> ShardedObject:
    """The record of a stored key, without data."""
    try:
        return ShardedObject.empty_from_unique_key(stored_key)
    except ShardingError:
        return PlainObject.named(stored_key)


def is_plain(stored_key: str) -> bool:
    """Whether an object is stored under its bare key."""
    return isinstance(record_of(stored_key), PlainObject)


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint has, for ``ask``.

    ``is_bare``: it has no common data, so that each leaf of a state dict is asked for by its name, or unexpected.
    ``rank`` is of this process: each of them asks for the same whole.
    """

    tensors: Mapping[str, Stored]
    objects: Collection[str]
    is_bare: bool
    rank: int

    def record(self, name: str, leaf: Any = None) -> ShardedTensor | PlainObject:
        """The record of what is stored under a name, of bytes if nothing is."""
        if name not in self.tensors:
            return PlainObject.named(name, self.rank)
        found = whole(name, self.tensors[name], leaf)
        found.is_on_slice = True  # other ranks may ask for a copy, or none
        return found


def ask(state: Any, common: Any, stored: Names) -> Any:
    """A copy of a state dict with records in place of leaves that are stored under their name and not in common data.

    An empty list asks for all that is stored below its name.
    """

    def change(path: tree.KeyPath, node: Any) -> Any:
        if isinstance(node, ShardedObject):
            bare = node.unique_key not in stored.objects and node.key in stored.objects and prod(node.global_shape) == 1
            return PlainObject.named(node.key, node.replica_id) if bare else node
        if isinstance(node, ShardedBase | LocalNonpersistentObject) or not path:
            return node
        found = tree.get(common, path)
        is_named = found is tree.GONE or is_placeholder(found)
        is_number = type(node) in PLAIN_TENSORS and in_place.is_number(state, path, node)  # of no memory of its own
        asked = _leaf(tree.key_text(path), None if is_number else node, stored) if is_named else None
        return node if asked is None else asked

    return tree.mapped(state, change, same=(ShardedTensor, LocalNonpersistentObject))


def _leaf(name: str, node: Any, stored: Names) -> Any:
    """The record of a leaf that counts as asked for; None for other leaves and for what is walked through."""
    if tree.is_dict(node):
        return LocalNonpersistentObject(node) if stored.is_bare and not node else None  # DCP stores no empty dict
    if type(node) is list:
        if name in stored.objects and not tree.holds_record(node):
            return stored.record(name)
        return None if node or not stored.is_bare else _below(name, stored) or stored.record(name)
    is_asked = stored.is_bare or name in stored.tensors or name in stored.objects
    return stored.record(name, node) if is_asked else None


def _below(name: str, stored: Names) -> list[Any]:
    """Records of all that is stored below the name of a list: DCP goes into lists that hold dicts or tensors."""
    prefix = f"{name}."
    found = {
        tuple(key.removeprefix(prefix).split(".")): stored.record(key)
        for key in sorted({*stored.tensors, *stored.objects})
        if key.startswith(prefix)
    }
    nested = _with_lists(tree.nest(found))
    return nested if type(nested) is list else []


def _with_lists(node: Any) -> Any:
    """Nested dicts, those with the keys "0", "1", and so on made lists."""
    if type(node) is not dict:
        return node
    parts = {name: _with_lists(part) for name, part in node.items()}
    places = [str(at) for at in range(len(parts))]
    return [parts[at] for at in places] if parts.keys() == set(places) and parts else parts


def whole(name: str, stored: Stored, leaf: Any = None) -> ShardedTensor:
    """A tensor asked for whole: into the caller's own, ``leaf``, or into a new one in place of anything else."""
    data = leaf.detach() if type(leaf) in PLAIN_TENSORS and not leaf.is_meta else None
    dtype, shape = (stored.dtype, stored.shape) if data is None else (data.dtype, tuple(data.shape))
    return ShardedTensor(name, data, dtype, shape, shape, (0,) * len(shape), (1,) * len(shape))
