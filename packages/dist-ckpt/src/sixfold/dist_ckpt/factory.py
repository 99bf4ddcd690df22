"""Factories: tensors that are stored as something else.

state dict --> expand (this file) --> state dict without factories --> tree.py
loaded dict --> merge (this file) --> result
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from sixfold.dist_ckpt import tree
from sixfold.dist_ckpt.mapping import ShardedTensorFactory


class Merge(NamedTuple):
    """Where a factory stood and how its sub dict becomes one tensor again."""

    path: tree.Path
    merge_fn: Callable[..., Any]


def expand(node: Any, path: tree.Path = ()) -> tuple[Any, list[Merge]]:
    """A copy of the containers with each factory replaced by what it builds, outer ones first."""
    if isinstance(node, ShardedTensorFactory):
        built, inner = expand(node.build(), path)
        return built, [Merge(path, node.merge_fn), *inner]
    if not isinstance(node, dict | list):
        return node, []
    merges: list[Merge] = []
    copies: list[tuple[Any, Any]] = []
    for name, child in node.items() if isinstance(node, dict) else enumerate(node):
        copy, found = expand(child, (*path, name))
        copies.append((name, copy))
        merges += found
    return (dict(copies) if isinstance(node, dict) else [copy for _, copy in copies]), merges


def merge(result: Any, merges: Sequence[Merge], left_out: Collection[tree.Path]) -> None:
    """Apply the merge functions to ``result``, inner ones first.

    A factory that lost a leaf to ``strict`` has nothing to merge: its sub dict stays as it is.
    """
    for path, merge_fn in reversed(merges):
        incomplete = any(lost[: len(path)] == path for lost in left_out)
        if not incomplete and (sub_dict := tree.get(result, path)) is not tree.GONE:
            tree.put(result, path, merge_fn(sub_dict))
