"""What a rank stores: parameters, gradients, optimizer state and buffers, as sixfold.fsdp lays them out.

    config, parallel, layers of a rank --> units (this file) --> Stored (this file) --> plan.py
    activations are in activations.py

Integers only: no torch, no tensors, no ranks. N is the size of the shard group, dp * cp / dp_replicate. Every rule here
is one of sixfold.fsdp's, for tensors that are cut between any two elements, and a test compares it with ``report()``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from sixfold.fsdp.pieces import columns
from sixfold.fsdp.strategy import ShardingStrategy

if TYPE_CHECKING:
    from sixfold.gpt.config import GPTConfig, ParallelConfig, TrainConfig

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_POOL_ALIGN = 128  # of what one reduction needs, in sixfold.fsdp's ways.py
_MOST_PIECES = 16  # likewise


@dataclass(frozen=True, slots=True)
class Unit:
    """What is gathered and freed together: its class and the elements of its tensors on a tensor-parallel rank.

    ``moments``: AdamW's (2) or Muon's (1), for each tensor. ``quantized``: it travels as fp8; () where none does.
    """

    kind: str
    tensors: tuple[int, ...]
    moments: tuple[int, ...]
    quantized: tuple[bool, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(self.tensors)


def layer_tensors(model: GPTConfig, tp: int = 1) -> dict[str, int]:
    """Elements of each tensor of a layer on a tensor-parallel rank, in the order of the module."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size // tp
    queries = model.num_attention_heads * model.head_dim // tp
    keys = model.num_query_groups * model.head_dim // tp
    sizes = {"attention_norm": hidden}
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        sizes[f"{name}"] = hidden * width
        if model.qkv_bias:
            sizes[f"{name}.bias"] = width
    sizes["out"] = queries * hidden
    if model.qk_norm:
        sizes |= {"q_norm": model.head_dim, "k_norm": model.head_dim}
    return sizes | {"ffn_norm": hidden, "gate": hidden * ffn, "up": hidden * ffn, "down": ffn * hidden}


def table_numel(model: GPTConfig, tp: int = 1) -> int:
    """Elements of the embedding, and of the head, with vocabulary padding."""
    return model.padded_vocab_size // tp * model.hidden_size


def stage_parameters(model: GPTConfig, layers: Sequence[int], *, first: bool, last: bool) -> int:
    """Parameters of a stage before any split, without vocabulary padding; a tied table counts on the first stage."""
    tables = model.vocab_size * model.hidden_size * (first + (last and not model.tie_embeddings))
    return len(layers) * sum(layer_tensors(model).values()) + tables + (model.hidden_size if last else 0)


