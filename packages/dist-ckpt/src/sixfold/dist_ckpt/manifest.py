"""The manifest: what a checkpoint holds and where, free of any library's classes.

plan + written frames --> manifest.py (this file) <--> metadata.py <--> .metadata
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sixfold.dist_ckpt.box import Box


class ByteRange(NamedTuple):
    """A frame: ``length`` bytes of a file of the checkpoint's folder from ``offset``."""

    file: str
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.file}[{self.offset}:{self.offset + self.length}]"


class StoredChunk(NamedTuple):
    """One box of a tensor and the frame that holds it."""

    box: Box
    frame: ByteRange


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint; its chunks cover it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Tensors by key, objects by stored key; ``save_id`` is None for folders of other libraries.

    ``needs_metadata_json`` is true if the writer was not plain DCP: then a folder without
    metadata.json is a save that never finished.
    """

    tensors: dict[str, StoredTensor]
    objects: dict[str, ByteRange]
    save_id: str | None = None
    needs_metadata_json: bool = False

    def frames(self) -> list[ByteRange]:
        """Every frame, tensors first."""
        return [chunk.frame for tensor in self.tensors.values() for chunk in tensor.chunks] + [*self.objects.values()]
