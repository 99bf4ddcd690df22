"""Where each tensor lies in a flat buffer of N equal shards.

    TensorSpec list --> plan_layout (this file) --> flat_buffer.py

Pure: no tensors, no ranks, no processes. Offsets are bytes in the gathered
buffer, whose shard r is ``[r * shard_bytes, (r + 1) * shard_bytes)``.

[Note: cuts fall on blocks] Every tensor is contiguous in the gathered buffer, so that layers read it in place. It may
therefore cross from shard r to r + 1 only where its block border is the shard border. Else padding comes before it, or
the shard grows. (veScale's RaggedShard, arXiv 2602.22437, plans the same.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sixfold.fsdp.buffers.column_ranges import round_up
from sixfold.fsdp.errors import FsdpError


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to place.

    Args:
        granularity: ``"element"``, ``"row"`` (slices of dim 0), ``"tensor"`` (whole, one owner) or elements per block.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    granularity: str | int = "element"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        value = self.granularity
        named = isinstance(value, str) and value in ("element", "row", "tensor")
        if not named and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise FsdpError(f"{self.name}: granularity is {value!r}; it is 'element', 'row', 'tensor' or an int >= 1")

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes between two places where a cut may fall (at least one element)."""
        if self.granularity == "tensor":
            elements = self.numel
        elif self.granularity == "row":
            elements = math.prod(self.shape[1:])
        elif self.granularity == "element":
            elements = 1
        else:
            elements = int(self.granularity)
        return max(elements, 1) * self.dtype.itemsize


@dataclass(frozen=True)
class Slice:
    """Elements ``[start, stop)`` of flattened ``name``, at ``offset_bytes`` of their rank's shard."""

    name: str
    start: int
    stop: int
    offset_bytes: int

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]@{self.offset_bytes}"


