"""State dicts for the doors to torch's own checkpoints, and what they must come back as.

    contents --> torch.distributed.checkpoint.save, load --> same (this file) --> tests

Nothing here uses the package: what lies in a folder is read with torch's own FileSystemReader.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def contents(value: float = 1.0) -> dict[str, Any]:
    """One leaf of each kind that torch's planner knows: tensors are scaled by ``value``, ``step`` tells it."""
    return {
        "model": {
            "w": torch.arange(24.0).view(4, 6) * value,
            "half": (torch.arange(8.0) * value).to(torch.bfloat16),
            "layers": [{"b": torch.arange(3) * int(value)}, {"b": torch.full((2,), True)}],
            "scalar": torch.tensor(2.5 * value),
            "empty": torch.empty(2, 0),
            "turned": (torch.arange(12.0).view(3, 4) * value).t(),
        },
        "step": int(value),
        "lr": 0.25 * value,
        "text": "a b",
        "nothing": None,
        "raw": b"\x00\xff" * 3,
        "stream": io.BytesIO(b"of a loader"),
        "plan": [1, {"a": (2, 3)}],
    }


def blank() -> dict[str, Any]:
    """The same names with nothing of the values: what a job has before it loads."""
    model = contents(0.0)["model"]
    return {**dict.fromkeys(contents()), "model": model, "plan": [0, {"a": (0, 0)}]}


def same(found: Any, expected: Any) -> bool:
    """Equal, of the same kind, all the way down; tensors by dtype, shape and value."""
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, io.BytesIO):
        return isinstance(found, io.BytesIO) and found.getvalue() == expected.getvalue()
    if isinstance(expected, Mapping):
        return (
            isinstance(found, Mapping)
            and found.keys() == expected.keys()
            and all(same(found[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and bool(found == expected)


def entries(metadata: dcp.Metadata) -> dict[str, Any]:
    """``state_dict_metadata`` without chunks that hold nothing, of which only torch's writer keeps a place."""
    found = metadata.state_dict_metadata
    for entry in found.values():
        if isinstance(entry, TensorStorageMetadata):
            entry.chunks = [chunk for chunk in entry.chunks if 0 not in chunk.sizes]
    return found


def places(metadata: dcp.Metadata) -> dict[Any, tuple[str, int, int]]:
    """``storage_data`` of those."""
    kept = {(key, tuple(c.offsets)) for key, entry in entries(metadata).items() for c in getattr(entry, "chunks", ())}
    return {
        index: (info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
        if index.offset is None or (index.fqn, tuple(index.offset)) in kept
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks that there is one process and that a checkpoint is overwritten."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def dcp_save(state: dict[str, Any], writer: Any = None, **options: Any) -> Any:
    """``torch.distributed.checkpoint.save``, of one process unless a group is there."""
    with quiet():
        return dcp.save(state, storage_writer=writer, **options)


def dcp_load(state: dict[str, Any], reader: Any = None, **options: Any) -> dict[str, Any]:
    """``torch.distributed.checkpoint.load``; gives back the state dict, which is filled in place."""
    with quiet():
        dcp.load(state, storage_reader=reader, **options)
    return state


def everything(reader: Any) -> dict[str, Any]:
    """All that a folder holds, nested as it was, by torch's planner that needs no names."""
    found: dict[str, Any] = {}
    _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def step_of(path: Path) -> int:
    """Which ``contents`` a folder holds, by torch's own reader; fails on a mixture of two."""
    found = everything(dcp.FileSystemReader(path))
    assert same(found, contents(float(found["step"]))), "a mixture of two saves"
    return int(found["step"])


class Meddling(DefaultSavePlanner):
    """A planner that does something else at the n-th value that a writer asks it for."""

    def __init__(self, action: Any, at: int = 2) -> None:
        super().__init__()
        self.action, self.left = action, at

    def resolve_data(self, write_item: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            self.action()
        return super().resolve_data(write_item)
