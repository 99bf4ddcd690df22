"""Nested dicts and lists: take apart, compare, map, merge.

    state dict --> this file --> utils.py; also for callers of megatron-core's ``dist_checkpointing.dict_utils``

Names and meanings are megatron-core's. Dicts and lists of any class are walked through; all else, tuples too, is a
value.
Pure: no files, no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch

from sixfold.dist_ckpt.errors import CheckpointError

Key = tuple[Any, ...]


class DictError(CheckpointError, ValueError):
    """Two structures do not fit together, or something is neither a dict nor a list."""


def _items(node: dict[Any, Any] | list[Any]) -> Iterable[tuple[Any, Any]]:
    return node.items() if isinstance(node, dict) else enumerate(node)


def extract_matching_values(
    x: dict[Any, Any] | list[Any], predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """The values for which ``predicate`` holds and the others, each in the structure of ``x``.

    Dicts and lists that are left without content are dropped; those that were empty before count as not matching.

    Args:
        x: nested dicts and lists.
        predicate: asked of values that are neither; in a list also of an empty dict or list.
        return_lists_as_dicts: lists become {position: value}, so that places can be found again.
    Raises:
        DictError: ``x`` is neither a dict nor a list.
    """
    if not isinstance(x, dict | list):
        raise DictError(f"a {type(x).__name__} is taken apart; it is a dict or a list")
    sides: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
    for name, child in _items(x):
        if isinstance(child, dict | list) and (child or isinstance(x, dict)):
            parts = extract_matching_values(child, predicate, return_lists_as_dicts)
            kept = bool(parts[0]), bool(parts[1]) or not child
            for side, part, keep in zip(sides, parts, kept, strict=True):
                if keep:
                    side[name] = part
        else:
            sides[0 if predicate(child) else 1][name] = child
    if isinstance(x, dict) or return_lists_as_dicts:
        return sides
    return list(sides[0].values()), list(sides[1].values())


def diff(x1: Any, x2: Any, prefix: Key = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """What differs: paths only in ``x1``, paths only in ``x2``, and (path, type, type, ...) of unequal values.

    Tensors are compared element by element, records (things with a ``replica_id``) by their data. Surplus places of
    sequences are given as numbers, as megatron-core does, the last first.
    """
    both_dicts = isinstance(x1, dict) and isinstance(x2, dict)
    if both_dicts or (_is_sequence(x1) and type(x1) is type(x2)):
        a, b = (x if both_dicts else dict(enumerate(x)) for x in (x1, x2))
        left, right = ([(*prefix, name) for name in x - y] for x, y in ((a.keys(), b.keys()), (b.keys(), a.keys())))
        if not both_dicts:
            left, right = (sorted((name for *_, name in side), reverse=True) for side in (left, right))
        found: tuple[list[Any], list[Any], list[Any]] = left, right, []
        for name in a.keys() & b.keys():
            for known, more in zip(found, diff(a[name], b[name], (*prefix, name)), strict=True):
                known += more
        return found
    if hasattr(x1, "replica_id") and hasattr(x2, "replica_id"):
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    details = () if _is_sequence(x1) else _unequal(x1, x2)
    return [], [], [] if details is None else [(prefix, type(x1), type(x2), *details)]


def _is_sequence(x: Any) -> bool:
    is_array = type(x).__module__ == "numpy" and type(x).__name__ == "ndarray" and x.ndim > 0
    return isinstance(x, list | tuple) or is_array


def _unequal(x1: Any, x2: Any) -> tuple[Any, ...] | None:
    """None for equal values; else what is told of them."""
    try:
        if not (isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor)):
            return () if bool(x1 != x2) else None
        differs = x1.cpu() != x2.cpu()
        return (differs.sum(), differs.shape, differs.nonzero().tolist()) if bool(differs.any()) else None
    except (RuntimeError, TypeError, ValueError):
        return (x1.shape, x2.shape) if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor) else ()


def inspect_types(x: Any, prefix: Key = (), indent: int = 4) -> None:
    """Print the structure of ``x`` with the types of its values."""
    margin = " " * indent * len(prefix)
    if isinstance(x, dict | list):
        print()
        for name, child in _items(x):
            print(f"{margin}{'>' if isinstance(x, dict) else '-'} {name}: ", end="")
            inspect_types(child, (*prefix, name), indent)
    elif isinstance(x, torch.Tensor):
        print(f"Tensor of shape {x.shape}")
    else:
        text = str(x)
        print(f"[{type(x)}]: {text if len(text) <= 30 else text[:30] + '... (truncated)'}")


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """All values, in order."""
    return (value for _, _, value in nested_items_iter(x))


def nested_items_iter(x: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """(container, name or place, value) of all values, in order."""
    for name, child in _items(x):
        if isinstance(child, dict | list):
            yield from nested_items_iter(child)
        else:
            yield x, name, child


def dict_map(f: Callable[[Any], Any], d: dict[Any, Any]) -> None:
    """Replace each value by ``f(value)``, in place."""
    dict_map_with_key(lambda _, value: f(value), d)


def dict_map_with_key(f: Callable[[Any, Any], Any], d: dict[Any, Any]) -> None:
    """Replace each value by ``f(name, value)``, in place; the name is the innermost one."""
    for container, name, value in list(nested_items_iter(d)):
        container[name] = f(name, value)


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """``x`` with each value replaced by ``f(value)``, in place; a value alone gives ``f(x)``."""
    if not isinstance(x, dict | list):
        return f(x)
    for name, child in list(_items(x)):
        x[name] = dict_list_map_inplace(f, child)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """The same as new dicts and lists."""
    if isinstance(x, dict):
        return {name: dict_list_map_outplace(f, child) for name, child in x.items()}
    return [dict_list_map_outplace(f, child) for child in x] if isinstance(x, list) else f(x)


def merge(x1: Any, x2: Any, key: Key = ()) -> Any:
    """``x1`` with what ``x2`` has more, in place: dicts by name, lists of equal length by place.

    Raises:
        DictError: both have a value at one place, or lists of unlike length.
    """
    if isinstance(x1, list) and isinstance(x2, list) and len(x1) != len(x2):
        raise DictError(f"lists of different lengths ({len(x1)} and {len(x2)}) cannot be merged, at level {key}")
    both = (isinstance(x1, dict) and isinstance(x2, dict)) or (isinstance(x1, list) and isinstance(x2, list))
    if not both:
        raise DictError(f"two values cannot be merged: `{x1}` and `{x2}`, at level {key}")
    for name, child in _items(x2):
        is_new = isinstance(x1, dict) and name not in x1
        x1[name] = child if is_new else merge(x1[name], child, (*key, name))
    return x1


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], Hashable] = lambda x: x,
    value_fn: Callable[[Any], Any] = lambda x: x,
    reduce_fn: Callable[[list[Any]], Any] = lambda x: x,
) -> dict[Any, Any]:
    """``{key: reduce_fn(values)}``, values grouped by ``key_fn``, as ``more_itertools.map_reduce``."""
    groups: dict[Any, list[Any]] = {}
    for x in xs:
        groups.setdefault(key_fn(x), []).append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