@dataclass(frozen=True)
class Layout:
    """Tensors in a flat buffer of ``world_size`` shards of ``shard_bytes``.

    ``offsets_bytes[i]`` is where ``specs[i]`` starts in the gathered buffer.
    """

    specs: tuple[TensorSpec, ...]
    offsets_bytes: tuple[int, ...]
    world_size: int
    shard_bytes: int
    align_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Bytes of all shards that hold no tensor."""
        return self.world_size * self.shard_bytes - sum(spec.nbytes for spec in self.specs)

    @cached_property
    def _by_offset(self) -> tuple[list[int], list[int]]:
        # Tensors without elements occupy nothing and would shadow a neighbour at the same offset.
        order = sorted((i for i, s in enumerate(self.specs) if s.nbytes), key=lambda i: self.offsets_bytes[i])
        return order, [self.offsets_bytes[i] for i in order]

    def slices(self, rank: int) -> tuple[Slice, ...]:
        """What shard ``rank`` holds, in the order of the flat buffer; at most one slice per tensor."""
        if not 0 <= rank < self.world_size:
            raise FsdpError(f"rank is {rank}; this layout has shards 0 to {self.world_size - 1}")
        low, high = rank * self.shard_bytes, (rank + 1) * self.shard_bytes
        order, starts = self._by_offset
        found = []
        for at in range(max(bisect_right(starts, low) - 1, 0), len(order)):
            spec, offset = self.specs[order[at]], starts[at]
            if offset >= high:
                break
            first, last = max(offset, low), min(offset + spec.nbytes, high)
            if first < last:
                size = spec.dtype.itemsize
                found.append(Slice(spec.name, (first - offset) // size, (last - offset) // size, first - low))
        return tuple(found)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {spec.name: i for i, spec in enumerate(self.specs)}

    def parts(self, name: str) -> tuple[tuple[int, int, int], ...]:
        """``(rank, start, stop)`` of each shard that holds elements of ``name``, in the order of ranks."""
        at = self._by_name[name]
        spec, low = self.specs[at], self.offsets_bytes[at]
        high, size = low + spec.nbytes, spec.dtype.itemsize
        found = []
        for rank in range(low // self.shard_bytes, -(-high // self.shard_bytes)):
            first, last = max(low, rank * self.shard_bytes), min(high, (rank + 1) * self.shard_bytes)
            if first < last:
                found.append((rank, (first - low) // size, (last - low) // size))
        return tuple(found)

    def whole_bytes(self) -> list[int]:
        """Bytes of whole tensors (granularity ``"tensor"``) in each shard."""
        owned = [0] * self.world_size
        for spec, offset in zip(self.specs, self.offsets_bytes, strict=True):
            if spec.nbytes and spec.granularity == "tensor":
                owned[offset // self.shard_bytes] += spec.nbytes
        return owned

    def is_cut(self, name: str) -> bool:
        """``name`` lies in more than one shard."""
        at = self._by_name[name]
        first, last = self.offsets_bytes[at], self.offsets_bytes[at] + max(self.specs[at].nbytes, 1) - 1
        return first // self.shard_bytes != last // self.shard_bytes

    def __str__(self) -> str:
        order, starts = self._by_offset
        parts = [f"{self.specs[i].name} {o}..{o + self.specs[i].nbytes}" for i, o in zip(order, starts, strict=True)]
        return f"{self.world_size} x {self.shard_bytes} pad {self.padding_bytes}: " + ", ".join(parts)


def plan_layout(
    specs: Sequence[TensorSpec], world_size: int, *, align_bytes: int = 128, held: Sequence[int] | None = None
) -> Layout:
    """Place tensors in ``world_size`` equal shards, as small as the search finds.

    Each tensor starts on a multiple of ``align_bytes``; a cut falls on a block border that is also such
    a multiple. [Note: cuts fall on blocks] Element granularity wastes at most
    ``align_bytes * (world_size + len(specs))`` bytes. The given order is kept unless placing the large
    indivisible tensors first makes the shard smaller.

    Args:
        held: bytes of whole tensors (granularity ``"tensor"``) that each rank owns in other layouts. Shards that share
            no tensor with a neighbour change places, so that the heaviest goes to the rank that owns least.
    Raises:
        FsdpError: a name twice, ``world_size`` < 1, or ``align_bytes`` no multiple of an element.
    Cost: O(T log bytes) for T tensors, whatever ``world_size`` is.
    """
    if world_size < 1:
        raise FsdpError(f"world_size is {world_size}; it is >= 1")
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise FsdpError(f"{spec.name} is in the list twice; a layout has each name once")
        seen.add(spec.name)
        if align_bytes < 1 or align_bytes % spec.dtype.itemsize:
            raise FsdpError(f"{spec.name}: align_bytes is {align_bytes}, no multiple of one {spec.dtype} element")
    best = _search(specs, world_size, align_bytes)
    if any(_step(spec, align_bytes) != align_bytes for spec in specs):
        order = sorted(range(len(specs)), key=lambda i: (-min(_step(specs[i], align_bytes), specs[i].nbytes), i))
        other = _search([specs[i] for i in order], world_size, align_bytes)
        if other[0] < best[0]:
            offsets = [0] * len(specs)
            for place, i in enumerate(order):
                offsets[i] = other[1][place]
            best = other[0], offsets
    if held is not None:
        best = best[0], _spread(specs, best[1], best[0], held)
    return Layout(tuple(specs), tuple(best[1]), world_size, best[0], align_bytes)


def _spread(specs: Sequence[TensorSpec], offsets: Sequence[int], shard: int, held: Sequence[int]) -> list[int]:
    """Offsets after shards that stand alone have changed places. [Note: cuts fall on blocks] Others keep theirs."""
    load = [0] * len(held)
    alone = [True] * len(held)
    for spec, offset in zip(specs, offsets, strict=True):
        first, last = offset // shard, (offset + max(spec.nbytes, 1) - 1) // shard
        if spec.nbytes and last > first:
            alone[first : last + 1] = [False] * (last + 1 - first)
        elif spec.nbytes and spec.granularity == "tensor":
            load[first] += spec.nbytes
    singles = [at for at in range(len(held)) if alone[at]]
    # Each of the two orders is stable: every rank computes this alone and all must break ties alike.
    heaviest = sorted(singles, key=lambda at: -load[at])
    emptiest = sorted(singles, key=lambda rank: held[rank])
    moved = dict(zip(heaviest, emptiest, strict=True)) if any(load) else {}
    return [
        offset + (moved.get(offset // shard, offset // shard) - offset // shard) * shard if spec.nbytes else offset
        for spec, offset in zip(specs, offsets, strict=True)
    ]


def _step(spec: TensorSpec, align: int) -> int:
    """Bytes between two places of ``spec`` where a shard may end."""
    return math.lcm(spec.block_bytes, align)


def _search(specs: Sequence[TensorSpec], world_size: int, align: int) -> tuple[int, list[int]]:
    """The smallest shard found, and the offsets in it."""
    sizes = [round_up(spec.nbytes, align) for spec in specs]
    steps = [_step(spec, align) for spec in specs]
    least = max(round_up(-(-sum(sizes) // world_size), align), align)
    most = max(round_up(sum(sizes), align), align)  # all on the first rank: nothing is cut
    nbytes = [spec.nbytes for spec in specs]
    # A tensor over three shards or more needs shards that are whole numbers of its blocks, hence the quanta.
    # Only the largest tensors span so many; more quanta than these cost time and save nothing.
    largest = sorted(((size, step) for size, step in zip(nbytes, steps, strict=True) if step <= size), reverse=True)
    quanta = {align, *list(dict.fromkeys(step for _, step in largest))[:16]}
    common = math.lcm(*quanta)
    if common <= most:
        quanta.add(common)
    best = most, _place(nbytes, steps, world_size, most, align)
    for quantum in sorted(quanta, reverse=True):
        low, high = -(-least // quantum), -(-best[0] // quantum)
        while low < high:  # not monotone everywhere; any shard that fits is right, a smaller one is better
            middle = (low + high) // 2
            found = _place(nbytes, steps, world_size, middle * quantum, align)
            if found is None:
                low = middle + 1
            else:
                high = middle
                if middle * quantum < best[0]:
                    best = middle * quantum, found
    offsets = best[1]
    assert offsets is not None, f"all tensors fit one shard of {most} bytes"
    return best[0], offsets


def _place(nbytes: Sequence[int], steps: Sequence[int], world_size: int, shard: int, align: int) -> list[int] | None:
    """Offsets one after the other, or None if ``world_size`` shards of ``shard`` bytes are too small."""
    offsets, at = [], 0
    for size, step in zip(nbytes, steps, strict=True):
        at = round_up(at, align)
        border = (at // shard + 1) * shard
        if at + size > border:
            at += (border - at) % step  # now the border is whole steps away, or is where it starts
            if at + size > border + shard and shard % step:  # a second border inside it would miss the blocks
                if size > shard:
                    return None
                at = border
        offsets.append(at)
        at += size
        if at > world_size * shard:
            return None
    return offsets
