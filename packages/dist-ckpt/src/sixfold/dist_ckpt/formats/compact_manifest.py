"""The compact manifest: what a checkpoint holds and where, as integers that a load maps and does not decode.

    Index (dcp_pickle.py) --> encode (this file) --> shard_manifest.pt
    shard_manifest.pt, mapped --> read (this file) --> Manifest whose chunks are looked at when they are asked for

``.metadata`` of ten million chunks takes two gigabytes and minutes to decode; a rank needs some ten thousand of them.

[Note: the form] First ``MAGIC``, then two int64 of the machine's byte order: 1 if the save wrote no ``.metadata``,
and the bytes of a JSON text. Then the text: save id, number of axes D, names of files, objects, and five columns of
the tensors in the order of their keys. The columns are key, dtype, shape, number of chunks, and the longest chunk on
the first axis. Where files are compressed, the text has their numbers too, under ``_MAGIC_4``. Then one row for each
chunk, by tensor and by place: (offset[D], size[D], file, start, length).

The text has an entry per key, and is read by columns. Jobs with experts have hundreds of thousands of keys, of which
a rank asks for few. So no line of Python is run for a key before it is asked for. A load looks only at rows that a
bisection by the first axis finds. Nothing in the file is believed. The columns are checked as a whole. Each row that
is used is checked as metadata.py checks its entries. The blocks that it lies in are checked against their digests.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise
from typing import Any

import torch

from sixfold.dist_ckpt.errors import CorruptError, UnsafeError
from sixfold.dist_ckpt.formats.dcp_pickle import Index
from sixfold.dist_ckpt.geometry.box import Box, Ints
from sixfold.dist_ckpt.geometry.manifest import FEW_CHUNKS, ByteRange, Manifest, StoredChunk
from sixfold.dist_ckpt.interpreter import collection_paused
from sixfold.dist_ckpt.state.tensor_memory import tensor_bytes

#: 0.1.0 takes a file of such a name for one of a checkpoint's objects, and so replaces a folder that holds it.
FILE_NAME = "shard_manifest.pt"
_MAGIC_4, MAGIC, _MAGIC_2, _MAGIC_1 = (b"6FCKPT\x00%c" % form for form in (4, 3, 2, 1))
_HEAD, _HEAD_1 = struct.Struct("=8s2q"), struct.Struct("=8s8q")
_MOST = 1 << 62  # of a number that is added to another


def encode(index: Index, *, is_alone: bool = False) -> Iterator[bytes]:
    """The parts of the file. Memory: a batch of rows besides what each tensor takes.

    ``is_alone``: the save writes no ``.metadata``.
    """
    keys = [key for key, _, _ in index.tensors]
    assert keys == sorted(keys), "an index is sorted by key"
    longest_K = torch.zeros(len(keys), dtype=torch.int64, device="cpu")
    for part in index.parts() if index.dims else ():
        longest_K.scatter_reduce_(0, part.tensor_M, part.sizes_MD[:, 0], "amax")
    files = {name: number for number, name in enumerate(index.files)}
    names = {dtype: str(dtype)[6:] for dtype in {dtype for _, dtype, _ in index.tensors}}
    columns = [keys, [names[dtype] for _, dtype, _ in index.tensors], [shape for *_, shape in index.tensors]]
    head: dict[str, Any] = {
        "save_id": index.save_id,
        "axes": index.dims,
        "files": list(index.files),
        "objects": {key: [files[frame.file], *frame[1:]] for key, frame in sorted(index.objects.items())},
        "tensors": [*columns, index.counts(), longest_K.tolist()],
    }
    if index.compressed:
        head["compressed"] = sorted(files[name] for name in index.compressed)
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield _HEAD.pack(_MAGIC_4 if index.compressed else MAGIC, is_alone, len(text)) + text
    for part in index.parts():
        place_M3 = torch.stack([part.file_M, part.start_M, part.length_M], 1)
        yield bytes(tensor_bytes(torch.cat([part.offsets_MD, part.sizes_MD, place_M3], 1)))


def is_alone(data: memoryview) -> bool:
    """Whether the save of a file that ``read`` takes wrote no ``.metadata``: one that is there was made later."""
    return bool(_HEAD.unpack_from(data)[1])


@collection_paused()
def read(data: memoryview, sizes: Callable[[str], int], check: Callable[[int, int], None]) -> Manifest:
    """The manifest of a mapped file, whose chunks are read and checked when they are asked for.

    Args:
        data: the file.
        sizes: of the files of the checkpoint, by name; raises for one that is not of it.
        check: called before bytes [start, stop) are looked at; raises if they are not those that were written.
    Raises:
        CorruptError: it is not what such a file is. UnsafeError: a file name that leaves the folder. The same when
        a chunk is asked for that contradicts itself.
    """
    try:
        check(0, _HEAD.size)
        magic, _, text_bytes = _HEAD.unpack_from(data)
        if magic == _MAGIC_1:
            check(0, len(data))
            head, start, stop = _head_1(data)
            return _manifest(data[:stop], head, start, sizes, check)
        start = _HEAD.size + text_bytes
        if magic not in (_MAGIC_4, MAGIC, _MAGIC_2) or not 0 <= text_bytes <= len(data) - _HEAD.size:
            raise CorruptError("not a compact manifest, or one of a version that is not read here")
        check(_HEAD.size, start)
        return _manifest(data, json.loads(bytes(data[_HEAD.size : start])), start, sizes, check)
    except (struct.error, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorruptError(f"no compact manifest: {type(error).__name__}: {error}") from error


def _head_1(data: memoryview) -> tuple[Any, int, int]:
    """The head of a file of the first form, as of 0.2.0.dev0 before November 23, and where its rows begin and end.

    Int64: the numbers of dtypes, files, objects, tensors, chunks, axes and bytes of text; ends of texts; a frame for
    each object; (first chunk, dtype, axes, search axis, longest chunk on it, shape[D]) for each tensor and behind the
    last; a number for each chunk. Then the rows, as now, and the text.
    """
    *_, dtypes, files, objects, tensors, chunks, axes, _ = _HEAD_1.unpack_from(data)
    counts, width = (1, dtypes, files, objects, tensors), 5 + axes
    at = sum(counts)
    flat = struct.unpack_from(f"={at + 3 * objects + (tensors + 1) * width}q", data, _HEAD_1.size)
    start = _HEAD_1.size + 8 * (len(flat) + chunks)
    stop, ends = start + 8 * chunks * (2 * axes + 3), [0, *flat[:at]]
    if min(*counts, chunks, axes) < 0 or ends != sorted(ends):
        raise CorruptError(f"numbers {counts}, {chunks}, {axes} and texts {ends!r:.99} contradict each other")
    texts = (str(data[stop + low : stop + high], "utf-8", "surrogatepass") for low, high in pairwise(ends))
    (save_id,), names, places, found, keys = (list(islice(texts, count)) for count in counts)
    frames = [flat[low : low + 3] for low in range(at, at + 3 * objects, 3)]
    rows = pairwise(flat[low : low + width] for low in range(at + 3 * objects, len(flat), width))
    described = {
        key: [names[row[1]], row[5 : 5 + row[2]], after[0] - row[0], row[5] if row[3] else row[4]]
        for key, (row, after) in zip(keys, rows, strict=True)
    }
    head = {"axes": axes, "files": places, "objects": dict(zip(found, frames, strict=True)), "tensors": described}
    return head | {"save_id": save_id or None}, start, stop


def _manifest(data: memoryview, head: Any, start: int, sizes: Callable[[str], int], check: Any) -> Manifest:
    for name in head["files"]:
        if type(name) is not str or name in ("", ".", "..") or "/" in name or not name.isprintable():
            raise UnsafeError(f"the file name {name!r} leaves the folder; it is a bare file name")
    (axes,) = _counts("axes", [head["axes"]])
    rows = _Rows(data, start, axes, head["files"], [sizes(name) for name in head["files"]], check)
    objects = {key: rows.frame(key, *_counts(key, frame)) for key, frame in head["objects"].items()}
    columns = head["tensors"]
    if isinstance(columns, dict):  # earlier forms have a list for each key
        columns = [list(columns), *([*zip(*columns.values(), strict=True)] or [()] * 4)]
    keys, names, shapes, counts, longest = columns
    _counts("tensors", [*chain.from_iterable(shapes), *counts, *longest])
    dtypes = {name: vars(torch).get(name) for name in set(names)}
    for name, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(f"{keys[names.index(name)]}: {name!r} is no dtype")
    if len(deepest := max(shapes, key=len, default=())) > axes:
        key = keys[shapes.index(deepest)]
        raise CorruptError(f"{key}: {len(deepest)} axes of {axes}")
    numbers = dict(zip(keys, range(len(keys)), strict=True))
    if len({len(numbers), *map(len, columns)}) > 1 or not {*map(type, keys)} <= {str}:
        raise CorruptError(f"{len(keys)} keys, of which {len(numbers)} differ, do not fit the columns beside them")
    firsts = [*accumulate(counts, initial=0)]
    if start + 8 * (count := firsts[-1]) * rows.width != len(data):
        raise CorruptError(f"{len(data) - start} bytes do not hold {count} rows of {rows.width} numbers")
    if not isinstance(head["save_id"], str | None):
        raise CorruptError(f"the save id is a {type(head['save_id']).__name__}")
    tensors = _Tensors(numbers, [dtypes[name] for name in names], shapes, firsts, longest, rows)
    return Manifest(
        tensors,
        objects,
        head["save_id"],
        needs_metadata_json=True,
        files=tuple(head["files"]),
        compressed=frozenset(head["files"][number] for number in _counts("compressed", head.get("compressed", []))),
    )


def _counts(what: str, numbers: list[Any]) -> list[int]:
    if odd := [number for number in numbers if type(number) is not int or not 0 <= number < _MOST]:
        raise CorruptError(f"{what}: {odd!r:.99} are no counts")
    return numbers


def index_of(manifest: Manifest) -> Index:
    """The arrays of a manifest that ``read`` has made, mapped and not copied. Every row is checked first."""
    tensors: dict[str, Any] = dict(manifest.tensors)
    for stored in tensors.values():
        for row in stored.rows:
            stored.chunk(row)
    count_K = torch.tensor([len(stored.rows) for stored in tensors.values()], dtype=torch.int64, device="cpu")
    if not count_K.any():
        return Index.of(manifest)
    file: _Rows = next(iter(tensors.values())).file
    assert manifest.files is not None, "a manifest of another kind"
    rows_NW = file.array(range(int(count_K.sum())))
    dims = file.axes
    return Index(
        tensors=[(key, stored.dtype, stored.shape) for key, stored in tensors.items()],
        tensor_N=torch.repeat_interleave(count_K),
        offsets_ND=rows_NW[:, :dims],
        sizes_ND=rows_NW[:, dims : 2 * dims],
        files=manifest.files,
        file_N=rows_NW[:, 2 * dims],
        start_N=rows_NW[:, 2 * dims + 1],
        length_N=rows_NW[:, 2 * dims + 2],
        objects=manifest.objects,
        save_id=manifest.save_id,
        compressed=manifest.compressed,
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a file, from byte ``start`` on, and the files that they name, with their sizes."""

    data: memoryview
    start: int
    axes: int
    files: Sequence[str]
    sizes: Sequence[int]
    check: Callable[[int, int], None]

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return 2 * self.axes + 3

    def numbers(self, row: int, count: int) -> Ints:
        """The first ``count`` of a row, and of those behind it."""
        at = self.start + 8 * row * self.width
        self.check(at, at + 8 * count)
        return struct.unpack_from(f"={count}q", self.data, at)

    def array(self, rows: range) -> torch.Tensor:
        """Whole rows, at least one, where they are mapped."""
        at, count = self.start + 8 * rows.start * self.width, len(rows) * self.width
        self.check(at, at + 8 * count)
        return torch.frombuffer(self.data, dtype=torch.int64, count=count, offset=at).view(-1, self.width)

    def frame(self, key: str, file: int, start: int, length: int) -> ByteRange:
        """A frame, which lies in its file."""
        if not 0 <= file < len(self.files):
            raise CorruptError(f"{key}: file number {file} of {len(self.files)}")
        if start < 0 or length < 0 or start + length > self.sizes[file]:
            raise CorruptError(f"{key}: bytes {start} + {length} of {self.files[file]}, which has {self.sizes[file]}")
        return ByteRange(self.files[file], start, length)


