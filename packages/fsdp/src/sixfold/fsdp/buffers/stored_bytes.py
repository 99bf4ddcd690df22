"""Bytes of every buffer that a rank holds, for tensors that are cut between any two elements; in integers.

    elements of tensors, BufferFormats --> StreamSizes, stored_bytes (this file) --> cost_model.py --> a plan of a run

No torch, no tensors, no ranks. A model is made by the same rules: reduction_sizes.py and ``turn_ranges``. Where
tensors lie is the answer of packing.py and layout.py in closed form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sixfold.fsdp.buffers.column_ranges import round_up
from sixfold.fsdp.buffers.reduction_sizes import ReductionPath, ReductionSizes, largest_repeated, pool_slots
from sixfold.fsdp.strategy import ShardingStrategy

MIXED_NUMEL = 2**13  # elements of the scratch of mixed additions: 32 KiB of fp32
NORM_BYTES = 2**16  # for a norm where no slot is: parts of 8,192 float64


@dataclass(frozen=True, kw_only=True)
class BufferFormats:
    """Bytes of an element of each kind, and how memory is asked for; options are those of the wrapper.

    Attributes:
        compute, main, grad, reduce: bytes of an element of gathered weights, main weights and local sums, main
            gradients at rest, and of what travels in a reduction.
        align: each tensor starts at a multiple of so many bytes.
        rank_order: ``MixedPrecision(grad_sum="rank_order")``, or ``"tree"``.
        tree_slots: of ``grad_sum="tree"``: ``slots_for`` the microbatches that a rank has of a batch.
        gloo: tensors are on CPUs and travel over gloo.
        main_apart: main weights are a copy of their own, even if their dtype is that of gathered weights.
    """

    strategy: ShardingStrategy
    compute: int
    main: int
    grad: int
    reduce: int
    align: int = 128
    gathered_bytes: int | str | None = None
    reduce_buffers: int = 2
    bucket_bytes: int | None = None
    rank_order: bool = False
    tree_slots: int = 0
    gloo: bool = False
    main_apart: bool = False

    @property
    def aliased(self) -> bool:
        """Main weights are what is gathered: there is no copy of them."""
        return self.compute == self.main and not self.main_apart


@dataclass(frozen=True)
class StreamSizes:
    """A flat buffer in equal shards of positions, with the padding that alignment takes.

    Where matrices travel as fp8, a position is either a byte or as wide as the other tensors. In the first case an
    element of another tensor takes several positions; in the second, fp8 travels widened. The one that moves fewer
    bytes is taken.

    Attributes:
        tensors: elements of each, in the order of the module.
        quantized: it travels as fp8; () where none does.
        ranks: that share the shards; ``replicas``: copies of them.
        trained: its tensors have gradients; frozen ones are a flat buffer of their own.
    """

    tensors: tuple[int, ...]
    formats: BufferFormats
    ranks: int
    replicas: int = 1
    quantized: tuple[bool, ...] = ()
    trained: bool = True

    @property
    def parts(self) -> int:
        """Shards of main weights."""
        return self.ranks if self.formats.strategy.shards_optimizer else 1

    @cached_property
    def pitch(self) -> int:
        """Bytes of a position as it travels."""
        wide = self.formats.compute
        if not any(self.quantized):
            return wide
        return min((1, wide), key=lambda pitch: (self.parts * self._shard(pitch) * (2 * pitch + 4), -pitch))

    @cached_property
    def shard_numel(self) -> int:
        """Positions of a shard."""
        return self._shard(self.pitch)

    @property
    def full_numel(self) -> int:
        """Positions of the whole; every rank of the group takes an equal part of it."""
        return round_up(self.parts * self.shard_numel, self.ranks)

    @property
    def main_numel(self) -> int:
        """Positions of main weights on a rank."""
        return self.full_numel if self.parts == 1 else self.shard_numel

    @property
    def gathered_bytes(self) -> int:
        """Of the whole as it travels, and of what layers read of fp8, rounded up to the alignment."""
        align, narrow = self.formats.align, [n for n, fp8 in zip(self.tensors, self.quantized, strict=False) if fp8]
        copies = sum(round_up(n * self.formats.compute, align) for n in narrow)
        return round_up(self.full_numel * self.pitch, align) + copies

    @property
    def weight_bytes(self) -> int:
        """Of compute weights that stay: the shard that is gathered, or the whole."""
        return self.main_numel * self.pitch if self.formats.strategy.shards_params else self.gathered_bytes

    @property
    def sum_bytes(self) -> int:
        """Of a local sum of the whole."""
        return self.full_numel * self.formats.main

    def held_numel(self, rank: int) -> tuple[int, ...]:
        """Elements of each tensor in shard ``rank``."""
        offsets, sizes = self._offsets(self.pitch), self._sizes(self.pitch)
        low, high = (0, offsets[-1]) if self.parts == 1 else (rank * self.shard_numel, (rank + 1) * self.shard_numel)
        here = [max(min(at + size, high) - max(at, low), 0) for at, size in zip(offsets, sizes, strict=False)]
        return tuple(one * numel // size for one, numel, size in zip(here, self.tensors, sizes, strict=True))

    def _paths(self, bucket_bytes: int, *, alone: bool) -> list[ReductionPath]:
        """Of its reductions; ``alone``: the only flat buffer of a unit other than the root."""
        formats = self.formats
        sizes = ReductionSizes(
            row=self.main_numel,
            parts=self.parts,
            ranks=self.ranks,
            replicas=self.replicas,
            exchanges=(formats.rank_order or (formats.gloo and self.parts > 1), formats.rank_order),
            main=formats.main,
            reduce=formats.reduce,
            narrow=formats.reduce != formats.main,
            bucket_bytes=bucket_bytes,
        )
        return [sizes.own(), *([sizes.fused(alone=alone)] if formats.strategy.shards_grads else [])]

    def _sizes(self, pitch: int) -> tuple[int, ...]:
        """Positions of each tensor."""
        wide = self.formats.compute // pitch if any(self.quantized) else 1
        if wide == 1:
            return self.tensors
        pairs = zip(self.tensors, self.quantized, strict=True)
        return tuple(numel * (1 if narrow else wide) for numel, narrow in pairs)

    def _offsets(self, pitch: int) -> tuple[int, ...]:
        """First position of each tensor, and the end of the last one."""
        border, at, found = self._border(pitch), 0, [0]
        for size in self._sizes(pitch):
            found[-1] = at = round_up(at, border)
            at += size
            found.append(at)
        return tuple(found)

    def _shard(self, pitch: int) -> int:
        border = self._border(pitch)
        return max(round_up(-(-round_up(self._offsets(pitch)[-1], border) // self.parts), border), border)

    def _border(self, pitch: int) -> int:
        return self.formats.align // min(pitch, self.formats.main)


@dataclass(frozen=True, kw_only=True)
class StoredBytes:
    """Bytes of a rank by purpose. Their sum is what ``report()["bytes"]`` and the optimizer hold after a step.

    Attributes:
        parameters: compute weights that stay: whole ones, or the shards that are gathered.
        gradients: main gradients that stay, and whole local sums of strategies that do not shard gradients.
        optimizer: main weights (if they are not the compute weights) and the optimizer's state.
        gathered: memory in which whole weights come and go, the root unit's included.
        reducing: slots of reductions in flight, scratch, and whole local sums beside sharded gradients.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reducing: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.gathered + self.reducing


