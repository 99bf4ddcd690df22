"""Strategies: the ways to save and load; see base.py for how to add one.

A strategy is for a new format, in local folders. For a new place of the format that there is, derive a store
(``stores.ByPointer``): with it everything public works.

``strategies.torch`` the recommended format, ``strategies.fully_parallel`` wrappers that share the work of
replicas, ``strategies.zarr`` the deprecated format, ``strategies.base`` the abstract classes.

From outside: async_utils, base, checkpointable, common, fully_parallel, torch, zarr.
"""

from sixfold.dist_ckpt.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get,
    register,
)

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "StrategyAction",
    "get",
    "register",
]
