"""The manifest: what a checkpoint holds and where, free of any library's classes.

plan + written frames --> manifest.py (this file) <--> metadata.py <--> .metadata
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from sixfold.dist_ckpt.geometry.box import Box, Ints


class ByteRange(NamedTuple):
    """A frame: ``length`` bytes of a file of the checkpoint's folder from ``offset``."""

    file: str
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.file}[{self.offset}:{self.offset + self.length}]"


class Run(NamedTuple):
    """Where a box lies in a frame that holds more than it.

    The frame holds a tensor of ``shape``; the box is its row-major run from element ``first`` on.
    megatron's flattened layout of before 0.15 needs it: one frame, several boxes.
    """

    shape: Ints
    first: int


class StoredChunk(NamedTuple):
    """One box of a tensor and the frame that holds it; ``run`` is None if the frame holds nothing else."""

    box: Box
    frame: ByteRange
    run: Run | None = None

    @property
    def frame_shape(self) -> Ints:
        """Shape of the tensor in the frame."""
        return self.box.size if self.run is None else self.run.shape

    @property
    def first(self) -> int:
        """Element of the frame at which the box begins."""
        return 0 if self.run is None else self.run.first

    @property
    def frame_elements(self) -> int:
        """Elements of the tensor in the frame."""
        return prod(self.frame_shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint; its chunks cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


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
    """

    tensors: dict[str, StoredTensor]
    objects: dict[str, ByteRange]
    save_id: str | None = None
    needs_metadata_json: bool = False
    decoder: ChunkDecoder | None = None

    def frames(self) -> list[ByteRange]:
        """Every frame, tensors first."""
        return [chunk.frame for tensor in self.tensors.values() for chunk in tensor.chunks] + [*self.objects.values()]

    def frames_by_key(self) -> Iterator[tuple[str, ByteRange]]:
        """Every frame with its key, which for an object is the stored one."""
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield key, chunk.frame
        yield from self.objects.items()
