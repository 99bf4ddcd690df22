"""Records as tensors that torch's own distributed checkpoints save and load.

    ShardedTensor --> CheckpointableShardedTensor, LocalShardsContainer (this file) --> torch.distributed.checkpoint

They implement torch's ``_Checkpointable`` protocol: which chunks there are, and the tensor of each. The names are
megatron-core's (``strategies/checkpointable.py``). Flattened ranges are as many chunks as they are boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from sixfold.dist_ckpt.errors import MismatchError, ShardingError
from sixfold.dist_ckpt.state.records import ShardedTensor

__all__ = ["CheckpointableShardedTensor", "LocalShardsContainer"]


class _Checkpointable(torch.Tensor):
    """A tensor of the global shape without memory; only a checkpoint can do something with it."""

    records: list[ShardedTensor]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ShardingError(f"{cls.__name__} is for torch.distributed.checkpoint only; {func} was called with it")

    def _chunks(self) -> list[tuple[torch.Size, torch.Tensor]]:
        """Offset and tensor of each box, in order."""
        return [
            (torch.Size(piece.box.offset), record.view(piece)) for record in self.records for piece in record.pieces()
        ]

    def __create_write_items__(self, fqn: str, tensor: _Checkpointable, index: int | None = None) -> list[WriteItem]:
        """What to write: one item for each box."""
        shape = torch.Size(self.records[0].global_shape)
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset, number if index is None else index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=data.size()),
                    properties=TensorProperties.create_from_tensor(data),
                    size=shape,
                ),
            )
            for number, (offset, data) in enumerate(self._chunks())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What to read."""
        return [ChunkStorageMetadata(offsets=offset, sizes=data.size()) for offset, data in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor of one box, sharing memory with the record.

        Raises:
            MismatchError: there is no box at that offset, or several boxes and no offset.
        """
        chunks = self._chunks()
        found = [data for offset, data in chunks if index.offset is None or offset == index.offset]
        if len(found) != 1:
            raise MismatchError(
                f"{index.fqn}: {len(found)} of this rank's {len(chunks)} boxes are at offset {index.offset}; one is"
            )
        return found[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({', '.join(map(str, self.records))})"


def _wrapped(cls: type[torch.Tensor], record: ShardedTensor) -> Any:
    """A tensor without memory of the record's global shape."""
    if record.data is None:
        raise ShardingError(f"{record}: data is None; torch.distributed.checkpoint needs the tensor")
    make: Any = torch.Tensor._make_wrapper_subclass
    return make(cls, torch.Size(record.global_shape), dtype=record.dtype, device=record.data.device)


class CheckpointableShardedTensor(_Checkpointable):
    """One record."""

    @staticmethod
    def __new__(cls: type[CheckpointableShardedTensor], data: torch.Tensor, sh_ten: ShardedTensor) -> Any:
        return _wrapped(cls, sh_ten)

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._sh_ten = sh_ten
        self.records = [sh_ten]

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> CheckpointableShardedTensor:
        """The record as such a tensor."""
        data: Any = sh_ten.data
        return cls(data, sh_ten)


class LocalShardsContainer(_Checkpointable):
    """Several records of one global tensor on one rank: torch wants one tensor for each name."""

    @staticmethod
    def __new__(cls: type[LocalShardsContainer], local_shards: Sequence[CheckpointableShardedTensor]) -> Any:
        if not local_shards or not all(isinstance(shard, CheckpointableShardedTensor) for shard in local_shards):
            raise ShardingError("a LocalShardsContainer holds one CheckpointableShardedTensor or more")
        return _wrapped(cls, local_shards[0].records[0])

    def __init__(self, local_shards: Sequence[CheckpointableShardedTensor]) -> None:
        self._local_shards = list(local_shards)
        self.records = [record for shard in local_shards for record in shard.records]
