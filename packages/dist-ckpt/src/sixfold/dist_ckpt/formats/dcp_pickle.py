"""The pickle of ``.metadata``, written opcode by opcode from arrays.

    Index: tensors, and integers for each chunk --> dcp_pickle.py (this file) --> bytes that torch DCP unpickles

Building torch's objects and pickling them costs some 25 us for each chunk, more than writing a small tensor. The bytes
have a fixed form, so they are put together here: the objects that torch 2.13 writes, state by state, without their
import.

[Note: rows] All chunks with the same number of axes have the same opcodes, and only integers differ. These have a
fixed width: ``BININT``, or ``LONG1`` of 8 bytes if one of the batch is longer. Every text is put into the pickle's
memo before the first chunk, under a number. So the chunks of a batch are one array of bytes: each row is the form,
and each integer a few columns. No line of Python is run for a chunk. Besides the result, memory is that of a batch.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import torch

from sixfold.dist_ckpt.errors import ShardingError
from sixfold.dist_ckpt.formats.unpickle import MODULES
from sixfold.dist_ckpt.formats.zstd import DESCRIPTOR
from sixfold.dist_ckpt.geometry.box import Ints
from sixfold.dist_ckpt.geometry.manifest import ByteRange, Manifest
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes

BATCH_ROWS = 1 << 16
_LIMIT32 = 1 << 31
_GLOBALS = {**{name: module for module, name in MODULES}, "Size": "torch"}
_NAMES = ("offsets", "sizes", "fqn", "index", "offset", "relative_path", "length")  # of attributes of each chunk
_CODED = ("transform_descriptors", DESCRIPTOR)  # of those that are compressed


class Part(NamedTuple):
    """Some rows of an ``Index``, in its order."""

    tensor_M: torch.Tensor
    offsets_MD: torch.Tensor
    sizes_MD: torch.Tensor
    file_M: torch.Tensor
    start_M: torch.Tensor
    length_M: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """What a checkpoint holds, as arrays: rows for its chunks, K tensors of at most D axes.

    Attributes:
        tensors: key, dtype and shape of each, sorted by key, which is the order of the bytes of keys too.
        tensor_N: which tensor a chunk is of.
        offsets_ND, sizes_ND: its box; axes that its tensor does not have are not looked at.
        files: names; file_N: which of them holds the chunk; start_N, length_N: where in it.
        order: numbers of the M chunks, by tensor and then by place: among the N rows of the first three arrays, and
            among those of the last three; None: as they stand.
        objects: frames by stored key.
        compressed: those of ``files`` in which each frame is one zstd frame.
        planner_data: what a planner of DCP keeps there, plain values; its own has the path of each key.
    """

    tensors: Sequence[tuple[str, torch.dtype, Ints]]
    tensor_N: torch.Tensor
    offsets_ND: torch.Tensor
    sizes_ND: torch.Tensor
    files: Sequence[str]
    file_N: torch.Tensor
    start_N: torch.Tensor
    length_N: torch.Tensor
    objects: Mapping[str, ByteRange]
    save_id: str | None
    planner_data: object = None
    order: tuple[torch.Tensor, torch.Tensor] | None = None
    compressed: frozenset[str] = frozenset()

    def within(self, folder: str) -> Index:
        """The same, whose files lie in a folder; ``folder`` ends with a slash."""
        objects = {key: frame._replace(file=folder + frame.file) for key, frame in self.objects.items()}
        compressed = frozenset(folder + name for name in self.compressed)
        return replace(self, files=[folder + name for name in self.files], objects=objects, compressed=compressed)

    @property
    def chunk_count(self) -> int:
        """M."""
        return len(self.tensor_N if self.order is None else self.order[0])

    @property
    def dims(self) -> int:
        """D."""
        return self.offsets_ND.shape[1]

    def parts(self) -> Iterator[Part]:
        """All chunks, a batch at a time: nothing as long as all of them is made."""
        for low in range(0, self.chunk_count, BATCH_ROWS):
            rows = slice(low, low + BATCH_ROWS)
            at, place = (rows, rows) if self.order is None else (self.order[0][rows], self.order[1][rows])
            boxes = self.tensor_N[at], self.offsets_ND[at], self.sizes_ND[at]
            yield Part(*boxes, self.file_N[place], self.start_N[place], self.length_N[place])

    def counts(self) -> list[int]:
        """Chunks of each tensor."""
        count_K = torch.zeros(len(self.tensors), dtype=torch.int64, device="cpu")
        for part in self.parts():
            count_K += torch.bincount(part.tensor_M, minlength=len(self.tensors))
        found: list[int] = count_K.tolist()
        return found

    @classmethod
    def of(cls, manifest: Manifest) -> Index:
        """The same of a manifest."""
        tensors = sorted(manifest.tensors.items(), key=itemgetter(0))
        dims = max((len(tensor.shape) for _, tensor in tensors), default=0)
        files: dict[str, int] = {}
        rows, boxes = [], []
        for number, (_, tensor) in enumerate(tensors):
            more = (0,) * (dims - len(tensor.shape))
            for box, frame, _ in sorted(tensor.chunks):
                boxes.append(((*box.offset, *more), (*box.size, *more)))
                rows.append((number, files.setdefault(frame.file, len(files)), frame.offset, frame.length))
        for frame in manifest.objects.values():
            files.setdefault(frame.file, len(files))
        rows_N4 = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 4)
        boxes_N2D = torch.tensor(boxes, dtype=torch.int64, device="cpu").view(len(boxes), 2, dims)
        return cls(
            tensors=[(key, tensor.dtype, tensor.shape) for key, tensor in tensors],
            tensor_N=rows_N4[:, 0],
            offsets_ND=boxes_N2D[:, 0],
            sizes_ND=boxes_N2D[:, 1],
            files=list(files),
            file_N=rows_N4[:, 1],
            start_N=rows_N4[:, 2],
            length_N=rows_N4[:, 3],
            objects=manifest.objects,
            save_id=manifest.save_id,
            compressed=manifest.compressed,
        )


class Writer:
    """Opcodes and the memo: what is used twice is named by a number from its second use on."""

    def __init__(self) -> None:
        self._memo: dict[object, bytes] = {}
        self._numbers: dict[object, int] = {}
        self._kinds: dict[tuple[torch.dtype, Ints], bytes] = {}

    def metadata(self, index: Index, dcp_version: str) -> Iterator[bytes]:
        """The parts of ``.metadata``: a protocol 4 pickle of DCP's ``Metadata`` with our ``sixfold_save_id``."""
        # Lists of parts first: the memo is filled in the order in which the bytes stand.
        names = [self._global(name) for name in ("ChunkStorageMetadata", "Size", "MetadataIndex", "_StorageInfo")]
        names += [self._text(name) for name in (*_NAMES, *index.files, *(_CODED if index.compressed else ()))]
        yield b"\x80\x04" + b"".join(name + b"0" for name in names)  # each into the memo, and off the stack
        yield b"".join((self._new("Metadata"), b"}(", self._text("state_dict_metadata"), b"}("))
        axes_K = torch.tensor([len(shape) for _, _, shape in index.tensors], dtype=torch.int64, device="cpu")
        yield from self._entries(index, axes_K)
        yield b"".join(self._text(key) + self._new("BytesStorageMetadata") for key in index.objects)
        yield b"".join((b"u", self._text("planner_data"), _plain(index.planner_data)))
        yield self._text("storage_data") + b"}("
        keys_K = torch.tensor([self._numbers[key] for key, _, _ in index.tensors], dtype=torch.int64, device="cpu")
        for part in index.parts():
            yield from self._places(index, axes_K, keys_K, part)
        for key, frame in index.objects.items():
            file = (self._text("relative_path"), self._text(frame.file))
            where = (self._text("offset"), _pickled(frame.offset), self._text("length"), _pickled(frame.length))
            name = (b"}(", self._text("fqn"), self._text(key), self._text("index"), b"Nub")
            yield b"".join((self._new("MetadataIndex"), *name, self._new("_StorageInfo"), b"}(", *file, *where, b"ub"))
        parts = [b"u", self._text("storage_meta"), self._new("StorageMeta"), b"}(", self._text("checkpoint_id"), b"N"]
        parts += [self._text("save_id"), b"N" if index.save_id is None else self._text(index.save_id)]
        parts += [self._text("load_id"), b"N"]
        parts += [self._text("modules"), b"]ub", self._text("version"), self._text(dcp_version)]
        if index.save_id is not None:
            parts += [self._text("sixfold_save_id"), self._text(index.save_id)]
        yield b"".join([*parts, b"ub."])

    def _entries(self, index: Index, axes_K: torch.Tensor) -> Iterator[bytes]:
        """Entries of ``state_dict_metadata``: tensors without chunks, then the others, batch by batch of chunks."""
        last = -1
        for number, count in enumerate(index.counts()):
            if not count:
                yield self._tensor(*index.tensors[number]) + b"eub"
        new, size = self._new("ChunkStorageMetadata") + b"}(" + self._text("offsets"), self._text("sizes")
        for part in index.parts():
            blobs: dict[int, tuple[memoryview, int]] = {}
            for axes, row_M in _by_axes(part, axes_K):
                offsets, sizes = part.offsets_MD[row_M, :axes], part.sizes_MD[row_M, :axes]
                rows, width = _rows([new, *self._sizes(offsets), size, *self._sizes(sizes), b"ub"], len(row_M))
                blobs[axes] = memoryview(rows), width
            found, counts = torch.unique_consecutive(part.tensor_M, return_counts=True)
            entries = list[bytes | memoryview]()
            for number, count in zip(found.tolist(), counts.tolist(), strict=True):
                axes = len(index.tensors[number][2])
                blob, width = blobs[axes]
                if number != last:
                    entries += [b"eub" if last >= 0 else b"", self._tensor(*index.tensors[number])]
                entries.append(blob[: count * width])
                blobs[axes], last = (blob[count * width :], width), number
            yield b"".join(entries)
        yield b"eub" if last >= 0 else b""

    def _tensor(self, key: str, dtype: torch.dtype, shape: Ints) -> bytes:
        """An entry up to its chunks. What follows the key is the same for equal ones, once all of it is in the memo."""
        begin, known = self._text(key), len(self._memo)
        if (dtype, shape) in self._kinds:
            return begin + self._kinds[dtype, shape]
        parts = [self._new("TensorStorageMetadata"), b"}(", self._text("properties"), self._properties(dtype)]
        parts += [self._text("size"), self._global("Size"), _pickled(tuple(shape)), b"\x85R"]
        rest = b"".join([*parts, self._text("chunks"), b"]("])
        if len(self._memo) == known:
            self._kinds[dtype, shape] = rest
        return begin + rest

    def _places(self, index: Index, axes_K: torch.Tensor, keys_K: torch.Tensor, part: Part) -> Iterator[bytes]:
        """Entries of ``storage_data``: where the chunks of a batch lie."""
        files_F = torch.tensor([self._numbers[name] for name in index.files], dtype=torch.int64, device="cpu")
        coded_F = torch.tensor([name in index.compressed for name in index.files], dtype=torch.int64, device="cpu")
        for (axes, coded), row_M in _by_form(part, axes_K, coded_F):
            key, file = keys_K[part.tensor_M[row_M]], files_F[part.file_M[row_M]]
            form: list[bytes | torch.Tensor] = [self._new("MetadataIndex") + b"}(" + self._text("fqn"), _fetch(key)]
            form += [self._text("index") + b"N" + self._text("offset"), *self._sizes(part.offsets_MD[row_M, :axes])]
            form += [b"ub" + self._new("_StorageInfo") + b"}(" + self._text("relative_path"), _fetch(file)]
            form += [self._text("offset"), _integers(part.start_M[row_M])]
            transforms = self._text(_CODED[0]) + b"]" + self._text(DESCRIPTOR) + b"a" if coded else b""
            form += [self._text("length"), _integers(part.length_M[row_M]), transforms + b"ub"]
            yield _rows(form, len(row_M))[0]

    def _sizes(self, values_ND: torch.Tensor) -> list[bytes | torch.Tensor]:
        """torch.Size of each row."""
        axes = values_ND.shape[1]
        columns = [_integers(values_ND[:, axis]) for axis in range(axes)]
        end = (b")", b"\x85", b"\x86", b"\x87", b"t")[min(axes, 4)]  # of a tuple
        return [self._global("Size") + (b"(" if axes > 3 else b""), *columns, end + b"\x85R"]

    def _properties(self, dtype: torch.dtype) -> bytes:
        """One object for all tensors of a dtype. State: dtype, layout, requires_grad, memory format, pin_memory."""
        if dtype in self._memo:
            return self._memo[dtype]
        number = self._number(dtype)
        name = str(dtype).removeprefix("torch.")
        parts = [self._new("TensorProperties"), b"(", self._text("torch"), self._text(name), b"\x93"]
        parts += [self._global("_get_layout"), self._text("torch.strided"), b"\x85R\x89"]
        parts += [self._global("_MEM_FORMAT_ENCODING"), b"K\x00\x85R\x89tb", number]
        return b"".join(parts)

    def _new(self, name: str) -> bytes:
        """An object without state: BUILD adds it."""
        return self._global(name) + b")\x81"

    def _global(self, name: str) -> bytes:
        place = ("global", name)
        if place in self._memo:
            return self._memo[place]
        loaded = self._text(_GLOBALS[name]) + self._text(name) + b"\x93"
        return loaded + self._number(place)

    def _text(self, text: str) -> bytes:
        if text in self._memo:
            return self._memo[text]
        data = text.encode("utf-8", "surrogatepass")
        head = b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        return head + data + self._number(text)

    def _number(self, value: object) -> bytes:
        """The opcode that puts the top of the stack into the memo; from now on ``value`` is fetched from there."""
        number = len(self._memo)
        self._numbers[value] = number
        short = number < 256
        self._memo[value] = b"h" + bytes([number]) if short else b"j" + struct.pack("<I", number)
        return b"q" + bytes([number]) if short else b"r" + struct.pack("<I", number)


