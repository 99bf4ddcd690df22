"""What a rank stores: weights, gradients, optimizer state and buffers, as sixfold.fsdp lays them out.

    units (tensor_sizes.py), config, parallel --> Stored (this file) --> plan.py

Integers only: no torch, no tensors, no ranks. Every rule here is one of sixfold.fsdp's, for tensors that are cut
between any two elements, and a test compares it with ``report()``. N is the ranks that share a stream: dp * cp /
dp_replicate, and dp * cp / ep for experts, which have no replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from sixfold.fsdp.buffers.column_ranges import columns
from sixfold.fsdp.strategy import ShardingStrategy
from sixfold.gpt.plan.tensor_sizes import Stream, Unit, largest_tensor
from sixfold.pipeline.schedules import by_name, registered

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCHEDULES = {entry.name for entry in registered()}  # "plan" is another one's base
_SHARDED_GRADS = ("optim_grads", "optim_grads_params")
_POOL_ALIGN = 128  # of what one reduction needs, in sixfold.fsdp's ways.py
_MOST_PIECES = 16  # likewise
_MIXED_NUMEL, _NORM_BYTES = 2**13, 2**16  # likewise, in reduce.py


def ranks_of(parallel: ParallelConfig, *, experts: bool) -> tuple[int, int]:
    """(ranks that share the shards of a stream, copies of them)."""
    if experts:
        return parallel.dp * parallel.cp // parallel.ep, 1
    return parallel.dp * parallel.cp // parallel.dp_replicate, parallel.dp_replicate


def run_sharding(config: TrainConfig, parallel: ParallelConfig) -> str:
    """``parallel.sharding``, but where no other rank has the same weights fsdp keeps them whole, unless it is told how
    much to gather."""
    alone = parallel.dp * parallel.cp == 1
    return "no_shard" if alone and config.fsdp.gathered_bytes is None else parallel.sharding


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes of an element of each kind, and how memory for temporaries is asked for."""

    compute: int
    main: int
    grad: int
    reduce: int
    align: int
    gathered_bytes: int | str | None
    reduce_buffers: int
    bucket_bytes: int | None
    rank_order: bool
    offload: bool
    gloo: bool  # sums into shards are exchanges in the order of ranks, whatever ``rank_order`` says
    versioned: bool  # the schedule keeps versions of compute weights, and main weights are always another copy

    @classmethod
    def of(cls, config: TrainConfig, *, gloo: bool = False) -> Formats:
        """As rank_model.py hands them to sixfold.fsdp."""
        fsdp = config.fsdp
        main = _ITEMSIZE[fsdp.main_dtype]
        return cls(
            compute=4 if config.train.precision == "fp32" else 2,
            main=main,
            grad=_ITEMSIZE[fsdp.grad_dtype or fsdp.main_dtype],
            reduce=_ITEMSIZE[fsdp.reduce_dtype or fsdp.main_dtype],
            align=fsdp.align_bytes,
            gathered_bytes=fsdp.gathered_bytes,
            reduce_buffers=fsdp.reduce_buffers,
            bucket_bytes=fsdp.bucket_bytes,
            rank_order=fsdp.grad_sum == "rank_order",
            offload=fsdp.offload,
            gloo=gloo,
            versioned=_versioned(config.parallel.schedule),
        )

    @property
    def aliased(self) -> bool:
        """Main weights are what is gathered: there is no copy of them."""
        return self.compute == self.main and not self.versioned


@lru_cache(maxsize=64)
def _versioned(schedule: str) -> bool:
    return schedule in _SCHEDULES and not by_name(schedule).flushed


