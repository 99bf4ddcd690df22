"""ZeRO-1, 2 and 3 for any PyTorch model, on flat buffers, with the bits of data parallel training.

nn.Module + ProcessGroup --> FullyShardedDataParallel --> main parameters --> any torch optimizer
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.strategy import ShardingStrategy

if TYPE_CHECKING:
    from sixfold.fsdp.buffers.flat_buffer import DataParallelBuffer, ParamAndGradBuffer
    from sixfold.fsdp.buffers.temporary_memory import TemporaryBucketAllocator
    from sixfold.fsdp.config import BufferConfig, MixedPrecision
    from sixfold.fsdp.engine.gather import AllGatherPipeline
    from sixfold.fsdp.engine.reduce import GradReducePipeline
    from sixfold.fsdp.state.records import StateRecord
    from sixfold.fsdp.wrapper.fully_sharded import FullyShardedDataParallel, fully_shard, fully_shard_optimizer
    from sixfold.fsdp.wrapper.pipeline_stage import StageHandle

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
    "AllGatherPipeline": "engine.gather",
    "BufferConfig": "config",
    "DataParallelBuffer": "buffers.flat_buffer",
    "FullyShardedDataParallel": "wrapper.fully_sharded",
    "GradReducePipeline": "engine.reduce",
    "MixedPrecision": "config",
    "ParamAndGradBuffer": "buffers.flat_buffer",
    "StageHandle": "wrapper.pipeline_stage",
    "StateRecord": "state.records",
    "TemporaryBucketAllocator": "buffers.temporary_memory",
    "fully_shard": "wrapper.fully_sharded",
    "fully_shard_optimizer": "wrapper.fully_sharded",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(f"{__name__}.torch_private")  # refuses a torch that lacks what is used of it
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
