"""Conversion: the tensors of one checkpoint in bounded memory, and their way into another format.

    folder --> batches, read (this file) --> tools.diff, safetensors_export.py
    folder --> records that map its files (this file) --> save: torch_dist, zarr

A record whose values lie plain in a file of the source maps them, so that the page cache and not the
process holds them.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError, typed
from sixfold.dist_ckpt.geometry.box import cuts
from sixfold.dist_ckpt.geometry.manifest import Stored
from sixfold.dist_ckpt.plans.plan import Read
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.road.sources import Sources
from sixfold.dist_ckpt.state.by_name import PlainObject
from sixfold.dist_ckpt.state.records import Piece, ShardedBase, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.stores import LocalStore, Store, paths, store_at
from sixfold.dist_ckpt.stores import local as storage
from sixfold.dist_ckpt.stores.folder import Checkpoint, open_checkpoint
from sixfold.dist_ckpt.strategies.base import owns_file
from sixfold.dist_ckpt.tools import safetensors_export
from sixfold.dist_ckpt.tools.safetensors_export import nbytes_of
from sixfold.dist_ckpt.tools.standin import stand_ins

BATCH_BYTES = 256 * 2**20


def opened(folder: Path) -> Checkpoint | None:
    """The checkpoint, if the built-in engine reads it."""
    try:
        return open_checkpoint(folder)
    except MismatchError:  # a strategy of its own reads it, or the error of ``listed`` says why not
        return None


def listed(folder: Path, keys: str = "*") -> tuple[dict[str, ShardedTensor], dict[str, ShardedObject]]:
    """The tensors, and the objects by their stored key, whose key matches a glob."""
    stored = serialization.load_sharded_metadata(folder)
    found = {name: stored[name] for name in sorted(stored) if fnmatchcase(stored[name].key, keys)}
    objects = {name: record for name, record in found.items() if isinstance(record, ShardedObject)}
    return {name: record for name, record in found.items() if isinstance(record, ShardedTensor)}, objects


def batches(tensors: Mapping[str, ShardedTensor]) -> Iterator[list[ShardedTensor]]:
    """All tensors in the order of the mapping, as records of row-major ranges, some ``BATCH_BYTES`` at a time."""
    batch: list[ShardedTensor] = []
    filled = 0
    for part in (part for record in tensors.values() for part in _row_parts(record)):
        if batch and filled + nbytes_of(part) > BATCH_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(part)
        filled += nbytes_of(part)
    if batch:
        yield batch


def _row_parts(record: ShardedTensor) -> Iterator[ShardedTensor]:
    shape = record.global_shape
    for cut in cuts(shape, max(1, BATCH_BYTES // record.dtype.itemsize)):
        ends = [axis.indices(length)[:2] for axis, length in zip(cut, shape, strict=True)]
        local, offset = tuple(stop - start for start, stop in ends), tuple(start for start, _ in ends)
        yield ShardedTensor(record.key, None, record.dtype, local, shape, offset, None)


def read(folder: Path, records: Iterable[ShardedBase], safe_globals: Sequence[Any] | None = None) -> list[Any]:
    """The values of records, checked. ``safe_globals``: None has unknown classes stood in for, for looking only."""
    state = dict(enumerate(records))
    objects = [record.unique_key for record in state.values() if isinstance(record, ShardedObject)]
    if safe_globals is None:
        safe_globals = stand_ins(_pickles(folder, objects))
    loaded = serialization.load(state, folder, group=None, validate_access_integrity=False, safe_globals=safe_globals)
    return [loaded[index] for index in state]


def _pickles(folder: Path, objects: Sequence[str]) -> Iterator[bytes]:
    if (folder / "common.pt").exists():
        yield storage.read_small(folder / "common.pt")
    if objects and (checkpoint := opened(folder)) is not None:
        for frame in (checkpoint.manifest.objects[name] for name in objects):
            yield bytes(checkpoint.frame(frame))


def common_data(folder: Path) -> dict[Any, Any]:
    """Common data of a checkpoint, unknown classes stood in for."""
    return serialization.load_common_state_dict(folder, safe_globals=stand_ins(_pickles(folder, ())))


def to_safetensors(
    source: Path,
    destination: str | Path | Store,
    tensors: Mapping[str, ShardedTensor],
    max_shard_bytes: int | None,
    meter: Meter,
) -> tuple[str, list[str]]:
    """See ``tools.convert``. Returns the target and the names of its files."""
    store = LocalStore(paths.local(destination, "safetensors are written into a local folder").resolve())
    files, index = safetensors_export.plan(tensors, max_shard_bytes)
    nbytes = sum(map(nbytes_of, tensors.values()))

    def values() -> Iterator[torch.Tensor]:
        for batch in batches({key: tensors[key] for file in files for key in file.keys}):
            yield from read(source, batch)
            meter.add(sum(map(nbytes_of, batch)))

    def write() -> list[str]:
        save = store.begin(secrets.token_hex(8), nbytes, "error")
        try:
            with store.told(save, nbytes):
                safetensors_export.write(Path(save.staging), files, index, values())
                meter.finish()
                store.publish(save)
        except BaseException:
            store.abandon(save)
            raise
        return sorted(store.list_files())

    return store.name, typed(write)


def to_checkpoint(
    source: Path,
    destination: str | Path | Store,
    tensors: Mapping[str, ShardedTensor],
    objects: Mapping[str, ShardedObject],
    to: str,
    meter: Meter,
    safe_globals: Sequence[Any],
    *,
    in_place: bool = False,
) -> tuple[str, list[str]]:
    """See ``tools.convert``. Returns the target and the names of its files, relative.

    ``in_place``: the target may be the source, and bytes of plain DCP, which have no grid, stay under their own keys;
    else they become common data.
    """
    store, if_exists = store_at(destination), "replace" if in_place else "error"
    target = store.local_folder
    if target is not None:
        storage.check_target(target, if_exists, owns_file)
        target.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = opened(source)
    state: dict[Any, Any] = dict(serialization.load_common_state_dict(source, safe_globals=safe_globals))
    prefix, beside = (None, None) if target is None else (f".{target.name}.tmp-", target.parent)  # where there is room
    with tempfile.TemporaryDirectory(prefix=prefix, dir=beside) as scratch:
        if checkpoint is not None and checkpoint.integrity is not None:
            checkpoint.integrity.check_blocks(checkpoint.folder, checkpoint.integrity.all_blocks())
        found: dict[str, Any] = {}
        for key, record in tensors.items():
            mapped = None if checkpoint is None else _mapped(checkpoint, key, regular=to == "zarr")
            found[f"sixfold.tensor.{key}"] = mapped or [_assembled(source, record, Path(scratch))]
            meter.add(nbytes_of(record) // 2)  # the other half is the save's
        for (key, cell), value in zip(objects.items(), read(source, objects.values(), safe_globals), strict=True):
            if isinstance(cell, PlainObject) and not in_place:
                state[key] = value
            else:
                found[f"sixfold.object.{key}"] = replace(cell, data=value)
        if clashes := found.keys() & state.keys():
            raise CheckpointError(f"the common data has the keys {sorted(clashes)[:3]}, which the conversion needs")
        serialization.save(state | found, store, (to, 1), group=None, if_exists=if_exists, progress=meter.rest())
    return store.name if target is None else str(target), sorted(store.list_files())


def _mapped(checkpoint: Checkpoint, key: str, *, regular: bool) -> list[ShardedTensor] | None:
    """One record per stored chunk; None if the target wants a regular grid and the chunks are none."""
    stored, sources = checkpoint.manifest.tensors[key], Sources(checkpoint)
    dtype, shape, fragments = stored.dtype, stored.shape, _grid(stored)
    if regular and fragments is None:
        return None
    steps = [Read(0, key, Piece(chunk.box, None), chunk, chunk.box, dtype, shape) for chunk in stored.chunks]
    return [
        ShardedTensor(key, sources.chunk(step), dtype, step.part.size, shape, step.part.offset, fragments)
        for step in steps
    ]


def _grid(stored: Stored) -> tuple[int, ...] | None:
    """Parts per axis if all chunks are alike and equal, else None."""
    sizes = {chunk.box.size for chunk in stored.chunks}
    if len(sizes) != 1:
        return None
    starts = [range(0, length, part) for length, part in zip(stored.shape, *sizes, strict=True)]
    fits = sorted(chunk.box.offset for chunk in stored.chunks) == [*product(*starts)]
    return tuple(map(len, starts)) if fits else None


def _assembled(source: Path, record: ShardedTensor, scratch: Path) -> ShardedTensor:
    """The whole tensor in a mapped file of its own."""
    elements = prod(record.global_shape)
    flat = torch.empty(0, dtype=record.dtype, device="cpu")
    if elements:
        storage.check_space(scratch, nbytes_of(record))
        flat = torch.from_file(str(scratch / secrets.token_hex(4)), shared=True, size=elements, dtype=record.dtype)
    whole = replace(record, data=flat.view(record.global_shape))
    read(source, [whole])
    return whole