def units_of_rank(
    config: TrainConfig, stages: Mapping[int, Sequence[int]], last: int, *, tp: int, one_table: bool
) -> tuple[Unit, ...]:
    """The fsdp units of a rank: the root unit, then the others in the order of the module.

    Args:
        stages: layers of each stage on the rank.
        last: number of the last stage.
        one_table: the first and the last stage share one embedding on their rank, which the root unit then holds.
    """
    model = config.model
    muon = config.optimizer.name == "muon"
    root: list[int] = []
    units: list[Unit] = []
    for stage, layers in sorted(stages.items()):
        if stage == 0:
            if one_table:
                root.append(table_numel(model, tp))
            else:
                units.append(Unit("embedding", (table_numel(model, tp),), (2,)))
        for _ in layers:
            tensors = layer_tensors(model, tp)
            matrices = ["norm" not in name and "bias" not in name for name in tensors]
            moments = tuple(1 if muon and matrix else 2 for matrix in matrices)
            quantized = tuple(matrices) if config.train.precision == "fp8" else ()
            units.append(Unit("layer", tuple(tensors.values()), moments, quantized))
        if stage == last:
            root.append(model.hidden_size)
            if not one_table:
                units.append(Unit("head", (table_numel(model, tp),), (2,)))
    return Unit("root", tuple(root), (2,) * len(root)), *units


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes of an element of each kind, and how memory for temporaries is asked for."""

    compute: int
    main: int
    grad: int
    reduce: int
    align: int
    gathered_bytes: int | str
    reduce_buffers: int
    bucket_bytes: int | None
    rank_order: bool
    offload: bool
    gloo: bool  # sums into shards are exchanges in the order of ranks, whatever ``rank_order`` says
    versioned: bool  # the schedule keeps versions of compute weights, and main weights are always another copy

    @classmethod
    def of(cls, config: TrainConfig, *, gloo: bool = False) -> Formats:
        """As build.py hands them to sixfold.fsdp."""
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
            versioned=not config.parallel.entry.flushed,
        )

    @property
    def aliased(self) -> bool:
        """Main weights are what is gathered: there is no copy of them."""
        return self.compute == self.main and not self.versioned


@dataclass(frozen=True)
class Cut:
    """A unit in N equal shards of positions: elements, with the padding that alignment takes.

    Where matrices travel as fp8, a position is a byte, and an element of another tensor takes as many as it has bytes.
    """

    unit: Unit
    formats: Formats
    strategy: ShardingStrategy
    ranks: int

    @property
    def parts(self) -> int:
        """Shards of main weights."""
        return self.ranks if self.strategy.shards_optimizer else 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First element of each tensor, and the end of the last one."""
        border, at, found = self._border, 0, [0]
        for positions in self._positions:
            at = _up(at, border)
            found[-1] = at
            at += positions
            found.append(at)
        return tuple(found)

    @property
    def shard_numel(self) -> int:
        """Elements of a shard."""
        return max(_up(-(-_up(self.offsets[-1], self._border) // self.parts), self._border), self._border)

    @property
    def full_numel(self) -> int:
        """Elements of the whole; every rank of the group takes an equal part of it."""
        return _up(self.parts * self.shard_numel, self.ranks)

    @property
    def main_numel(self) -> int:
        """Elements of main weights on a rank."""
        return self.full_numel if self.parts == 1 else self.shard_numel

    @property
    def gathered_bytes(self) -> int:
        """Of the whole as it travels, and of what layers read of fp8, rounded up to the alignment."""
        copies = sum(_up(n * self.formats.compute, self.formats.align) for n in self._quantized_numels)
        return _up(self.full_numel * self.pitch, self.formats.align) + copies if self.unit.tensors else 0

    @property
    def sum_bytes(self) -> int:
        """Of a local sum of the whole."""
        return self.full_numel * self.formats.main if self.unit.tensors else 0

    def state_numel(self, rank: int) -> int:
        """Elements of optimizer state for what shard ``rank`` holds of each tensor."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        if self.parts == 1:
            low, high = 0, self.offsets[-1]
        total = 0
        rows = zip(self.offsets, self._positions, self.unit.tensors, self.unit.moments, strict=False)
        for start, positions, numel, moments in rows:
            here = max(min(start + positions, high) - max(start, low), 0)
            total += moments * here * numel // positions
        return total

    @property
    def pitch(self) -> int:
        """Bytes of a position as it travels."""
        return 1 if any(self.unit.quantized) else self.formats.compute

    @property
    def _positions(self) -> tuple[int, ...]:
        """Of each tensor."""
        if not any(self.unit.quantized):
            return self.unit.tensors
        pairs = zip(self.unit.tensors, self.unit.quantized, strict=True)
        return tuple(numel * (1 if narrow else self.formats.compute) for numel, narrow in pairs)

    @property
    def _quantized_numels(self) -> list[int]:
        return [n for n, narrow in zip(self.unit.tensors, self.unit.quantized, strict=False) if narrow]

    @property
    def _border(self) -> int:
        return self.formats.align // min(self.pitch, self.formats.main)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Bytes of a rank by purpose, activations apart. Their sum is what ``report()["bytes"]`` and the optimizer hold.

    Attributes:
        parameters: compute weights that stay: whole ones, or the shards that are gathered.
        gradients: main gradients where they stay, and whole local sums of strategies that do not shard them.
        optimizer: main weights (where they are no compute weights) and moments.
        gathered: memory in which whole weights come and go, the root unit's included.
        reducing: buffers of reductions in flight, and whole local sums beside sharded gradients.
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
    shard: int = 0,
) -> Stored:
    """What a rank holds of ``units`` from the first step's end on.

    Args:
        per_microbatch: gradients are reduced in each backward (``fsdp.grad_reduce``), else summed whole until the last.
        gloo: what travels between ranks goes over it (CPU tensors).
        shard: position in the shard group; the first holds the most.
    """
    formats, strategy = Formats.of(config, gloo=gloo), ShardingStrategy(parallel.sharding)
    ranks = parallel.dp * parallel.cp // parallel.dp_replicate
    each = {unit: Cut(unit, formats, strategy, ranks) for unit in units}  # layers are alike: worked out once
    cuts = [each[unit] for unit in units]
    held = [cut for cut in cuts if cut.unit.tensors]
    weights = sum(cut.main_numel * cut.pitch if strategy.shards_params else cut.gathered_bytes for cut in held)
    states = {unit: cut.state_numel(shard) for unit, cut in each.items()}
    moments = sum(states[cut.unit] for cut in held) * formats.main
    main = 0 if formats.aliased else sum(cut.main_numel for cut in held) * formats.main
    home = sum(cut.main_numel for cut in held) * formats.grad
    sums = sum(cut.sum_bytes for cut in held)
    if strategy.shards_grads:
        gradients, local = home, 0 if per_microbatch else sums
    else:
        gradients, local = sums if formats.grad == formats.main else sums + home, 0
    pool = pool_bytes(cuts, formats, parallel.dp_replicate)
    if formats.versioned:  # sums in place, or of every rank's part of one tensor after the other
        largest = largest_tensor(units) if formats.rank_order and ranks > 1 else 0
        pool = ranks * largest * formats.main
    return Stored(
        parameters=weights,
        gradients=gradients,
        optimizer=main + (0 if formats.offload else moments),
        gathered=_arena_bytes(cuts, formats) if strategy.shards_params else 0,
        reducing=local + pool,
    )


def wire_bytes(unit: Unit, formats: Formats) -> int:
    """Of a gather of the unit, padding apart."""
    narrow = sum(n for n, quantized in zip(unit.tensors, unit.quantized, strict=False) if quantized)
    return (unit.numel - narrow) * formats.compute + narrow


def reduces_per_microbatch(config: TrainConfig, *, stages: int, split: bool) -> bool:
    """Whether ``fsdp.grad_reduce`` reduces gradients in every backward of a rank of so many stages."""
    asked = config.fsdp.grad_reduce
    if asked != "auto":
        return asked == "microbatch"
    return config.parallel.sharding in ("optim_grads", "optim_grads_params") and stages == 1 and not split


def _arena_bytes(cuts: Sequence[Cut], formats: Formats) -> int:
    """Of gathered weights: the root's own, and the turns of the others."""
    root, others = cuts[0].gathered_bytes, [cut for cut in cuts[1:] if cut.unit.tensors]
    sizes = [cut.gathered_bytes for cut in others]
    if formats.gathered_bytes == "all" or not others:
        return root + sum(sizes)
    if isinstance(formats.gathered_bytes, int):
        return root + min(sum(sizes), (formats.gathered_bytes - root) // formats.align * formats.align)
    limit = max(_repeated(others, sizes) or sizes)
    turns = [size for size in sizes if size <= limit]
    first = max(turns[::2])
    return root + max([first + max(turns[1::2], default=0), *sizes])


def pool_bytes(cuts: Sequence[Cut], formats: Formats, replicas: int) -> int:
    """Of the slots in which reductions are in flight."""
    held = [cut for cut in cuts if cut.unit.tensors]
    sizes = [cut.sum_bytes for cut in cuts]
    bucket = formats.bucket_bytes or max(
        max(_repeated(cuts, sizes), default=0) or max(sizes), math.ceil(max(sizes) / _MOST_PIECES)
    )
    slots: list[int] = []
    pieces = 0
    for cut in held:
        ways = [_own_way(cut, bucket, replicas)]
        if cut.strategy.shards_grads:
            ways.append(_fused_way(cut, bucket, replicas, root=cut is cuts[0]))
        slots += [nbytes for _, nbytes in ways]
        pieces += max(count for count, _ in ways)
    largest = max(slots, default=0)
    return largest * min(formats.reduce_buffers, pieces) if largest else 0


def _own_way(cut: Cut, bucket: int, replicas: int) -> tuple[int, int]:
    """Pieces of a reduction of whole sums, and bytes of a slot for one."""
    formats = cut.formats
    direct = formats.reduce == formats.main and not any(_scratch(cut, cut.main_numel, replicas))
    widths = [cut.main_numel] if direct else _widths(cut, bucket, replicas)
    staged = formats.reduce != formats.main or len(widths) > 1
    return len(widths), _slot(cut, max(widths), replicas, sent=staged, result=False)


def _fused_way(cut: Cut, bucket: int, replicas: int, *, root: bool) -> tuple[int, int]:
    """The same of gradients that are reduced in the backward that makes them."""
    formats = cut.formats
    widths = _widths(cut, bucket, replicas)
    in_slot = not root and len(widths) == 1 and formats.reduce == formats.main
    result = not in_slot and formats.reduce != formats.main
    return len(widths), _slot(cut, max(widths), replicas, sent=True, result=result)


def _widths(cut: Cut, bucket: int, replicas: int) -> list[int]:
    unit = 64 * replicas * (cut.ranks if cut.parts == 1 else 1)
    found = columns(cut.main_numel, cut.parts, cut.formats.main, bucket, unit=unit)
    return [stop - start for start, stop in found] or [0]


def _scratch(cut: Cut, width: int, replicas: int) -> tuple[int, int]:
    """Elements that sums in the order of ranks need beside what is sent: over shards, over replicas."""
    formats = cut.formats
    exchanged = formats.rank_order or (formats.gloo and cut.parts > 1)
    over_shards = _received(cut.parts * width, cut.ranks) if exchanged else 0
    return over_shards, _received(width, replicas) if formats.rank_order else 0


def _received(sent: int, ranks: int) -> int:
    if ranks == 1:
        return 0
    if sent % ranks:
        return ranks * sent
    return sent // 2 if ranks == 2 else sent  # two ranks swap what each lacks


def _slot(cut: Cut, width: int, replicas: int, *, sent: bool, result: bool) -> int:
    formats = cut.formats
    received, from_replicas = _scratch(cut, width, replicas)
    parts = (
        cut.parts * width * formats.reduce if sent else 0,
        received * formats.reduce,
        width * formats.main if result else 0,
        from_replicas * formats.main,
    )
    return sum(_up(nbytes, _POOL_ALIGN) for nbytes in parts)


def _repeated(cuts: Sequence[Cut], sizes: Sequence[int]) -> list[int]:
    """Sizes of units whose class occurs more than once."""
    kinds = Counter(cut.unit.kind for cut in cuts)
    return [size for cut, size in zip(cuts, sizes, strict=True) if kinds[cut.unit.kind] > 1]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def largest_tensor(units: Iterable[Unit]) -> int:
    """Elements of the largest tensor."""
    return max((numel for unit in units for numel in unit.tensors), default=0)
