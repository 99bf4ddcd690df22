"""How a stream's local gradients get to their reduction, and what memory that takes beside them.

    streams, dtypes, bucket_bytes --> ReductionPath, Pool (this file) --> reduce.py

Decided once, when the model is wrapped. A slot of the pool holds what one reduction in flight needs, side by side:

    [ sent: local sums, or the copy that travels | received: rank_order | result | received from replicas: rank_order ]
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sixfold.fsdp.buffers.column_ranges import columns
from sixfold.fsdp.buffers.gradients import State
from sixfold.fsdp.buffers.slots import TemporaryBucketAllocator
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.buffers.unit_buffer import ParamAndGradBuffer
from sixfold.fsdp.collectives.gradient_sums import grad_sum_of
from sixfold.fsdp.config import MixedPrecision

_ALIGN = 128


@dataclass(frozen=True, slots=True)
class ReductionPath:
    """One path of a stream to its main gradients.

    Attributes:
        kind: where its local gradients lie. [Note: states of local gradients]
        pieces: column ranges, one collective each.
        staged: what travels is a copy in a slot, in the dtype that travels.
        nbytes: of sent, received, result, received from replicas, for the widest piece; each is aligned.
    """

    kind: State
    pieces: tuple[tuple[int, int], ...]
    staged: bool
    nbytes: tuple[int, int, int, int]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that one piece takes."""
        return sum(self.nbytes)


@dataclass(frozen=True, slots=True)
class Sections:
    """A slot, cut for one piece."""

    sent: Tensor
    received: Tensor
    result: Tensor
    from_replicas: Tensor


class ReductionPaths:
    """The paths of all streams of a model.

    Args:
        bucket_bytes: of main_dtype, all ranks' parts together; None: the largest unit whose class occurs twice.
    Attributes:
        sums: how to sum over each Comm.
        of: the path of each stream when its gradients lie so.
        as_made: where gradients of each stream go that are reduced in the backward that makes them.
    """

    def __init__(
        self, units: Collection[Unit], precision: MixedPrecision, *, shards_grads: bool, bucket_bytes: int | None
    ) -> None:
        self.sums = {
            comm: grad_sum_of(precision.grad_sum, comm)
            for unit in units
            for stream in unit.trained
            for comm in (stream.ranks.shard, stream.ranks.outer)
        }
        self._main, self._reduce = precision.main_dtype, precision.reduce_dtype or precision.main_dtype
        self.bucket_bytes = largest_repeated(units) if bucket_bytes is None else bucket_bytes
        self.of: dict[tuple[ParamAndGradBuffer, State], ReductionPath] = {}
        self.as_made: dict[ParamAndGradBuffer, State] = {}
        for unit in units:
            for stream in unit.trained:
                for path in [self._own(stream), *([self._fused(unit, stream)] if shards_grads else [])]:
                    self.of[stream, path.kind] = path
                    self.as_made[stream] = path.kind

    def make_pool(self, slots: int, device: torch.device, *, fill: bool = False) -> TemporaryBucketAllocator:
        """At most ``slots`` slots, each large enough for a piece of any stream; ``fill``: with NaN when given back."""
        largest = max((path.slot_bytes for path in self.of.values()), default=0)
        if not largest:
            return TemporaryBucketAllocator([], device)
        pieces: dict[ParamAndGradBuffer, int] = {}
        for (stream, _), path in self.of.items():
            pieces[stream] = max(pieces.get(stream, 0), len(path.pieces))
        return TemporaryBucketAllocator([largest] * min(slots, sum(pieces.values())), device, fill=fill)

    def sections(
        self, path: ReductionPath, stream: ParamAndGradBuffer, start: int, stop: int, memory: Tensor
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
        return Sections(sent[: stream.cut.parts * width], received, result[:width], from_replicas)

    def _own(self, stream: ParamAndGradBuffer) -> ReductionPath:
        row = stream.cut.main_numel
        direct = self._reduce == self._main and self._scratch(stream, row) == (0, 0)
        pieces = ((0, row),) if direct else self._pieces(stream)
        return self._path(State.OWN, stream, pieces, staged=self._reduce != self._main or len(pieces) > 1)

    def _fused(self, unit: Unit, stream: ParamAndGradBuffer) -> ReductionPath:
        """Sums in a slot where they fit and travel as they are; the root's gradients come all through a backward."""
        pieces = self._pieces(stream)
        if unit.index and len(unit.trained) == 1 and len(pieces) == 1 and self._reduce == self._main:
            return self._path(State.SLOT, stream, pieces, staged=False)
        return self._path(State.HELD, stream, pieces, staged=True)

    def _pieces(self, stream: ParamAndGradBuffer) -> tuple[tuple[int, int], ...]:
        cut, ranks = stream.cut, stream.ranks
        # Borders that keep pieces divisible by the ranks that share a sum.
        unit = 64 * ranks.outer.size * (ranks.shard.size if cut.parts == 1 else 1)
        found = columns(cut.main_numel, cut.parts, self._main.itemsize, self.bucket_bytes, unit=unit)
        return found or ((0, 0),)  # tensors without elements

    def _scratch(self, stream: ParamAndGradBuffer, width: int) -> tuple[int, int]:
        """Elements that the sums over shards and over replicas need for ``width`` columns."""
        shard, outer = stream.ranks.shard, stream.ranks.outer
        sums = self.sums[shard]
        return (
            sums.scratch_numel(shard.size, stream.cut.parts * width, all_reduced=stream.all_reduced),
            self.sums[outer].scratch_numel(outer.size, width, all_reduced=True) if outer.size > 1 else 0,
        )

    def _path(
        self, kind: State, stream: ParamAndGradBuffer, pieces: Sequence[tuple[int, int]], *, staged: bool
    ) -> ReductionPath:
        widths = {stop - start for start, stop in pieces}
        needs = [self._scratch(stream, width) for width in widths]
        sent = stream.cut.parts * max(widths) if staged or kind is State.SLOT else 0
        result = max(widths) if kind is State.HELD and self._reduce != self._main else 0
        nbytes = (
            sent * self._reduce.itemsize,
            max(one for one, _ in needs) * self._reduce.itemsize,
            result * self._main.itemsize,
            max(one for _, one in needs) * self._main.itemsize,
        )
        sent_bytes, received, result_bytes, from_replicas = (-(-one // _ALIGN) * _ALIGN for one in nbytes)
        return ReductionPath(kind, tuple(pieces), staged, (sent_bytes, received, result_bytes, from_replicas))


def largest_repeated(units: Collection[Unit]) -> int:
    """Bytes of local sums of the largest stream in a unit whose class occurs twice; of the largest if none does.

    At least a sixteenth of the largest of all.
    """
    sizes: dict[type, list[int]] = {}
    for unit in units:
        nbytes = max((stream.gradients.sum_bytes for stream in unit.trained), default=0)
        sizes.setdefault(type(unit.module), []).append(nbytes)
    repeated = [max(found) for found in sizes.values() if len(found) > 1]
    largest = max((max(found) for found in sizes.values()), default=0)
    return max(max(repeated, default=0) or largest, math.ceil(largest / _MOST_PIECES))


_MOST_PIECES = 16  # small repeated units do not cut a large one to shreds: each piece is a collective
