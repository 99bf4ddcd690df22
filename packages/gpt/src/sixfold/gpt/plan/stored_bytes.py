"""What a rank stores: weights, gradients, optimizer state and buffers.

    units (tensor_sizes.py), config --> fsdp's cost_model.stored_bytes --> stored (this file) --> plan.py

Integers only: no torch, no tensors, no ranks. How large each buffer is, sixfold.fsdp says; here is who shares what, and
which optimizer has how many moments. A test compares the sum with ``report()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING

from sixfold.fsdp.cost_model import BufferFormats, StoredBytes, StreamSizes, slots_for, stored_bytes
from sixfold.fsdp.strategy import ShardingStrategy
from sixfold.gpt.config.batch_schedule import batch_sizes
from sixfold.gpt.plan.tensor_sizes import Stream, Unit, largest_tensor
from sixfold.pipeline.schedules import by_name, registered

if TYPE_CHECKING:
    from sixfold.gpt.config.train_config import ParallelConfig, TrainConfig

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_SCHEDULES = {entry.name for entry in registered()}  # "plan" is another one's base


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


def formats_of(config: TrainConfig, parallel: ParallelConfig, *, gloo: bool = False) -> BufferFormats:
    """As rank_model.py hands them to sixfold.fsdp. A schedule that keeps versions of compute weights has main weights
    of their own."""
    fsdp = config.fsdp
    return BufferFormats(
        strategy=ShardingStrategy(run_sharding(config, parallel)),
        compute=4 if config.train.precision == "fp32" else 2,
        main=_ITEMSIZE[fsdp.main_dtype],
        grad=_ITEMSIZE[fsdp.grad_dtype or fsdp.main_dtype],
        reduce=_ITEMSIZE[fsdp.reduce_dtype or fsdp.main_dtype],
        align=fsdp.align_bytes,
        gathered_bytes=fsdp.gathered_bytes,
        reduce_buffers=fsdp.reduce_buffers,
        bucket_bytes=fsdp.bucket_bytes,
        rank_order=config.grad_sum in ("rank_order", "tree"),
        tree_slots=slots_for(_most_microbatches(config, parallel)) if config.grad_sum == "tree" else 0,
        gloo=gloo,
        main_apart=_versioned(config.parallel.schedule),
    )


def _most_microbatches(config: TrainConfig, parallel: ParallelConfig) -> int:
    """Of a rank, in any update."""
    return max(batch for _, batch in batch_sizes(config)) // (config.train.micro_batch_size * max(parallel.dp, 1))


@lru_cache(maxsize=64)
def _versioned(schedule: str) -> bool:
    return schedule in _SCHEDULES and not by_name(schedule).flushed


def stored(
    config: TrainConfig,
    parallel: ParallelConfig,
    units: Sequence[Unit],
    *,
    per_microbatch: bool,
    gloo: bool,
    rank: int = 0,
) -> StoredBytes:
    """What a rank holds of ``units`` from the first step's end on.

    Args:
        per_microbatch: gradients are reduced in each backward (``fsdp.grad_reduce``), else summed whole until the last.
        gloo: what travels between ranks goes over it (CPU tensors).
        rank: among dp x cp; the first holds the most.
    """
    formats = formats_of(config, parallel, gloo=gloo)
    each: dict[Stream, StreamSizes] = {}  # layers are alike: worked out once
    states: dict[Stream, int] = {}
    averages: dict[Stream, int] = {}  # of all weights but a tied table's second copy
    for stream in (stream for unit in units for stream in unit.streams if stream not in each):
        ranks, copies = ranks_of(parallel, experts=stream.experts)
        each[stream] = sizes = StreamSizes(stream.tensors, formats, ranks, copies, stream.quantized, not stream.frozen)
        shard = rank // parallel.ep if stream.experts else rank % ranks
        held = sizes.held_numel(shard)
        states[stream] = sum(map(mul, stream.moments, held))
        own = [stream.frozen or m > 0 for m in stream.moments]
        averages[stream] = sum(map(mul, own, held)) if config.optimizer.ema_decay else 0
    moments = sum(states[stream] for unit in units for stream in unit.streams) * formats.main
    averaged = sum(averages[stream] for unit in units for stream in unit.streams) * formats.main
    slots = None
    if formats.main_apart:  # versions of weights: sums in place, or of every rank's part of one tensor after the other
        ranks, _ = ranks_of(parallel, experts=False)
        slots = ranks * largest_tensor(units) * formats.main if formats.rank_order and ranks > 1 else 0
    return stored_bytes(
        [(unit.kind, [each[stream] for stream in unit.streams]) for unit in units],
        formats,
        per_microbatch=per_microbatch,
        state_bytes=averaged + (0 if config.fsdp.offload else moments),
        slot_bytes=slots,
    )


def saved_bytes(config: TrainConfig, parallel: ParallelConfig, units: Sequence[Unit]) -> int:
    """What a rank writes of a checkpoint or a snapshot: its share of main weights, their average and moments, once.

    A tied head is the embedding, which another unit has. What every tensor-parallel rank has counts in equal parts.
    """
    itemsize, nbytes = _ITEMSIZE[config.fsdp.main_dtype], 0
    copies_of_weights = 2 if config.optimizer.ema_decay else 1
    for unit in units:
        for stream in () if unit.kind == "head" and config.model.tie_embeddings else unit.streams:
            ranks, copies = ranks_of(parallel, experts=stream.experts)
            tp = [parallel.tp if whole else 1 for whole in stream.whole] or [1] * len(stream.tensors)
            sizes = zip(stream.tensors, stream.moments, tp, strict=True)
            values = sum(
                numel * (copies_of_weights + moments) // ranks_with_it for numel, moments, ranks_with_it in sizes
            )
            nbytes += -(-values * itemsize // (ranks * copies))
    return nbytes


def wire_bytes(stream: Stream, formats: BufferFormats) -> int:
    """Of a gather of the stream, padding apart."""
    narrow = sum(n for n, quantized in zip(stream.tensors, stream.quantized, strict=False) if quantized)
    return (stream.numel - narrow) * formats.compute + narrow


def reduces_per_microbatch(config: TrainConfig, parallel: ParallelConfig, *, stages: int, split: bool) -> bool:
    """Whether ``fsdp.grad_reduce`` reduces gradients in every backward of a rank of so many stages.

    A tree reduces each microbatch. Split backwards first sum it whole.
    """
    asked = config.fsdp.grad_reduce
    if config.grad_sum == "tree":
        return not split
    if asked != "auto":
        return asked == "microbatch"
    return ShardingStrategy(run_sharding(config, parallel)).shards_grads and stages == 1 and not split


def held_gradients(unit: Unit, config: TrainConfig, parallel: ParallelConfig, *, per_microbatch: bool) -> int:
    """Elements of gradients of ``unit`` that lie where autograd made them until its reduction takes them.

    One tensor's, where each is added to a sum as it comes; all of the unit's, where no single sum can be in a slot.
    """
    formats, trained = formats_of(config, parallel), unit.trained
    sums = len(trained) == 1 and formats.reduce == formats.main and unit.kind != "root"
    if sums or not per_microbatch or not formats.strategy.shards_grads:
        return max((numel for stream in trained for numel in stream.tensors), default=0)
    return sum(stream.numel for stream in trained)
