"""Strategies: how the sharded and the common part of a state dict become files, and files values again.

    user's strategy, built-in strategies --> register (this file) --> save, load (serialization.py)

Four abstract classes and one of background saves, megatron-core's (``dist_checkpointing/strategies/base.py``), and a
registry from (backend, version) to strategies. For one backend and version every saving strategy goes with every
loading strategy: a strategy changes the way, never the format.

The built-in engine (saving.py, loading.py) is told what to do by ``SaveEngine`` and ``LoadEngine``. A
strategy of a user leaves ``engine()`` alone; then its own ``save`` or ``load`` runs, between the checks
and the commit that every checkpoint gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from sixfold.dist_ckpt.collectives.exchange import Exchange, Group
    from sixfold.dist_ckpt.strategies.async_utils import AsyncRequest


class StrategyAction(Enum):
    """The four kinds of strategies."""

    SAVE_SHARDED = "save_sharded"
    SAVE_COMMON = "save_common"
    LOAD_SHARDED = "load_sharded"
    LOAD_COMMON = "load_common"


Records = list[ShardedBase]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveEngine:
    """What the built-in engine needs to know of a saving strategy.

    Attributes:
        thread_count: threads that write.
        arrange: called with a function that gives this rank's records and with the save's exchange;
            returns the records with new replica ids. The function may raise: then ``arrange`` makes
            the error known to the ranks it would wait for. None: records as they are.
        memory: what the engine keeps between two saves of one strategy object, plans by their hash;
            None: nothing is kept.
    """

    thread_count: int = 2
    arrange: Callable[[Callable[[], Records], Exchange], Records] | None = None
    memory: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadEngine:
    """What the built-in engine needs to know of a loading strategy.

    Attributes:
        parallel: ranges are read by one rank of ``group`` each and sent on to the others that want them.
        group: that group; None for all ranks that load.
        memory: what is kept between two loads of one strategy object; None: nothing.
        with_common: read the common data too.
    """

    parallel: bool = False
    group: Group = None
    memory: dict[str, Any] | None = field(default=None)
    with_common: bool = True


class SaveStrategyBase(ABC):  # noqa: B024
    """A strategy that writes ``backend`` in ``version``."""

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ShardedObjects are given to this strategy; the common strategy gets them if not."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend!r}, {self.version})"


class LoadStrategyBase(ABC):
    """A strategy that reads one backend or several, in one version or several."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether ShardedObjects are given to this strategy; the common strategy gets them if not."""
        return False

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise if this strategy cannot read ``loaded_backend``."""

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise if this strategy cannot read ``loaded_version`` of its backend."""

    def __str__(self) -> str:
        return f"{type(self).__name__}()"


