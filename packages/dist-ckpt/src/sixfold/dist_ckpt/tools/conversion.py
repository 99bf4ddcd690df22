"""Conversion: a checkpoint written anew, in another format or without some of its tensors.

    folder --> records that map its files (this file) --> save: torch_dist, zarr
    folder --> stored_values.py: batches of values --> files of safetensors (this file)

A record whose values lie plain in a file of the source maps them, so that the page cache and not the process holds
them. Safetensors, the format that model hubs and inference engines read, are streamed. The ``safetensors`` library
(extra ``safetensors``) would want a whole file's bytes in memory to write it. It opens each file afterwards, which
checks header and lengths by independent code.
"""

from __future__ import annotations

import json
import secrets
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, read_config
from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, typed
from sixfold.dist_ckpt.formats.safetensors import INDEX_NAME, NAMES
from sixfold.dist_ckpt.geometry.manifest import Stored
from sixfold.dist_ckpt.plans.plan import Read
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.save_load.reader import Sources
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.dcp_names import PlainObject
from sixfold.dist_ckpt.state.placeholders import Placeholder, is_placeholder, placeholder
from sixfold.dist_ckpt.state.records import Piece, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes
from sixfold.dist_ckpt.storage import local as storage
from sixfold.dist_ckpt.storage.local import LocalStore, store_at
from sixfold.dist_ckpt.storage.store import Store
from sixfold.dist_ckpt.strategies.base import owns_file
from sixfold.dist_ckpt.tools import damage_check, stored_values
from sixfold.dist_ckpt.tools.stored_values import nbytes_of

