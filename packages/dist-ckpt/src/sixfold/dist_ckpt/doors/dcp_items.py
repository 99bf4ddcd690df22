"""What torch's planner asks for, item by item: where it lies, whether it can be filled, whether it is whole.

ReadItem + stored chunk --> box_of (this file) --> dcp_read.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as TorchShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from sixfold.dist_ckpt.errors import CorruptError, MismatchError, ShardingError
from sixfold.dist_ckpt.files.integrity import Span
from sixfold.dist_ckpt.geometry.box import Box, Ints, cover_weight, describe
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


def check_whole(planner: LoadPlanner, items: Iterable[ReadItem], manifest: Manifest) -> None:
    """CorruptError if chunks do not cover each element that torch's planner asks for once; a hole would stay as it was.

    Planners of users may have reasons to read less.
    """
    if type(planner) not in (DefaultLoadPlanner, _EmptyStateDictLoadPlanner):
        return
    planned: defaultdict[tuple[str, Ints], list[Box]] = defaultdict(list)
    for item in items:
        if item.type != LoadItemType.BYTE_IO:
            shard = item.dest_index.fqn, tuple(item.dest_index.offset or ())
            planned[shard].append(Box(tuple(item.dest_offsets), tuple(item.lengths)))
    for key, value in vars(planner)["state_dict"].items():
        asked = key in manifest.tensors and isinstance(value, torch.Tensor)
        for start, shape in _local(value) if asked else ():
            parts, wanted = planned[key, start], Box((0,) * len(shape), shape)
            if (missing := wanted.volume - sum(part.volume for part in parts)) > 0:
                raise CorruptError(f"{key}: {missing} of its elements are in no chunk of the checkpoint")
            if wanted.volume and len(parts) > 1 and sum(map(cover_weight, parts)) != cover_weight(wanted):
                where = describe(key, Box(start, shape), manifest.tensors[key].shape)
                raise CorruptError(f"{where}: chunks of the checkpoint overlap there; which one holds is not known")


def _local(tensor: torch.Tensor) -> list[tuple[Ints, Ints]]:
    """Start and shape of what this rank holds of a tensor, of a DTensor, of torch's ShardedTensor."""
    if isinstance(tensor, TorchShardedTensor):
        return [(tuple(own.metadata.shard_offsets), tuple(own.tensor.shape)) for own in tensor.local_shards()]
    if not isinstance(tensor, DTensor):
        return [((0,) * tensor.dim(), tuple(tensor.shape))]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    shape = tuple(tensor.to_local().shape)
    return [(tuple(chunk.offsets), shape if len(chunks) == 1 else tuple(chunk.sizes)) for chunk in chunks]


def outside(touched: Iterable[Span], wished: Iterable[Span]) -> list[Span]:
    """The blocks of ``touched`` that are not in ``wished``."""
    known = {block for span in wished for block in span.blocks()}
    return [
        Span(block.file, block.number, block.number + 1)
        for span in touched
        for block in span.blocks()
        if block not in known
    ]