@dataclass(frozen=True)
class Cut:
    """A stream in N equal shards of positions: elements, with the padding that alignment takes.

    Where matrices travel as fp8, a position may be a byte, and an element of another tensor takes as many as it has
    bytes; or it is as wide as the others, and fp8 travels widened: whichever moves fewer bytes.
    """

    stream: Stream
    formats: Formats
    strategy: ShardingStrategy
    ranks: int
    replicas: int = 1

    @property
    def parts(self) -> int:
        """Shards of main weights."""
        return self.ranks if self.strategy.shards_optimizer else 1

    @cached_property
    def pitch(self) -> int:
        """Bytes of a position as it travels."""
        wide = self.formats.compute
        if not any(self.stream.quantized):
            return wide
        return min((1, wide), key=lambda pitch: (self._positions(pitch) * (2 * pitch + 4), -pitch))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First position of each tensor, and the end of the last one."""
        return self._offsets(self.pitch)

    @cached_property
    def shard_numel(self) -> int:
        """Positions of a shard."""
        return self._shard(self.pitch)

    @property
    def full_numel(self) -> int:
        """Positions of the whole; every rank of the group takes an equal part of it."""
        return _up(self.parts * self.shard_numel, self.ranks)

    @property
    def main_numel(self) -> int:
        """Positions of main weights on a rank."""
        return self.full_numel if self.parts == 1 else self.shard_numel

    @property
    def gathered_bytes(self) -> int:
        """Of the whole as it travels, and of what layers read of fp8, rounded up to the alignment."""
        quantized = [n for n, narrow in zip(self.stream.tensors, self.stream.quantized, strict=False) if narrow]
        copies = sum(_up(n * self.formats.compute, self.formats.align) for n in quantized)
        return _up(self.full_numel * self.pitch, self.formats.align) + copies

    @property
    def sum_bytes(self) -> int:
        """Of a local sum of the whole."""
        return self.full_numel * self.formats.main

    def state_numel(self, rank: int) -> int:
        """Elements of optimizer state for what shard ``rank`` holds of each tensor."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        if self.parts == 1:
            low, high = 0, self.offsets[-1]
        total = 0
        sizes = self._sizes(self.pitch)
        for start, size, numel, moments in zip(
            self.offsets, sizes, self.stream.tensors, self.stream.moments, strict=False
        ):
            here = max(min(start + size, high) - max(start, low), 0)
            total += moments * here * numel // size
        return total

    def _sizes(self, pitch: int) -> tuple[int, ...]:
        """Positions of each tensor."""
        wide = self.formats.compute // pitch if any(self.stream.quantized) else 1
        if wide == 1:
            return self.stream.tensors
        pairs = zip(self.stream.tensors, self.stream.quantized, strict=True)
        return tuple(numel * (1 if narrow else wide) for numel, narrow in pairs)

    def _offsets(self, pitch: int) -> tuple[int, ...]:
        border, at, found = self._border(pitch), 0, [0]
        for size in self._sizes(pitch):
            at = _up(at, border)
            found[-1] = at
            at += size
            found.append(at)
        return tuple(found)

    def _shard(self, pitch: int) -> int:
        border = self._border(pitch)
        return max(_up(-(-_up(self._offsets(pitch)[-1], border) // self.parts), border), border)

    def _positions(self, pitch: int) -> int:
        """Of all shards."""
        return self.parts * self._shard(pitch)

    def _border(self, pitch: int) -> int:
        return self.formats.align // min(pitch, self.formats.main)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Bytes of a rank by purpose, activations apart. Their sum is what ``report()["bytes"]`` and the optimizer hold.

    Attributes:
        parameters: compute weights that stay: whole ones, or the shards that are gathered.
        gradients: main gradients where they stay, and whole local sums of strategies that do not shard them.
        optimizer: main weights (where they are no compute weights) and moments.
        gathered: memory in which whole weights come and go, the root unit's included.
        reducing: buffers of reductions in flight, scratch, and whole local sums beside sharded gradients.
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


def stored(
    config: TrainConfig,
    parallel: ParallelConfig,
    units: Sequence[Unit],
    *,
    per_microbatch: bool,
    gloo: bool,
    rank: int = 0,
) -> Stored:
    """What a rank holds of ``units`` from the first step's end on.

    Args:
        per_microbatch: gradients are reduced in each backward (``fsdp.grad_reduce``), else summed whole until the last.
        gloo: what travels between ranks goes over it (CPU tensors).
        rank: among dp x cp; the first holds the most.
    """
    formats, strategy = Formats.of(config, gloo=gloo), ShardingStrategy(run_sharding(config, parallel))
    each: dict[Stream, Cut] = {}  # layers are alike: worked out once
    states: dict[Stream, int] = {}
    for stream in (stream for unit in units for stream in unit.streams if stream not in each):
        ranks, copies = ranks_of(parallel, experts=stream.experts)
        each[stream] = cut = Cut(stream, formats, strategy, ranks, copies)
        states[stream] = cut.state_numel(rank // parallel.ep if stream.experts else rank % ranks)
    cuts = [[each[stream] for stream in unit.streams] for unit in units]
    held = [cut for row in cuts for cut in row]
    weights = sum(cut.main_numel * cut.pitch if strategy.shards_params else cut.gathered_bytes for cut in held)
    moments = sum(states[cut.stream] for cut in held) * formats.main
    main = 0 if formats.aliased else sum(cut.main_numel for cut in held) * formats.main
    home = sum(cut.main_numel for cut in held) * formats.grad
    sums = sum(cut.sum_bytes for cut in held)
    if strategy.shards_grads:
        gradients, local = home, 0 if per_microbatch else sums
    else:
        gradients, local = sums if formats.grad == formats.main else sums + home, 0
    kinds = [unit.kind for unit in units]
    pool = pool_bytes(kinds, cuts, formats)
    if formats.versioned:  # sums in place, or of every rank's part of one tensor after the other
        ranks, _ = ranks_of(parallel, experts=False)
        pool = ranks * largest_tensor(units) * formats.main if formats.rank_order and ranks > 1 else 0
    return Stored(
        parameters=weights,
        gradients=gradients,
        optimizer=main + (0 if formats.offload else moments),
        gathered=_arena_bytes(kinds, cuts, formats) if strategy.shards_params else 0,
        reducing=local + pool + _scratch_bytes(formats, pool),
    )


def _scratch_bytes(formats: Formats, pool: int) -> int:
    """Of mixed additions, and of a norm where no slot of the pool is; on CPUs alone."""
    if not formats.gloo:
        return 0
    mixed = len({formats.compute, formats.main, formats.reduce, formats.grad}) > 1
    return (_MIXED_NUMEL * formats.main if mixed else 0) + (0 if pool else _NORM_BYTES)


def wire_bytes(stream: Stream, formats: Formats) -> int:
    """Of a gather of the stream, padding apart."""
    narrow = sum(n for n, quantized in zip(stream.tensors, stream.quantized, strict=False) if quantized)
    return (stream.numel - narrow) * formats.compute + narrow


def reduces_per_microbatch(config: TrainConfig, parallel: ParallelConfig, *, stages: int, split: bool) -> bool:
    """Whether ``fsdp.grad_reduce`` reduces gradients in every backward of a rank of so many stages."""
    asked = config.fsdp.grad_reduce
    if asked != "auto":
        return asked == "microbatch"
    return run_sharding(config, parallel) in _SHARDED_GRADS and stages == 1 and not split


def held_gradients(unit: Unit, config: TrainConfig, parallel: ParallelConfig, *, per_microbatch: bool) -> int:
    """Elements of gradients of ``unit`` that lie where autograd made them until its reduction takes them.

    One tensor's, where each is added to a sum as it comes; all of the unit's, where no single sum can be in a slot.
    """
    narrow = Formats.of(config).reduce != Formats.of(config).main
    sums = len(unit.streams) == 1 and not narrow and unit.kind != "root"
    if sums or not per_microbatch or run_sharding(config, parallel) not in _SHARDED_GRADS:
        return max(unit.tensors, default=0)
    return unit.numel


def _arena_bytes(kinds: Sequence[str], cuts: Sequence[Sequence[Cut]], formats: Formats) -> int:
    """Of gathered weights: the root's own, and the turns of the others."""
    root, *turns = (sum(cut.gathered_bytes for cut in row) for row in cuts)
    pairs = [(kind, size) for kind, size in zip(kinds[1:], turns, strict=True) if size]
    sizes = [size for _, size in pairs]
    if formats.gathered_bytes == "all" or not sizes:
        return root + sum(sizes)
    if isinstance(formats.gathered_bytes, int):
        return root + min(sum(sizes), (formats.gathered_bytes - root) // formats.align * formats.align)
    limit = max(_repeated(pairs) or sizes)
    small = [size for size in sizes if size <= limit]
    first = max(small[::2])
    return root + max([first + max(small[1::2], default=0), *sizes])


def pool_bytes(kinds: Sequence[str], cuts: Sequence[Sequence[Cut]], formats: Formats) -> int:
    """Of the slots in which reductions are in flight."""
    sizes = [max((cut.sum_bytes for cut in row), default=0) for row in cuts]
    repeated = max(_repeated(list(zip(kinds, sizes, strict=True))), default=0) or max(sizes)
    bucket = formats.bucket_bytes or max(repeated, math.ceil(max(sizes) / _MOST_PIECES))
    slots: list[int] = []
    pieces = 0
    for row in cuts:
        for cut in row:
            ways = [_own_way(cut, bucket)]
            if cut.strategy.shards_grads:
                ways.append(_fused_way(cut, bucket, alone=row is not cuts[0] and len(row) == 1))
            slots += [nbytes for _, nbytes in ways]
            pieces += max(count for count, _ in ways)
    largest = max(slots, default=0)
    return largest * min(formats.reduce_buffers, pieces) if largest else 0


def _own_way(cut: Cut, bucket: int) -> tuple[int, int]:
    """Pieces of a reduction of whole sums, and bytes of a slot for one."""
    formats = cut.formats
    direct = formats.reduce == formats.main and not any(_scratch(cut, cut.main_numel))
    widths = [cut.main_numel] if direct else _widths(cut, bucket)
    staged = formats.reduce != formats.main or len(widths) > 1
    return len(widths), _slot(cut, max(widths), sent=staged, result=False)


def _fused_way(cut: Cut, bucket: int, *, alone: bool) -> tuple[int, int]:
    """The same of gradients that are reduced in the backward that makes them.

    ``alone``: the only stream of a unit other than the root.
    """
    formats = cut.formats
    widths = _widths(cut, bucket)
    in_slot = alone and len(widths) == 1 and formats.reduce == formats.main
    result = not in_slot and formats.reduce != formats.main
    return len(widths), _slot(cut, max(widths), sent=True, result=result)


def _widths(cut: Cut, bucket: int) -> list[int]:
    unit = 64 * cut.replicas * (cut.ranks if cut.parts == 1 else 1)
    found = columns(cut.main_numel, cut.parts, cut.formats.main, bucket, unit=unit)
    return [stop - start for start, stop in found] or [0]


def _scratch(cut: Cut, width: int) -> tuple[int, int]:
    """Elements that sums in the order of ranks need beside what is sent: over shards, over replicas."""
    formats = cut.formats
    exchanged = formats.rank_order or (formats.gloo and cut.parts > 1)
    over_shards = _received(cut.parts * width, cut.ranks) if exchanged else 0
    return over_shards, _received(width, cut.replicas) if formats.rank_order else 0


def _received(sent: int, ranks: int) -> int:
    if ranks == 1:
        return 0
    if sent % ranks:
        return ranks * sent
    return sent // 2 if ranks == 2 else sent  # two ranks swap what each lacks


def _slot(cut: Cut, width: int, *, sent: bool, result: bool) -> int:
    formats = cut.formats
    received, from_replicas = _scratch(cut, width)
    parts = (
        cut.parts * width * formats.reduce if sent else 0,
        received * formats.reduce,
        width * formats.main if result else 0,
        from_replicas * formats.main,
    )
    return sum(_up(nbytes, _POOL_ALIGN) for nbytes in parts)


def _repeated(pairs: Sequence[tuple[str, int]]) -> list[int]:
    """Sizes of units whose class occurs more than once."""
    kinds = Counter(kind for kind, _ in pairs)
    return [size for kind, size in pairs if kinds[kind] > 1]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
