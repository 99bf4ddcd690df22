"""Conversion: a checkpoint written anew, in another format or without some of its tensors.

    folder --> records that map its files (this file) --> save: torch_dist, zarr
    folder --> stored_values.py: batches of values (this file) --> hugging_face/model_files.py: files of safetensors

A record whose values lie plain in a file of the source maps them, so that the page cache and not the process holds
them. Safetensors, the format that model hubs and inference engines read, are streamed: one process writes all files, or
each rank of a group its own.
"""

from __future__ import annotations

import secrets
import tempfile
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, read_config
from sixfold.dist_ckpt.collectives.exchange import Exchange
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError, typed
from sixfold.dist_ckpt.formats import zstd
from sixfold.dist_ckpt.geometry.manifest import Stored
from sixfold.dist_ckpt.hugging_face.model_files import (
    ExportPlan,
    abandoned_on_error,
    check_no_other_dtype,
    converted,
    dtype_of,
    publish,
    write_files,
    written_dtype,
)
from sixfold.dist_ckpt.plans.batches import batches, nbytes_of
from sixfold.dist_ckpt.plans.plan import Read
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.save_load.reader import Sources
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.dcp_names import PlainObject
from sixfold.dist_ckpt.state.placeholders import Placeholder, is_placeholder, placeholder, with_kind
from sixfold.dist_ckpt.state.records import Piece, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.storage.local import LocalStore, store_at
from sixfold.dist_ckpt.storage.store import Save, Store
from sixfold.dist_ckpt.strategies.base import owns_file
from sixfold.dist_ckpt.tools import damage_check, stored_values


