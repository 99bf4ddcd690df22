"""Collectives on the groups that were given.

    ProcessGroup or DeviceMesh --> Comm (this file) --> engine/gather.py, gradient_sums.py

A Comm knows one group; LocalComm is the group of one, by copies, so the engine's code is the same in one
process. Never the default group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)


class Comm(Protocol):
    """Collectives among ``size`` ranks; this one is ``rank``. Each returns a Work, or None when it is done."""

    size: int
    rank: int

    def all_gather(self, full: Tensor, part: Tensor) -> Any:
        """``full`` (size * n,) becomes the parts (n,) of all ranks; ``part`` may be its own place in ``full``."""

    def reduce_scatter(self, part: Tensor, full: Tensor) -> Any:
        """``part`` (n,) becomes this rank's shard of the sum of ``full`` (size * n,); it may lie in ``full``."""

    def all_reduce(self, full: Tensor) -> Any:
        """``full`` becomes its sum."""

    def maximum(self, full: Tensor) -> Any:
        """``full`` becomes its maximum, element by element."""

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """``received`` (size * n,) becomes shard ``rank`` of every rank's ``sent``."""

    def swap(self, received: Tensor, sent: Tensor) -> Any:
        """Between two ranks: ``received`` (n,) becomes what the other one ``sent`` (n,)."""

    def all_to_all_uneven(
        self, received: Tensor, sent: Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> Any:
        """``sent`` holds ``outgoing[r]`` elements for each rank r, ``received`` gets ``incoming[r]`` from each."""

    def broadcast(self, full: Tensor, source: int = 0) -> Any:
        """``full`` becomes that of rank ``source``."""

    def spread(self, full: Tensor, part: Tensor) -> Any:
        """``all_gather`` of sums, as a part of a reduction."""


class LocalComm:
    """A group of one."""

    size = 1
    rank = 0

    def all_gather(self, full: Tensor, part: Tensor) -> None:
        """Copy, unless ``part`` lies in ``full``."""
        if full.data_ptr() != part.data_ptr():
            full.copy_(part)

    def reduce_scatter(self, part: Tensor, full: Tensor) -> None:
        """Copy, unless ``part`` lies in ``full``."""
        if full.data_ptr() != part.data_ptr():
            part.copy_(full)

    def all_reduce(self, full: Tensor) -> None:
        """Nothing to add."""

    def maximum(self, full: Tensor) -> None:
        """Nothing to compare."""

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Copy."""
        received.copy_(sent)

    def swap(self, received: Tensor, sent: Tensor) -> None:
        """There is no other."""

    def all_to_all_uneven(
        self, received: Tensor, sent: Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> None:
        """Copy."""
        received.copy_(sent)

    def broadcast(self, full: Tensor, source: int = 0) -> None:
        """Nothing to send."""

    def spread(self, full: Tensor, part: Tensor) -> None:
        """Copy, unless ``part`` lies in ``full``."""
        self.all_gather(full, part)


_GATHER, _SCATTER, _SUM, _EXCHANGE, _BROADCAST, _MAXIMUM = range(1, 7)


class Launches:
    """What one communicator was asked to do, in order: the same on all its ranks, or they wait for ever."""

    def __init__(self) -> None:
        self._count = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=32)  # place in the order, what it is

    def add(self, kind: int, tensor: Tensor | None) -> None:
        """The next collective; ``tensor`` has as many elements on all ranks, or is None."""
        self._count += 1
        self._recent.append((self._count, (0 if tensor is None else tensor.numel()) << 3 | kind))

    def last(self) -> tuple[int, list[int]]:
        """How many, and what the last ones were. Any thread may ask."""
        recent = list(self._recent)  # at once: another thread may be in the middle of ``add``
        return (recent[-1][0] if recent else 0), [what for _, what in recent]


class GroupComm:
    """Asynchronous collectives on two communicators of one group: gathers do not queue behind reductions.

    Args:
        gathers: for all-gathers and broadcasts.
        reductions: for sums, and what belongs to them; it may be the same.
    """

    def __init__(self, gathers: dist.ProcessGroup, reductions: dist.ProcessGroup) -> None:
        self.size = gathers.size()
        self.rank = gathers.rank()
        self.gathers, self.reductions = gathers, reductions
        self.launches = (Launches(), Launches())
        # torch 2.13 renamed the flat collectives: choose once. The methods of the group, because torch.distributed's
        # functions take registered groups only.
        self._gather = _method(gathers, "all_gather_single", "_allgather_base")
        self._spread = _method(reductions, "all_gather_single", "_allgather_base")
        self._scatter = _method(reductions, "reduce_scatter_single", "_reduce_scatter_base")
        self._exchange = _method(reductions, "all_to_all_single", "alltoall_base")
        self._gather_options, self._scatter_options = AllgatherOptions(), ReduceScatterOptions()
        self._sum_options, self._exchange_options = AllreduceOptions(), AllToAllOptions()
        self._broadcast_options, self._maximum_options = BroadcastOptions(), AllreduceOptions()
        self._maximum_options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._gather_options.asyncOp = self._scatter_options.asyncOp = self._broadcast_options.asyncOp = True
        self._sum_options.asyncOp = self._exchange_options.asyncOp = self._maximum_options.asyncOp = True

    def all_gather(self, full: Tensor, part: Tensor) -> Any:
        """One all-gather."""
        self.launches[0].add(_GATHER, full)
        return self._gather(full, part, self._gather_options)

    def reduce_scatter(self, part: Tensor, full: Tensor) -> Any:
        """One reduce-scatter (sum; the division is the engine's, a premultiplied sum exists on NCCL only)."""
        self.launches[1].add(_SCATTER, full)
        return self._scatter(part, full, self._scatter_options)

    def all_reduce(self, full: Tensor) -> Any:
        """One all-reduce."""
        self.launches[1].add(_SUM, full)
        return self.reductions.allreduce([full], self._sum_options)

    def maximum(self, full: Tensor) -> Any:
        """One all-reduce."""
        self.launches[1].add(_MAXIMUM, full)
        return self.reductions.allreduce([full], self._maximum_options)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """One all-to-all of equal shards."""
        self.launches[1].add(_EXCHANGE, sent)
        return self._exchange(received, sent, [], [], self._exchange_options)

    def swap(self, received: Tensor, sent: Tensor) -> Any:
        """One all-to-all in which a rank keeps nothing for itself."""
        self.launches[1].add(_EXCHANGE, sent)
        return self._swap(self._exchange, received, sent)

    def _swap(self, exchange: Callable[..., Any], received: Tensor, sent: Tensor) -> Any:
        counts = [sent.numel(), 0] if self.rank else [0, sent.numel()]
        return exchange(received, sent, counts, counts, self._exchange_options)

    def all_to_all_uneven(
        self, received: Tensor, sent: Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> Any:
        """One all-to-all of unequal parts."""
        self.launches[1].add(_EXCHANGE, None)
        return self._exchange(received, sent, list(incoming), list(outgoing), self._exchange_options)

    def broadcast(self, full: Tensor, source: int = 0) -> Any:
        """One broadcast, of bytes: module buffers have any dtype, and no back end sends all of them."""
        self.launches[0].add(_BROADCAST, full)
        self._broadcast_options.rootRank = source
        return self.gathers.broadcast([full.view(-1).view(torch.uint8)], self._broadcast_options)

    def spread(self, full: Tensor, part: Tensor) -> Any:
        """One all-gather, on the reductions' communicator. Ranks start it when they like: it is in no order."""
        return self._spread(full, part, self._gather_options)


def _method(group: dist.ProcessGroup, *names: str) -> Callable[..., Any]:
    found: Callable[..., Any] = next(getattr(group, name) for name in names if hasattr(group, name))
    return found


class GlooComm(GroupComm):
    """CPU tensors over gloo.

    torch's all-gather over it (2.13) makes a copy of the whole each time. Its reduce-scatter is an all-reduce of such
    a copy, with a Work that knows no deadline. Two ranks swap what they have in place instead, and gradient_sums.py
    never asks for the reduce-scatter.
    """

    def __init__(self, gathers: dist.ProcessGroup, reductions: dist.ProcessGroup) -> None:
        super().__init__(gathers, reductions)
        self._gather_swap = _method(gathers, "all_to_all_single", "alltoall_base")

    def all_gather(self, full: Tensor, part: Tensor) -> Any:
        """One all-gather; between two ranks one all-to-all."""
        if self.size != 2:
            return super().all_gather(full, part)
        self.launches[0].add(_GATHER, full)
        return self._fill(self._gather_swap, full, part)

    def spread(self, full: Tensor, part: Tensor) -> Any:
        """The same, on the reductions' communicator."""
        return self._fill(self._exchange, full, part) if self.size == 2 else super().spread(full, part)

    def _fill(self, exchange: Callable[..., Any], full: Tensor, part: Tensor) -> Any:
        rows = full.view(2, -1)
        if rows[self.rank].data_ptr() != part.data_ptr():
            rows[self.rank].copy_(part)
        return self._swap(exchange, rows[1 - self.rank], part)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The main mesh: parameters are sharded over ``shard`` and copied over ``outer`` (HSDP; a group of one else)."""

    shard: Comm
    outer: Comm

    @cached_property
    def size(self) -> int:
        """Ranks of both dimensions."""
        return self.shard.size * self.outer.size

    @property
    def rank(self) -> int:
        """Position in the mesh, replicas outermost."""
        return self.outer.rank * self.shard.size + self.shard.rank
