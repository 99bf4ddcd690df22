"""The compact manifest: what a checkpoint holds and where, as integers that a load maps and does not decode.

    Index (dcp_pickle.py) --> encode (this file) --> shard_manifest.pt
    shard_manifest.pt, mapped --> read (this file) --> Manifest whose entries are looked at when they are asked for

``.metadata`` of ten million chunks takes two gigabytes and minutes to decode; a rank needs some ten thousand of them.

[Note: the form] Little-endian int64 throughout, text apart. In this order:

- head: ``MAGIC``, 1 if the save wrote no ``.metadata``, then the numbers of dtypes, files, objects O, tensors K,
  chunks N, axes D, and the bytes of text
- ends of the texts in the text: save id ("" for none), dtypes, files, keys of objects, keys of tensors; keys sorted
- objects: O x (file, start, length)
- tensors: K + 1 x (first chunk, dtype, axes, search axis, longest, shape[D]); the last one ends the chunks
- starts: N, of each chunk on the search axis of its tensor, on which the longest chunk is ``longest``
- chunks: N x (offset[D], size[D], file, start, length), by tensor and then by place
- the text, UTF-8

The search axis is the one that tells the chunks of a tensor apart best. What a load looks at for each tensor is so a
bisection in the keys, the starts of its chunks, and the chunks that it wants. Nothing in the file is believed: each row
that is used is checked as metadata.py checks its entries, and the blocks it lies in against their digests.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from sixfold.dist_ckpt.errors import CorruptError, UnsafeError
from sixfold.dist_ckpt.files.dcp_pickle import Index, sort_key
from sixfold.dist_ckpt.files.frame import tensor_bytes
from sixfold.dist_ckpt.files.mapped_rows import FIXED, MAGIC, Reader
from sixfold.dist_ckpt.geometry.box import Box, Ints
from sixfold.dist_ckpt.geometry.manifest import FEW_CHUNKS, ByteRange, Manifest, StoredChunk

#: 0.1.0 takes a file of such a name for one of a checkpoint's objects, and so replaces a folder that holds it.
FILE_NAME = "shard_manifest.pt"
_KEPT_TENSORS = 1 << 16


def encode(index: Index, *, is_alone: bool = False) -> Iterator[bytes]:
    """The parts of the file. Memory: a batch of rows besides what each tensor takes.

    ``is_alone``: the save writes no ``.metadata``.
    """
    keys = [sort_key(key) for key, _, _ in index.tensors]
    assert keys == sorted(keys), "an index is sorted by key"
    objects = sorted(index.objects.items(), key=lambda item: sort_key(item[0]))
    dtypes = list(dict.fromkeys(str(dtype).removeprefix("torch.") for _, dtype, _ in index.tensors))
    texts = [sort_key(index.save_id or "")]
    texts += [name.encode("utf-8", "surrogatepass") for name in (*dtypes, *index.files, *(key for key, _ in objects))]
    texts += keys
    ends = list(accumulate(map(len, texts)))
    chunks, dims = index.chunk_count, index.dims
    yield _int64s([MAGIC, is_alone, len(dtypes), len(index.files), len(objects), len(keys), chunks, dims, ends[-1]])
    yield _int64s(ends)
    files = {name: number for number, name in enumerate(index.files)}
    yield _int64s([part for _, frame in objects for part in (files[frame.file], frame.offset, frame.length)])
    axis_K, longest_K = _search_axes(index)
    yield from _tensor_rows(index, dtypes, axis_K, longest_K)
    for part in index.parts():
        axes_M = axis_K[part.tensor_M, None]
        yield _bytes(part.offsets_MD.gather(1, axes_M) if dims else torch.zeros_like(axes_M))
    for part in index.parts():
        place_M3 = torch.stack([part.file_M, part.start_M, part.length_M], 1)
        yield _bytes(torch.cat([part.offsets_MD, part.sizes_MD, place_M3], 1))
    for low in range(0, len(texts), 1 << 14):
        yield b"".join(texts[low : low + (1 << 14)])


def _search_axes(index: Index) -> tuple[torch.Tensor, torch.Tensor]:
    """For each tensor the axis on which its chunks are shortest beside its length, and the longest chunk there."""
    tensors, dims = len(index.tensors), index.dims
    if not tensors:
        return (torch.zeros(0, dtype=torch.int64, device="cpu"),) * 2
    longest_KD = torch.ones(tensors, max(1, dims), dtype=torch.int64, device="cpu")
    for part in index.parts():
        for axis in range(dims):
            longest_KD[:, axis].scatter_reduce_(0, part.tensor_M, part.sizes_MD[:, axis], "amax")
    shapes = [(*shape, *(0,) * (max(1, dims) - len(shape))) for _, _, shape in index.tensors]
    shape_KD = torch.tensor(shapes, dtype=torch.int64, device="cpu").view(tensors, max(1, dims))
    axis_K = (shape_KD // longest_KD).argmax(1)
    return axis_K, longest_KD.gather(1, axis_K[:, None])[:, 0]


def _tensor_rows(index: Index, dtypes: Sequence[str], axis_K: torch.Tensor, longest_K: torch.Tensor) -> Iterator[bytes]:
    codes, first = {name: number for number, name in enumerate(dtypes)}, 0
    flat: list[int] = []
    searched = zip(index.tensors, index.counts(), axis_K.tolist(), longest_K.tolist(), strict=True)
    for (_, dtype, shape), count, axis, longest in searched:
        flat += (first, codes[str(dtype).removeprefix("torch.")], len(shape), axis, longest)
        flat += (*shape, *(0,) * (index.dims - len(shape)))
        first += count
        if len(flat) > 1 << 16:
            yield _int64s(flat)
            flat = []
    yield _int64s([*flat, first, *(0,) * (FIXED - 1 + index.dims)])


def _int64s(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _bytes(values: torch.Tensor) -> bytes:
    data = values.contiguous()
    if sys.byteorder == "big":
        data = data.view(torch.uint8).view(-1, 8).flip(1).contiguous()
    return bytes(tensor_bytes(data))


def read(data: memoryview, sizes: Callable[[str], int], check: Callable[[int, int], None]) -> Manifest:
    """The manifest of a mapped file, whose entries are read and checked when they are asked for.

    Args:
        data: the file.
        sizes: of the files of the checkpoint, by name; raises for one that is not of it.
        check: called before bytes [start, stop) are looked at; raises if they are not those that were written.
    Raises:
        CorruptError: it is not what such a file is. UnsafeError: a file name that leaves the folder. The same when
        an entry is asked for that contradicts itself.
    """
    reader = Reader(data, check)
    names = [reader.text(1 + reader.head.dtypes + number) for number in range(reader.head.files)]
    for name in names:
        if name in ("", ".", "..") or "/" in name or not name.isprintable():
            raise UnsafeError(f"the file name {name!r} leaves the folder; it is a bare file name")
    places = _Places(names, [sizes(name) for name in names])
    dtypes = [_dtype(reader.text(1 + number)) for number in range(reader.head.dtypes)]
    return Manifest(
        _Tensors(reader, dtypes, places),
        _Objects(reader, places),
        reader.text(0) or None,
        needs_metadata_json=True,
        files=tuple(names),
    )


def is_alone(data: memoryview) -> bool:
    """Whether the save of a file that ``read`` takes wrote no ``.metadata``: one that is there was made later."""
    return struct.unpack_from("<q", data, 8) == (1,)


def index_of(manifest: Manifest) -> Index:
    """The arrays of a manifest that ``read`` has made, mapped and not copied. Every row is checked first."""
    tensors, objects = manifest.tensors, manifest.objects
    assert isinstance(tensors, _Tensors) and manifest.files is not None, "a manifest of another kind"
    return tensors.index(manifest.files, dict(objects), manifest.save_id)


class _Places:
    """The files of frames, and what lies in them."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self._names, self._sizes = names, sizes

    def frame(self, key: str, file: int, start: int, length: int) -> ByteRange:
        """A frame, which lies in its file."""
        if not 0 <= file < len(self._names):
            raise CorruptError(f"{key}: file number {file} of {len(self._names)}")
        if start < 0 or length < 0 or start + length > self._sizes[file]:
            raise CorruptError(f"{key}: bytes {start} + {length} of {self._names[file]}, which has {self._sizes[file]}")
        return ByteRange(self._names[file], start, length)


