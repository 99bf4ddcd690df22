"""The entry points: strategies are looked up, then the built-in engine or the strategy itself does the work.

    save, load --> strategies --> saving.py, loading.py: the built-in engine
    (this file)               --> user_strategies.py: strategies of users

Tools, torch_dcp and modules under megatron-core's names stand beside or above this file;
all others are below it.

[Note: what was saved last] A background save is begun by all ranks of its group. So each rank waits for it by itself
before it opens the same place. A load then gives what this process saved last, and all ranks open the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from sixfold.dist_ckpt.checkpoint.opening import open_checkpoint, opens, read_config
from sixfold.dist_ckpt.collectives.exchange import Group, checked_timeout, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError, naming, typed
from sixfold.dist_ckpt.mirror.local_view import viewed
from sixfold.dist_ckpt.progress import Progress
from sixfold.dist_ckpt.save_load import loading, saving, user_strategies
from sixfold.dist_ckpt.save_load.loading import LoadRequest
from sixfold.dist_ckpt.save_load.requested_keys import StrictHandling, parse_strict
from sixfold.dist_ckpt.save_load.saving import SaveRequest
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.placeholders import is_placeholder
from sixfold.dist_ckpt.state.records import ShardedObject, ShardedTensor
from sixfold.dist_ckpt.storage.local import store_at
from sixfold.dist_ckpt.storage.store import Store
from sixfold.dist_ckpt.strategies import base
from sixfold.dist_ckpt.strategies.async_utils import AsyncRequest
from sixfold.dist_ckpt.strategies.base import StrategyAction, register
from sixfold.dist_ckpt.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from sixfold.dist_ckpt.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from sixfold.dist_ckpt.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from sixfold.dist_ckpt.torch_arguments import ARGUMENTS

Found = TypeVar("Found")

_SAVER = "sixfold.dist_ckpt.background.saver"

register(StrategyAction.SAVE_SHARDED, "torch_dist", 1, TorchDistSaveShardedStrategy())
register(StrategyAction.LOAD_SHARDED, "torch_dist", 1, TorchDistLoadShardedStrategy())
register(StrategyAction.SAVE_SHARDED, "zarr", 1, ZarrSaveShardedStrategy())
register(StrategyAction.LOAD_SHARDED, "zarr", 1, ZarrLoadShardedStrategy())
register(StrategyAction.SAVE_COMMON, "torch", 1, TorchCommonSaveStrategy())
register(StrategyAction.LOAD_COMMON, "torch", 1, TorchCommonLoadStrategy())


@naming(ARGUMENTS)
def save(
    sharded_state_dict: Mapping[Any, Any],
    checkpoint_dir: str | Path | Store,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[dict[Any, Any]], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    async_sharded_save: bool = False,
    group: Group = "world",
    if_exists: str = "replace",
    check_finite: bool = False,
    metadata: str = "torch",
    megatron: bool = False,
    since: str | Path | None = None,
    compress: str | None = None,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> AsyncRequest | None:
    """Save a state dict, every rank of ``group`` its shards, as one checkpoint folder.

    Collective over ``group``. The folder appears complete or not at all, and replaces an older checkpoint in one
    step. It keeps the mode, group and extended attributes of the folder that it replaces. The call waits for a
    background save of this process to the same folder, or to that of ``since``. The state dict is not changed.

    Args:
        sharded_state_dict: nested dicts and lists of records and DTensors. A plain tensor is the same on all ranks,
            and one of them writes it. Everything else is common data, which the first rank of the group writes. For
            an object with ``state_dict`` and ``load_state_dict`` its state dict is saved.
        checkpoint_dir: the folder, whose parents are made; a URL as text; or a store (``stores.Store``).
        sharded_strategy: None, a tuple such as ``("torch_dist", 1)``, or a strategy.
        common_strategy: None, ``("torch", 1)`` or a strategy.
        validate_access_integrity: False does not compare replicas of a shard; all else of a save is always validated.
        preprocess_common_before_consistancy_check: applied to the common data before it is
            compared between ranks.
        content_metadata: saved with the common data under ``content_metadata``, a key that the state dict has not.
        async_sharded_save: begin a background save and return a request, for
            ``strategies.async_utils.AsyncCallsQueue``; ``async_save`` gives the handle itself. Of a user's
            ``AsyncSaveShardedStrategy`` the request begins when it is scheduled.
        group: a process group, None for this process alone, or "world".
        if_exists: "replace" a checkpoint in the folder, or "error" if it is not empty.
        check_finite: NaN or infinity in a tensor or an array, also within another value, is an error.
        metadata: "torch" writes ``.metadata``, which torch DCP and megatron-core read; "compact" leaves it to
            ``tools.metadata``: loads of this package need the compact manifest alone.
        megatron: keep all plain tensors in the common data too, where megatron-core looks for them; else the smallest
            ones, 64 KiB in all.
        since: an older checkpoint of this package on the same file system, such as that of the last step. What has not
            changed since is not written: its files are linked. Each folder is whole; either may be deleted.
        compress: "zstd" compresses tensors, in chunks of 4 MiB; those below 16 KiB stay as they are. It needs the
            module ``zstandard`` (extra ``zstd``), as does each load. The room asked for is that of a plain save.
        timeout_s: longest wait for one peer, seconds: more than the slowest rank takes to write.
        progress: called with the bytes that this rank has written and its total, from 0 to the total; the last call
            comes before the commit. One call at a time, from any thread. An exception in it ends the save on all ranks.
    Returns:
        None, or with ``async_sharded_save`` the request.
    Raises:
        ShardingError: holes, overlaps, unlike shapes or dtypes, data that would not be read back.
        MismatchError: a tuple that no strategy is registered for.
        StorageError: full disk, a target that holds other files, any error of the system.
        LostPeerError: a rank is dead or late. Any error is raised on every rank.
    """
    arguments = dict(locals())
    del arguments["async_sharded_save"]
    await_saves_to(since)
    request = SaveRequest(**arguments)
    if not async_sharded_save:
        await_saves_to(request.store)
        (user_strategies if request.engine is None else saving).save(request)
        return None
    if request.engine is None:
        return user_strategies.async_save(request)
    from sixfold.dist_ckpt.background import saver

    return AsyncRequest(None, (), [], handle=saver.start(request))


@naming(ARGUMENTS)
def load(
    sharded_state_dict: Mapping[Any, Any],
    checkpoint_dir: str | Path | Store,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: StrictHandling | str = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    group: Group = "world",
    dtype_policy: str = "exact",
    verify: str = "touched",
    safe_globals: Sequence[Any] = (),
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> Any:
    """Load a checkpoint into the layout that the state dict describes, whatever layout it was saved at.

    Collective over ``group``. The call waits for a background save of this process to the same folder, as all readers
    do. The values go into the tensors of the records. The result holds these tensors, detached,
    with the same storage. After an error their content is undefined. An object with ``state_dict`` and
    ``load_state_dict`` gets its state last, when no rank has an error; the result holds the object.

    Args:
        sharded_state_dict: records say what is wanted. A plain tensor of the saved shape and dtype is filled; any
            other common value in it is ignored. The dict is not changed. From a folder of plain DCP a leaf is wanted
            if its name is stored: its path, joined by dots.
        checkpoint_dir: a folder, URL or store of a checkpoint of this package, of torch DCP, of megatron-core, or
            of a format whose strategy is given or registered.
        sharded_strategy, common_strategy: None for what the folder's metadata.json names, a tuple or a strategy.
        validate_access_integrity: all ranks together ask for each element once; False allows
            parts of tensors and overlapping parts.
        strict: ``StrictHandling`` or its string.
        group: a process group, None for this process alone, or "world".
        dtype_policy: what to do if the stored dtype is another. "exact" converts if each value survives the way
            there and back. "cast" converts and warns once. "strict" refuses.
        verify: "touched" checks the digests of what is read, each block on one rank of the group;
            "full" of everything; "off" only sizes and structure.
        safe_globals: classes that common data and objects may name besides torch's own list.
        timeout_s: longest wait for one peer, seconds; a URL that fails is asked again for half of it.
        progress: called with the bytes of tensors that this rank has read, and its total, as in ``save``.
    Returns:
        The state dict with plain tensors and the saved common data; for ``return_*`` modes the
        tuple (state dict, missing keys, unexpected keys).
    Raises:
        MismatchError, ShardingError, CorruptError, UnsafeError, StorageError, LostPeerError: see
            errors.py; raised on every rank, and before the result is returned.
    """
    await_saves_to(checkpoint_dir)
    with errors_to_all(group, timeout_s):
        # Who waits for this rank does so for timeout_s: a store that fails is told of before.
        store = store_at(checkpoint_dir, checked_timeout(timeout_s) / 2)
        sharded, common = _strategies(store.local_folder, sharded_strategy, common_strategy)
        engine = _engine(sharded, common)
        if engine is None and store.local_folder is None:
            raise CheckpointError(
                f"{store.name}: strategies of users read local folders; torch_dist and zarr come from any store"
            )
        request = LoadRequest(
            state=sharded_state_dict,
            store=store,
            validate_access_integrity=validate_access_integrity,
            strict=parse_strict(strict),
            group=group,
            dtype_policy=dtype_policy,
            verify=verify,
            safe_globals=safe_globals,
            timeout_s=timeout_s,
            progress=progress,
        )
    if engine is None:
        return user_strategies.load(
            request, sharded, TorchCommonLoadStrategy(safe_globals) if common.is_built_in else common
        )
    return loading.load(request, engine)


def await_saves_to(place: Any) -> None:
    """Wait until no background save of this process to a place is in flight. See [Note: what was saved last]."""
    if _SAVER in sys.modules:  # else this process has begun none
        sys.modules[_SAVER].await_saves_to(place)


def _strategies(
    folder: Path | None, sharded_strategy: Any = None, common_strategy: Any = None
) -> tuple[base.LoadShardedStrategy, base.LoadCommonStrategy]:
    """The two loading strategies: as given, else as a folder's metadata.json names them, else torch_dist.

    A folder that names no registered backend is left to torch_dist, whose error says what is wrong.
    """
    config = None if folder is None else read_config(folder)
    pairs = config or (("torch_dist", 1), ("torch", 1))
    try:
        sharded: base.LoadShardedStrategy = base.find(StrategyAction.LOAD_SHARDED, sharded_strategy, pairs[0])
        common: base.LoadCommonStrategy = base.find(StrategyAction.LOAD_COMMON, common_strategy, pairs[1])
    except CheckpointError:
        if sharded_strategy is None and common_strategy is None:
            return TorchDistLoadShardedStrategy(), TorchCommonLoadStrategy()
        raise
    for given, strategy, (backend, version) in zip(
        (sharded_strategy, common_strategy), (sharded, common), pairs, strict=True
    ):
        if config is not None and given is not None:
            strategy.check_backend_compatibility(backend)
            strategy.check_version_compatibility(version)
    return sharded, common


def _engine(sharded: base.LoadShardedStrategy, common: base.LoadCommonStrategy) -> base.LoadEngine | None:
    """What the built-in engine shall do; None if one of the strategies reads by itself."""
    return sharded.engine() if common.is_built_in else None


def with_local_view(place: str | Path | Store, read: Callable[[Path], Found]) -> Found:
    """What ``read`` finds in a checkpoint as a local folder; errors of the system are StorageErrors."""

    def in_view() -> Found:
        await_saves_to(place)
        with viewed(place) as folder:
            return read(folder)

    return typed(in_view)


def load_common_state_dict(checkpoint_dir: str | Path | Store, *, safe_globals: Sequence[Any] = ()) -> dict[Any, Any]:
    """The common data alone: what decides on config and version before any tensor is read.

    A plain tensor that is larger than the smallest ones is a tensor on the meta device here: ``load`` gives its values.

    Raises: as ``load``. {} for a plain DCP folder.
    """
    return common_data(checkpoint_dir, safe_globals, copies=True)


def common_data(
    checkpoint_dir: str | Path | Store, safe_globals: Sequence[Any] = (), *, copies: bool = False
) -> dict[Any, Any]:
    """The same, for the tools: without ``copies`` a placeholder stands for each tensor of the checkpoint."""

    def read(folder: Path) -> dict[Any, Any]:
        sharded, common = _strategies(folder)
        if _engine(sharded, common) is not None:
            return loading.load_common_state_dict(folder, safe_globals=safe_globals, copies=copies)
        return common.load_common(folder)

    return with_local_view(checkpoint_dir, read)


def load_tensors_metadata(checkpoint_dir: str | Path | Store, sharded_strategy: Any = None) -> dict[str, ShardedTensor]:
    """Every tensor as one shard without data, with its true dtype and shape: a state dict to load with."""
    return with_local_view(
        checkpoint_dir, lambda folder: _strategies(folder, sharded_strategy)[0].load_tensors_metadata(folder)
    )


def load_sharded_metadata(
    checkpoint_dir: str | Path | Store, sharded_strategy: Any = None, common_strategy: Any = None
) -> dict[str, ShardedTensor | ShardedObject]:
    """``load_tensors_metadata`` plus the objects by stored key, bytes of plain DCP under their own.

    What it returns is a state dict to load with.
    """
    strategies = sharded_strategy, common_strategy
    return with_local_view(
        checkpoint_dir, lambda folder: user_strategies.listing(folder, *_strategies(folder, *strategies))
    )


def plain_tensors_of(common: Any, tensors: Iterable[str], keys: str = "*") -> dict[str, torch.Tensor]:
    """The tensors that stand in common data alone, as older saves have them, by their place joined by dots.

    Args:
        common: with placeholders. tensors: names of those of the checkpoint. keys: a glob; others are left out.
    Raises:
        MismatchError: two places read alike, or one of them as the name of a tensor of the checkpoint.
    """
    found: dict[str, torch.Tensor] = {}
    taken = set(tensors)
    for path, leaf in tree.leaves(common):
        key = tree.key_text(path)
        if not isinstance(leaf, torch.Tensor) or is_placeholder(leaf) or not fnmatchcase(key, keys):
            continue
        if key in taken:
            raise MismatchError(
                f"{key}: two tensors of the checkpoint have this name, such as {{'a.b': x}} and {{'a': {{'b': y}}}}. "
                "load(state, path) gives each at its own place; save it from there under other names"
            )
        taken.add(key)
        found[key] = leaf
    return found


def load_plain_tensors(checkpoint_dir: str | Path | Store, *, progress: Progress | None = None) -> dict[str, Any]:
    """Every tensor whole, in this process alone: ``load_tensors_metadata`` and ``load``, whose ``progress`` it is.

    Plain tensors that older saves keep in common data come under their place in the state dict, joined by dots.
    """
    tensors = load_tensors_metadata(checkpoint_dir)
    plain = plain_tensors_of(common_data(checkpoint_dir), tensors)
    loaded = load(tensors, checkpoint_dir, group=None, progress=progress)
    return plain | {key: loaded[key] for key in tensors}


def load_content_metadata(
    checkpoint_dir: str | Path | Store | None = None, *, preloaded_state_dict: Mapping[Any, Any] | None = None
) -> Any:
    """What ``save`` was given as ``content_metadata``, or None; from a folder or from loaded common data."""
    if (checkpoint_dir is None) == (preloaded_state_dict is None):
        raise CheckpointError("load_content_metadata takes a folder or a preloaded_state_dict, one of the two")
    common = preloaded_state_dict if checkpoint_dir is None else load_common_state_dict(checkpoint_dir)
    return (common or {}).get("content_metadata")


def check_is_distributed_checkpoint(checkpoint_dir: str | Path | Store) -> bool:
    """Whether the folder opens as a whole checkpoint, here or by a registered strategy; no tensor is read.

    Raises:
        StorageError: the system or the store does not let us see.
    """
    store = store_at(checkpoint_dir)

    def read(folder: Path) -> None:
        sharded, common = _strategies(folder)
        if _engine(sharded, common) is None:
            user_strategies.listing(folder, sharded, common)
        else:
            open_checkpoint(folder, verify="off")

    return opens(lambda: with_local_view(store, read))  # no answer is no "no": a run would begin from zero


def check_is_registered(folder: Path) -> None:
    """MismatchError if the folder's metadata.json names a strategy that nobody has registered in this process."""
    for action, pair in zip(
        (StrategyAction.LOAD_SHARDED, StrategyAction.LOAD_COMMON), read_config(folder) or (), strict=False
    ):
        try:
            base.get(action, *pair)
        except MismatchError as error:
            raise MismatchError(f"{folder} is of a strategy that is not registered here: {error}") from error


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> base.SaveShardedStrategy:
    """The strategy that ``(backend, version)`` stands for at save."""
    return cast(base.SaveShardedStrategy, base.get(StrategyAction.SAVE_SHARDED, backend, version))


def get_default_save_common_strategy(backend: str = "torch", version: int = 1) -> base.SaveCommonStrategy:
    """The strategy that ``(backend, version)`` stands for at save of common data."""
    return cast(base.SaveCommonStrategy, base.get(StrategyAction.SAVE_COMMON, backend, version))


def get_default_load_sharded_strategy(checkpoint_dir: str | Path | Store) -> base.LoadShardedStrategy:
    """The strategy that a folder's metadata.json stands for at load."""
    config = with_local_view(checkpoint_dir, read_config) or (("torch_dist", 1),)
    return cast(base.LoadShardedStrategy, base.get(StrategyAction.LOAD_SHARDED, *config[0]))