@dataclass(frozen=True, slots=True, eq=False)
class _Tensors(Mapping[str, "_Stored"]):
    """The tensors by key, each made when it is asked for."""

    numbers: Mapping[str, int]
    dtypes: Sequence[Any]
    shapes: Sequence[Sequence[int]]
    firsts: Sequence[int]  # rows, and where those of the last end
    longest: Sequence[int]
    rows: _Rows

    def __getitem__(self, key: str) -> _Stored:
        number = self.numbers[key]
        rows, shape = range(self.firsts[number], self.firsts[number + 1]), tuple(self.shapes[number])
        return _Stored(key, self.dtypes[number], shape, rows, self.longest[number], self.rows)

    def __contains__(self, key: object) -> bool:
        return key in self.numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the file: ``manifest.Stored``."""

    key: str
    dtype: torch.dtype
    shape: Ints
    rows: range
    longest: int  # of its chunks on the first axis
    file: _Rows

    @property
    def chunks(self) -> Sequence[StoredChunk]:
        numbers, width = self.file.numbers(self.rows.start, len(self.rows) * self.file.width), self.file.width
        return [self._chunk(numbers[at : at + width]) for at in range(0, len(numbers), width)]

    @property
    def chunk_count(self) -> int:
        return len(self.rows)

    def near(self, wanted: Box) -> Sequence[StoredChunk]:
        if len(self.rows) < FEW_CHUNKS or not self.shape:
            return self.chunks
        # By place: on the first axis they are sorted. Where a file lies about that, chunks are missed, and told.
        low = bisect_right(self.rows, wanted.offset[0] - self.longest, key=self._start)
        high = bisect_left(self.rows, wanted.offset[0] + wanted.size[0], low, key=self._start)
        found = self.rows[low:high]
        if len(found) >= FEW_CHUNKS:
            rows_NW, axes, dims = self.file.array(found), len(self.shape), self.file.axes
            start_ND, size_ND = rows_NW[:, :axes], rows_NW[:, dims : dims + axes]
            begin_D, end_D = torch.tensor([wanted.offset, [a + n for a, n in zip(*wanted, strict=True)]], device="cpu")
            meets_N = ((start_ND < end_D) & (start_ND + size_ND > begin_D)).all(1)
            return [self.chunk(found[number]) for number in meets_N.nonzero()[:, 0].tolist()]
        return [self.chunk(row) for row in found]

    def _start(self, row: int) -> int:
        return self.file.numbers(row, 1)[0]

    def chunk(self, row: int) -> StoredChunk:
        """One row, checked."""
        return self._chunk(self.file.numbers(row, self.file.width))

    def _chunk(self, numbers: Ints) -> StoredChunk:
        axes, dims = len(self.shape), self.file.axes
        box = Box(numbers[:axes], numbers[dims : dims + axes])
        if not box.within(self.shape) or 0 in box.size:
            raise CorruptError(
                f"{self.key}: chunk {box.offset} + {box.size} is no part of a tensor of shape {self.shape}"
            )
        return StoredChunk(box, self.file.frame(self.key, *numbers[2 * dims :]))