def stored_bytes(
    units: Sequence[tuple[object, Sequence[StreamSizes]]],
    formats: BufferFormats,
    *,
    per_microbatch: bool,
    state_bytes: int = 0,
    slot_bytes: int | None = None,
) -> StoredBytes:
    """What a rank holds of ``units`` from the first step's end on.

    Args:
        units: (class, flat buffers) of each, the root unit first. Units whose class occurs twice share memory.
        per_microbatch: True: gradients are reduced in each backward. False: they are summed whole until the last one.
        state_bytes: bytes of the optimizer's state in the device's memory.
        slot_bytes: bytes of all slots, if another package makes the reductions.
    """
    strategy, held = formats.strategy, [one for _, flat_buffers in units for one in flat_buffers]
    mains, trained = sum(one.main_numel for one in held), [one for one in held if one.trained]
    trained_mains, sums = sum(one.main_numel for one in trained), sum(one.sum_bytes for one in trained)
    slots = _slot_bytes(units, formats) if slot_bytes is None else slot_bytes
    home = trained_mains * formats.grad
    if strategy.shards_grads:
        gradients, local = home, 0 if per_microbatch else sums
    elif formats.tree_slots:
        gradients, local = sums + home, 0
    else:
        gradients, local = sums if formats.grad == formats.main else sums + home, 0
    gradients += formats.tree_slots * trained_mains * formats.main
    if formats.gloo:  # scratch of mixed additions, and of a norm where no slot is
        mixed = len({formats.compute, formats.main, formats.reduce, formats.grad}) > 1
        local += (MIXED_NUMEL * formats.main if mixed else 0) + (0 if slots else NORM_BYTES)
    return StoredBytes(
        parameters=sum(one.weight_bytes for one in held),
        gradients=gradients,
        optimizer=(0 if formats.aliased else mains * formats.main) + state_bytes,
        gathered=_gathered_bytes(units, formats) if strategy.shards_params else 0,
        reducing=local + slots,
    )


