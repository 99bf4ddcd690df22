"""Conversion: the tensors of one checkpoint in bounded memory, and their way into another format.

    folder --> batches, read (this file) --> tools.diff, safetensors_export.py
    folder --> records that map its files (this file) --> save: torch_dist, zarr

A record whose values lie plain in a file of the source maps them, so that the page cache and not the
process holds them.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError, typed
from sixfold.dist_ckpt.geometry.manifest import Stored, StoredChunk
from sixfold.dist_ckpt.plans.plan import Read
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.road.reader import Reader
from sixfold.dist_ckpt.road.sources import Sources
from sixfold.dist_ckpt.state.by_name import PlainObject, record_of
from sixfold.dist_ckpt.state.records import Piece, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.stores import LocalStore, Store, paths, store_at
from sixfold.dist_ckpt.stores import local as storage
from sixfold.dist_ckpt.stores.folder import Checkpoint, open_checkpoint
from sixfold.dist_ckpt.strategies.base import owns_file
from sixfold.dist_ckpt.tools import safetensors_export, standin

BATCH_BYTES = 256 * 2**20


def nbytes_of(record: ShardedTensor) -> int:
    """Bytes of the whole tensor."""
    return prod(record.global_shape) * record.dtype.itemsize


def batches(tensors: Mapping[str, ShardedTensor], batch_bytes: int | None = None) -> Iterator[list[ShardedTensor]]:
    """All tensors in the order of the mapping, as records of whole rows, some ``batch_bytes`` at a time."""
    limit = batch_bytes or BATCH_BYTES
    batch: list[ShardedTensor] = []
    filled = 0
    for record in tensors.values():
        for part in _row_parts(record, limit):
            size = prod(part.local_shape) * part.dtype.itemsize
            if batch and filled + size > limit:
                yield batch
                batch, filled = [], 0
            batch.append(part)
            filled += size
    if batch:
        yield batch


def _row_parts(record: ShardedTensor, limit: int) -> Iterator[ShardedTensor]:
    shape = record.global_shape
    row = prod(shape[1:]) * record.dtype.itemsize
    rows = shape[0] if shape else 1
    step = max(1, limit // row) if row else max(1, rows)
    if not shape or rows <= step:
        yield replace(record, data=None)
        return
    for low in range(0, rows, step):
        local = (min(step, rows - low), *shape[1:])
        yield ShardedTensor(record.key, None, record.dtype, local, shape, (low,) + (0,) * (len(shape) - 1), None)


def read(folder: Path, batch: Sequence[ShardedTensor]) -> list[torch.Tensor]:
    """The values of a batch, checked."""
    state = dict(enumerate(batch))
    loaded = serialization.load(
        state, folder, group=None, validate_access_integrity=False, safe_globals=standin.stand_ins(folder)
    )
    return [loaded[index] for index in state]


def object_keys(folder: Path) -> list[str]:
    """Stored keys of the objects, those of plain DCP included."""
    try:
        return sorted(open_checkpoint(folder).manifest.objects)
    except MismatchError:  # another backend: its strategy lists
        listed = serialization.load_sharded_metadata(folder)
        return sorted(key for key, record in listed.items() if isinstance(record, ShardedObject))


def to_safetensors(
    source: Path,
    destination: str | Path | Store,
    tensors: Mapping[str, ShardedTensor],
    max_shard_bytes: int | None,
    meter: Meter,
) -> tuple[str, list[str]]:
    """See ``tools.convert``. Returns the target and the names of its files."""
    target = paths.local(destination, "safetensors are written into a local folder").resolve()
    storage.check_target(target, "error")
    store = LocalStore(target)
    plan = safetensors_export.plan(tensors, max_shard_bytes)

    def values() -> Iterator[torch.Tensor]:
        for batch in batches({key: tensors[key] for file in plan.files for key in file.keys}):
            yield from read(source, batch)
            meter.add(sum(prod(part.local_shape) * part.dtype.itemsize for part in batch))

    def write() -> None:
        nbytes = sum(map(nbytes_of, tensors.values()))
        save = store.begin(secrets.token_hex(8), nbytes, "error")
        try:
            with store.told(save, nbytes):
                safetensors_export.write(Path(save.staging), plan, values())
                meter.finish()
                store.publish(save)
        except BaseException:
            store.abandon(save)
            raise

    typed(write)
    return str(target), sorted(path.name for path in target.iterdir())


def to_checkpoint(
    source: Path,
    destination: str | Path | Store,
    tensors: Mapping[str, ShardedTensor],
    objects: Sequence[str],
    to: str,
    meter: Meter,
    safe_globals: Sequence[Any],
    *,
    in_place: bool = False,
) -> tuple[str, list[str]]:
    """See ``tools.convert``. Returns the target and the names of its files, relative.

    ``in_place``: the target may be the source, and bytes of plain DCP stay under their own keys.
    """
    store, if_exists = store_at(destination), "replace" if in_place else "error"
    target = store.local_folder
    if target is not None:
        storage.check_target(target, if_exists, owns_file)
        target.parent.mkdir(parents=True, exist_ok=True)
    checkpoint = _opened(source)
    state: dict[Any, Any] = dict(serialization.load_common_state_dict(source, safe_globals=safe_globals))
    names = [f"sixfold.tensor.{key}" for key in tensors], [f"sixfold.object.{key}" for key in objects]
    clashes = {*names[0], *names[1]} & {key for key in state if isinstance(key, str)}
    if clashes:
        raise CheckpointError(f"the common data has the keys {sorted(clashes)[:3]}, which the conversion needs")
    prefix, beside = (None, None) if target is None else (f".{target.name}.tmp-", target.parent)  # where there is room
    with tempfile.TemporaryDirectory(prefix=prefix, dir=beside) as scratch:
        if checkpoint is not None and checkpoint.integrity is not None:
            checkpoint.integrity.check_blocks(checkpoint.folder, checkpoint.integrity.all_blocks())
        for name, (key, record) in zip(names[0], tensors.items(), strict=True):
            mapped = None if checkpoint is None else _mapped(checkpoint, key, regular=to == "zarr")
            state[name] = mapped or [_assembled(source, record, Path(scratch))]
            meter.add(nbytes_of(record) // 2)  # the other half is the save's
        for name, stored_key in zip(names[1], objects, strict=True):
            if in_place:
                state[name] = _object(stored_key, source, safe_globals)
            else:
                _add_object(state, name, stored_key, source, checkpoint, safe_globals)
        serialization.save(state, store, (to, 1), group=None, if_exists=if_exists, progress=meter.rest())
    if target is None:
        return store.name, sorted(store.list_files())
    return str(target), sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())


def _opened(source: Path) -> Checkpoint | None:
    """The source, if the built-in engine reads it."""
    try:
        return open_checkpoint(source)
    except MismatchError:
        serialization.load_tensors_metadata(source)  # a strategy of its own reads it, or its error says why not
        return None


def _mapped(checkpoint: Checkpoint, key: str, *, regular: bool) -> list[ShardedTensor] | None:
    """One record per stored chunk; None if the target wants a regular grid and the chunks are none."""
    stored = checkpoint.manifest.tensors[key]
    fragments = _grid(stored)
    if (regular and fragments is None) or not stored.chunks:
        return None
    sources = Sources(checkpoint)
    return [
        ShardedTensor(
            key,
            sources.chunk(_whole(key, stored, chunk)),
            stored.dtype,
            chunk.box.size,
            stored.shape,
            chunk.box.offset,
            fragments,
        )
        for chunk in stored.chunks
    ]


def _whole(key: str, stored: Stored, chunk: StoredChunk) -> Read:
    return Read(0, key, Piece(chunk.box, None), chunk, chunk.box, stored.dtype, stored.shape)


def _grid(stored: Stored) -> tuple[int, ...] | None:
    """Parts per axis if all chunks are alike and equal, else None."""
    sizes = {chunk.box.size for chunk in stored.chunks}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    if any(whole % part for whole, part in zip(stored.shape, size, strict=True)):
        return None
    fragments = tuple(whole // part for whole, part in zip(stored.shape, size, strict=True))
    aligned = all(at % part == 0 for c in stored.chunks for at, part in zip(c.box.offset, size, strict=True))
    return fragments if aligned and prod(fragments) == len(stored.chunks) else None


def _assembled(source: Path, record: ShardedTensor, scratch: Path) -> ShardedTensor:
    """The whole tensor in a mapped file of its own."""
    elements = prod(record.global_shape)
    if elements:
        storage.check_space(scratch, nbytes_of(record))
        file = scratch / secrets.token_hex(4)
        flat = torch.from_file(str(file), shared=True, size=elements, dtype=record.dtype)
    else:
        flat = torch.empty(0, dtype=record.dtype, device="cpu")
    whole = flat.view(record.global_shape)
    for batch in batches({record.key: record}):
        for part, tensor in zip(batch, read(source, batch), strict=True):
            whole[part.global_slice() if part.global_shape else ...] = tensor
        del tensor  # it may be the whole batch, and the next one is read before it is overwritten
    return replace(record, data=whole)


def _add_object(
    state: dict[Any, Any],
    name: str,
    stored_key: str,
    source: Path,
    checkpoint: Checkpoint | None,
    safe_globals: Sequence[Any],
) -> None:
    """An object as a record; bytes of plain DCP, which have no grid, as common data under their key."""
    if isinstance(record_of(stored_key), PlainObject):
        assert checkpoint is not None, f"{stored_key} has no grid and {source} is no DCP folder"
        frame = checkpoint.manifest.objects[stored_key]
        state[stored_key] = Reader(checkpoint, "exact").read_object(stored_key, frame, safe_globals)
        return
    state[name] = _object(stored_key, source, safe_globals)


def _object(stored_key: str, source: Path, safe_globals: Sequence[Any]) -> ShardedObject:
    record = record_of(stored_key)
    loaded = serialization.load(
        {"object": record}, source, group=None, validate_access_integrity=False, safe_globals=safe_globals
    )
    return replace(record, data=loaded["object"])
