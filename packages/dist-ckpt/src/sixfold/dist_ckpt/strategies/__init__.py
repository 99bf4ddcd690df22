"""Strategies: the ways to save and load; see base.py for how to add one.

``strategies.torch`` the recommended format, ``strategies.fully_parallel`` wrappers that share the work of
replicas, ``strategies.zarr`` the deprecated format, ``strategies.base`` the abstract classes.
"""

from sixfold.dist_ckpt.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get,
    register,
)

__all__ = [
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "StrategyAction",
    "get",
    "register",
]
