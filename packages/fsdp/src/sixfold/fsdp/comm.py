"""Collectives on the groups that were given.

    ProcessGroup or DeviceMesh --> Comm (this file) --> gather.py, sums.py

A Comm knows one group; LocalComm is the group of one, by copies, so the engine's code is the same in one
process. Never the default group.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
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


_END_S = 0.2  # for the thread to end


class _Waiter:
    """One thread that waits for Works one after the other, in the order in which they are handed over."""

    def __init__(self) -> None:
        self._handed: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._handed,), name="sixfold-fsdp-wait", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._handed, thread)

    def hand(self, wait: Callable[[], None]) -> None:
        """Wait for it after the ones before."""
        self._handed.put(wait)


def _end(handed: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    """A process must not end while the thread lets go of a Work, which is C++."""
    handed.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_S)


def _serve(handed: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (wait := handed.get()) is not None:
        wait()
        del wait  # and with it the Work: not first when the next one comes


class GlooSumWork:
    """A reduce-scatter of gloo with a deadline.

    torch's Work of it (2.13) waits for an all-reduce without any deadline, whatever it is told, and never says that it
    is completed: a peer that is stopped held the survivors for as long as the group's own timeout, 30 minutes.
    """

    def __init__(self, work: Any, waiter: _Waiter) -> None:
        self._work = work
        self._waiter = waiter
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._handed = False

    def _run(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:  # raised in the thread that waits for it
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """True from the end of the first wait on."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """As Work's, in time."""
        if not self._handed:
            self._handed = True
            self._waiter.hand(self._run)
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error


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
        self._waiter = _Waiter() if _sums_by_gloo(reductions) else None
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
        work = self._scatter(part, full, self._scatter_options)
        return work if self._waiter is None or full.is_cuda else GlooSumWork(work, self._waiter)

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

    def all_to_all_uneven(
        self, received: Tensor, sent: Tensor, incoming: Sequence[int], outgoing: Sequence[int]
    ) -> Any:
        """One all-to-all of unequal parts."""
        self.launches[1].add(_EXCHANGE, None)
        return self._exchange(received, sent, list(incoming), list(outgoing), self._exchange_options)

    def broadcast(self, full: Tensor, source: int = 0) -> Any:
        """One broadcast, of bytes: buffers have any dtype, and no back end sends all of them."""
        self.launches[0].add(_BROADCAST, full)
        self._broadcast_options.rootRank = source
        return self.gathers.broadcast([full.view(-1).view(torch.uint8)], self._broadcast_options)

    def spread(self, full: Tensor, part: Tensor) -> Any:
        """One all-gather, on the reductions' communicator. Ranks start it when they like: it is in no order."""
        return self._spread(full, part, self._gather_options)


def _method(group: dist.ProcessGroup, *names: str) -> Callable[..., Any]:
    found: Callable[..., Any] = next(getattr(group, name) for name in names if hasattr(group, name))
    return found


def _sums_by_gloo(group: dist.ProcessGroup) -> bool:
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:  # no back end for CPU tensors
        return False


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The main mesh: parameters are sharded over ``shard`` and copied over ``outer`` (HSDP; a group of one else)."""

    shard: Comm
    outer: Comm

    @property
    def size(self) -> int:
        """Ranks of both dimensions."""
        return self.shard.size * self.outer.size

    @property
    def rank(self) -> int:
        """Position in the mesh, replicas outermost."""
        return self.outer.rank * self.shard.size + self.shard.rank
