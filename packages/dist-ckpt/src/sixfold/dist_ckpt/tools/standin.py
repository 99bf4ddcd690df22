"""Common data and objects of any checkpoint as plain values, for looking and comparing only.

    common.pt, object frames --> standin.py (this file) --> values; classes become inert stand-ins

megatron puts its ``argparse.Namespace`` and enums into common data. A load refuses them unless they
are allowed by name; a tool that only shows or compares needs no class: each unknown one is replaced by a stand-in
that holds what the pickle says of it, and nothing of it is imported or run.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.errors import CorruptError, MismatchError, UnsafeError
from sixfold.dist_ckpt.state.records import ShardedObject
from sixfold.dist_ckpt.stores import local as storage
from sixfold.dist_ckpt.stores.folder import Checkpoint, open_checkpoint


class _StandIn:
    """An object of a class that is not imported: its name, arguments and state."""

    name = ""
    arguments: tuple[Any, ...] = ()  # a pickle may make an object without calling its class
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _StandIn)
            and self.name == other.name
            and equal(self.arguments, other.arguments)
            and equal(self.state, other.state)
        )

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"


def stand_ins(folder: Path) -> list[Any]:
    """``safe_globals`` that let a load of tensors alone pass by the classes in common data."""
    path = folder / "common.pt"
    return _stand_ins(storage.read_small(path), path) if path.exists() else []


def load_common(folder: Path) -> dict[Any, Any]:
    """Common data of a checkpoint, classes replaced by stand-ins where that is needed."""
    try:
        return serialization.load_common_state_dict(folder)
    except UnsafeError:
        value = _load(storage.read_small(folder / "common.pt"), folder / "common.pt")
    if not isinstance(value, dict):
        raise CorruptError(f"{folder / 'common.pt'} holds a {type(value).__name__}, not a dict")
    return value


def load_object(folder: Path, stored_key: str) -> Any:
    """One object of a checkpoint."""
    try:
        checkpoint: Checkpoint | None = open_checkpoint(folder)
    except MismatchError:  # another backend: its strategy reads
        checkpoint = None
    if checkpoint is None or stored_key not in checkpoint.manifest.objects:
        record = ShardedObject.empty_from_unique_key(stored_key)
        state = {"object": record}
        return serialization.load(state, folder, group=None, validate_access_integrity=False)["object"]
    frame = checkpoint.manifest.objects[stored_key]
    value = _load(bytes(checkpoint.frame(frame)), checkpoint.folder / frame.file)
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _stand_ins(data: bytes, path: Path) -> list[Any]:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception as error:  # damaged bytes raise whatever they like
        raise _corrupt(path, error) from error
    return [(type("_StandIn", (_StandIn,), {"name": name}), name) for name in names]


def _load(data: bytes, path: Path) -> Any:
    allowed = _stand_ins(data, path)
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # as above
        raise _corrupt(path, error) from error


def _corrupt(path: Path, error: Exception) -> CorruptError:
    return CorruptError(f"{path} is damaged: {type(error).__name__}: {str(error).partition(chr(10))[0]}")


def equal(a: Any, b: Any) -> bool:
    """Whether two values of common data are the same, tensors and NaN included."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return False
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict | OrderedDict) and isinstance(b, dict | OrderedDict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or (a != a and b != b and type(a) is type(b))
