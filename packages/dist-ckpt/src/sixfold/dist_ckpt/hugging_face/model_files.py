"""Files of safetensors for an export: which tensors lie in which file, who writes it, and the writing.

    whole tensors + Options --> ExportPlan (this file) --> exporting.py, tools/conversion.py
    parts of tensors, in the order of the plan --> FilesWriter (this file) --> the files, on disk

Each file is streamed by one rank. The ``safetensors`` library (extra ``safetensors``) would want a whole file's bytes
in memory to write it. It opens each file afterwards, which checks header and lengths by independent code.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from sixfold.dist_ckpt.errors import CheckpointError, CorruptError, MismatchError
from sixfold.dist_ckpt.formats import safetensors
from sixfold.dist_ckpt.formats.safetensors import INDEX_NAME, NAMES, PAIRS
from sixfold.dist_ckpt.hugging_face.key_map import KeyMap
from sixfold.dist_ckpt.plans import batches
from sixfold.dist_ckpt.plans.batches import nbytes_of
from sixfold.dist_ckpt.progress import Meter
from sixfold.dist_ckpt.state import plain_types
from sixfold.dist_ckpt.state.records import ShardedTensor
from sixfold.dist_ckpt.state.stateful import LIKE_PARAMETERS
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes
from sixfold.dist_ckpt.storage.local import LocalStore, write_file
from sixfold.dist_ckpt.storage.store import Save

_CONFIG = "config.json"
MAX_SHARD_BYTES = 5_000_000_000
_OF_OPTIMIZERS = re.compile(r"(?:.*\.)?(?:step|(?:state|param_groups)\..+)", re.DOTALL)  # as torch names their state
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class File(NamedTuple):
    """One file: its tensors in the order of their bytes, and all bytes before those."""

    name: str
    keys: tuple[str, ...]
    head: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """The files of an export. The same whatever the number of ranks is; each file is written by one of them.

    Attributes:
        files: in order, without the index.
        sources: by their names in the files, the tensors that are read: our key, the dtype that they have.
        dtype: of the values that are converted; None converts none.
    """

    files: tuple[File, ...]
    sources: Mapping[str, ShardedTensor]
    dtype: torch.dtype | None

    @property
    def nbytes(self) -> int:
        """Of all values in the files."""
        return sum(file.nbytes for file in self.files)

    @property
    def float_dtype(self) -> torch.dtype | None:
        """Of most floating-point numbers in the files, but for float8, which goes with scales; None without any."""
        counts = Counter[torch.dtype]()
        for record in self.sources.values():
            if (dtype := dtype_of(record, self.dtype)) in _DTYPES:
                counts[dtype] += prod(record.global_shape)
        return self.dtype or next((dtype for dtype, _ in counts.most_common(1)), None)

    @property
    def names(self) -> list[str]:
        """Of all files, the index among them."""
        return [file.name for file in self.files] + [INDEX_NAME] * (len(self.files) > 1)

    def of_rank(self, rank: int, ranks: int) -> list[File]:
        """The files that a rank writes: neighbours, and with more ranks than files those of ranks far apart."""
        return [file for at, file in enumerate(self.files) if at * ranks // len(self.files) == rank]

    def batches(self, files: Iterable[File], most: int | None = None) -> Iterator[list[ShardedTensor]]:
        """What is read for these files, in the order in which it is written."""
        return batches.batches((self.sources[name] for file in files for name in file.keys), most)

    @property
    def digest(self) -> str:
        """Equal for plans that are equal."""
        return sha256(b"".join(file.name.encode() + file.head for file in self.files)).hexdigest()

    def __str__(self) -> str:
        return "\n".join(f"{file.name}: {len(file.keys)} tensors, {file.nbytes} bytes" for file in self.files)


@dataclass(frozen=True, slots=True)
class Options:
    """What an export does with names, values and files; ``exporting.export`` says what each is.

    Raises:
        CheckpointError: no KeyMap; a dtype that values are not converted to.
    """

    key_map: KeyMap | None = None
    dtype: torch.dtype | None = None
    max_shard_bytes: int | None = MAX_SHARD_BYTES

    def __post_init__(self) -> None:
        if self.key_map is not None and not isinstance(self.key_map, KeyMap):
            raise CheckpointError(f"key_map is a {type(self.key_map).__name__}; it is a hugging_face.KeyMap")
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise CheckpointError(f"dtype is {self.dtype}; an export converts to one of {', '.join(map(str, _DTYPES))}")

    def planned(self, tensors: Mapping[str, ShardedTensor]) -> ExportPlan:
        """The plan of an export of whole tensors, which are given by our keys.

        Raises:
            MismatchError: a name that the KeyMap does not take, or gives to two. CheckpointError: as ``plan_files``.
        """
        names = {key: key for key in tensors} if self.key_map is None else self.key_map.theirs(tensors)
        sources = {names[key]: record for key, record in tensors.items()}
        written = {
            name: replace(record, data=None, dtype=dtype_of(record, self.dtype)) for name, record in sources.items()
        }
        return ExportPlan(tuple(plan_files(written, self.max_shard_bytes)), sources, self.dtype)


def plan_files(tensors: Mapping[str, ShardedTensor], max_shard_bytes: int | None) -> list[File]:
    """Share whole tensors among files of at most ``max_shard_bytes`` of values, in the order of their names.

    One file is ``model.safetensors``, as transformers calls it; several are numbered, and go with an index.

    Raises:
        CheckpointError: the library is missing; a dtype or a name that the format does not know; ``max_shard_bytes``
            < 1.
    """
    library()
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; it is >= 1")
    for key, record in sorted(tensors.items()):
        if record.dtype not in NAMES or (record.dtype is PAIRS and not record.global_shape):
            raise CheckpointError(f"{key}: safetensors knows no {record.dtype}; leave it out with keys")
        if key == "__metadata__" or key != key.encode(errors="replace").decode():
            raise CheckpointError(f"{key!r}: safetensors knows no tensor of this name; leave it out with keys")
    most = sum(map(nbytes_of, tensors.values())) + 1 if max_shard_bytes is None else max_shard_bytes
    groups = [*batches.grouped(sorted(tensors), lambda key: nbytes_of(tensors[key]), most)] or [[]]
    count = len(groups)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return [
        _file(name if count > 1 else "model.safetensors", keys, tensors)
        for name, keys in zip(names, groups, strict=True)
    ]


def _file(name: str, keys: Sequence[str], tensors: Mapping[str, ShardedTensor]) -> File:
    # Wide elements first: each tensor then starts at a multiple of its element's size.
    ordered = sorted(keys, key=lambda key: (-tensors[key].dtype.itemsize, key))
    head = safetensors.encode_header([(key, tensors[key].dtype, tensors[key].global_shape) for key in ordered])
    return File(name, tuple(ordered), head, sum(nbytes_of(tensors[key]) for key in keys))


def index_of(files: Sequence[File]) -> bytes:
    """The content of the index of several files."""
    places = {name: file.name for file in files for name in file.keys}
    return safetensors.encode_index(places, sum(file.nbytes for file in files))


def written_dtype(key: str, stored: torch.dtype, shape: Sequence[int], dtype: torch.dtype | None) -> torch.dtype:
    """What values of a stored dtype become: integers, and float8, which goes with scales, stay as they are.

    So do single numbers of an optimizer: in bfloat16 its step 301 would be 300, and one more would still be 300.
    """
    is_number = not shape and _OF_OPTIMIZERS.fullmatch(key) and key.rpartition(".")[2] not in LIKE_PARAMETERS
    return stored if dtype is None or stored not in _DTYPES or is_number else dtype


def dtype_of(record: ShardedTensor, dtype: torch.dtype | None) -> torch.dtype:
    """``written_dtype`` of a tensor, or of a part of it."""
    return written_dtype(record.key, record.dtype, record.global_shape, dtype)


def converted(key: str, values: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Values in the dtype in which they are written.

    Raises:
        MismatchError: a finite value would become infinite.
    """
    new = written_dtype(key, values.dtype, values.shape, dtype)
    if new == values.dtype:
        return values
    found = values.to(new)
    infinite = found.isinf()
    if bool(infinite.any()) and bool((infinite & values.isfinite()).any()):
        largest = float(values[values.isfinite()].abs().max())
        raise MismatchError(
            f"{key}: {largest:g} is finite in {values.dtype} and infinite in {new}. Export in a dtype of a wider "
            "range, such as torch.bfloat16"
        )
    return found


