"""Requests: what a call of ``save``, ``async_save`` or ``load`` asks for, as one value.

    arguments of the public functions --> SaveRequest (this file) --> saving.py, user_strategies.py, background/
                                      --> LoadRequest (this file) --> loading.py, user_strategies.py

Everything that a save or load must know and has not found out itself is here, checked and looked up on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sixfold.dist_ckpt.collectives.exchange import Group, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError
from sixfold.dist_ckpt.formats import metadata
from sixfold.dist_ckpt.plans.plan import check_policy
from sixfold.dist_ckpt.plans.validation import StrictHandling
from sixfold.dist_ckpt.progress import Progress
from sixfold.dist_ckpt.storage.local import read_small
from sixfold.dist_ckpt.storage.store import POINTER, Store
from sixfold.dist_ckpt.storage.store_at import store_at
from sixfold.dist_ckpt.strategies import base


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The arguments of a call of ``save`` or ``async_save``, which ``serialization.save`` explains, and what they name.

    Attributes:
        store: opened. sharded, common: strategies that were looked up.
        engine: what the built-in engine shall do; None: the strategies write by themselves (user_strategies.py).
    Raises:
        CheckpointError: what is wrong with any of it, on every rank.
    """

    sharded_state_dict: Mapping[Any, Any]
    checkpoint_dir: Any
    sharded_strategy: Any = None
    common_strategy: Any = None
    validate_access_integrity: bool = True
    preprocess_common_before_consistancy_check: Callable[[dict[Any, Any]], Any] | None = None
    content_metadata: dict[str, Any] | None = None
    group: Group = field(kw_only=True)
    timeout_s: float = field(kw_only=True)
    if_exists: str = field(default="replace", kw_only=True)
    check_finite: bool = field(default=False, kw_only=True)
    metadata: str = field(default="torch", kw_only=True)
    progress: Progress | None = field(default=None, kw_only=True)
    store: Store = field(init=False)
    sharded: base.SaveShardedStrategy = field(init=False)
    common: base.SaveCommonStrategy = field(init=False)
    engine: base.SaveEngine | None = field(init=False)

    def __post_init__(self) -> None:
        with errors_to_all(self.group, self.timeout_s):
            check_if_exists(self.if_exists)
            if self.metadata not in ("torch", "compact"):
                raise CheckpointError(
                    f"metadata is {self.metadata!r}; it is 'torch' or 'compact' (no .metadata is written)"
                )
            sharded = base.find(base.StrategyAction.SAVE_SHARDED, self.sharded_strategy, ("torch_dist", 1))
            common = base.find(base.StrategyAction.SAVE_COMMON, self.common_strategy, ("torch", 1))
            engine = sharded.engine() if common.is_built_in else None
            store = store_at(self.checkpoint_dir, self.timeout_s)
            for name, value in {"store": store, "sharded": sharded, "common": common, "engine": engine}.items():
                object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRequest:
    """What a call of ``load`` asks for; strategies apart. ``serialization.load`` says what each is."""

    state: Mapping[Any, Any]
    store: Store
    validate_access_integrity: bool = True
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED
    group: Group
    dtype_policy: str = "exact"
    verify: str = "touched"
    safe_globals: Sequence[Any] = ()
    timeout_s: float = 600.0
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_policy(self.dtype_policy)


def read_config(checkpoint_dir: str | Path) -> tuple[tuple[str, int], tuple[str, int]] | None:
    """Sharded and common (backend, version) of a folder's metadata.json; None if there is no readable one."""
    try:
        return metadata.read_config(read_small(Path(checkpoint_dir) / POINTER))
    except (OSError, ValueError, CheckpointError):  # what is wrong with it, the engine says
        return None


def check_if_exists(if_exists: str) -> None:
    """CheckpointError for what is neither of the two words."""
    if if_exists not in ("replace", "error"):
        raise CheckpointError(f"if_exists is {if_exists!r}; it is 'replace' or 'error'")
