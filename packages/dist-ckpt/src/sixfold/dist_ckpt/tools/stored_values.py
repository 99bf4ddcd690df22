"""Values of any checkpoint in bounded memory, for looking, comparing and converting.

    folder --> listed --> batches --> read (this file) --> commands.py: diff; conversion.py; damage_check.py
    bytes of common.pt, of objects --> inert stand-ins for unknown classes (this file) --> safe_globals of a load

megatron puts its ``argparse.Namespace`` and enums into common data. A load refuses the user's classes unless they are
allowed by name. A tool that only shows or compares needs no class. So each unknown class is replaced by a stand-in
that holds what the pickle says of it. Nothing of the class is imported or run.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sixfold.dist_ckpt import serialization
from sixfold.dist_ckpt.checkpoint.opening import Checkpoint, open_checkpoint
from sixfold.dist_ckpt.errors import MismatchError, typed
from sixfold.dist_ckpt.formats import weights_only
from sixfold.dist_ckpt.hugging_face.model_files import check_no_tensor
from sixfold.dist_ckpt.plans import batches
from sixfold.dist_ckpt.state import plain_types, tree
from sixfold.dist_ckpt.state.dcp_names import PlainObject
from sixfold.dist_ckpt.state.placeholders import without_placeholders
from sixfold.dist_ckpt.state.records import ShardedBase, ShardedObject, ShardedTensor
from sixfold.dist_ckpt.state.tensor_memory import check_readable
from sixfold.dist_ckpt.storage import local as storage

_KINDS = (bool, int, float, complex, bytes, bytearray, set, frozenset)  # equal across kinds in Python


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


def object_bytes(folder: Path) -> dict[str, int]:
    """Bytes that objects take in their files, by stored key; of a format that the built-in engine reads."""
    checkpoint = opened(folder)
    return {} if checkpoint is None else {key: frame.length for key, frame in checkpoint.manifest.objects.items()}


def read(folder: Path, records: Iterable[ShardedBase], safe_globals: Sequence[Any] | None = None) -> list[Any]:
    """The values of records, checked. ``safe_globals``: None has unknown classes stood in for, for looking only."""
    state = dict(enumerate(records))
    objects = [record.unique_key for record in state.values() if isinstance(record, ShardedObject)]
    if safe_globals is None:
        safe_globals = _stand_ins(_pickles(folder, objects))
    loaded = serialization.load(state, folder, group=None, validate_access_integrity=False, safe_globals=safe_globals)
    return [loaded[index] for index in state]


def common_data(folder: Path) -> dict[Any, Any]:
    """Common data of a checkpoint without placeholders, unknown classes stood in for."""
    return without_placeholders(serialization.common_data(folder, _stand_ins(_pickles(folder, ()))))


def plain_tensors(folder: Path, keys: str, tensors: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors that stand in common data alone and whose place matches a glob. ``tensors``: other names.

    Raises:
        CheckpointError: one of them has no dense form, as a sparse or a quantised tensor; two have one name.
    """
    plain = serialization.plain_tensors_of(common_data(folder), tensors, keys)
    found = {key: value.detach() for key, value in plain.items()}
    for key, value in found.items():
        check_readable(key, value)
    return {key: value.resolve_conj().resolve_neg().contiguous() for key, value in found.items()}


def check_tensors_alone(folder: Path, keys: str, objects: Iterable[ShardedObject]) -> None:
    """Refuse a tensor within another value of common data or of plain DCP, such as a tuple: it has no name of its own.

    Raises:
        CheckpointError: with the place, and how to leave it out.
    """
    for path, leaf in tree.leaves(common_data(folder)):
        if fnmatchcase(name := tree.key_text(path), keys) and not isinstance(leaf, torch.Tensor):
            check_no_tensor(name, leaf)
    sizes = object_bytes(folder)
    found = [record for record in objects if isinstance(record, PlainObject)]
    for group in batches.grouped(found, lambda record: sizes.get(record.unique_key, 0), batches.BATCH_BYTES):
        for record, value in zip(group, read(folder, group), strict=True):
            check_no_tensor(record.key, value)


def _pickles(folder: Path, objects: Sequence[str]) -> Iterator[bytes]:
    if (folder / "common.pt").exists():
        yield typed(lambda: storage.read_small(folder / "common.pt"))
    if objects and (checkpoint := opened(folder)) is not None:
        for frame in (checkpoint.manifest.objects[name] for name in objects):
            yield bytes(checkpoint.frame(frame))


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
        if not isinstance(other, _StandIn) or self.name != other.name:
            return False
        return equal((self.arguments, self.state), (other.arguments, other.state))

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _stand_ins(files: Iterable[bytes]) -> list[tuple[type, str]]:
    """``safe_globals`` for a load of these bytes."""
    names = set[str]()
    for data in files:
        with suppress(Exception):  # damaged bytes raise whatever they like; the load tells it
            found = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
            names |= set(found) - {name for _, name in plain_types.allowed(data, ())}
    return [(type("_StandIn", (_StandIn,), {"name": name}), name) for name in names]


def equal(a: Any, b: Any) -> bool:
    """Whether two values of common data are the same, tensors, arrays and NaN included."""
    if _is_unusual(a) or _is_unusual(b):  # those that have no ``==``
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _saved(a) == _saved(b)
    if hasattr(a, "shape") or hasattr(b, "shape"):  # tensors, and arrays and numbers of numpy
        if not hasattr(a, "shape") or not isinstance(b, torch.Tensor if isinstance(a, torch.Tensor) else type(a)):
            return False  # every object is one of ``object``, and numpy's float64 is a ``float``
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque) and isinstance(b, list | tuple | deque):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Namespace | SimpleNamespace) and type(a) is type(b):
        return equal(vars(a), vars(b))
    if type(a) is not type(b) and isinstance(a, _KINDS) and isinstance(b, _KINDS):
        return False  # True is 1 and 1.0, b"a" a bytearray, and a load gives back what was saved
    return bool(a == b) or (a != a and b != b and type(a) is type(b))


def _is_unusual(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided)


def _saved(tensor: torch.Tensor) -> bytes:
    return weights_only.dump(tensor, "a tensor")
