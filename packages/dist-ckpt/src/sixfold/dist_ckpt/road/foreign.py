"""Strategies that the built-in engine does not know: their own code runs, between our checks and our commit.

    save: records --> checked over all ranks --> strategy.save into a staging folder --> commit (this file)
    load: folder --> strategy's listing (this file) --> loading.py --> strategy.load (this file) --> result

What a strategy of a user writes has no ``integrity.json``, unless it wraps the torch_dist strategy; then
that file is completed here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.files import integrity
from sixfold.dist_ckpt.geometry.box import whole
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.ranks.exchange import told_to_all
from sixfold.dist_ckpt.road import loading, saving
from sixfold.dist_ckpt.road.hosts import Seen
from sixfold.dist_ckpt.road.loading import Looked, Values, Ways
from sixfold.dist_ckpt.road.reader import copy_values
from sixfold.dist_ckpt.road.request import LoadRequest, SaveRequest, read_config
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.stores import LocalStore
from sixfold.dist_ckpt.stores import local as storage
from sixfold.dist_ckpt.stores.folder import Checkpoint
from sixfold.dist_ckpt.stores.store import POINTER
from sixfold.dist_ckpt.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadEngine,
    LoadShardedStrategy,
)

if TYPE_CHECKING:
    from sixfold.dist_ckpt.strategies.async_utils import AsyncRequest


def save(request: SaveRequest) -> None:
    """As ``serialization.save``, with strategies that write by themselves."""
    begun = _begin(request)
    strategy = request.sharded

    def write(mine: dict[Any, Any]) -> None:
        if isinstance(strategy, AsyncSaveShardedStrategy) and type(strategy).save is AsyncSaveShardedStrategy.save:
            strategy.async_save(mine, begun.staging).execute_sync(request.group, request.timeout_s)
        else:
            strategy.save(mine, begun.staging)

    with begun.agreed.abandoned_on_error():
        begun.agreed.exchange.together(lambda: begun.run(write), lambda _: begun.commit())


def async_save(request: SaveRequest) -> AsyncRequest:
    """A request of an AsyncSaveShardedStrategy that writes by itself; its last finalize function commits.

    The values are those of the call: the strategy copies what it needs, common data is written now. A request that
    fails, or is never scheduled, leaves its staging folder to the next save.
    """
    strategy = request.sharded
    with told_to_all(request.group, request.timeout_s):
        if not isinstance(strategy, AsyncSaveShardedStrategy):
            raise CheckpointError(
                f"{strategy} saves by itself and is no AsyncSaveShardedStrategy, so that only a plain save can let it; "
                "background saves go with ('torch_dist', 1), also inside a FullyParallelSaveStrategyWrapper"
            )
    begun = _begin(request)
    made: list[AsyncRequest] = []
    with begun.agreed.abandoned_on_error():
        begun.agreed.exchange.together(
            lambda: begun.run(lambda mine: made.append(strategy.async_save(mine, begun.staging))),
            lambda _: begun.save_common(),
        )
    return made[0]._replace(finalize_fns=[*made[0].finalize_fns, begun.commit_together])


@dataclass(slots=True)
class _Begun:
    """A save that all ranks agree on, by strategies that write by themselves."""

    request: SaveRequest
    store: LocalStore
    agreed: saving.Agreed
    has_common: bool = False

    @property
    def staging(self) -> Path:
        """The folder that is not the checkpoint yet."""
        return Path(self.agreed.ticket.staging)

    def run(self, write: Callable[[dict[Any, Any]], None]) -> tuple[None, None]:
        """Let the strategies write this rank's records; in the form of ``Exchange.together``."""
        request, save, nbytes = self.request, self.agreed.ticket.save, self.agreed.content.nbytes
        mine, objects = _shares(self.agreed.records, request.sharded.can_handle_sharded_objects)
        if self.agreed.exchange.rank:
            self.store.join(save)
        meter = Meter(request.progress, lambda: nbytes)
        with self.store.told(save, nbytes):
            write(mine)
            if objects:
                request.common.save_sharded_objects(objects, self.staging)
        meter.finish()
        return None, None

    def save_common(self) -> None:
        """The common data, unless that is done; on the first rank."""
        if not self.has_common:
            with self.store.told(self.agreed.ticket.save, self.agreed.content.nbytes):
                self.request.common.save_common(self.agreed.content.common, self.staging)
            self.has_common = True

    def commit(self) -> None:
        """What is written last, and into place; on the first rank."""
        save, strategy, common = self.agreed.ticket.save, self.request.sharded, self.request.common
        with self.store.told(save, self.agreed.content.nbytes):
            strategy.check_written(self.staging)
        self.save_common()
        with self.store.told(save, self.agreed.content.nbytes):
            config = {
                "sharded_backend": strategy.backend,
                "sharded_backend_version": strategy.version,
                "common_backend": common.backend,
                "common_backend_version": common.version,
            }
            storage.write_file(self.staging, POINTER, json.dumps(config).encode())
            _complete_integrity(self.staging)
            _sync(self.staging)
        self.store.publish(save)

    def commit_together(self) -> None:
        """``commit``, called on all ranks."""
        with self.agreed.abandoned_on_error():
            self.agreed.exchange.together(lambda: (None, None), lambda _: self.commit())


