"""Tools: look at checkpoints, check, convert and compare them. What the command ``sixfold-ckpt`` prints.

    folder --> inspect, verify, convert, diff (this file) --> dict --> __main__.py: text or JSON

One plain process, no group. Tensors pass in batches of rows, objects a few at a time, so that memory stays bounded
whatever the size. What is at a URL is fetched before ``progress`` is first called, which tells of the work on it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from sixfold.dist_ckpt.checkpoint import safetensors_folder
from sixfold.dist_ckpt.checkpoint.opening import read_config
from sixfold.dist_ckpt.collectives.exchange import Exchange, Group, errors_to_all
from sixfold.dist_ckpt.errors import CheckpointError, MismatchError, typed
from sixfold.dist_ckpt.formats import zstd
from sixfold.dist_ckpt.geometry.box import cuts
from sixfold.dist_ckpt.hugging_face.key_map import KeyMap
from sixfold.dist_ckpt.hugging_face.model_files import ExportPlan, Options
from sixfold.dist_ckpt.plans.batches import batches, grouped, nbytes_of
from sixfold.dist_ckpt.progress import Meter, Progress
from sixfold.dist_ckpt.state import tree
from sixfold.dist_ckpt.state.dcp_names import PlainObject
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import comparable, has_values
from sixfold.dist_ckpt.storage.by_pointer import folders
from sixfold.dist_ckpt.storage.local import LocalStore, local_path, located
from sixfold.dist_ckpt.storage.store import Store
from sixfold.dist_ckpt.tools import conversion, damage_check, stored_values
from sixfold.dist_ckpt.tools.stored_values import equal

_COMPARED_ELEMENTS = 1 << 18  # at once; differences take some 60 bytes each
_OBJECT_BYTES = 16 * 2**20  # of objects that are compared at once, as they are stored


def inspect(path: str | Path | Store, *, keys: str = "*") -> dict[str, Any]:
    """What a checkpoint holds; no tensor is read.

    Args:
        keys: a glob; tensors and objects whose key does not match are left out.
    Returns:
        path, backend, version, save_id, nbytes (of the tensors listed), tensors [key, dtype, shape, nbytes, chunks],
        objects [key, shape], common [top-level keys], files [name, nbytes], integrity (whether each byte has a
        checksum), compress ("zstd" if chunks are compressed, else None). The backend and version are those of
        metadata.json. They are "torch_dist" and None for a plain DCP folder, "safetensors" and None for one of Hugging
        Face.
    Raises:
        CheckpointError: no such folder, or it cannot be read.
    """
    with damage_check.opened(path) as folder:
        config, checkpoint = read_config(folder), stored_values.opened(folder)
        backend, version = config[0] if config else ("torch_dist", None)
        tensors, objects = stored_values.listed(folder, keys)
        stored = {} if checkpoint is None else checkpoint.manifest.tensors
        grids = {o.key: [] if isinstance(o, PlainObject) else list(o.global_shape) for o in objects.values()}
        return {
            "path": damage_check.name_of(path, folder),
            "backend": safetensors_folder.BACKEND if safetensors_folder.is_one(folder) else backend,
            "version": version,
            "save_id": None if checkpoint is None else checkpoint.manifest.save_id,
            "nbytes": sum(map(nbytes_of, tensors.values())),
            "tensors": [
                {
                    "key": key,
                    "dtype": str(record.dtype).removeprefix("torch."),
                    "shape": list(record.global_shape),
                    "nbytes": nbytes_of(record),
                    "chunks": stored[key].chunk_count if key in stored else None,
                }
                for key, record in tensors.items()
            ],
            "objects": [{"key": key, "shape": shape} for key, shape in sorted(grids.items())],
            "common": [str(key) for key in stored_values.common_data(folder)],
            "files": [{"name": name, "nbytes": nbytes} for name, nbytes in damage_check.files(folder)],
            "integrity": checkpoint is not None and checkpoint.integrity is not None,
            "compress": "zstd" if checkpoint is not None and checkpoint.manifest.compressed else None,
        }


def verify(path: str | Path | Store, *, quick: bool = False, progress: Progress | None = None) -> dict[str, Any]:
    """Check a checkpoint and report all damage, not the first.

    Args:
        quick: names, sizes and metadata only; otherwise every byte that has a checksum.
        progress: called with bytes checked and in all, as of ``save``; an exception in it ends the call.
    Returns:
        path, ok, checked, checked_bytes, problems [kind, file, key or None, detail]. ``checked`` is False with
        ``quick``, and in a format without checksums. Kinds: "missing", "size" and "extra"
        (files), "checksum" (bytes), "unreadable" (a file that is not what it should be), "mixed" (files of two
        saves), "unfinished" (a save that never ended), "unsafe" (a pickle or a path that no checkpoint needs).
        leftovers: folders of saves that never finished, beside the files of the checkpoint, in a copy of a store; no
        problem of the checkpoint, and nothing reads them: they may be removed.
    Raises:
        MismatchError: there is no such folder.
    """
    with damage_check.opened(path, whole=not quick) as folder:
        problems, checked = typed(lambda: damage_check.problems(folder, quick=quick, progress=progress))
        name, leftovers = (
            damage_check.name_of(path, folder),
            sorted(folders(file for file, _ in damage_check.files(folder))),
        )
    counts = {"checked": checked > 0, "checked_bytes": checked}
    return {"path": name, "ok": not problems, **counts, "problems": problems, "leftovers": leftovers}


def convert(
    src: str | Path | Store,
    dst: str | Path | Store,
    *,
    to: str,
    max_shard_bytes: int | None = None,
    keys: str = "*",
    key_map: KeyMap | None = None,
    dtype: torch.dtype | None = None,
    compress: str | None = None,
    progress: Progress | None = None,
    safe_globals: Sequence[Any] = (),
    group: Group = None,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Write a checkpoint in another format; every byte of the source that has a checksum is checked.

    Args:
        dst: a folder that does not exist or is empty; it appears complete or not at all.
        to: "torch_dist", "zarr", or "safetensors", which takes the tensors alone. Plain tensors, which are common
            data, get their place in the state dict as name, joined by dots. A tensor within a tuple or another
            object is an error. A ``ShardedObject`` stays behind.
        max_shard_bytes: safetensors only: tensors per file, unless one tensor alone is larger.
        keys: a glob; other tensors and objects are left out.
        key_map: names of the tensors in safetensors by those in the checkpoint: ``hugging_face.KeyMap``.
        dtype: values of floating-point numbers are converted to it; one that would become infinite is an error. Step
            counts and learning rates of optimizers stay as they are.
        compress: torch_dist only: as of ``save``. What is compressed in the source is plain without it.
        progress: called with bytes of tensors done and in all, the last time before ``dst`` appears.
        safe_globals: as in ``load``.
        group: safetensors only: the ranks that share the files among them, all of which make this call; None for this
            process alone, "world" for all.
        timeout_s: the longest wait for one of them.
    Returns:
        src, dst, to, tensors (their number), nbytes (of tensors), files (names).
    Raises:
        StorageError: ``dst`` is not empty. MismatchError: ``key_map`` does not fit the names. CheckpointError: the
            source cannot be read, or not be written as ``to``.
    """
    with errors_to_all(group, timeout_s):
        if to not in ("torch_dist", "zarr", "safetensors"):
            raise CheckpointError(f"to is {to!r}; it is 'torch_dist', 'zarr' or 'safetensors'")
        options = Options(key_map, dtype, max_shard_bytes)
        for name, value in {"max_shard_bytes": max_shard_bytes, "group": group}.items():
            if value is not None and to != "safetensors":
                raise CheckpointError(f"{name} is {value} and to is {to!r}; it goes with 'safetensors'")
        zstd.check_option(compress)
        if compress is not None and to != "torch_dist":
            raise CheckpointError(f"compress is {compress!r} and to is {to!r}; it goes with 'torch_dist'")
        if not isinstance(dst, Store):
            located(dst, "dst")
        if to != "torch_dist":
            local_path(dst, f"{to} is written into a local folder; upload it")
    if to == "safetensors":
        return _to_safetensors(src, dst, keys, options, Exchange(group, timeout_s), progress)
    with damage_check.opened(src, whole=True) as source:
        wanted, objects = stored_values.listed(source, keys)
        _check_matches(keys, src, [*wanted, *objects])
        if key_map is not None and not safetensors_folder.is_one(source):
            raise CheckpointError(
                f"{source} is no folder of safetensors, and to is {to!r}; key_map names tensors on the way from such "
                "folders and to them"
            )
        names = None if key_map is None else key_map.ours(wanted)
        target, files = typed(
            lambda: conversion.to_checkpoint(
                source, dst, wanted, objects, to, progress, safe_globals, names=names, dtype=dtype, compress=compress
            )
        )
        return _converted(damage_check.name_of(src, source), target, to, wanted.values(), files)


