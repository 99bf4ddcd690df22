"""State dicts as trees: nested dicts and lists with records and common data at the leaves.

    caller's state dict --> tree.py (this file) --> records + common data
    loaded values + common data --> tree.py --> result

Never changes the caller's dicts and lists. A path is a tuple of dict keys and list positions. Dicts, OrderedDicts,
defaultdicts and lists are walked through and come back as what they were; anything else is a leaf.

[Note: dicts of other classes] A subclass of dict, such as an AttributeDict, is taken for the dict, OrderedDict or
defaultdict that it is, and comes back as one: torch's weights-only rules read no such class, registered or not. What
it holds besides its items would be lost, and is an error; an OrderedDict has it too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase

KeyPath = tuple[Any, ...]


GONE: Any = object()  # marks a place that holds nothing; compared by identity
_DICTS = (dict, OrderedDict, defaultdict)
BRANCHES = frozenset({*_DICTS, list})  # what is walked through, see also [Note: dicts of other classes]
#: Leaves that are what they are: no record, DTensor or Stateful object, and nothing is within them.
PLAIN = frozenset({int, float, bool, str, bytes, type(None), torch.Tensor, torch.nn.Parameter})


class Split(NamedTuple):
    """A state dict taken apart."""

    records: list[tuple[KeyPath, ShardedBase]]
    local: list[tuple[KeyPath, LocalNonpersistentObject]]
    common: dict[Any, Any]


def checked(state: Any) -> dict[Any, Any]:
    """A shallow copy of a state dict; ShardingError if it is none."""
    if not isinstance(state, Mapping):
        raise ShardingError(f"the state dict is a {type(state).__name__}; it is a dict of records and common data")
    return rebuilt(state, children(plain_dict(state, ()))) if is_dict(state) else dict(state)


def is_dict(node: Any) -> bool:
    """Whether a node is walked through by its keys."""
    return type(node) in _DICTS or is_other_dict(node)


def is_other_dict(node: Any) -> bool:
    """Whether a node is one of [Note: dicts of other classes]; torch reads a Counter."""
    return isinstance(node, dict) and type(node) not in _DICTS and type(node) is not Counter


def is_branch(node: Any) -> bool:
    """Whether a node is walked through."""
    return type(node) is list or is_dict(node)


def lost_attributes(node: Any) -> list[str]:
    """What an object of a subclass of dict has besides its items, and a dict could not have."""
    return [] if isinstance(node, OrderedDict) else [*map(str, _attributes(node))]


def _attributes(node: Any) -> dict[Any, Any]:
    """Attributes that are no items; None and False are what classes begin with."""
    state = object.__getstate__(node)
    parts = [part for part in (state if isinstance(state, tuple) else (state,)) if part]
    found = {name: value for part in parts for name, value in part.items()}
    return {
        name: value
        for name, value in found.items()
        if value is not None and value is not False and dict.get(node, name, GONE) is not value
    }


def plain_dict(node: Any, path: KeyPath) -> Any:
    """The node, or what stands for a dict of another class. ShardingError: see [Note: dicts of other classes]."""
    if not is_other_dict(node):
        return node
    if lost := lost_attributes(node):
        raise ShardingError(
            f"{path_text(path)} is a {type(node).__qualname__}, which would come back as a dict, without its "
            f"attributes ({', '.join(lost[:3])}). Pass its items as a dict, and what else it holds under keys"
        )
    return rebuilt(node, children(node))


def children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Names and nodes below a dict or a list; nothing for a leaf."""
    if type(node) in _DICTS:
        return node.items()  # type: ignore[no-any-return]
    if is_other_dict(node):
        return [(name, node[name]) for name in node]  # as its class gives them
    return enumerate(node) if type(node) is list else ()