_ALIGNMENT = 8


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
) -> tuple[str, list[str]]:
    """See ``tools.convert``. Returns the target and the names of its files, relative.

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
    state = _common(common, tensors, () if integrity is None else integrity.in_common, to)
    # Beside the target, where there is room, under a name that its next save knows for a leftover.
    prefix = None if target is None else f".{target.name}.tmp-{secrets.token_hex(8)}"
    beside = None if target is None else target.parent
    with tempfile.TemporaryDirectory(prefix=prefix, dir=beside) as scratch:
        if checkpoint is not None and integrity is not None:
            integrity.check_blocks(checkpoint.folder, integrity.all_blocks())
        found: dict[str, Any] = {}
        for key, record in tensors.items():
            mapped = None if checkpoint is None else _mapped(checkpoint, key, regular=to == "zarr")
            found[f"sixfold.tensor.{key}"] = mapped or [_assembled(source, record, Path(scratch))]
            meter.add(nbytes_of(record) // 2)  # the other half is the save's
        for (key, cell), value in zip(
            objects.items(), stored_values.read(source, objects.values(), safe_globals), strict=True
        ):
            if isinstance(cell, PlainObject) and not in_place and (to == "zarr" or "." not in key):
                state[key] = value
            else:
                found[f"sixfold.object.{key}"] = replace(cell, data=value)
        if clashes := found.keys() & state.keys():
            raise CheckpointError(f"the common data has the keys {sorted(clashes)[:3]}, which the conversion needs")
        with torch.serialization.safe_globals([*safe_globals]):  # what was let in may go out
            serialization.save(state | found, store, (to, 1), group=None, if_exists=if_exists, progress=meter.rest())
    return store.name if target is None else str(target), sorted(store.list_files())


def _common(common: dict[Any, Any], kept: Collection[str], copies: Collection[str], to: str) -> dict[Any, Any]:
    """Common data without what stands for a tensor that is left out, and for zarr without second copies of values.

    ``copies``: names of tensors whose values it holds too.
    """

    def change(path: tree.KeyPath, leaf: Any) -> Any:
        key = tree.key_text(path)
        if not is_placeholder(leaf) and not (isinstance(leaf, torch.Tensor) and key in copies):
            return leaf
        if key not in kept:
            return tree.GONE
        return Placeholder(leaf) if to == "torch_dist" else placeholder(leaf)  # no integrity.json names copies there

    found = tree.mapped(common, change, same=tree.BRANCHES)
    return {} if found is tree.GONE else dict(found)


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
    stored_values.read(source, [whole])
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
        config = read_config(source)
        backend = config[0][0] if config else "torch_dist"
        if backend not in ("torch_dist", "zarr"):
            raise CheckpointError(f"{source} is of the backend {backend!r}; torch_dist and zarr are written here")
        to_checkpoint(source, folder, kept, objects, backend, progress, safe_globals, in_place=True)


class File(NamedTuple):
    """One file of safetensors: its tensors in the order of their bytes, and all bytes before those."""

    name: str
    keys: tuple[str, ...]
    head: bytes
    nbytes: int


def to_safetensors(
    source: Path,
    destination: str | Path | Store,
    tensors: Mapping[str, ShardedTensor],
    max_shard_bytes: int | None,
    progress: Progress | None,
    plain: Mapping[str, torch.Tensor],
) -> tuple[str, list[str]]:
    """See ``tools.convert``. Returns the target and the names of its files. ``plain``: those of common data."""
    tensors = {**{key: _whole(key, value) for key, value in plain.items()}, **tensors}
    store = LocalStore(storage.local_path(destination, "safetensors are written into a local folder").resolve())
    files, given = plan_files(tensors, max_shard_bytes), plain
    nbytes = sum(map(nbytes_of, tensors.values()))
    meter = Meter(progress, lambda: nbytes)

    def parts() -> Iterator[torch.Tensor]:
        for is_given, keys in groupby((key for file in files for key in file.keys), key=lambda key: key in given):
            if is_given:
                for key in keys:
                    yield given[key]
                    meter.add(nbytes_of(tensors[key]))
                continue
            for batch in stored_values.batches(tensors[key] for key in keys):
                yield from stored_values.read(source, batch)
                meter.add(sum(map(nbytes_of, batch)))

    def write() -> list[str]:
        save = store.begin(secrets.token_hex(8), nbytes, "error")
        try:
            with store.told(save, nbytes):
                write_files(Path(save.staging), files, parts())
                meter.finish()
                store.publish(save, [file.name for file in files])
        except BaseException:
            store.abandon(save)
            raise
        return sorted(store.list_files())

    return store.name, typed(write)


def _whole(key: str, value: torch.Tensor) -> ShardedTensor:
    shape = tuple(value.shape)
    return ShardedTensor(key, value, value.dtype, shape, shape, (0,) * len(shape), None)


def plan_files(tensors: Mapping[str, ShardedTensor], max_shard_bytes: int | None) -> list[File]:
    """Share whole tensors among files of at most ``max_shard_bytes`` of values, in the order of their keys.

    Returns:
        The files; the index after those of tensors, if these may be several.
    Raises:
        CheckpointError: the library is missing; a dtype that the format does not know; ``max_shard_bytes`` < 1.
    """
    _library()
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; it is >= 1")
    for key, record in sorted(tensors.items()):
        if record.dtype not in NAMES:
            raise CheckpointError(f"{key}: safetensors knows no {record.dtype}; leave it out with keys")
        if key == "__metadata__" or key != key.encode(errors="replace").decode():
            raise CheckpointError(f"{key!r}: safetensors knows no tensor of this name; leave it out with keys")
    if max_shard_bytes is None:
        return [_file("model.safetensors", sorted(tensors), tensors)]
    groups = [*stored_values.grouped(sorted(tensors), lambda key: nbytes_of(tensors[key]), max_shard_bytes)] or [[]]
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    files = [_file(name, keys, tensors) for name, keys in zip(names, groups, strict=True)]
    index = {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": {key: file.name for file in files for key in file.keys},
    }
    return [*files, File(INDEX_NAME, (), json.dumps(index, indent=2, sort_keys=True).encode(), 0)]


def _file(name: str, keys: list[str], tensors: Mapping[str, ShardedTensor]) -> File:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    # Wide elements first: each tensor then starts at a multiple of its element's size.
    ordered = sorted(keys, key=lambda key: (-tensors[key].dtype.itemsize, key))
    for key in ordered:
        record, stop = tensors[key], at + nbytes_of(tensors[key])
        shape = list(record.global_shape)
        header[key] = {"dtype": NAMES[record.dtype], "shape": shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return File(name, tuple(ordered), len(text).to_bytes(8, "little") + text, at)


def write_files(folder: Path, files: Sequence[File], parts: Iterator[torch.Tensor]) -> None:
    """Write the files into ``folder``.

    Args:
        parts: the tensors of all files in order, each whole or as consecutive ranges.
    """
    for planned in files:
        with (folder / planned.name).open("xb", buffering=1 << 20) as file:
            file.write(planned.head)
            left = planned.nbytes
            while left:
                # Nothing here keeps a tensor while the next batch of them is read.
                left -= file.write(tensor_bytes(next(parts).contiguous()))
            assert left == 0, f"{planned.name} got {-left} bytes too many"
    for planned in (file for file in files if file.name != INDEX_NAME):
        with _library().safe_open(str(folder / planned.name), framework="pt") as opened:
            found = set(opened.keys())
        if found != set(planned.keys):
            text = f"was written with {len(planned.keys)} tensors and reads back with {len(found)}"
            raise CorruptError(f"{folder / planned.name} {text}")


def _library() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise CheckpointError(
            "export to safetensors needs the library; pip install 'sixfold-dist-ckpt[safetensors]'"
        ) from error
    return safetensors