def _to_safetensors(
    src: str | Path | Store,
    dst: str | Path | Store,
    keys: str,
    options: Options,
    exchange: Exchange,
    progress: Progress | None,
) -> dict[str, Any]:
    """``convert`` by one or all ranks: what they look at first is an error on all if it is one on any."""
    with ExitStack() as stack:

        def looked() -> tuple[Path, dict[str, ShardedTensor], dict[str, torch.Tensor], ExportPlan]:
            source = stack.enter_context(damage_check.opened(src, whole=True))
            wanted, objects = stored_values.listed(source, keys)
            plain = stored_values.plain_tensors(source, keys, wanted)
            _check_matches(keys, src, [*wanted, *plain])
            stored_values.check_tensors_alone(source, keys, objects.values())
            whole = {key: conversion.whole_record(key, value) for key, value in plain.items()} | wanted
            return source, whole, plain, options.planned(whole)

        source, whole, plain, plan = exchange.run_on_all(looked)
        store = LocalStore(local_path(dst, "safetensors are written into a local folder").resolve())
        files = conversion.to_safetensors(source, store, plan, plain, exchange, progress)
        return _converted(damage_check.name_of(src, source), store.name, "safetensors", whole.values(), files)


def _converted(src: str, dst: str, to: str, tensors: Collection[ShardedTensor], files: Sequence[str]) -> dict[str, Any]:
    nbytes = sum(map(nbytes_of, tensors))
    return {"src": src, "dst": dst, "to": to, "tensors": len(tensors), "nbytes": nbytes, "files": list(files)}