def _gathered_bytes(units: Sequence[tuple[object, Sequence[StreamSizes]]], formats: BufferFormats) -> int:
    """The root's own, and the turns of the others."""
    (_, root), *others = [(kind, sum(one.gathered_bytes for one in flat_buffers)) for kind, flat_buffers in units]
    turns = [(0, kind, size) for kind, size in others if size]
    total = sum(size for _, _, size in turns)
    if isinstance(formats.gathered_bytes, int):
        total = min(total, (formats.gathered_bytes - root) // formats.align * formats.align)
    elif formats.gathered_bytes != "all":
        total = max((start + size for start, size in turn_ranges(turns)), default=0)
    return root + total


def _slot_bytes(units: Sequence[tuple[object, Sequence[StreamSizes]]], formats: BufferFormats) -> int:
    units = [(kind, [one for one in flat_buffers if one.trained]) for kind, flat_buffers in units]
    sums = [(kind, max((one.sum_bytes for one in flat_buffers), default=0)) for kind, flat_buffers in units]
    bucket = formats.bucket_bytes or largest_repeated(sums)
    known: dict[tuple[int, bool], list[ReductionPath]] = {}  # layers are alike: worked out once
    paths = []
    for at, (_, flat_buffers) in enumerate(units):
        alone = bool(at) and len(flat_buffers) == 1
        for one in flat_buffers:
            if (id(one), alone) not in known:
                known[id(one), alone] = one._paths(bucket, alone=alone)
            paths.append(known[id(one), alone])
    slots, nbytes = pool_slots(paths, formats.reduce_buffers)
    return slots * nbytes


def turn_ranges(units: Sequence[tuple[int, object, int]]) -> list[tuple[int, int]]:
    """(first byte, bytes) of each unit: two slots for each depth of units inside units, in which the units take turns.

    A slot is as large as the largest of its units whose class occurs more than once. A single unit that is larger (an
    embedding, a head) takes a range from the first slot's start on, over both and beyond: so the depth takes the larger
    of the two slots and its largest unit.

    Args:
        units: (depth, class or None if it is of none, bytes) of each.
    """
    starts, base = [0] * len(units), 0
    for depth in sorted({depth for depth, _, _ in units}):
        members = [at for at, (of, _, _) in enumerate(units) if of == depth]
        kinds = Counter(units[at][1] for at in members)
        sizes = {at: units[at][2] for at in members}
        repeated = [sizes[at] for at in members if units[at][1] is not None and kinds[units[at][1]] > 1]
        turns = [at for at in members if sizes[at] <= max(repeated or sizes.values())]
        first = max(sizes[at] for at in turns[::2])
        for at in members:
            starts[at] = base
        for at in turns[1::2]:
            starts[at] = base + first
        base = max(starts[at] + sizes[at] for at in members)
    return [(start, nbytes) for start, (_, _, nbytes) in zip(starts, units, strict=True)]