def _by_axes(part: Part, axes_K: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of tensors of 0, 1, 2, .. axes."""
    axes_M = axes_K[part.tensor_M]
    for axes in torch.unique(axes_M).tolist():
        yield axes, torch.nonzero(axes_M == axes)[:, 0]


def _by_form(part: Part, axes_K: torch.Tensor, coded_F: torch.Tensor) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    """The same, and those in plain files apart from those in compressed ones."""
    if not coded_F.any():
        yield from (((axes, 0), row_M) for axes, row_M in _by_axes(part, axes_K))
        return
    coded_M = coded_F[part.file_M]
    for axes, row_M in _by_axes(part, axes_K):
        for coded in torch.unique(coded_M[row_M]).tolist():
            yield (axes, coded), row_M[coded_M[row_M] == coded]


def _integers(values_N: torch.Tensor) -> torch.Tensor:
    """The opcode of each count with its bytes, one row for each: BININT, or LONG1 of 8 bytes if one needs it."""
    wide = bool((values_N >= _LIMIT32).any())
    head = b"\x8a\x08" if wide else b"J"
    return _little(head, values_N, 8 if wide else 4)


def _fetch(numbers_N: torch.Tensor) -> torch.Tensor:
    """LONG_BINGET of each number of the memo."""
    return _little(b"j", numbers_N, 4)


def _little(head: bytes, values_N: torch.Tensor, nbytes: int) -> torch.Tensor:
    """``head`` and the low bytes of each value, the lowest first: uint8 of N rows."""
    rows = torch.empty(len(values_N), len(head) + nbytes, dtype=torch.uint8, device="cpu")
    rows[:, : len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    parts = values_N.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(-1, 8)
    rows[:, len(head) :] = (parts if sys.byteorder == "little" else parts.flip(1))[:, :nbytes]
    return rows


def _rows(form: Sequence[bytes | torch.Tensor], count: int) -> tuple[bytes, int]:
    """The bytes of ``count`` rows end to end, and the bytes of one. See [Note: rows]."""
    width = sum(len(part) if isinstance(part, bytes) else part.shape[1] for part in form)
    rows, at = torch.empty(count, width, dtype=torch.uint8, device="cpu"), 0
    for part in form:
        columns = torch.frombuffer(bytearray(part), dtype=torch.uint8) if isinstance(part, bytes) else part
        rows[:, at : at + columns.shape[-1]] = columns
        at += columns.shape[-1]
    return bytes(tensor_bytes(rows)), width


def _pickled(value: object) -> bytes:
    """The opcodes of a value, without those of the memo, whose numbers are this file's."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]  # between PROTO and STOP


def _plain(value: object) -> bytes:
    """The same of plain types. ShardingError for what names a class, so that no reader need trust it."""
    try:
        data = _pickled(value)
        named = next((named for opcode, named, _ in pickletools.genops(data + b".") if opcode.name == "GLOBAL"), "")
    except (TypeError, pickle.PicklingError) as error:
        named = str(error)
    if named:
        raise ShardingError(
            f"planner_data holds what is not plain ({named}); what a planner keeps in .metadata is None, numbers, "
            "texts, and tuples, lists and dicts of them. Put anything else into the state dict"
        )
    return data