def to_checkpoint(
    source: Path,
    destination: str | Path | Store,
    tensors: Mapping[str, ShardedTensor],
    objects: Mapping[str, ShardedObject],
    to: str,
    progress: Progress | None,
    safe_globals: Sequence[Any],
    *,
    in_place: bool = False,
    names: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    compress: str | None = None,
) -> tuple[str, list[str]]:
    """See ``tools.convert``. Returns the target and the names of its files, relative.

    ``names``: other names for all tensors. ``dtype``: of the values that are converted. ``compress``: as of ``save``.

    ``in_place``: the target may be the source, and bytes of plain DCP, which have no grid, stay under their own keys.
    Else those without a dot become common data, and in zarr all: with a dot, only the name tells where they belong.
    """
    store, if_exists = store_at(destination), "replace" if in_place else "error"
    target = store.local_folder
    if target is not None:
        storage.check_target(target, if_exists, owns_file)
        target.parent.mkdir(parents=True, exist_ok=True)
    meter, checkpoint = Meter(progress, lambda: sum(map(nbytes_of, tensors.values()))), stored_values.opened(source)
    common = serialization.load_common_state_dict(source, safe_globals=safe_globals)
    integrity = None if checkpoint is None else checkpoint.integrity
    state = _common(common, tensors, () if integrity is None else integrity.in_common, to, dtype)
    # Beside the target, where there is room, under a name that its next save knows for a leftover.
    prefix = None if target is None else f".{target.name}.tmp-{secrets.token_hex(8)}"
    beside = None if target is None else target.parent
    with tempfile.TemporaryDirectory(prefix=prefix, dir=beside) as scratch:
        if checkpoint is not None and integrity is not None:
            integrity.check_blocks(checkpoint.folder, integrity.all_blocks())
        found: dict[str, Any] = {}
        for key, record in tensors.items():
            is_same = checkpoint is not None and dtype_of(record, dtype) == record.dtype
            mapped = _mapped(checkpoint, key, regular=to == "zarr") if checkpoint is not None and is_same else None
            parts = mapped or [_assembled(source, record, Path(scratch), dtype)]
            new = key if names is None else names[key]
            found[f"sixfold.tensor.{new}"] = parts if new == key else [replace(part, key=new) for part in parts]
            meter.add(nbytes_of(record) // 2)  # the other half is the save's
        for (key, cell), value in zip(
            objects.items(), stored_values.read(source, objects.values(), safe_globals), strict=True
        ):
            check_no_other_dtype(key, value, dtype)
            if isinstance(cell, PlainObject) and not in_place and (to == "zarr" or "." not in key):
                state[key] = value
            else:
                found[f"sixfold.object.{key}"] = replace(cell, data=value)
        if clashes := found.keys() & state.keys():
            raise CheckpointError(f"the common data has the keys {sorted(clashes)[:3]}, which the conversion needs")
        with torch.serialization.safe_globals([*safe_globals]):  # what was let in may go out
            options: dict[str, Any] = {"if_exists": if_exists, "progress": meter.rest(), "compress": compress}
            serialization.save(state | found, store, (to, 1), group=None, **options)
    return store.name if target is None else str(target), sorted(store.list_files())


def _common(
    common: dict[Any, Any], kept: Collection[str], copies: Collection[str], to: str, dtype: torch.dtype | None
) -> dict[Any, Any]:
    """Common data without what stands for a tensor that is left out, and for zarr without second copies of values.

    ``copies``: names of tensors whose values it holds too.
    """

    def change(path: tree.KeyPath, leaf: Any) -> Any:
        key = tree.key_text(path)
        if not is_placeholder(leaf) and not (isinstance(leaf, torch.Tensor) and key in copies):
            check_no_other_dtype(key, leaf, dtype)
            return leaf
        if key not in kept:
            return tree.GONE
        leaf = with_kind(leaf.detach().to(written_dtype(key, leaf.dtype, leaf.shape, dtype)), leaf)
        return Placeholder(leaf) if to == "torch_dist" else placeholder(leaf)  # no integrity.json names copies there

    found = tree.mapped(common, change, same=tree.BRANCHES)
    return {} if found is tree.GONE else dict(found)


def _mapped(checkpoint: Checkpoint, key: str, *, regular: bool) -> list[ShardedTensor] | None:
    """One record per stored chunk; None if they are compressed, or no regular grid where the target wants one."""
    stored, sources = checkpoint.manifest.tensors[key], Sources(checkpoint)
    dtype, shape, fragments = stored.dtype, stored.shape, _grid(stored)
    is_compressed = any(chunk.frame.file in checkpoint.manifest.compressed for chunk in stored.chunks)
    if is_compressed or (regular and fragments is None):
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


def _assembled(source: Path, record: ShardedTensor, scratch: Path, dtype: torch.dtype | None) -> ShardedTensor:
    """The whole tensor in a mapped file of its own, its values converted if ``dtype`` says so."""
    whole = replace(record, data=None, dtype=dtype_of(record, dtype))
    elements = prod(record.global_shape)
    flat = torch.empty(0, dtype=whole.dtype, device="cpu")
    if elements:
        storage.check_space(scratch, nbytes_of(whole))
        flat = torch.from_file(str(scratch / secrets.token_hex(4)), shared=True, size=elements, dtype=whole.dtype)
    whole.data = flat.view(record.global_shape)
    if whole.dtype == record.dtype:
        stored_values.read(source, [whole])
        return whole
    for batch in batches([record]):
        for part, values in zip(batch, stored_values.read(source, batch), strict=True):
            whole.data[part.global_slice()] = converted(record.key, values, dtype)
    return whole


def remove_sharded_tensors(
    checkpoint_dir: str | Path,
    key_prefix: str,
    *,
    safe_globals: Sequence[Any] = (),
    progress: Progress | None = None,
) -> None:
    """Remove the tensors whose key begins with ``key_prefix`` from a checkpoint; one process alone calls it.

    The rest is written anew, every byte checked, and replaces the folder in one step. Meanwhile both need room.
    Objects, common data and the cut of the tensors stay. Warns if no key begins so.

    Args:
        checkpoint_dir: a local folder of this package, of DCP, of megatron-core, or of zarr.
        safe_globals: as in ``load``, for common data and objects.
        progress: called with bytes of the tensors that stay, as in ``tools.convert``.
    Raises:
        CheckpointError: as ``load`` and ``save``; then the folder is as it was.
    """
    folder = storage.local_path(checkpoint_dir, "tensors are removed in a local folder; download and upload it")
    with damage_check.opened(folder) as source:
        tensors, objects = stored_values.listed(source)
        kept = {key: record for key, record in tensors.items() if not key.startswith(key_prefix)}
        if len(kept) == len(tensors):
            warnings.warn(f"no tensor of {source} has a key that begins with {key_prefix!r}", stacklevel=2)
            Meter(progress).finish()
            return
        backend, checkpoint = _backend(source, ("torch_dist", "zarr")), stored_values.opened(source)
        compress = "zstd" if checkpoint is not None and checkpoint.manifest.compressed else None
        to_checkpoint(source, folder, kept, objects, backend, progress, safe_globals, in_place=True, compress=compress)


def _backend(source: Path, written: Sequence[str]) -> str:
    config = read_config(source)
    backend = config[0][0] if config else "torch_dist"
    if backend not in written:
        raise CheckpointError(f"{source} is of the backend {backend!r}; written here: {', '.join(written)}")
    return backend


def consolidate(
    path: str | Path,
    *,
    compress: str | None = None,
    safe_globals: Sequence[Any] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a checkpoint anew in its place: it shares no file with others, and no byte of its files is unused.

    For one that was saved with ``since``, before it is copied elsewhere or others are edited. Every byte is checked,
    and the folder is replaced in one step; meanwhile both need room. ``tools.convert`` writes into another.

    Args:
        path: a local folder of this package or of DCP.
        compress: as of ``save``; without it all tensors are plain then.
        safe_globals, progress: as in ``tools.convert``.
    Returns:
        path, nbytes (of its files now), nbytes_before.
    Raises:
        CheckpointError: as ``load`` and ``save``; then the folder is as it was.
    """
    folder = storage.local_path(path, "files are linked in local folders alone; a copy at a URL is whole")
    zstd.check_option(compress)
    with damage_check.opened(folder) as source:
        before, backend = damage_check.files(source), _backend(source, ("torch_dist",))
        tensors, objects = stored_values.listed(source)
        arguments = source, folder, tensors, objects, backend, progress, safe_globals
        target, _ = typed(lambda: to_checkpoint(*arguments, in_place=True, compress=compress))
    sizes = {"nbytes": sum(size for _, size in damage_check.files(Path(target)))}
    return {"path": target, **sizes, "nbytes_before": sum(size for _, size in before)}


def to_safetensors(
    source: Path,
    store: LocalStore,
    plan: ExportPlan,
    plain: Mapping[str, torch.Tensor],
    exchange: Exchange,
    progress: Progress | None,
) -> list[str]:
    """See ``tools.convert``. Returns the names of the files. ``plain``: values of common data, by our keys.

    Collective, with the same plan on all ranks: each reads what its files hold, and writes them.
    """

    def begun(found: Sequence[tuple[str, str]]) -> Save:
        if len(set(found)) > 1:
            raise MismatchError("the ranks see different checkpoints, or export to different folders; give all one")
        return store.begin(secrets.token_hex(8), plan.nbytes, "error")

    _, save = exchange.all_reduce(lambda: (None, (plan.digest, store.name)), begun)
    files = plan.of_rank(exchange.rank, exchange.ranks)
    nbytes = sum(file.nbytes for file in files)

    def parts() -> Iterator[torch.Tensor]:
        for batch in plan.batches(files):
            stored = [part for part in batch if part.key not in plain]
            values = deque(stored_values.read(source, stored) if stored else ())
            for part in batch:  # each is let go of when it is written
                if part.key in plain:
                    yield converted(part.key, plain[part.key][part.global_slice()], plan.dtype)
                else:
                    yield converted(part.key, values.popleft(), plan.dtype)

    def write() -> tuple[None, None]:
        store.join(save)
        meter = Meter(progress, lambda: nbytes)
        with store.told(save, nbytes):
            write_files(Path(save.staging), files, parts(), meter)
        meter.finish()
        return None, None

    with abandoned_on_error(store, save, exchange.rank):
        exchange.all_reduce(write, lambda _: publish(store, save, plan))
    return sorted(plan.names)


def whole_record(key: str, value: torch.Tensor) -> ShardedTensor:
    """A tensor as one whole shard."""
    shape = tuple(value.shape)
    return ShardedTensor(key, value, value.dtype, shape, shape, (0,) * len(shape), None)
