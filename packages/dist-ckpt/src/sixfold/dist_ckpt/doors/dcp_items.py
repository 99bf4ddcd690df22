"""What torch's planner asks for, item by item: where it lies, whether it can be filled, whether it is whole.

ReadItem + stored chunk --> box_of (this file) --> dcp_read.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from sixfold.dist_ckpt.errors import CorruptError, MismatchError, ShardingError
from sixfold.dist_ckpt.files.integrity import Block, Span
from sixfold.dist_ckpt.geometry.box import Box, cover_weight, describe, whole
from sixfold.dist_ckpt.geometry.manifest import Manifest, StoredChunk
from sixfold.dist_ckpt.state.dense import check_writable


def box_of(item: ReadItem, chunk: StoredChunk, tensor: torch.Tensor) -> Box:
    """The place of an item in the global tensor."""
    key, inside = item.storage_index.fqn, Box(tuple(item.storage_offsets), tuple(item.lengths))
    if not inside.within(chunk.box.size):
        raise MismatchError(f"{key}: the planner asks for {inside} of a chunk of shape {chunk.box.size}")
    if tuple(tensor.shape) != inside.size:
        raise MismatchError(
            f"{key}: the planner gives a tensor of shape {tuple(tensor.shape)} for a part of {inside.size}"
        )
    return inside.shifted(chunk.box.offset)


def is_writable(key: str, tensor: torch.Tensor) -> bool:
    """Whether bytes can be put where a tensor lies; False for a subclass, which is filled by torch's copy.

    Raises:
        ShardingError: a meta tensor; two elements in one place.
    """
    try:
        check_writable(key, tensor)
    except ShardingError:
        if type(tensor) is torch.Tensor:
            raise
        return False
    return True


def part_of(value: Any, item: ReadItem) -> torch.Tensor:
    """What an item wants of a whole chunk."""
    if not isinstance(value, torch.Tensor):
        raise CorruptError(f"{item.storage_index.fqn} is stored as a {type(value).__name__} and not as a tensor")
    if tuple(value.shape) == tuple(item.lengths):
        return value
    return value[tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))]


def check_whole(planner: LoadPlanner, manifest: Manifest) -> None:
    """CorruptError if chunks do not cover each element once of what torch's planner asks for.

    A hole would stay as it was. Planners of users may have reasons to read less.
    """
    if type(planner) not in (DefaultLoadPlanner, _EmptyStateDictLoadPlanner):
        return
    for key, value in vars(planner)["state_dict"].items():
        if key not in manifest.tensors or not isinstance(value, torch.Tensor):
            continue
        stored = manifest.tensors[key]
        boxes, wanted = [chunk.box for chunk in stored.chunks], whole(stored.shape)
        if (missing := wanted.volume - sum(box.volume for box in boxes)) > 0:
            raise CorruptError(f"{key}: {missing} of its elements are in no chunk of the checkpoint")
        if len(boxes) > 1 and sum(map(cover_weight, boxes)) != cover_weight(wanted):
            name = describe(key, wanted, stored.shape)
            raise CorruptError(f"{name}: chunks of the checkpoint overlap there; which one holds is not known")


def blocks_of(spans: Iterable[Span]) -> set[Block]:
    """Each of them."""
    return {block for span in spans for block in span.blocks()}
