"""How a flat buffer's local gradients get to their reduction, and what memory that takes beside them.

    flat buffers, dtypes, bucket_bytes --> ReductionPaths, Sections (this file) --> reduce.py

Decided once, when the model is wrapped. A slot of the pool holds what one reduction in flight needs, side by side:

    [ sent: local sums, or the copy that travels | received: rank_order | result | received from replicas: rank_order ]
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.reduction_sizes import ReductionPath, ReductionSizes, State, largest_repeated, pool_slots
from sixfold.fsdp.buffers.temporary_memory import TemporaryBucketAllocator
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.collectives.gradient_sums import Wait, grad_sum_of
from sixfold.fsdp.config import MixedPrecision


@dataclass(frozen=True, slots=True)
class Sections:
    """A slot, cut for one piece."""

    sent: Tensor
    received: Tensor
    result: Tensor
    from_replicas: Tensor


class ReductionPaths:
    """The paths of all flat buffers of a model.

    Args:
        bucket_bytes: of main_dtype, all ranks' parts together; None: the largest unit whose class occurs twice.
    Attributes:
        sums: how to sum over each Comm.
        of: the path of each flat buffer when its gradients lie so.
        as_made: where gradients of each flat buffer go that are reduced in the backward that makes them.
    """

    def __init__(
        self, units: Collection[Unit], precision: MixedPrecision, *, shards_grads: bool, bucket_bytes: int | None
    ) -> None:
        self.sums = {
            comm: grad_sum_of(precision.grad_sum, comm)
            for unit in units
            for flat_buffer in unit.trained
            for comm in (flat_buffer.ranks.shard, flat_buffer.ranks.outer)
        }
        self._main, self._reduce = precision.main_dtype, precision.reduce_dtype or precision.main_dtype
        self.bucket_bytes = bucket_bytes_of(units) if bucket_bytes is None else bucket_bytes
        self.of: dict[tuple[ParamAndGradBuffer, State], ReductionPath] = {}
        self.as_made: dict[ParamAndGradBuffer, State] = {}
        for unit in units:
            for flat_buffer in unit.trained:
                sizes, alone = self._sizes(flat_buffer), unit.index > 0 and len(unit.trained) == 1
                for path in [sizes.own(), *([sizes.fused(alone=alone)] if shards_grads else [])]:
                    self.of[flat_buffer, path.kind] = path
                    self.as_made[flat_buffer] = path.kind
        self._in_parts = {one for one, _ in self.of if precision.grad_sum == "tree" and self._divides(one)}

    def _divides(self, flat_buffer: ParamAndGradBuffer) -> bool:
        ranks, pieces = flat_buffer.ranks, self.of[flat_buffer, State.OWN].pieces
        even = all((stop - start) % ranks.shard.size == 0 for start, stop in pieces)
        return flat_buffer.all_reduced and ranks.shard.size > 1 and ranks.outer.size == 1 and even

    def make_pool(self, slots: int, device: torch.device, *, fill: bool = False) -> TemporaryBucketAllocator:
        """At most ``slots`` slots, each large enough for any piece; ``fill``: with NaN when given back."""
        paths: dict[ParamAndGradBuffer, list[ReductionPath]] = {}
        for (flat_buffer, _), path in self.of.items():
            paths.setdefault(flat_buffer, []).append(path)
        count, nbytes = pool_slots(paths.values(), slots)
        return TemporaryBucketAllocator([nbytes] * count, device, fill=fill)

    def landing(self, flat_buffer: ParamAndGradBuffer, start: int, stop: int) -> tuple[int, int]:
        """Which of the columns ``[start, stop)`` of a sum land on this rank: all of its part.

        Of a sum that every rank needs whole, a tree lands a part on each: what a batch adds up to is gathered once.
        """
        if flat_buffer not in self._in_parts:
            return start, stop
        ranks = flat_buffer.ranks.shard
        part = (stop - start) // ranks.size
        return start + ranks.rank * part, start + (ranks.rank + 1) * part

    def gatherer(self, flat_buffer: ParamAndGradBuffer, wait: Wait) -> Callable[[Tensor], None] | None:
        """What gathers a sum that landed in parts; None: it is all here."""
        if flat_buffer not in self._in_parts:
            return None
        ranks, pieces = flat_buffer.ranks.shard, self.of[flat_buffer, State.OWN].pieces

        def gather(total: Tensor) -> None:
            for start, stop in pieces:
                low, high = self.landing(flat_buffer, start, stop)
                wait(ranks.spread(total[start:stop], total[low:high]))

        return gather

    def sections(
        self, path: ReductionPath, flat_buffer: ParamAndGradBuffer, start: int, stop: int, memory: Tensor
    ) -> Sections:
        """``memory`` (bytes) as the parts that the piece of columns ``[start, stop)`` needs."""
        at = 0
        parts: list[Tensor] = []
        dtypes = (self._reduce, self._reduce, self._main, self._main)
        for nbytes, dtype in zip(path.nbytes, dtypes, strict=True):
            parts.append(memory[at : at + nbytes].view(dtype))
            at += nbytes
        sent, received, result, from_replicas = parts
        width = stop - start
        return Sections(sent[: flat_buffer.cut.parts * width], received, result[:width], from_replicas)

    def _sizes(self, flat_buffer: ParamAndGradBuffer) -> ReductionSizes:
        shard, outer = flat_buffer.ranks.shard, flat_buffer.ranks.outer
        sums = self.sums[shard]
        return ReductionSizes(
            row=flat_buffer.cut.main_numel,
            parts=flat_buffer.cut.parts,
            ranks=shard.size,
            replicas=outer.size,
            exchanges=(
                sums.exchanges_whole if flat_buffer.all_reduced else sums.exchanges_shards,
                self.sums[outer].exchanges_whole,
            ),
            main=self._main.itemsize,
            reduce=self._reduce.itemsize,
            narrow=self._reduce != self._main,
            bucket_bytes=self.bucket_bytes,
        )


def bucket_bytes_of(units: Collection[Unit]) -> int:
    """Of the largest unit whose class occurs twice."""
    sums = (max((one.gradients.sum_bytes for one in unit.trained), default=0) for unit in units)
    return largest_repeated(zip((type(unit.module) for unit in units), sums, strict=True))