def _check_matches(keys: str, where: str | Path | Store, matches: Collection[str]) -> None:
    """A mistyped glob is told, and not taken for a checkpoint without tensors."""
    if keys != "*" and not matches:
        raise MismatchError(f"keys is {keys!r}, which matches nothing of {where}; inspect lists what there is")


def diff(
    a: str | Path | Store,
    b: str | Path | Store,
    *,
    rtol: float = 0.0,
    keys: str = "*",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare two checkpoints by value, whatever layout and format they were saved in.

    Args:
        rtol: values x of ``a`` and y of ``b`` are equal if |x - y| <= rtol * |y|; NaN and infinity equal
            themselves alone.
        keys: a glob; other tensors and objects are left out.
        progress: called with bytes of ``a`` compared and in all, of tensors and of objects.
    Returns:
        equal, only_in_a, only_in_b (keys), different [key, reason ("shape", "dtype" or "values"), count (elements
        that differ), max_abs], common_differs [paths]. count and max_abs are None but for values of tensors.
    Raises:
        CheckpointError: one of them cannot be read.
    Memory: two batches of tensors, or the largest object of both sides.
    """
    if not rtol >= 0:
        raise CheckpointError(f"rtol is {rtol}; it is >= 0")
    with damage_check.opened(a, whole=True) as first, damage_check.opened(b, whole=True) as second:
        sides = first, second
        left, right = (
            {**tensors, **objects} for tensors, objects in (stored_values.listed(side, keys) for side in sides)
        )
        _check_matches(keys, f"{first} and {second}", left.keys() | right.keys())
        different: list[dict[str, Any]] = []
        tensors: list[ShardedTensor] = []
        objects: list[str] = []
        for key in sorted(left.keys() & right.keys()):
            one, other = left[key], right[key]
            if not isinstance(one, ShardedTensor) or not isinstance(other, ShardedTensor):
                objects.append(key)
            elif one.global_shape != other.global_shape or one.dtype != other.dtype:
                different.append(_entry(key, "shape" if one.global_shape != other.global_shape else "dtype"))
            else:
                tensors.append(one)
        sizes = [stored_values.object_bytes(side) for side in sides]
        nbytes = sum(map(nbytes_of, tensors)) + sum(sizes[0].get(key, 0) for key in objects)
        meter = Meter(progress, lambda: nbytes)
        different += _different_tensors(sides, tensors, rtol, meter)
        for group in grouped(objects, lambda k: max(s.get(k, _OBJECT_BYTES) for s in sizes), _OBJECT_BYTES):
            different += _different_objects(sides, group, [(left[key], right[key]) for key in group])
            meter.add(sum(sizes[0].get(key, 0) for key in group))
        common = stored_values.common_data(first), stored_values.common_data(second)
        plain, entries = _plain_on_one_side(sides, (left, right), common, rtol)
        different += entries
        found = {
            "only_in_a": sorted(left.keys() - right.keys() - plain),
            "only_in_b": sorted(right.keys() - left.keys() - plain),
            "different": sorted(different, key=lambda entry: str(entry["key"])),
            "common_differs": _differing_paths(*common, plain),
        }
        meter.finish()
        return {"equal": not any(found.values()), **found}


def _entry(key: str, reason: str, count: int | None = None, max_abs: float | None = None) -> dict[str, Any]:
    return {"key": key, "reason": reason, "count": count, "max_abs": max_abs}


def _different_objects(
    sides: tuple[Path, Path], keys: Sequence[str], pairs: Sequence[tuple[ShardedBase, ShardedBase]]
) -> list[dict[str, Any]]:
    """What differs of a few objects; they are in memory twice, and gone when this returns."""
    found = (stored_values.read(side, records) for side, records in zip(sides, zip(*pairs, strict=True), strict=True))
    return [_entry(key, "values") for key, x, y in zip(keys, *found, strict=True) if not equal(x, y)]


def _different_tensors(
    sides: tuple[Path, Path], tensors: Sequence[ShardedTensor], rtol: float, meter: Meter
) -> list[dict[str, Any]]:
    found: dict[str, tuple[int, float]] = {}
    for batch in batches(tensors):
        _compare_batch(sides, batch, rtol, found)
        meter.add(sum(map(nbytes_of, batch)))
    return [_entry(key, "values", *found[key]) for key in found]


def _compare_batch(
    sides: tuple[Path, Path], batch: Sequence[ShardedTensor], rtol: float, found: dict[str, tuple[int, float]]
) -> None:
    """Add what differs in a batch; it is in memory twice, once of each folder, and gone when this returns."""
    for part, x, y in zip(batch, *(stored_values.read(side, batch) for side in sides), strict=True):
        for cut in cuts(x.shape, _COMPARED_ELEMENTS):
            count, max_abs = _compare(x[cut], y[cut], rtol)
            if count:
                before = found.get(part.key, (0, 0.0))
                found[part.key] = before[0] + count, max(before[1], max_abs)


def _compare(x: torch.Tensor, y: torch.Tensor, rtol: float) -> tuple[int, float]:
    """Elements that differ, and by how much at most."""
    x, y = comparable(x), comparable(y)
    differs = (x != y) & ~((x != x) & (y != y))
    if not bool(differs.any()):
        return 0, 0.0
    kind = torch.complex128 if x.is_complex() else torch.float64
    p, q = x[differs].to(kind), y[differs].to(kind)
    gap = (p - q).abs()
    gap[torch.isnan(gap)] = torch.inf  # one of the two is NaN
    if not (x.is_floating_point() or x.is_complex()):
        gap = gap.clamp(min=1.0)  # of integers that float64 does not tell apart
    # What is infinite on one side is far from all else: rtol * inf would allow any gap.
    is_finite = torch.isfinite(p) & torch.isfinite(q)
    far = gap[~((gap <= rtol * q.abs()) & is_finite)]
    return far.numel(), float(far.max()) if far.numel() else 0.0


def _plain_on_one_side(
    sides: tuple[Path, Path], listed: tuple[dict[str, Any], dict[str, Any]], common: tuple[Any, Any], rtol: float
) -> tuple[set[str], list[dict[str, Any]]]:
    """Names of tensors that one side has in common data, as older saves have plain ones, and what differs of them."""
    names, different = set[str](), list[dict[str, Any]]()
    for one, other in ((0, 1), (1, 0)):
        plain = {tree.key_text(path): leaf for path, leaf in tree.leaves(common[other]) if _is_dense(leaf)}
        for key in sorted(listed[one].keys() & plain.keys() - listed[other].keys()):
            record, tensor = listed[one][key], plain[key].detach()
            if not isinstance(record, ShardedTensor):
                continue
            names.add(key)
            if record.global_shape != tensor.shape or record.dtype != tensor.dtype:
                different.append(_entry(key, "shape" if record.global_shape != tensor.shape else "dtype"))
                continue
            pair = stored_values.read(sides[one], [record])[0], tensor
            count, max_abs = _compare(*(pair if one == 0 else pair[::-1]), rtol)
            if count:
                different.append(_entry(key, "values", count, max_abs))
    return names, different


def _is_dense(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and has_values(leaf)


def _differing_paths(left: Any, right: Any, compared: Collection[str]) -> list[str]:
    """Paths of common data that differ, but for those of tensors that were ``compared``."""
    # An empty dict is a leaf; at the top it says no more than that the paths of the other side are missing.
    x, y = ({path: leaf for path, leaf in tree.leaves(part) if path} for part in (left, right))
    x, y = ({path: leaf for path, leaf in side.items() if tree.key_text(path) not in compared} for side in (x, y))
    missing = object()
    differing = {path for path in x.keys() | y.keys() if not equal(x.get(path, missing), y.get(path, missing))}
    return sorted(set(map(tree.path_text, differing)))
