"""Sharded data parallelism (ZeRO-1, 2, 3) on flat buffers, bitwise equal to data parallel in one process.

nn.Module + ProcessGroup --> FullyShardedDataParallel --> main parameters --> any torch optimizer
"""

from sixfold.fsdp.alloc import TemporaryBucketAllocator
from sixfold.fsdp.buffer import DataParallelBuffer, ParamAndGradBuffer
from sixfold.fsdp.config import BufferConfig, MixedPrecision, ShardingStrategy
from sixfold.fsdp.errors import FsdpError
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
