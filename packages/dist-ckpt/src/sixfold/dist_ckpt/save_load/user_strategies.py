"""Strategies that the built-in engine does not know: their own code runs, between our checks and our commit.

    save: records --> checked over all ranks --> strategy.save into a staging folder --> commit (this file)
    load: folder --> strategy's listing (this file) --> loading.py --> strategy.load (this file) --> result

What a strategy of a user writes has no ``integrity.json``, unless it wraps the torch_dist strategy; then
that file is completed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, read_config
from sixfold.dist_ckpt.collectives.exchange import errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError
from sixfold.dist_ckpt.formats import integrity
from sixfold.dist_ckpt.geometry.box import whole
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest, StoredChunk, StoredTensor
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.save_load import loading
from sixfold.dist_ckpt.save_load.dtype_conversion import copy_values
from sixfold.dist_ckpt.save_load.host_view import HostView
from sixfold.dist_ckpt.save_load.loading import LoadRequest
from sixfold.dist_ckpt.save_load.saving import Agreed, SaveRequest, agree_on
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.storage.local import LocalStore
from sixfold.dist_ckpt.storage.store import POINTER, Store
from sixfold.dist_ckpt.strategies import base

Result = TypeVar("Result")

if TYPE_CHECKING:
    from sixfold.dist_ckpt.strategies.async_utils import AsyncRequest


def save(request: SaveRequest) -> None:
    """As ``serialization.save``, with strategies that write by themselves."""
    agreed, strategy = _begun(request), request.sharded

    def write(mine: dict[Any, Any], staging: Path) -> None:
        kind = base.AsyncSaveShardedStrategy
        if isinstance(strategy, kind) and type(strategy).save is kind.save:
            strategy.async_save(mine, staging).execute_sync(request.group, request.timeout_s)
        else:
            strategy.save(mine, staging)

    with agreed.abandoned_on_error():
        agreed.exchange.all_reduce(lambda: (_written(request, agreed, write), None), lambda _: _commit(request, agreed))


def async_save(request: SaveRequest) -> AsyncRequest:
    """A request of an AsyncSaveShardedStrategy that writes by itself; its last finalize function commits.

    The values are those of the call: the strategy copies what it needs, common data is written now. A request that
    fails, or is never scheduled, leaves its staging folder to the next save.
    """
    strategy = request.sharded
    with errors_to_all(request.group, request.timeout_s):
        if not isinstance(strategy, base.AsyncSaveShardedStrategy):
            raise CheckpointError(
                f"{strategy} saves by itself and is no AsyncSaveShardedStrategy, so that only a plain save can let it; "
                "background saves go with ('torch_dist', 1), also inside a FullyParallelSaveStrategyWrapper"
            )
    agreed = _begun(request)
    exchange = agreed.exchange
    with agreed.abandoned_on_error():
        made = exchange.run_on_all(lambda: _written(request, agreed, strategy.async_save))

    def commit() -> None:
        with agreed.abandoned_on_error():
            exchange.all_reduce(lambda: (None, None), lambda _: _commit(request, agreed))

    return made._replace(finalize_fns=[*made.finalize_fns, commit])


def _begun(request: SaveRequest) -> Agreed:
    """A save that all ranks agree on, by strategies that write by themselves."""
    with errors_to_all(request.group, request.timeout_s):
        if request.check_finite:
            raise CheckpointError(f"check_finite is part of the built-in engine; {request.sharded} saves by itself")
        _local(request.store)
    agreed = agree_on(request)
    with agreed.abandoned_on_error():
        agreed.exchange.run_on_all(agreed.join)  # before any rank waits for others inside of a strategy
    return agreed


def _local(store: Store) -> LocalStore:
    if not isinstance(store, LocalStore):
        raise CheckpointError(
            f"{store.name}: strategies of users write into local folders; only torch_dist goes to a URL"
        )
    return store


@contextmanager
def _staging(agreed: Agreed) -> Iterator[Path]:
    """The folder that is not the checkpoint yet; errors inside name what is the matter with it."""
    with _local(agreed.content.store).told(agreed.ticket.save, agreed.content.nbytes):
        yield Path(agreed.ticket.save.staging)


def _written(request: SaveRequest, agreed: Agreed, write: Callable[[dict[Any, Any], Path], Result]) -> Result:
    """Let the strategies write this rank's records, on the first rank the common data too; what ``write`` returns."""
    content, rank = agreed.content, agreed.exchange.rank
    mine, objects = _shares(agreed.records, request.sharded.can_handle_sharded_objects)
    meter = Meter(request.progress, lambda: content.nbytes)
    with _staging(agreed) as staging:
        result = write(mine, staging)
        if objects:
            request.common.save_sharded_objects(objects, staging)
        if not rank:
            request.common.save_common(content.common, staging)
    meter.finish()
    return result


