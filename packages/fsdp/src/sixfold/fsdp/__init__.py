"""Sharded data parallelism (ZeRO-1, 2, 3) on flat buffers, bitwise equal to data parallel in one process.

nn.Module + ProcessGroup --> FullyShardedDataParallel --> main parameters --> any torch optimizer
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.strategy import ShardingStrategy

if TYPE_CHECKING:
    from sixfold.fsdp.alloc import TemporaryBucketAllocator
    from sixfold.fsdp.buffer import DataParallelBuffer, ParamAndGradBuffer
    from sixfold.fsdp.config import BufferConfig, MixedPrecision
    from sixfold.fsdp.gather import AllGatherPipeline
    from sixfold.fsdp.reduce import GradReducePipeline
    from sixfold.fsdp.shard import FullyShardedDataParallel, fully_shard, fully_shard_optimizer
    from sixfold.fsdp.stage import StageHandle
    from sixfold.fsdp.state import StateRecord

__all__ = [
    "AllGatherPipeline",
    "BufferConfig",
    "DataParallelBuffer",
    "FsdpError",
    "FullyShardedDataParallel",
    "GradReducePipeline",
    "MixedPrecision",
    "ParamAndGradBuffer",
    "ShardingStrategy",
    "StageHandle",
    "StateRecord",
    "TemporaryBucketAllocator",
    "fully_shard",
    "fully_shard_optimizer",
]

# These need torch, which is loaded when the first of them is asked for: the cost model needs none.
_NEED_TORCH = {
    "AllGatherPipeline": "gather",
    "BufferConfig": "config",
    "DataParallelBuffer": "buffer",
    "FullyShardedDataParallel": "shard",
    "GradReducePipeline": "reduce",
    "MixedPrecision": "config",
    "ParamAndGradBuffer": "buffer",
    "StageHandle": "stage",
    "StateRecord": "state",
    "TemporaryBucketAllocator": "alloc",
    "fully_shard": "shard",
    "fully_shard_optimizer": "shard",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(f"{__name__}.torch_private")  # refuses a torch that lacks what is used of it
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
