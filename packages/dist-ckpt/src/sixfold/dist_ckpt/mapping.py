"""The records of a state dict, under the name that megatron-core gives their module."""

from sixfold.dist_ckpt.state.records import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)

__all__ = [
    "LocalNonpersistentObject",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]