class FilesWriter:
    """Writes files in order, from their tensors, each whole or as consecutive ranges. Closed files are on disk."""

    def __init__(self, folder: Path, files: Iterable[File], meter: Meter | None = None) -> None:
        self._folder, self._files, self._meter = folder, iter(files), meter
        self._file: Any = None
        self._current: File | None = None
        self._left = 0

    def add(self, part: torch.Tensor) -> None:
        """The next values."""
        data = tensor_bytes(part.contiguous())
        while len(data) and not self._left:
            if not self._next():
                raise AssertionError(f"{len(data)} bytes are left when all files are full")
        if len(data):
            self._left -= self._file.write(data)
            assert self._left >= 0, f"{self._current} got {-self._left} bytes too many"
            if self._meter is not None:
                self._meter.add(len(data))

    def finish(self) -> None:
        """Write what has no bytes, and close the last file."""
        while self._next():
            assert self._left == 0, f"{self._current} lacks {self._left} bytes"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _next(self) -> bool:
        if self._current is not None:
            assert self._left == 0, f"{self._current.name} lacks {self._left} bytes"
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            _check_readable(self._folder / self._current.name, self._current)
        self._current = next(self._files, None)
        if self._current is None:
            return False
        self._file = (self._folder / self._current.name).open("xb", buffering=1 << 20)
        self._file.write(self._current.head)
        self._left = self._current.nbytes
        return True


