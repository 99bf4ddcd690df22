"""Strategies that the built-in engine does not know: their own code runs, between our checks and our commit.

    save: records --> checked over all ranks --> strategy.save into a staging folder --> commit (this file)
    load: folder --> strategy's listing --> checked over all ranks --> strategy.load (this file) --> result

What a strategy of a user writes has no ``integrity.json``, unless it wraps the torch_dist strategy; then
that file is completed here.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError, ShardingError
from sixfold.dist_ckpt.files import integrity, metadata
from sixfold.dist_ckpt.plans import plan, validation
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.ranks.exchange import Exchange, told_to_all
from sixfold.dist_ckpt.road import loading, saving
from sixfold.dist_ckpt.road.loading import LoadRequest
from sixfold.dist_ckpt.road.reader import check_policy
from sixfold.dist_ckpt.road.request import SaveRequest
from sixfold.dist_ckpt.state import factory, tree
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.stores import LocalStore
from sixfold.dist_ckpt.stores import local as storage
from sixfold.dist_ckpt.strategies.base import AsyncSaveShardedStrategy, LoadCommonStrategy, LoadShardedStrategy

if TYPE_CHECKING:
    from sixfold.dist_ckpt.strategies.async_utils import AsyncRequest

CONFIG_NAME = "metadata.json"
Config = tuple[tuple[str, int], tuple[str, int]]


def read_config(checkpoint_dir: str | Path) -> Config | None:
    """Sharded and common (backend, version) of a folder's metadata.json; None if there is no readable one."""
    try:
        return metadata.read_config(storage.read_small(Path(checkpoint_dir) / CONFIG_NAME))
    except (OSError, ValueError, CheckpointError):  # what is wrong with it, the engine says
        return None


def save(request: SaveRequest) -> None:
    """As ``serialization.save``, with strategies that write by themselves."""
    begun = _begin(request)
    strategy = request.sharded

    def write(mine: dict[Any, Any]) -> None:
        if isinstance(strategy, AsyncSaveShardedStrategy) and type(strategy).save is AsyncSaveShardedStrategy.save:
            strategy.async_save(mine, begun.staging).execute_sync(request.group, request.timeout_s)
        else:
            strategy.save(mine, begun.staging)

    with begun.abandoned_on_error():
        begun.exchange.together(lambda: begun.run(write), lambda _: begun.commit())


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
    with begun.abandoned_on_error():
        begun.exchange.together(
            lambda: begun.run(lambda mine: made.append(strategy.async_save(mine, begun.staging))),
            lambda _: begun.save_common(),
        )
    return made[0]._replace(finalize_fns=[*made[0].finalize_fns, begun.commit_together])


@dataclass(slots=True)
class _Begun:
    """A save that all ranks agree on, by strategies that write by themselves."""

    request: SaveRequest
    store: LocalStore
    exchange: Exchange
    agreed: saving.Agreed
    records: list[tuple[tree.Path, ShardedBase]]
    has_common: bool = False

    @property
    def staging(self) -> Path:
        """The folder that is not the checkpoint yet."""
        return Path(self.agreed.ticket.staging)

    def run(self, write: Callable[[dict[Any, Any]], None]) -> tuple[None, None]:
        """Let the strategies write this rank's records; in the form of ``Exchange.together``."""
        request, save, nbytes = self.request, self.agreed.ticket.save, self.agreed.content.nbytes
        mine, objects = _shares(self.records, request.sharded.can_handle_sharded_objects)
        if self.exchange.rank:
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
            storage.write_file(self.staging, CONFIG_NAME, json.dumps(config).encode())
            _complete_integrity(self.staging)
            _sync(self.staging)
        self.store.publish(save)

    def commit_together(self) -> None:
        """``commit``, called on all ranks."""
        with self.abandoned_on_error():
            self.exchange.together(lambda: (None, None), lambda _: self.commit())

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """An error inside removes what was written."""
        try:
            yield
        except BaseException:
            self.agreed.abandon()
            raise


def _begin(request: SaveRequest) -> _Begun:
    strategy, store = request.sharded, request.store

    def split() -> tuple[tuple[dict[Any, Any], tree.Split], None]:
        if request.check_finite:
            raise CheckpointError(f"check_finite is part of the built-in engine; {strategy} saves by itself")
        if not isinstance(store, LocalStore):
            raise CheckpointError(
                f"{store.name}: strategies of users write into local folders; only torch_dist goes to a URL"
            )
        return _split(request.state), None

    exchange = Exchange(request.group, request.timeout_s)
    (expanded, parts), _ = exchange.together(split, lambda _: None)
    assert isinstance(store, LocalStore), "another is refused above"
    return _Begun(request, store, exchange, saving.agree_on(replace(request, state=expanded)), parts.records)


