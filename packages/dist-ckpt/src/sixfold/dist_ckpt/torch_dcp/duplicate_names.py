"""Tensors that torch's planner takes for copies: are they the same on all ranks?

    state dict of each rank --> digests of tensors (this file) --> first rank: alike? --> torch's save

torch saves one of the plain tensors that ranks have under one name, and one of the shards of DTensors under one name
and place. Stages of a pipeline whose optimizers count their parameters from 0 would lose all but one.

[Note: few DTensors] A model may have very many of them. So each rank sends digests of at most ``_MOST_SHARDS``. They
are the same on all ranks that have the same names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from heapq import nsmallest
from typing import Any

import torch

from sixfold.dist_ckpt.collectives import consistency
from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.formats.integrity import crc32
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.dtensor import layout_of
from sixfold.dist_ckpt.state.stateful import is_stateful
from sixfold.dist_ckpt.state.tensor_memory import PLAIN_TENSORS, has_values, is_dtensor, local_of

_TIMEOUT_S, _MOST_SHOWN, _MOST_SHARDS = 600.0, 10, 64
_Alike = dict[str, tuple[tuple[int, ...], int]]


def same_names(state: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with the state dicts of its Stateful objects, as torch's save takes it.

    Of a large tensor samples are compared. Not looked at where the caller brings a planner of his own or saves alone.

    Args:
        options: those of torch's save.
    Raises:
        ShardingError: plain tensors under one name, or shards of DTensors under one name and place, differ. On all.
    """
    whole = {name: leaf.state_dict() if is_stateful(leaf) else leaf for name, leaf in state.items()}
    if options.get("planner") is not None or options.get("no_dist") or not options.get("use_collectives", True):
        return whole
    exchange = Exchange(options.get("process_group") or "world", _TIMEOUT_S)
    if exchange.ranks > 1:
        exchange.all_reduce(lambda: (None, _digests(whole)), _check)
    return whole


def _digests(state: Mapping[str, Any]) -> _Alike:
    leaves = [(tree.key_text(path), leaf) for path, leaf in tree.leaves(state)]
    plain = [
        (name, leaf)
        for name, leaf in leaves
        if type(leaf) in PLAIN_TENSORS and not is_dtensor(leaf) and has_values(leaf)
    ]
    named = [(name, leaf) for name, leaf in leaves if is_dtensor(leaf)]
    few = nsmallest(_MOST_SHARDS, named, key=lambda pair: crc32(pair[0].encode("utf-8", "surrogatepass")))
    shards = (shard for name, leaf in few for shard in _shard(name, leaf))
    return {name: (tuple(leaf.shape), consistency.digest_of_sample(leaf)) for name, leaf in (*plain, *shards)}


def _shard(name: str, leaf: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's part of a DTensor, by name and place; nothing of one that torch has to say something about."""
    with suppress(ShardingError):
        layout, local = layout_of(name, leaf), local_of(leaf)
        if layout is not None and layout.pairs and has_values(local):
            yield f"{name} from {layout.pairs[0][0].offset}", local


def _check(by_rank: list[_Alike]) -> None:
    first: dict[str, tuple[int, tuple[tuple[int, ...], int]]] = {}
    lines: dict[str, str] = {}
    for rank, found in enumerate(by_rank):
        for name, value in found.items():
            before, known = first.setdefault(name, (rank, value))
            if known != value:
                lines.setdefault(name, f"{name}: ranks {before} and {rank} hold different tensors")
    if lines:
        more = [f"and {len(lines) - _MOST_SHOWN} more"] * (len(lines) > _MOST_SHOWN)
        raise ShardingError(
            "tensors under one name differ between ranks, and torch's planner saves one of them:\n  "
            + "\n  ".join([*[*lines.values()][:_MOST_SHOWN], *more])
            + "\nGive each a name of its own, as {f'stage{pp_rank}': ...}. Where one is meant for all, pass "
            "planner=torch.distributed.checkpoint.DefaultSavePlanner(), which saves it without this check"
        )
