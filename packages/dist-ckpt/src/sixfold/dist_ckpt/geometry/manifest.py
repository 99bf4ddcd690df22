"""The manifest: what a checkpoint holds and where, free of any library's classes.

plan + written frames --> manifest.py (this file) <--> metadata.py <--> .metadata
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from sixfold.dist_ckpt.geometry.box import Box, Ints

FEW_CHUNKS = 16  # of a tensor are all looked at


class ByteRange(NamedTuple):
    """A frame: ``length`` bytes of a file of the checkpoint's folder from ``offset``."""

    file: str
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.file}[{self.offset}:{self.offset + self.length}]"


class Run(NamedTuple):
    """Where a box lies in a frame that holds more than it.

    The frame holds a tensor of ``shape``, and the box is its row-major run from element ``first`` on. The flattened
    layout of megatron before 0.15 needs it: one frame, several boxes.
    """

    shape: Ints
    first: int


class StoredChunk(NamedTuple):
    """One box of a tensor and the frame that holds it; ``run`` is None if the frame holds nothing else."""

    box: Box
    frame: ByteRange
    run: Run | None = None


class Stored(Protocol):
    """A tensor of the checkpoint; its chunks cover it."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its values."""

    @property
    def shape(self) -> Ints:
        """Of the whole tensor."""

    @property
    def chunks(self) -> Sequence[StoredChunk]:
        """All of them, in the order of their places."""

    @property
    def chunk_count(self) -> int:
        """How many they are."""

    def near(self, wanted: Box) -> Sequence[StoredChunk]:
        """The chunks that may share an element with a box, and perhaps others."""


@dataclass(frozen=True)
class StoredTensor:
    """``Stored`` with all its chunks in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def chunk_count(self) -> int:
        return len(self.chunks)

    @cached_property
    def _search(self) -> tuple[int, int, list[StoredChunk]]:
        """The axis whose starts tell the chunks apart best, the longest chunk on it, and the chunks by these starts."""
        boxes = [chunk.box for chunk in self.chunks]
        axis = max(range(len(self.shape)), key=lambda d: len({box.offset[d] for box in boxes}))
        return axis, max(box.size[axis] for box in boxes), sorted(self.chunks, key=lambda chunk: chunk.box.offset[axis])

    def near(self, wanted: Box) -> Sequence[StoredChunk]:
        if len(self.chunks) < FEW_CHUNKS or not self.shape:
            return self.chunks
        axis, longest, chunks = self._search
        start = wanted.offset[axis]
        low = bisect_right(chunks, start - longest, key=lambda chunk: chunk.box.offset[axis])
        return chunks[low : bisect_left(chunks, start + wanted.size[axis], key=lambda chunk: chunk.box.offset[axis])]


class ChunkDecoder(Protocol):
    """Reads chunks and objects that are bare files and no frames (zarr)."""

    def is_plain(self, chunk: StoredChunk) -> bool:
        """Whether the chunk's file is the values of its box in row-major order."""

    def decode(self, folder: Path, chunk: StoredChunk) -> torch.Tensor:
        """The values of the box of any other chunk."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Tensors by key, objects by stored key; ``save_id`` is None for folders of other libraries.

    ``needs_metadata_json`` is true if the writer was not plain DCP: then a folder without
    metadata.json is a save that never finished. ``decoder`` is set where chunks and objects are bare files and no
    frames (zarr).

    Chunks may be read from a file as they are asked for (compact_manifest.py): what looks at a few of them costs as
    much as those. Then ``files`` names all files of frames, and each frame is checked to lie in its file when it is
    read; else it is None.

    ``compressed`` names the files in which each frame is one zstd frame; see formats/zstd.py.
    """

    tensors: Mapping[str, Stored]
    objects: Mapping[str, ByteRange]
    save_id: str | None = None
    needs_metadata_json: bool = False
    decoder: ChunkDecoder | None = None
    files: tuple[str, ...] | None = None
    compressed: frozenset[str] = frozenset()

    def in_memory(self) -> Manifest:
        """The same with all chunks read."""
        made = {key: StoredTensor(found.dtype, found.shape, tuple(found.chunks)) for key, found in self.tensors.items()}
        return replace(self, tensors=made)

    def frames_by_key(self) -> Iterator[tuple[str, ByteRange]]:
        """Every frame with its key, which for an object is the stored one; tensors first."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, chunk.frame
        yield from self.objects.items()
