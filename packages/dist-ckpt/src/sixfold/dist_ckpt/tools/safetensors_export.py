"""Export of tensors as safetensors: the format that model hubs and inference engines read.

    tensors' shapes --> plan (this file) --> files and their headers
    plan + values in order --> write (this file) --> model*.safetensors, index

Values are streamed: the ``safetensors`` library (extra ``safetensors``) would want a whole file's bytes in
memory to write it. It opens each file afterwards, which checks header and lengths by independent code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError
from sixfold.dist_ckpt.files.frame import tensor_bytes
from sixfold.dist_ckpt.files.safetensors import INDEX_NAME, NAMES
from sixfold.dist_ckpt.state.records import ShardedTensor

_ALIGNMENT = 8


class File(NamedTuple):
    """One file: its tensors in the order of their bytes, and all bytes before those."""

    name: str
    keys: tuple[str, ...]
    head: bytes
    nbytes: int


def nbytes_of(record: ShardedTensor) -> int:
    """Bytes of what a record holds."""
    return prod(record.local_shape) * record.dtype.itemsize


def plan(tensors: Mapping[str, ShardedTensor], max_shard_bytes: int | None) -> tuple[list[File], bytes | None]:
    """Share whole tensors among files of at most ``max_shard_bytes`` of values, in the order of their keys.

    Returns:
        The files, and the index if there may be several.
    Raises:
        CheckpointError: the library is missing; a dtype that the format does not know; ``max_shard_bytes`` < 1.
    """
    _library()
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; it is >= 1")
    groups: list[list[str]] = [[]]
    filled = 0
    for key, record in sorted(tensors.items()):
        if record.dtype not in NAMES:
            raise CheckpointError(f"{key}: safetensors knows no {record.dtype}; leave it out with keys")
        if groups[-1] and max_shard_bytes is not None and filled + nbytes_of(record) > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += nbytes_of(record)
    if max_shard_bytes is None:
        return [_file("model.safetensors", groups[0], tensors)], None
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    files = [_file(name, keys, tensors) for name, keys in zip(names, groups, strict=True)]
    index = {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": {key: file.name for file in files for key in file.keys},
    }
    return files, json.dumps(index, indent=2, sort_keys=True).encode()


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


def write(folder: Path, files: Sequence[File], index: bytes | None, values: Iterator[torch.Tensor]) -> None:
    """Write the files into ``folder``, on disk when it returns.

    Args:
        values: the tensors of all files in order, each whole or as consecutive ranges.
    """
    for planned in [*files, *([File(INDEX_NAME, (), index, 0)] if index is not None else [])]:
        with (folder / planned.name).open("xb", buffering=1 << 20) as file:
            file.write(planned.head)
            left = planned.nbytes
            while left:
                # Nothing here keeps a tensor while the next batch of them is read.
                left -= file.write(tensor_bytes(next(values).contiguous()))
            assert left == 0, f"{planned.name} got {-left} bytes too many"
            file.flush()
            os.fsync(file.fileno())
    for planned in files:
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
