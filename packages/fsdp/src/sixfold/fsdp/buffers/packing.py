"""Parameters of several dtypes in one gathered buffer: where each lies, and which bytes of it travel.

    parameters + dtypes --> pack (this file) --> layout, bytes per position --> flat_buffer.py, weights.py

Pure: no tensors, no ranks, no processes. A flat buffer has one layout of positions, for main weights, gradients and
gathered weights alike; ``pitch`` is how many gathered bytes a position has.

[Note: one collective for several dtypes] Packing the dtypes of each rank one after the other would tear every tensor
that lies on two ranks. Two flat buffers would be two collectives. So all tensors lie in one. One whose elements have
``pitch`` bytes lies there as it is. A wider one takes several positions for each element and is not cut between ranks,
so that its bytes lie in one piece too. Main weights and gradients leave the positions behind its elements empty. A
narrower one travels widened, and is copied out. The pitch is the one that moves the fewest bytes. It is the narrowest
where wide parameters are few (fp8 matrices and bf16 norms), and a wider one where cutting them matters more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sixfold.fsdp.buffers.layout import Layout, TensorSpec, plan_layout

_OF_SIZE = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
_BYTES_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def travels_as(dtype: torch.dtype, pitch: int, *, fp8: bool) -> torch.dtype:
    """What a parameter of ``dtype`` travels in; fp8 bytes as integers."""
    if fp8:
        return _BYTES_OF_SIZE[pitch]
    return dtype if dtype.itemsize >= pitch else _OF_SIZE[pitch]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Attributes:
    layout: planned in positions of ``itemsize`` bytes.
    pitch: bytes of a position in the gathered buffer.
    """

    layout: Layout
    itemsize: int
    pitch: int

    @property
    def positions(self) -> int:
        """Of all shards."""
        return self.layout.world_size * self.layout.shard_bytes // self.itemsize

    @property
    def moved_bytes(self) -> int:
        """By a micro-batch that gathers twice and reduces fp32 once."""
        return self.positions * (2 * self.pitch + 4)


def pack(
    specs: Sequence[TensorSpec],
    parts: int,
    *,
    main_itemsize: int,
    align_bytes: int,
    held: Sequence[int] | None = None,
) -> Packing:
    """Place tensors whose ``dtype`` is what they travel in.

    Args:
        specs: granularities are those of main weights; a tensor that is not cut keeps the shape they give.
        parts: shards.
        main_itemsize: bytes of an element of main weights; less than the pitch, the layout is planned in it.
        held: see ``plan_layout``.
    Cost: one ``plan_layout`` for each width.
    """
    widths = sorted({spec.dtype.itemsize for spec in specs})
    found = [_with_pitch(specs, pitch, parts, main_itemsize, align_bytes, held) for pitch in widths]
    return min(found, key=lambda one: (one.moved_bytes, -one.pitch))


def _with_pitch(
    specs: Sequence[TensorSpec],
    pitch: int,
    parts: int,
    main_itemsize: int,
    align_bytes: int,
    held: Sequence[int] | None,
) -> Packing:
    itemsize = min(pitch, main_itemsize)
    placed = []
    for spec in specs:
        times = spec.dtype.itemsize // pitch
        if times > 1:
            placed.append(replace(spec, dtype=_OF_SIZE[times * itemsize], granularity=_whole(spec)))
        else:
            placed.append(spec if spec.dtype.itemsize == itemsize else replace(spec, dtype=_OF_SIZE[itemsize]))
    layout = plan_layout(placed, parts, align_bytes=align_bytes, held=held if parts > 1 else None)
    return Packing(layout=layout, itemsize=itemsize, pitch=pitch)


def _whole(spec: TensorSpec) -> str | int:
    """A granularity that is never cut and leaves main weights in the shape of ``spec``'s own."""
    return "tensor" if isinstance(spec.granularity, str) and spec.granularity != "element" else max(spec.numel, 1)
