"""The records of a state dict, under the name that megatron-core gives their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sixfold.dist_ckpt.geometry.integers import ReplicaId as ReplicaId
from sixfold.dist_ckpt.state.factory import ShardedTensorFactory as ShardedTensorFactory
from sixfold.dist_ckpt.state.factory import apply_factories as apply_factories
from sixfold.dist_ckpt.state.factory import apply_factory_merges as apply_factory_merges
from sixfold.dist_ckpt.state.records import LocalNonpersistentObject as LocalNonpersistentObject
from sixfold.dist_ckpt.state.records import ShardedBase as ShardedBase
from sixfold.dist_ckpt.state.records import ShardedObject as ShardedObject
from sixfold.dist_ckpt.state.records import ShardedTensor as ShardedTensor
from sixfold.dist_ckpt.state.records import is_main_replica as is_main_replica

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
FactoryBuildFn = Callable[..., ShardedStateDict]
FactoryMergeFn = Callable[[StateDict], Any]