def rebuilt(node: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A new dict or list of the kind of ``node`` with other content; attributes of an OrderedDict stay.

    ``torch.nn.Module.state_dict`` keeps the versions of its modules in such an attribute.
    """
    if isinstance(node, OrderedDict):
        ordered = OrderedDict(items)
        vars(ordered).update(vars(node) if type(node) is OrderedDict else _attributes(node))
        return ordered
    if isinstance(node, defaultdict):
        return defaultdict(node.default_factory, items)
    if type(node) is list:
        return [child for _, child in items]
    return dict(items)


def leaves(node: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """All leaves with their paths; an empty dict or list is a leaf."""
    if not is_branch(node) or not node:
        return [(path, node)]
    return [leaf for name, child in children(node) for leaf in leaves(child, (*path, name))]


def names_of_tensors(node: Any) -> list[str]:
    """The names of all tensors of common data."""
    return [key_text(path) for path, leaf in leaves(node) if isinstance(leaf, torch.Tensor)]


def path_text(path: KeyPath) -> str:
    """``optimizer.param_groups[0].lr``: names joined by dots, positions and other keys in brackets."""
    text = "".join(f".{part}" if isinstance(part, str) else f"[{part!r}]" for part in path)
    return text.removeprefix(".") or "the state dict"


def key_text(path: KeyPath) -> str:
    """``optimizer.param_groups.0.lr``: the name that torch's own distributed checkpoints give to a leaf."""
    return ".".join(map(str, path))


def mapped(
    node: Any, change: Callable[[KeyPath, Any], Any], path: KeyPath = (), same: Collection[object] = PLAIN | BRANCHES
) -> Any:
    """``node`` with ``change(path, part)`` in place of each part, which is looked into if it stays itself.

    A part that becomes GONE is left out, and a container that loses all it had. A list that loses some of its elements
    becomes {position: value}, so that positions survive. ``same``: types of parts that are not given to ``change``.

    Raises:
        ShardingError: a dict with tensors as keys, or with attributes: [Note: dicts of other classes].
    """
    if isinstance(node, dict) and type(node) not in same:
        node = plain_dict(node, path)
    new = node if type(node) in same else change(path, node)
    if new is not node or type(node) not in BRANCHES:
        return new
    if any(isinstance(name, torch.Tensor) for name, _ in children(node)):
        raise ShardingError(
            f"{path_text(path)} has tensors as keys, which no load can tell apart; pass a state_dict(), as optimizers "
            "have one"
        )
    kept = [
        (name, part) for name, of in children(node) if (part := mapped(of, change, (*path, name), same)) is not GONE
    ]
    if not kept and node:
        return GONE
    return dict(kept) if type(node) is list and len(kept) < len(node) else rebuilt(node, kept)


def split(tree: Mapping[Any, Any]) -> Split:
    """Take a state dict apart into records, local objects and common data."""
    parts = Split([], [], {})

    def taken(path: KeyPath, leaf: Any) -> Any:
        if isinstance(leaf, ShardedBase):
            parts.records.append((path, leaf))
        elif isinstance(leaf, LocalNonpersistentObject):
            parts.local.append((path, leaf))
        else:
            return leaf
        return GONE

    common = mapped(tree, taken)
    return parts if common is GONE else parts._replace(common=common)


def assemble(common: Any, request: Any, values: Mapping[KeyPath, Any], path: KeyPath = ()) -> Any:
    """The result of a load: saved common data with the loaded values at the places of the request.

    Common leaves of the request count for nothing. A record without a value (left out by
    ``strict``) leaves no entry in a dict and None in a list. A dict is of the kind that was saved. At the top, and
    where nothing common was saved, it is of the request's kind. Its order is the request's; what else was saved
    comes after.
    """
    if isinstance(request, ShardedBase | LocalNonpersistentObject):
        return values.get(path, GONE)
    is_list = type(request) is list
    if not is_dict(request) and not is_list:
        return common
    positions = is_list and is_dict(common) and all(isinstance(name, int) for name in common)
    saved = dict(children(common)) if positions or (type(common) is list) == is_list else {}
    found = dict(saved)
    for name, child in children(request):
        value = assemble(found.get(name, GONE), child, values, (*path, name))
        if value is not GONE:
            found[name] = value
    if not found and not holds_record(request):
        return common
    if is_list:
        return [found.get(place) for place in range(1 + max(found, default=-1))]
    order = saved if len(found) == len(saved) else dict.fromkeys((*request, *saved))
    return rebuilt(common if saved and path else request, [(name, found[name]) for name in order if name in found])


def holds_record(node: Any) -> bool:
    """Whether a record or a local object stands in a node, or is it."""
    return any(isinstance(leaf, ShardedBase | LocalNonpersistentObject) for _, leaf in leaves(node))


def get(tree: Any, path: KeyPath) -> Any:
    """The node at ``path``, or GONE. It may stand in a tuple."""
    for name in path:
        if isinstance(tree, torch.Tensor | str):  # their elements are no nodes
            return GONE
        try:
            tree = tree[name]
        except (KeyError, IndexError, TypeError):
            return GONE
    return tree


def attributes_of(node: Any, path: KeyPath = ()) -> dict[KeyPath, dict[str, Any]]:
    """What OrderedDicts hold besides their items, by their places: versions of modules."""
    found = {path: vars(node)} if type(node) is OrderedDict and vars(node) else {}
    for name, child in children(node):
        if is_branch(child):
            found |= attributes_of(child, (*path, name))
    return found


def put(tree: Any, path: KeyPath, value: Any) -> None:
    """Replace the node at ``path``, which exists. A tuple was saved as it is, and stays so."""
    parent = get(tree, path[:-1])
    if not isinstance(parent, tuple):
        parent[path[-1]] = value


def drop(tree: Any, path: KeyPath) -> None:
    """Take away the node at ``path``, which exists; in a list None takes its place, so that others keep theirs."""
    parent = get(tree, path[:-1])
    if is_dict(parent):
        del parent[path[-1]]
    elif not isinstance(parent, tuple):
        parent[path[-1]] = None


def with_more(node: Any, more: Any, path: KeyPath = ()) -> Any:
    """A node with the leaves of another one, which stand where it has none. A dict of positions adds to a list.

    Raises:
        ShardingError: it has a leaf where the other one has something below, or no list can hold the positions.
    """
    if node is GONE or not more:
        return more if node is GONE else node
    found = dict(children(node))
    if (is_dict(node) and is_dict(more)) or (type(node) is list and is_branch(more)):
        found |= {name: with_more(found.get(name, GONE), below, (*path, name)) for name, below in children(more)}
        if is_dict(node) or [*sorted(found)] == [*range(len(found))]:
            return rebuilt(node, sorted(found.items()) if type(node) is list else found.items())
    raise ShardingError(
        f"{path_text(path)}: rank 0 has a {type(node).__name__} there, and other ranks have tensors below it that it "
        "has not. Give it one form on all ranks; a rank that has nothing there leaves the key out"
    )


def nest(values: Mapping[KeyPath, Any]) -> dict[Any, Any]:
    """Nested dicts with the values at their paths; positions of lists become integer keys."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        node = root
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return root
