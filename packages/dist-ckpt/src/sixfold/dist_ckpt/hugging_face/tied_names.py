"""State dicts of models, and which of their names are one tensor on all ranks, such as a head and its embedding.

    state dict of each rank, expanded --> tied (this file) --> exporting.py, loading.py

[Note: tied on every rank] Two names are tied if each rank that holds elements of one of them holds the same elements
under the other. A rank without elements, as FSDP2 leaves the last ones of a short tensor, says nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.state import module_names, stateful, tree
from sixfold.dist_ckpt.state.records import ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import has_values, memory_of

Ties = dict[str, str]  # a name --> the first name of the same tensor, in the order of the lowest rank that has both


def state_of(model: Any) -> Any:
    """The state dict of a module, under names without the prefixes of wrappers; anything else as it is."""
    inner = module_names.inside(model)
    return stateful.named_state_of(inner, "", None)[0] if isinstance(inner, torch.nn.Module) else model


def tied(exchange: Exchange, make: Callable[[], Any]) -> tuple[Any, Ties]:
    """The state dict that ``make`` gives on this rank, and the tied names of all ranks. Collective."""

    def own() -> tuple[Any, list[list[str]]]:
        state, same = make(), defaultdict[Any, list[str]](list)
        for name, memory in _memories(state).items():
            if memory is not None:
                same[memory].append(name)
        return state, [names for names in same.values() if len(names) > 1]

    def candidates(by_rank: list[list[list[str]]]) -> Ties:
        return {name: names[0] for groups in reversed(by_rank) for names in groups for name in names[1:]}

    state, ties = exchange.all_reduce(own, candidates)
    if not ties:
        return state, ties
    memories = _memories(state)
    differ = [name for name, first in ties.items() if memories.get(name) != memories.get(first)]
    _, untied = exchange.all_reduce(lambda: (None, differ), lambda by_rank: set[str]().union(*by_rank))
    return state, {name: first for name, first in ties.items() if name not in untied and first not in ties}


def name_of(path: tree.KeyPath, leaf: Any) -> str:
    """The name under which a leaf of an expanded state dict is stored."""
    return leaf.key if isinstance(leaf, ShardedTensor) else tree.key_text(path)


def _memories(state: Any) -> dict[str, Any]:
    """Equal for names of one tensor, in the order of the state dict; None where this rank holds no element."""
    found = dict[str, Any]()
    for path, leaf in tree.leaves(state):
        data = leaf.data if isinstance(leaf, ShardedTensor) else leaf
        if not isinstance(data, torch.Tensor) or not has_values(data):
            continue
        shard = (leaf.shard_id[1:], leaf.global_shape) if isinstance(leaf, ShardedTensor) else None
        memory, name = memory_of(data), name_of(path, leaf)
        place = None if memory is None else (memory, shard)
        found[name] = (found[name], place) if found.get(name) is not None else place  # blocks of a strided DTensor
    return found