def _begin(request: SaveRequest) -> _Begun:
    store = request.store
    with told_to_all(request.group, request.timeout_s):
        if request.check_finite:
            raise CheckpointError(f"check_finite is part of the built-in engine; {request.sharded} saves by itself")
        if not isinstance(store, LocalStore):
            raise CheckpointError(
                f"{store.name}: strategies of users write into local folders; only torch_dist goes to a URL"
            )
    return _Begun(request, store, saving.agree_on(request))


def _shares(
    records: Iterable[tuple[tree.KeyPath, ShardedBase]], with_objects: bool
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What the sharded strategy gets and what the common strategy gets, as nested dicts."""
    shares: tuple[dict[tree.KeyPath, ShardedBase], dict[tree.KeyPath, ShardedBase]] = {}, {}
    for path, record in records:
        shares[isinstance(record, ShardedObject) and not with_objects][path] = record
    return tree.nest(shares[0]), tree.nest(shares[1])


def _complete_integrity(staging: Path) -> None:
    """Add the files that were written after ``integrity.json``, if a wrapped strategy wrote one."""
    path = staging / integrity.FILE_NAME
    if not path.exists():
        return
    known = integrity.decode(path, path.read_bytes())
    later = sorted(entry for entry in staging.iterdir() if entry.name not in known.files and entry != path)
    files = dict(known.files) | {entry.name: integrity.digest_of(entry.read_bytes()) for entry in later}
    path.unlink()
    storage.write_file(staging, integrity.FILE_NAME, integrity.Integrity(save_id=known.save_id, files=files).encode())


def _sync(staging: Path) -> None:
    """Put on disk what a strategy wrote; its own code need not know how."""
    for folder, _, names in os.walk(staging):
        for name in names:
            handle = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        storage.sync_folder(Path(folder))


def load(request: LoadRequest, strategy: LoadShardedStrategy, common_strategy: LoadCommonStrategy) -> Any:
    """As ``serialization.load``, with strategies that read by themselves."""
    with told_to_all(request.group, request.timeout_s):
        if request.store.local_folder is None:
            raise CheckpointError(f"{request.store.name}: strategies of users read local folders")

    def opened(seen: Seen, asked: LoadRequest) -> tuple[Checkpoint, dict[Any, Any], bool]:
        manifest = _manifest(seen.folder, strategy, common_strategy)
        return Checkpoint(seen.folder, manifest, None, "off", ()), common_strategy.load_common(seen.folder), False

    def read(wanted: Looked, asked: LoadRequest, *_: Any) -> tuple[Values, set[str]]:
        meter = Meter(asked.progress, lambda: wanted.reads.nbytes)
        found = _values(wanted, strategy, common_strategy, asked.dtype_policy)
        meter.finish()
        return found

    return loading.load(request, LoadEngine(), Ways(opened, read))


def _manifest(folder: Path, strategy: LoadShardedStrategy, common_strategy: LoadCommonStrategy) -> Manifest:
    """What the strategies list, each tensor as one chunk; where it lies is theirs to know."""
    if not folder.is_dir():
        raise MismatchError(f"Checkpoint directory {folder} does not exist")
    for kind, (backend, version) in zip((strategy, common_strategy), read_config(folder) or (), strict=False):
        kind.check_backend_compatibility(backend)
        kind.check_version_compatibility(version)
    stored, nowhere = listing(folder, strategy, common_strategy), ByteRange("", 0, 0)
    return Manifest(
        {
            key: StoredTensor(record.dtype, shape, (StoredChunk(whole(shape), nowhere),))
            for key, record in stored.items()
            if isinstance(record, ShardedTensor)
            for shape in [record.global_shape]
        },
        {key: nowhere for key, record in stored.items() if isinstance(record, ShardedObject)},
    )


def listing(
    folder: Path, strategy: LoadShardedStrategy, common_strategy: LoadCommonStrategy
) -> dict[str, ShardedTensor | ShardedObject]:
    """Everything stored, by key."""
    stored = dict(strategy.load_sharded_metadata(folder))
    if not strategy.can_handle_sharded_objects:
        stored.update(common_strategy.load_sharded_metadata(folder))
    return stored


def _values(
    wanted: Looked, strategy: LoadShardedStrategy, common_strategy: LoadCommonStrategy, dtype_policy: str
) -> tuple[Values, set[str]]:
    """What was loaded, by place, and the keys whose dtype was converted."""
    stored, folder = wanted.checkpoint.manifest, wanted.checkpoint.folder
    present: dict[tree.KeyPath, ShardedBase] = {}
    for path, record in wanted.parts.records:
        if isinstance(record, ShardedObject) and record.unique_key in stored.objects:
            present[path] = record.without_data()
        elif isinstance(record, ShardedTensor) and record.key in stored.tensors:
            present[path] = _as_stored(record, stored.tensors[record.key].dtype)
    mine, objects = _shares(present.items(), strategy.can_handle_sharded_objects)
    loaded = strategy.load(mine, folder)
    loaded_objects = common_strategy.load_sharded_objects(objects, folder) if objects else {}
    values: Values = {path: leaf.unwrap() for path, leaf in wanted.parts.local}
    converted = set[str]()
    for path, record in wanted.parts.records:
        if path not in present:
            continue
        found = tree.get(loaded, path)
        found = tree.get(loaded_objects, path) if found is tree.GONE else found
        if found is tree.GONE:
            raise CheckpointError(f"{record}: {strategy} returned no value for it")
        values[path] = found
        if isinstance(record, ShardedTensor):
            values[path] = _settle(record, found, dtype_policy)
            if found.dtype != record.dtype:
                converted.add(record.key)
    return values, converted


def _as_stored(record: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    """The record that the strategy gets: the caller's own, or one of the stored dtype with a tensor of its own."""
    copy = record.without_data()
    copy.dtype = dtype
    if record.data is not None and record.dtype == dtype:
        copy.data = record.data.detach()
    else:
        copy.init_data("cpu")
    return copy


def _settle(record: ShardedTensor, found: Any, dtype_policy: str) -> torch.Tensor:
    """Put what a strategy returned into the caller's tensor."""
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{record}: the strategy returned a {type(found).__name__}, not a tensor")
    assert record.data is not None, f"{record} was asked for and has no data"
    target = record.data.detach()
    if found.data_ptr() != target.data_ptr() or found.dtype != target.dtype:
        copy_values(record.key, found.view(target.shape), target, dtype_policy)
    return target