class ReadsOneFormat(LoadStrategyBase):
    """One backend in one version, ShardedObjects included: ``_reads`` says which part of a checkpoint, and those."""

    _reads = ("sharded", "torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != self._reads[1]:
            raise MismatchError(f"the {self._reads[0]} backend is {loaded_backend!r}; {self} reads {self._reads[1]!r}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != self._reads[2]:
            raise MismatchError(
                f"version {loaded_version} of the {self._reads[0]} backend; {self} reads {self._reads[2]}"
            )


class SaveShardedStrategy(SaveStrategyBase):
    """Writes ShardedTensors, and ShardedObjects if it can."""

    @abstractmethod
    def save(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        """Write this rank's main replicas into an existing folder, which is not the checkpoint yet.

        Called on every rank of the save at once, after all ranks' records were checked together; the
        folder moves into place when all have returned. An exception on one rank fails the save on all.

        Args:
            sharded_state_dict: nested dicts whose leaves are records.
            checkpoint_dir: the staging folder; all ranks share it.
        """

    def check_written(self, checkpoint_dir: Path) -> None:
        """Raise if what all ranks wrote is no whole; called on the first rank before the commit."""

    def owns_file(self, name: str) -> bool:
        """Whether a file of this name (relative, with ``/``) is part of such a checkpoint: a save may replace it.

        ``common.pt`` and ``metadata.json`` need no mention.
        """
        return False

    _built_in: SaveEngine | None = None

    def engine(self) -> SaveEngine | None:
        """What the built-in engine shall do; None: ``save`` is called."""
        return self._built_in


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Writes in the background: prepares in the call, and says by a request what is left to do.

    ``save(..., async_sharded_save=True)`` returns that request, with the commit as its last finalize function.
    """

    @abstractmethod
    def async_save(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> AsyncRequest:
        """Prepare, so that the caller may change its tensors, and return what writes into ``checkpoint_dir``.

        Called as ``save`` is. The function of the request runs in a thread of this process when the request is
        scheduled. Its finalize functions run on all ranks when it has ended on all.
        """

    def save(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        """The same to its end, on all ranks of the default group."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


class SaveCommonStrategy(SaveStrategyBase):
    """Writes the common data, and ShardedObjects for sharded strategies that cannot."""

    is_built_in = False  # True: the built-in engine writes what this strategy would write

    @abstractmethod
    def save_common(self, common_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        """Write the common data; called on the first rank only."""

    def save_sharded_objects(self, sharded_objects_state_dict: dict[Any, Any], checkpoint_dir: Path) -> None:
        """Write this rank's main replicas of ShardedObjects; called on every rank."""
        raise CheckpointError(f"{self} cannot save ShardedObjects; save_sharded_objects is not defined")


class LoadShardedStrategy(LoadStrategyBase):
    """Reads ShardedTensors, and ShardedObjects if it can."""

    @abstractmethod
    def load(self, sharded_state_dict: dict[Any, Any], checkpoint_dir: Path) -> dict[Any, Any]:
        """The same nested dicts with values for records. Called on every rank of the load at once.

        Data may be loaded into the records' tensors, or returned as other tensors, which are then copied
        into them.
        """

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedTensor]:
        """Every tensor by key as one shard without data."""

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedTensor | ShardedObject]:
        """The same with the ShardedObjects by stored key, if this strategy handles them."""
        if self.can_handle_sharded_objects:
            raise CheckpointError(f"{self} handles ShardedObjects and must define load_sharded_metadata")
        return dict(self.load_tensors_metadata(checkpoint_dir))

    _built_in: LoadEngine | None = None

    def engine(self) -> LoadEngine | None:
        """What the built-in engine shall do; None: ``load`` is called."""
        return self._built_in


class LoadCommonStrategy(LoadStrategyBase):
    """Reads the common data, and ShardedObjects for sharded strategies that cannot."""

    is_built_in = False  # True: the built-in engine reads what this strategy would read

    @abstractmethod
    def load_common(self, checkpoint_dir: Path) -> dict[Any, Any]:
        """The common data. Called on every rank."""

    def load_sharded_objects(self, sharded_objects_state_dict: dict[Any, Any], checkpoint_dir: Path) -> dict[Any, Any]:
        """The same nested dicts with the objects in place of their records."""
        raise CheckpointError(f"{self} cannot load ShardedObjects; load_sharded_objects is not defined")

    def load_sharded_metadata(self, checkpoint_dir: Path) -> dict[str, ShardedObject]:
        """ShardedObjects by stored key."""
        return {}


Strategy = SaveShardedStrategy | SaveCommonStrategy | LoadShardedStrategy | LoadCommonStrategy
_KINDS: dict[StrategyAction, type[Any]] = {
    StrategyAction.SAVE_SHARDED: SaveShardedStrategy,
    StrategyAction.SAVE_COMMON: SaveCommonStrategy,
    StrategyAction.LOAD_SHARDED: LoadShardedStrategy,
    StrategyAction.LOAD_COMMON: LoadCommonStrategy,
}
_registered: dict[tuple[StrategyAction, str, int], Any] = {}


def register(action: StrategyAction | str, backend: str, version: int, strategy: Strategy) -> None:
    """Make ``strategy`` what ``(backend, version)`` stands for, in ``save`` and in a folder's metadata.json.

    Args:
        action: a ``StrategyAction`` or its string, such as ``"save_sharded"``.
        backend, version: any name and number; an earlier entry is replaced.
        strategy: an instance of the abstract class of that action.
    Raises:
        CheckpointError: an unknown action, or a strategy of another kind.
    """
    kind = _action(action)
    if not isinstance(strategy, _KINDS[kind]):
        raise CheckpointError(
            f"{type(strategy).__name__} is no strategy for {kind.value}; derive it from {_KINDS[kind].__name__}"
        )
    _registered[kind, backend, version] = strategy


def get(action: StrategyAction | str, backend: str, version: int) -> Any:
    """The strategy that was registered.

    Raises:
        MismatchError: there is none; the text lists what there is.
    """
    kind = _action(action)
    try:
        return _registered[kind, backend, version]
    except KeyError:
        known = sorted((name, number) for what, name, number in _registered if what is kind)
        raise MismatchError(
            f"Cannot find a default strategy for: {(kind.value, backend, version)}: unknown strategy "
            f"{(backend, version)} for {kind.value}; there are {known}, strategies.register adds more"
        ) from None


# Under megatron-core's names.
get_default_strategy = get
register_default_strategy = register


def find(action: StrategyAction, strategy: Any, default: tuple[str, int]) -> Any:
    """A strategy given as None, as a tuple or as an object, as an object.

    Raises:
        MismatchError: an unknown tuple. CheckpointError: neither None, a tuple nor a strategy of that kind.
    """
    if strategy is None or isinstance(strategy, tuple):
        pair = default if strategy is None else strategy
        if len(pair) != 2:
            raise MismatchError(f"unknown strategy {strategy}; a tuple is (backend, version)")
        return get(action, *pair)
    if not isinstance(strategy, _KINDS[action]):
        raise CheckpointError(
            f"{strategy!r} is no strategy for {action.value}: None, a tuple (backend, version) or a "
            f"{_KINDS[action].__name__}"
        )
    return strategy


def owns_file(name: str) -> bool:
    """Whether a checkpoint of any registered format may hold a file of this relative path."""
    if name.rpartition("/")[2].startswith("shard_") and name.endswith(".pt"):
        return True  # objects of the common strategy
    return any(
        strategy.owns_file(name) for (what, *_), strategy in _registered.items() if what is StrategyAction.SAVE_SHARDED
    )


def _action(action: StrategyAction | str) -> StrategyAction:
    try:
        return StrategyAction(action)
    except ValueError:
        raise CheckpointError(f"action is {action!r}; it is one of {[kind.value for kind in StrategyAction]}") from None