def _commit(request: SaveRequest, agreed: Agreed) -> None:
    """What is written last, and into place; on the first rank."""
    strategy, common = request.sharded, request.common
    config = {
        "sharded_backend": strategy.backend,
        "sharded_backend_version": strategy.version,
        "common_backend": common.backend,
        "common_backend_version": common.version,
    }
    with _staging(agreed) as staging:
        strategy.check_written(staging)
        storage.write_file(staging, POINTER, json.dumps(config).encode())
        _complete_integrity(staging)
        unsynced = [str(path.relative_to(staging)) for path in staging.rglob("*")]
    _local(agreed.content.store).publish(
        agreed.ticket.save, unsynced
    )  # a strategy need not know how to put files on disk


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
    storage.write_file(staging, integrity.FILE_NAME, replace(known, files=files).encode())


def load(request: LoadRequest, strategy: base.LoadShardedStrategy, common_strategy: base.LoadCommonStrategy) -> Any:
    """As ``serialization.load``, with strategies that read by themselves."""
    return _Load(request, strategy, common_strategy).run()


class _Load(loading.Load):
    """A load by strategies that read by themselves."""

    def __init__(
        self, asked: LoadRequest, strategy: base.LoadShardedStrategy, common_strategy: base.LoadCommonStrategy
    ) -> None:
        super().__init__(asked, base.LoadEngine())
        self._strategies = strategy, common_strategy

    def opened(self, view: HostView) -> tuple[Checkpoint, dict[Any, Any], bool]:
        """What the strategies list, each tensor as one chunk; where it lies is theirs to know."""
        folder, nowhere = view.folder, ByteRange("", 0, 0)
        if not folder.is_dir():
            raise MismatchError(f"Checkpoint directory {folder} does not exist")
        for kind, (backend, version) in zip(self._strategies, read_config(folder) or (), strict=False):
            kind.check_backend_compatibility(backend)
            kind.check_version_compatibility(version)
        tensors, objects = dict[str, StoredTensor](), dict[str, ByteRange]()
        for key, record in listing(folder, *self._strategies).items():
            if isinstance(record, ShardedTensor):
                chunk = StoredChunk(whole(record.global_shape), nowhere)
                tensors[key] = StoredTensor(record.dtype, record.global_shape, (chunk,))
            else:
                objects[key] = nowhere
        checkpoint = Checkpoint(folder, Manifest(tensors, objects), None, "off", ())
        return checkpoint, self._strategies[1].load_common(folder), False

    def values(self, rank_load: loading.RankLoad, *_: Any) -> tuple[loading.Values, set[str]]:
        """What the strategies return for each record that is stored; they get records of stored dtypes."""
        meter = Meter(self.asked.progress, lambda: rank_load.reads.nbytes)
        stored, (strategy, common_strategy) = rank_load.checkpoint.manifest, self._strategies
        asked: dict[tree.KeyPath, ShardedBase] = {}
        for path, record in rank_load.parts.records:
            if isinstance(record, ShardedObject) and record.unique_key in stored.objects:
                asked[path] = record.without_data()
            elif isinstance(record, ShardedTensor) and record.key in stored.tensors:
                asked[path] = _as_stored(record, stored.tensors[record.key].dtype)
        mine, objects = _shares(asked.items(), strategy.can_handle_sharded_objects)
        loaded = strategy.load(mine, rank_load.checkpoint.folder)
        loaded_objects = common_strategy.load_sharded_objects(objects, rank_load.checkpoint.folder) if objects else {}
        values, converted = {path: leaf.unwrap() for path, leaf in rank_load.parts.local}, set[str]()
        for path, record in (entry for entry in rank_load.parts.records if entry[0] in asked):
            found = tree.get(loaded, path)
            found = tree.get(loaded_objects, path) if found is tree.GONE else found
            if found is tree.GONE:
                raise CheckpointError(f"{record}: {strategy} returned no value for it")
            values[path] = found
            if isinstance(record, ShardedTensor):
                values[path] = _settled(record, found, self.asked.dtype_policy)
                if found.dtype != record.dtype:
                    converted.add(record.key)
        meter.finish()
        return values, converted


def listing(
    folder: Path, strategy: base.LoadShardedStrategy, common_strategy: base.LoadCommonStrategy
) -> dict[str, ShardedTensor | ShardedObject]:
    """Everything stored, by key."""
    stored = dict(strategy.load_sharded_metadata(folder))
    if not strategy.can_handle_sharded_objects:
        stored.update(common_strategy.load_sharded_metadata(folder))
    return stored


def _as_stored(record: ShardedTensor, dtype: torch.dtype) -> ShardedTensor:
    """The record that the strategy gets: the caller's own, or one of the stored dtype with a tensor of its own."""
    if record.dtype == dtype and record.data is not None:
        return replace(record, data=record.data.detach())
    copy = replace(record, data=None, dtype=dtype)
    copy.init_data("cpu")
    return copy


def _settled(record: ShardedTensor, found: Any, dtype_policy: str) -> torch.Tensor:
    """Put what a strategy returned into the caller's tensor."""
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{record}: the strategy returned a {type(found).__name__}, not a tensor")
    assert record.data is not None, f"{record} was asked for and has no data"
    target = record.data.detach()
    if found.data_ptr() != target.data_ptr() or found.dtype != target.dtype:
        copy_values(record.key, found.view(target.shape), target, dtype_policy)
    return target