class _Objects(Mapping[str, ByteRange]):
    """Frames of objects by stored key."""

    def __init__(self, reader: Reader, places: _Places) -> None:
        self._reader, self._places = reader, places
        self._first = 1 + reader.head.dtypes + reader.head.files

    def __len__(self) -> int:
        return self._reader.head.objects

    def __iter__(self) -> Iterator[str]:
        return self._reader.sorted_texts(self._first, len(self))

    def __getitem__(self, key: str) -> ByteRange:
        number = self._reader.find(self._first, len(self), key)
        if number is None:
            raise KeyError(key)
        return self._places.frame(key, *self._reader.int64s(self._reader.head.at_objects + 24 * number, 3))


class _Tensors(Mapping[str, "_Stored"]):
    """Tensors by key; those asked for last are kept."""

    def __init__(self, reader: Reader, dtypes: Sequence[torch.dtype], places: _Places) -> None:
        self._reader, self._dtypes, self._places = reader, dtypes, places
        self._first = reader.head.texts - reader.head.tensors
        self._kept: dict[str, _Stored | None] = {}

    def __len__(self) -> int:
        return self._reader.head.tensors

    def __iter__(self) -> Iterator[str]:
        return self._reader.sorted_texts(self._first, len(self))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._found(key) is not None

    def __getitem__(self, key: str) -> _Stored:
        stored = self._found(key)
        if stored is None:
            raise KeyError(key)
        return stored

    def _found(self, key: str) -> _Stored | None:
        if key not in self._kept:
            if len(self._kept) >= _KEPT_TENSORS:
                self._kept.clear()
            number = self._reader.find(self._first, len(self), key)
            self._kept[key] = None if number is None else self._stored(key, number)
        return self._kept[key]

    def _stored(self, key: str, number: int) -> _Stored:
        head, width = self._reader.head, FIXED + self._reader.head.dims
        row = self._reader.int64s(head.at_tensors + 8 * number * width, width + 1)
        (first, dtype, axes, axis, longest), stop = row[:FIXED], row[width]
        shape = row[FIXED : FIXED + axes]
        fits = 0 <= first <= stop <= head.chunks and 0 <= dtype < len(self._dtypes)
        fits = fits and 0 <= axes <= head.dims and 0 <= longest < 1 << 62
        if not fits or min(shape, default=0) < 0 or not 0 <= axis < max(1, axes):
            raise CorruptError(f"{key}: the entry {row} contradicts itself")
        return _Stored(key, self._dtypes[dtype], shape, range(first, stop), axis, longest, self._reader, self._places)

    def index(self, files: Sequence[str], objects: Mapping[str, ByteRange], save_id: str | None) -> Index:
        """See ``index_of``."""
        head, tensors, counts = self._reader.head, [], []
        for key, stored in self.items():
            tensors.append((key, stored.dtype, stored.shape))
            counts.append(stored.chunk_count)
            for _ in stored.chunks:
                pass
        width = 2 * head.dims + 3
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        rows = self._reader.array(head.at_chunks, head.chunks * width) if head.chunks else empty
        rows_NW, dims = rows.view(-1, width), head.dims
        count_K = torch.tensor(counts, dtype=torch.int64, device="cpu")
        if sum(counts) != head.chunks:
            raise CorruptError(f"{sum(counts)} of {head.chunks} chunks belong to a tensor")
        return Index(
            tensors=tensors,
            tensor_N=torch.repeat_interleave(torch.arange(len(tensors), device="cpu"), count_K),
            offsets_ND=rows_NW[:, :dims],
            sizes_ND=rows_NW[:, dims : 2 * dims],
            files=files,
            file_N=rows_NW[:, 2 * dims],
            start_N=rows_NW[:, 2 * dims + 1],
            length_N=rows_NW[:, 2 * dims + 2],
            objects=objects,
            save_id=save_id,
        )


