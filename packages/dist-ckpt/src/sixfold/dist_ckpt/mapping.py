"""The records of a state dict, under the name that megatron-core gives their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sixfold.dist_ckpt.geometry.integers import ReplicaId
from sixfold.dist_ckpt.state.factory import ShardedTensorFactory, apply_factories, apply_factory_merges
from sixfold.dist_ckpt.state.records import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
FactoryBuildFn = Callable[..., ShardedStateDict]
FactoryMergeFn = Callable[[StateDict], Any]

__all__ = [
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]