def write_files(folder: Path, files: Iterable[File], parts: Iterable[torch.Tensor], meter: Meter | None = None) -> None:
    """Write files into ``folder``. ``parts``: the tensors of all files in order, see ``FilesWriter``."""
    with FilesWriter(folder, files, meter) as writer:
        for part in parts:  # nothing here keeps a tensor while the next batch of them is read
            writer.add(part)
            del part
        writer.finish()


def _check_readable(path: Path, file: File) -> None:
    with library().safe_open(str(path), framework="pt") as opened:
        found = set(opened.keys())
    if found != set(file.keys):
        raise CorruptError(f"{path} was written with {len(file.keys)} tensors and reads back with {len(found)}")


def publish(
    store: LocalStore, save: Save, plan: ExportPlan, extras: Sequence[Any] = (), architecture: str | None = None
) -> None:
    """What the first rank does when all files are written: the index, the ``extras``, one rename.

    ``architecture``: the class of the model, for its configuration; None leaves what that says.

    Raises:
        CheckpointError: a file is not there as its rank wrote it; an extra fails, or takes the name of a file.
    """
    staging = Path(save.staging)
    with store.told(save, 0):
        for file in plan.files:
            path = staging / file.name
            if not path.is_file() or path.stat().st_size != len(file.head) + file.nbytes:
                raise CheckpointError(f"{path} is not the file that its rank wrote; nothing else may write there")
        if len(plan.files) > 1:
            write_file(staging, INDEX_NAME, index_of(plan.files))
        before = _states(staging)
        for extra in extras:
            extra.save_pretrained(staging)
        after = _states(staging)
        if changed := [name for name, state in before.items() if after.get(name) != state]:
            raise CheckpointError(f"extras have changed {changed[0]}; they write files beside it, such as config.json")
        if _CONFIG in after:
            _correct(staging / _CONFIG, plan, architecture)
    store.publish(save, [name for name in after if name not in before])


def _correct(path: Path, plan: ExportPlan, architecture: str | None) -> None:
    """A configuration names the dtype of the weights and the class of the model: transformers makes the model so."""
    config = json.loads(path.read_text())
    if not isinstance(config, dict):
        return
    new, dtype = dict[str, Any](), plan.float_dtype
    if dtype is not None and (plan.dtype is not None or config.keys() & {"dtype", "torch_dtype", "model_type"}):
        names = {key for key in ("dtype", "torch_dtype") if key in config} or {"dtype"}
        new = dict.fromkeys(names, str(dtype).removeprefix("torch."))
    if architecture is not None:
        new["architectures"] = [architecture]
    if config | new != config:
        path.write_text(json.dumps(config | new, indent=2, sort_keys=True) + "\n")


def _states(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()}


@contextmanager
def abandoned_on_error(store: LocalStore, save: Save, rank: int) -> Iterator[None]:
    """An error inside removes what was written."""
    try:
        yield
    except BaseException:
        if rank == 0:
            store.abandon(save)
        raise


def library() -> Any:
    """The library, which is an extra. CheckpointError: it is not installed."""
    try:
        import safetensors as found
    except ImportError as error:
        raise CheckpointError(
            "export to safetensors needs the library; pip install 'sixfold-dist-ckpt[safetensors]'"
        ) from error
    return found


def check_no_tensor(name: str, value: Any) -> None:
    """CheckpointError if a value, such as a tuple, holds tensors: they have no name of their own."""
    if any(True for _ in _tensors_in(value, set())):
        raise CheckpointError(
            f"{name} is a {type(value).__name__} that holds tensors; safetensors knows tensors by name alone. Convert "
            "to torch_dist, which keeps it, or give keys that do not match it, such as 'model.*'"
        )


def check_no_other_dtype(name: str, value: Any, dtype: torch.dtype | None) -> None:
    """CheckpointError if a value that is kept as it is holds tensors which are to become ``dtype``."""
    found = ((own.dtype, own.shape) for own in _tensors_in(value, set()))
    kept = next((own for own, shape in found if written_dtype(name, own, shape, dtype) != own), None)
    if kept is not None:
        raise CheckpointError(
            f"{name} is a {type(value).__name__} that holds {kept}, and dtype is {dtype}: only dense tensors in dicts "
            "and lists are converted. Leave dtype out, or save that value in the dtype that it shall have"
        )


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, str | bytes | int | float | type(None)) and id(value) not in seen:
        seen.add(id(value))
        for pair in [*plain_types.parts_of(value)] or [*getattr(value, "__dict__", {}).items()]:
            for part in pair:
                yield from _tensors_in(part, seen)
