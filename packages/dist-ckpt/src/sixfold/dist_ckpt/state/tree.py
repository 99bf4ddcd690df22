"""State dicts as trees: nested dicts and lists with records and common data at the leaves.

    caller's state dict --> tree.py (this file) --> records + common data
    loaded values + common data --> tree.py --> result

Never changes the caller's dicts and lists. A path is a tuple of dict keys and list positions. Dicts, OrderedDicts,
defaultdicts and lists are walked through and come back as what they were; anything else is a leaf.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject, ShardedBase

KeyPath = tuple[Any, ...]


GONE: Any = object()  # marks a place that holds nothing; compared by identity


class Split(NamedTuple):
    """A state dict taken apart."""

    records: list[tuple[KeyPath, ShardedBase]]
    local: list[tuple[KeyPath, LocalNonpersistentObject]]
    common: dict[Any, Any]


def checked(state: Any) -> dict[Any, Any]:
    """A shallow copy of a state dict; ShardingError if it is none."""
    if not isinstance(state, Mapping):
        raise ShardingError(f"the state dict is a {type(state).__name__}; it is a dict of records and common data")
    return rebuilt(state, state.items()) if is_dict(state) else dict(state)


def is_dict(node: Any) -> bool:
    """Whether a node is walked through by its keys; a dict of another class is a leaf."""
    return type(node) in (dict, OrderedDict, defaultdict)


def children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Names and nodes below a dict or a list; nothing for a leaf."""
    if is_dict(node):
        return node.items()  # type: ignore[no-any-return]
    return enumerate(node) if type(node) is list else ()


def rebuilt(node: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    """A new dict or list of the kind of ``node`` with other content; attributes of an OrderedDict stay.

    ``torch.nn.Module.state_dict`` keeps the versions of its modules in such an attribute.
    """
    if type(node) is OrderedDict:
        ordered = OrderedDict(items)
        vars(ordered).update(vars(node))
        return ordered
    if type(node) is defaultdict:
        return defaultdict(node.default_factory, items)
    return dict(items) if type(node) is dict else [child for _, child in items]


def leaves(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """All leaves with their paths; an empty dict or list is a leaf."""
    if (is_dict(node) or type(node) is list) and node:
        for name, child in children(node):
            yield from leaves(child, (*path, name))
    else:
        yield path, node


def path_text(path: KeyPath) -> str:
    """``optimizer.param_groups[0].lr``: names joined by dots, positions and other keys in brackets."""
    text = "".join(f".{part}" if isinstance(part, str) else f"[{part!r}]" for part in path)
    return text.removeprefix(".") or "the state dict"


def key_text(path: KeyPath) -> str:
    """``optimizer.param_groups.0.lr``: the name that torch's own distributed checkpoints give to a leaf."""
    return ".".join(map(str, path))


def mapped(node: Any, change: Callable[[KeyPath, Any], Any], path: KeyPath = ()) -> Any:
    """``node`` with ``change(path, part)`` in place of each part, which is looked into if it stays itself.

    A part that becomes GONE is left out, and a container that loses all it had. A list that loses some of its elements
    becomes {position: value}, so that positions survive.
    """
    new = change(path, node)
    if new is not node or not (is_dict(node) or type(node) is list):
        return new
    kept = [(name, part) for name, of in children(node) if (part := mapped(of, change, (*path, name))) is not GONE]
    if not kept and node:
        return GONE
    return dict(kept) if type(node) is list and len(kept) < len(node) else rebuilt(node, kept)


def split(tree: Mapping[Any, Any]) -> Split:
    """Take a state dict apart into records, local objects and common data."""
    parts = list(leaves(tree))
    common = mapped(tree, lambda _, node: GONE if isinstance(node, ShardedBase | LocalNonpersistentObject) else node)
    records = [(path, leaf) for path, leaf in parts if isinstance(leaf, ShardedBase)]
    local = [(path, leaf) for path, leaf in parts if isinstance(leaf, LocalNonpersistentObject)]
    return Split(records, local, {} if common is GONE else common)


def assemble(common: Any, request: Any, values: Mapping[KeyPath, Any], path: KeyPath = ()) -> Any:
    """The result of a load: saved common data with the loaded values at the places of the request.

    Common leaves of the request count for nothing. A record without a value (left out by
    ``strict``) leaves no entry in a dict and None in a list. A dict is of the kind that was saved, or of the request's
    kind where nothing common was, and at the top; its order is the request's, what else was saved comes after.
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
    """The node at ``path``, or GONE."""
    for name in path:
        try:
            tree = tree[name]
        except (KeyError, IndexError, TypeError):
            return GONE
    return tree


def put(tree: Any, path: KeyPath, value: Any) -> None:
    """Replace the node at ``path``, which exists."""
    get(tree, path[:-1])[path[-1]] = value


def drop(tree: Any, path: KeyPath) -> None:
    """Take away the node at ``path``, which exists; in a list None takes its place, so that others keep theirs."""
    parent = get(tree, path[:-1])
    if is_dict(parent):
        del parent[path[-1]]
    else:
        parent[path[-1]] = None


def nest(values: Mapping[KeyPath, Any]) -> dict[Any, Any]:
    """Nested dicts with the values at their paths; positions of lists become integer keys."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        node = root
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return root