def _split(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], tree.Split]:
    """A state dict without factories, and its parts."""
    expanded, _ = factory.expand(tree.checked(state))
    return expanded, tree.split(expanded)


def _shares(records: list[tuple[tree.Path, ShardedBase]], with_objects: bool) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What the sharded strategy gets and what the common strategy gets, as nested dicts."""
    objects = {path: record for path, record in records if isinstance(record, ShardedObject) and not with_objects}
    rest = {path: record for path, record in records if path not in objects}
    return tree.nest(rest), tree.nest(dict(objects))


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


def _union(keys_by_rank: list[set[str]]) -> list[str]:
    return sorted({key for keys in keys_by_rank for key in keys})


class _Wanted(NamedTuple):
    """What this rank asks for."""

    expanded: Any
    merges: list[factory.Merge]
    parts: tree.Split
    stored: dict[str, ShardedTensor | ShardedObject]
    common: dict[Any, Any]


class _Asked(NamedTuple):
    """What the first rank must know of it."""

    tensors: list[plan.ShardReport]
    objects: list[plan.ObjectReport]
    stored: frozenset[str]
    mismatches: list[str]
    without_values: set[str]
    has_stateful: bool


def load(request: LoadRequest, strategy: LoadShardedStrategy, common_strategy: LoadCommonStrategy) -> Any:
    """As ``serialization.load``, with strategies that read by themselves."""
    check_policy(request.dtype_policy)
    strict = validation.parse_strict(request.strict)
    with told_to_all(request.group, request.timeout_s):
        if not isinstance(request.store, LocalStore):
            raise CheckpointError(f"{request.store.name}: strategies of users read local folders")
        folder = request.store.path
    exchange = Exchange(request.group, request.timeout_s)

    def decide(asked: list[_Asked]) -> tuple[set[str], set[str], bool]:
        stored = asked[0].stored
        if any(part.stored != stored for part in asked):
            raise CorruptError(f"the ranks see different checkpoints under {folder}; they share one file system")
        keys = {shard.key for part in asked for shard in part.tensors}
        keys |= {cell.stored_key for part in asked for cell in part.objects}
        missing, unexpected = set(stored - keys), set(keys - stored).union(*(part.without_values for part in asked))
        validation.check_keys(strict, missing, unexpected)
        validation.raise_problems([line for part in asked for line in part.mismatches], "asked for", MismatchError)
        if request.validate_access_integrity:
            problems = validation.tensor_problems([part.tensors for part in asked], "asked for")
            problems += validation.object_problems([part.objects for part in asked], "asked for")
            validation.raise_problems(problems, "asked for", ShardingError)
        return missing, unexpected, any(part.has_stateful for part in asked)

    wanted, (missing, unexpected, has_stateful) = exchange.together(
        lambda: _want(request.state, folder, strategy, common_strategy, request.dtype_policy), decide
    )

    def valued() -> tuple[dict[tree.Path, Any], set[str]]:
        meter = Meter(request.progress, lambda: sum(map(_bytes_of, wanted.parts.records)))
        found = _values(wanted, unexpected, folder, strategy, common_strategy, request.dtype_policy)
        meter.finish()
        return found

    values, casts = exchange.together(valued, _union)
    if casts and request.dtype_policy == "cast":
        warnings.warn(f"values were converted to another dtype in {', '.join(casts)}", stacklevel=3)
    result = loading.finished(
        lambda: loading.assembled(wanted.expanded, wanted.merges, wanted.parts, wanted.common, values),
        exchange if has_stateful else None,
    )
    missing = missing if strict.minds_missing else set()
    if strict.logs:
        loading.warn_of_keys(missing, unexpected)
    return (result, missing, unexpected) if strict.returns else result


def _want(
    state: Mapping[Any, Any],
    folder: Path,
    strategy: LoadShardedStrategy,
    common_strategy: LoadCommonStrategy,
    dtype_policy: str,
) -> tuple[_Wanted, _Asked]:
    if not folder.is_dir():
        raise MismatchError(f"Checkpoint directory {folder} does not exist")
    config = read_config(folder)
    if config is not None:
        for kind, (backend, version) in zip((strategy, common_strategy), config, strict=True):
            kind.check_backend_compatibility(backend)
            kind.check_version_compatibility(version)
    expanded, merges = factory.expand(tree.checked(state))
    parts = tree.split(expanded)
    stored = listing(folder, strategy, common_strategy)
    tensors = [record for _, record in parts.records if isinstance(record, ShardedTensor)]
    objects = [record for _, record in parts.records if isinstance(record, ShardedObject)]
    mismatches = [line for record in tensors if (line := _mismatch(record, stored.get(record.key), dtype_policy))]
    wanted = _Wanted(expanded, merges, parts, stored, common_strategy.load_common(folder))
    asked = _Asked(
        [plan.report(record) for record in tensors],
        [saving.object_report(record) for record in objects],
        frozenset(stored),
        mismatches,
        factory.owners_without_values(merges, parts, wanted.common),
        any(step.owner is not None for step in merges),
    )
    return wanted, asked


def _bytes_of(entry: tuple[tree.Path, ShardedBase]) -> int:
    """Bytes of a record's tensor; of an object none are told."""
    record = entry[1]
    return (
        sum(piece.box.volume for piece in record.pieces()) * record.dtype.itemsize
        if isinstance(record, ShardedTensor)
        else 0
    )