class _Stored:
    """A tensor of the file: ``manifest.Stored``."""

    __slots__ = ("_axis", "_key", "_longest", "_places", "_reader", "_rows", "_starts", "dtype", "shape")

    def __init__(
        self,
        key: str,
        dtype: torch.dtype,
        shape: Ints,
        rows: range,
        axis: int,
        longest: int,
        reader: Reader,
        places: _Places,
    ) -> None:
        self.dtype, self.shape = dtype, shape
        self._key, self._rows, self._axis, self._longest = key, rows, axis, longest
        self._reader, self._places = reader, places
        self._starts: tuple[torch.Tensor, torch.Tensor | None] | None = None  # sorted, and the order of the rows

    @property
    def chunks(self) -> Sequence[StoredChunk]:
        return _Chunks(self, self._rows)

    @property
    def chunk_count(self) -> int:
        return len(self._rows)

    def near(self, wanted: Box) -> Sequence[StoredChunk]:
        if len(self._rows) < FEW_CHUNKS or not self.shape:
            return [self.chunk(row) for row in self._rows]
        starts, order = self._sorted_starts()
        start = wanted.offset[self._axis]
        ends = torch.tensor([start - self._longest, start + wanted.size[self._axis] - 1], device="cpu")
        low, high = torch.searchsorted(starts, ends, right=True).tolist()
        found = range(low, high) if order is None else order[low:high].tolist()
        return [self.chunk(self._rows.start + number) for number in found]

    def _sorted_starts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._starts is None:
            starts = self._reader.array(self._reader.head.at_starts + 8 * self._rows.start, len(self._rows))
            # By place: on the first axis they are sorted. Where a file lies about that, chunks are missed, and told.
            self._starts = starts, None
            if self._axis:
                self._starts = starts.sort(stable=True)
        return self._starts

    def chunk(self, row: int) -> StoredChunk:
        """One row, checked."""
        head, axes = self._reader.head, len(self.shape)
        width = 2 * head.dims + 3
        numbers = self._reader.int64s(head.at_chunks + 8 * row * width, width)
        box = Box(numbers[:axes], numbers[head.dims : head.dims + axes])
        if not box.within(self.shape) or 0 in box.size:
            raise CorruptError(
                f"{self._key}: chunk {box.offset} + {box.size} is no part of a tensor of shape {self.shape}"
            )
        return StoredChunk(box, self._places.frame(self._key, *numbers[2 * head.dims :]))


class _Chunks(Sequence[StoredChunk]):
    """Chunks of a tensor, each read when it is asked for."""

    def __init__(self, stored: _Stored, rows: range) -> None:
        self._stored, self._rows = stored, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number):  # type: ignore[no-untyped-def]  # int or slice, as of any sequence
        rows = self._rows[number]
        return self._stored.chunk(rows) if isinstance(rows, int) else _Chunks(self._stored, rows)


def _dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise CorruptError(f"{name!r} is no dtype")
    return found
