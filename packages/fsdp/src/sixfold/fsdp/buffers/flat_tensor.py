"""One flat tensor in the layout of a flat buffer, and the record of a parameter that lies in it.

    layout.py --> Cut, DataParallelBuffer, ParamRecord (this file) --> weights.py, gradients.py, state/records.py

Knows places and views; owns no weight and no gradient. N is the size of the shard dimension, S the elements of a
shard. Compute weights, main weights and gradients of a flat buffer share one element layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.layout import Layout, Slice, TensorSpec
from sixfold.fsdp.errors import FsdpError

if TYPE_CHECKING:
    from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer


class DataParallelBuffer:
    """One flat tensor in the layout of a flat buffer: all shards, or this rank's alone.

    Args:
        layout: planned in elements of ``itemsize`` bytes.
        flat: (N * S,) or more for the whole, (S,) for the shard of ``rank``.
    """

    def __init__(self, layout: Layout, itemsize: int, rank: int, flat: Tensor) -> None:
        self.flat = flat
        self.shard_numel = layout.shard_bytes // itemsize
        self._whole = layout.world_size == 1 or flat.numel() != self.shard_numel
        self._rank = rank
        self._specs = {
            spec.name: (offset // itemsize, spec)
            for spec, offset in zip(layout.specs, layout.offsets_bytes, strict=True)
        }
        self._slices = {part.name: (part, part.offset_bytes // itemsize) for part in layout.slices(rank)}

    @property
    def shard(self) -> Tensor:
        """(S,) this rank's part."""
        start = self._rank * self.shard_numel if self._whole else 0
        return self.flat[start : start + self.shard_numel]

    def full(self, name: str) -> Tensor:
        """The whole tensor, in its shape."""
        if not self._whole:
            raise FsdpError(f"{name}: this flat tensor holds one shard; a full view needs the gathered one")
        offset, spec = self._specs[name]
        return self.flat[offset : offset + spec.numel].view(spec.shape)

    def slice(self, name: str) -> Slice | None:
        """What of ``name`` this rank's shard holds."""
        found = self._slices.get(name)
        return None if found is None else found[0]

    def local(self, name: str) -> Tensor:
        """This rank's part of ``name``: (n,) by element and block, (rows, ...) by row, the full shape by tensor.

        A tensor of shape () is (1,) by each of them.
        """
        part, offset = self._slices[name]
        flat = self.shard[offset : offset + part.stop - part.start]
        return flat.view(local_shape(self._specs[name][1], part))


def local_shape(spec: TensorSpec, part: Slice) -> tuple[int, ...]:
    """Shape of a main parameter that holds ``part``."""
    if spec.granularity == "tensor" and spec.shape:  # of () too: else its state would look like a step counter
        return spec.shape
    if spec.granularity == "row" and spec.shape:
        return ((part.stop - part.start) // max(math.prod(spec.shape[1:]), 1), *spec.shape[1:])
    return (part.stop - part.start,)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where the elements of a flat buffer lie on this rank.

    Attributes:
        layout: planned in elements of ``itemsize`` bytes.
        part: which of its shards this rank holds.
        full_numel: elements of the whole, padding included; a multiple of the ranks that share it.
    """

    layout: Layout
    itemsize: int
    part: int
    full_numel: int

    @cached_property
    def parts(self) -> int:
        """Shards of main weights; 1: every rank has all."""
        return self.layout.world_size

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a shard."""
        return self.layout.shard_bytes // self.itemsize

    @cached_property
    def main_numel(self) -> int:
        """Elements of what a rank holds of main weights and of main gradients."""
        return self.full_numel if self.parts == 1 else self.shard_numel

    def view_of(self, flat: Tensor) -> DataParallelBuffer:
        """``flat`` in this layout."""
        return DataParallelBuffer(self.layout, self.itemsize, self.part, flat)

    def part_of(self, flat: Tensor) -> Tensor:
        """(main_numel,) this rank's part of a whole."""
        return flat if self.parts == 1 else flat[self.part * self.shard_numel :][: self.shard_numel]


class ParamRecord:
    """One parameter in its flat buffer.

    ``main`` is what the optimizer updates (None where nothing of it lies here); ``wanted`` is ``requires_grad`` as it
    was last set; ``left_out``: every backward since the last reduction was asked for others (``inputs=``);
    ``parameter.data`` is ``compute`` for ever. [Note: views made once]
    """

    __slots__ = ("compute", "dtype", "flat_buffer", "left_out", "main", "name", "parameter", "spec", "wanted")

    def __init__(
        self, name: str, parameter: nn.Parameter, spec: TensorSpec, dtype: torch.dtype, flat_buffer: ParamAndGradBuffer
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.spec = spec
        self.dtype = dtype
        self.flat_buffer = flat_buffer
        self.compute: Tensor
        self.main: nn.Parameter | None = None
        self.left_out = False
        self.wanted = parameter.requires_grad

    @property
    def whole_on_one_rank(self) -> bool:
        """Its main parameter has the parameter's own shape, on the one rank that holds it. The same on all ranks."""
        in_shape = self.spec.granularity == "tensor" or len(self.spec.shape) == 1
        return in_shape and not self.flat_buffer.cut.layout.is_cut(self.name)