def listing(
    folder: Path, strategy: LoadShardedStrategy, common_strategy: LoadCommonStrategy
) -> dict[str, ShardedTensor | ShardedObject]:
    """Everything stored, by key."""
    stored = dict(strategy.load_sharded_metadata(folder))
    if not strategy.can_handle_sharded_objects:
        stored.update(common_strategy.load_sharded_metadata(folder))
    return stored


def _mismatch(record: ShardedTensor, stored: ShardedTensor | ShardedObject | None, dtype_policy: str) -> str | None:
    if not isinstance(stored, ShardedTensor):
        return None
    if record.global_shape != stored.global_shape and not record.allow_shape_mismatch:
        return f"{record.key}: asked for global shape {record.global_shape}, stored is {stored.global_shape}"
    if record.dtype != stored.dtype and dtype_policy == "strict":
        return f"{record.key}: asked for {record.dtype}, stored is {stored.dtype}; dtype_policy is 'strict'"
    return None


def _values(
    wanted: _Wanted,
    unexpected: set[str],
    folder: Path,
    strategy: LoadShardedStrategy,
    common_strategy: LoadCommonStrategy,
    dtype_policy: str,
) -> tuple[dict[tree.Path, Any], set[str]]:
    """What was loaded, by place, and the keys whose dtype was converted."""
    present: list[tuple[tree.Path, ShardedBase]] = []
    for path, record in wanted.parts.records:
        if isinstance(record, ShardedObject) and record.unique_key not in unexpected:
            present.append((path, record.without_data()))
        elif isinstance(record, ShardedTensor) and record.key not in unexpected:
            present.append((path, _as_stored(record, wanted.stored[record.key].dtype)))  # type: ignore[union-attr]
    mine, objects = _shares(present, strategy.can_handle_sharded_objects)
    loaded = strategy.load(mine, folder)
    loaded_objects = common_strategy.load_sharded_objects(objects, folder) if objects else {}
    values: dict[tree.Path, Any] = {path: leaf.unwrap() for path, leaf in wanted.parts.local}
    asked, converted = dict(wanted.parts.records), set[str]()
    for path, record in present:
        found = tree.get(loaded, path)
        found = tree.get(loaded_objects, path) if found is tree.GONE else found
        if found is tree.GONE:
            raise CheckpointError(f"{record}: {strategy} returned no value for it")
        original = asked[path]
        if isinstance(original, ShardedTensor):
            values[path] = _settle(original, found, dtype_policy)
            if found.dtype != original.dtype:
                converted.add(original.key)
        else:
            values[path] = found
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
    if record.data is None:
        record = record.without_data()
        record.init_data(found.device)
    assert record.data is not None, f"{record} has no data after init_data"
    target = record.data.detach()
    if found.data_ptr() == target.data_ptr() and found.dtype == target.dtype:
        return target
    if found.dtype != target.dtype and dtype_policy == "exact":
        back = found.to(target.dtype).to(found.dtype)
        if not torch.equal(torch.nan_to_num(back), torch.nan_to_num(found)):
            raise MismatchError(
                f"{record.key}: asked for {record.dtype}, and stored {found.dtype} values do not survive"
            )
    target.copy_(found.view(target.shape))
    return target
