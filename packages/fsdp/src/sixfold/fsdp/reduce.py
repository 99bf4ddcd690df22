"""Gradients: local fp32 sums, their reduction over ranks, and what main gradients become.

    hooks.py --> engine.py --> Reduction --> GradReducePipeline (this file) --> comm.py

GradReducePipeline is driven by events and knows no module. Reduction owns the pool of local buffers.

[Note: order of a sum] Autograd's gradient is added to a local sum in main_dtype; the sum is cast to reduce_dtype,
added over the shard ranks, in main_dtype over the replicas, divided once (a true division), and only then
added to ``main.grad``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Set
from typing import Any

import torch
from torch import Tensor

from sixfold.fsdp.alloc import TemporaryBucketAllocator
from sixfold.fsdp.buffer import ParamAndGradBuffer
from sixfold.fsdp.comm import grad_sum_of
from sixfold.fsdp.config import MixedPrecision
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.flat import ParamRecord
from sixfold.fsdp.streams import SideStream
from sixfold.fsdp.units import Unit
from sixfold.fsdp.waiting import Wait


class GradReducePipeline:
    """Reductions in flight, first in first out.

    Args:
        units: names.
        start: starts a unit's reduction and returns what finishes it.

    Attributes:
        watch: told each move and its unit, or None: "put" before, "reduce" after it was sent, "drain" when it is done.
    """

    def __init__(self, units: Collection[str], start: Callable[[str], Callable[[], None]]) -> None:
        self.watch: Callable[[str, str], None] | None = None
        self._start = start
        self._units = frozenset(units)
        self._flying: deque[tuple[str, Callable[[], None]]] = deque()
        self._histories: dict[str, deque[str]] = {unit: deque(maxlen=12) for unit in units}

    def __len__(self) -> int:
        return len(self._flying)

    def flying(self, unit: str) -> bool:
        """``unit`` has a reduction that is not finished."""
        return any(name == unit for name, _ in self._flying)

    def put(self, unit: str) -> None:
        """Start the reduction of ``unit``; illegal while one of it is in flight."""
        if unit not in self._units:
            raise FsdpError(f"put({unit!r}): there is no such unit", unit=unit, op="reduce")
        if self.flying(unit):
            history = ", ".join(self._histories[unit])
            raise FsdpError(
                f"put({unit!r}) while its reduction is in flight; drain it first. History: {history}",
                unit=unit,
                op="reduce",
            )
        self._histories[unit].append("put")
        self._tell("put", unit)
        self._flying.append((unit, self._start(unit)))
        self._tell("reduce", unit)

    def drain(self, limit: int) -> None:
        """Finish the oldest until at most ``limit`` (>= 0) are in flight."""
        if limit < 0:
            raise FsdpError(f"drain({limit}): the limit is >= 0", op="reduce")
        while len(self._flying) > limit:
            unit, finish = self._flying.popleft()
            self._histories[unit].append("drain")
            finish()
            self._tell("drain", unit)

    def finish(self) -> None:
        """Finish all."""
        self.drain(0)

    def _tell(self, move: str, unit: str) -> None:
        if self.watch is not None:
            self.watch(move, unit)


class Reduction:
    """Local sums of units and their reductions."""

    def __init__(
        self,
        units: Collection[Unit],
        *,
        precision: MixedPrecision,
        pool: TemporaryBucketAllocator,
        stream: SideStream,
        wait: Wait,
        divisor: float,
        device: torch.device,
    ) -> None:
        self._by_name = {unit.name: unit for unit in units}
        self._sums = {
            comm: grad_sum_of(precision.grad_sum, comm)
            for unit in units
            for stream in unit.trained
            for comm in (stream.ranks.shard, stream.ranks.outer)
        }
        self._reduce_dtype = precision.reduce_dtype or precision.main_dtype
        self._pool = pool
        self._side = stream
        self._wait = wait
        # A tensor on the device: CUDA multiplies by the reciprocal of a host number.
        self._divisor = None if divisor == 1.0 else torch.tensor(divisor, dtype=precision.main_dtype, device=device)
        self.pipeline = GradReducePipeline(self._by_name, self._start)
        self.reductions = 0

    def accumulate(self, record: ParamRecord, gradient: Tensor) -> None:
        """Add a gradient to the local sum that ``acquire`` made; the first one is copied."""
        assert record.local_grad is not None, f"{record.name} has no place for its local gradient"
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if record.filled:
            record.local_grad.add_(gradient)
        else:
            record.local_grad.copy_(gradient)
            record.filled = True

    def acquire(self, stream: ParamAndGradBuffer, pooled: bool) -> None:
        """Memory for ``stream``'s local sums; ``pooled``: the reduction follows in the same backward."""
        unit = self._by_name[stream.unit]
        while self.pipeline.flying(unit.name):
            self.pipeline.drain(len(self.pipeline) - 1)
        slot = self._pool_slot(unit) if pooled else None
        if slot is None:  # also when units that are not done hold the whole pool
            stream.gradients.use_own_local()
            return
        before = unit.trained[: unit.trained.index(stream)]
        at = sum(one.gradients.pool_bytes for one in before)
        stream.gradients.use_pool_local(slot, self._pool.memory(slot)[at:])

    def _pool_slot(self, unit: Unit) -> int | None:
        """The slot that all streams of ``unit`` share, or None if all are held."""
        held = self._pool.slot_of(unit.name)
        if held is not None:
            return held
        needed = sum(one.gradients.pool_bytes for one in unit.trained)
        slot = self._pool.allocate(unit.name, needed)
        while slot is None and len(self.pipeline):
            self.pipeline.drain(len(self.pipeline) - 1)
            slot = self._pool.allocate(unit.name, needed)
        return slot

    def _leave_pool(self, unit: Unit) -> None:
        """Its slot is free once no stream of ``unit`` has a sum in it."""
        held = self._pool.slot_of(unit.name) is not None
        if held and not any(stream.gradients.in_pool for stream in unit.trained):
            self._pool.free(unit.name)

    def put(self, unit: Unit) -> None:
        """Reduce what ``unit`` has summed locally (zeros, if other ranks have something)."""
        while self.pipeline.flying(unit.name):
            self.pipeline.drain(len(self.pipeline) - 1)
        for stream in unit.trained:
            if stream.gradients.local is None and stream.ranks.size > 1:
                self.acquire(stream, pooled=False)
        if any(stream.gradients.local is not None for stream in unit.trained):
            self.pipeline.put(unit.name)

    def not_finite(self, unit: Unit) -> int:
        """The place of the first local sum that is not finite among all of ``unit``, or -1. Reads the device: for
        ``checks="unit"`` only."""
        records = [record for stream in unit.trained for record in stream.records]
        for at, record in enumerate(records):
            if record.filled and record.local_grad is not None and not bool(torch.isfinite(record.local_grad).all()):
                return at
        return -1

    def _start(self, name: str) -> Callable[[], None]:
        unit = self._by_name[name]
        self.reductions += 1
        summed = [stream for stream in unit.trained if stream.gradients.local is not None]
        with self._side.enter():
            finishes = [self._start_stream(stream) for stream in summed]

        def finish() -> None:
            with self._side.enter():
                for finish_stream in finishes:
                    finish_stream()
                event = self._side.mark()
            self._side.join(event)
            for stream in summed:
                stream.gradients.in_pool = False
            self._leave_pool(unit)

        return finish

    def _start_stream(self, stream: ParamAndGradBuffer) -> Callable[[], None]:
        """One collective for all parameters of ``unit`` on this mesh."""
        ranks, gradients = stream.ranks, stream.gradients
        local, had = gradients.take_local(fill_zeros=ranks.size > 1)
        result = gradients.result_place(local)
        sent = local if self._reduce_dtype == local.dtype else local.to(self._reduce_dtype)
        shard_sum, outer_sum = self._sums[ranks.shard], self._sums[ranks.outer]
        # A group of one scatters too where weights are sharded, so that it tries what more ranks do.
        whole = stream.cut.parts == 1 and not stream.weights.shards_params
        start = shard_sum.everywhere if whole else shard_sum.scatter
        finish_sum = start(ranks.shard, sent, result)

        def wait(work: Any) -> None:
            self._wait(work, stream.unit, "reduce")

        def finish() -> None:
            total = finish_sum(wait)
            if ranks.outer.size > 1:  # in main_dtype, never rounded between
                total = outer_sum.everywhere(ranks.outer, total, total)(wait)
            if self._divisor is not None:
                total.div_(self._divisor)
            with torch._C.DisableTorchFunctionSubclass():
                gradients.add_result(total, had)

        return finish

    def discard(self, records: Set[ParamRecord]) -> None:
        """Forget what local sums hold of ``records``; what is in flight is finished first, and lands."""
        self.pipeline.finish()
        for record in records:
            record.filled = False
        for unit in self._by_name.values():
            for stream in unit.trained:
                if stream.gradients.local is not None and records >= set(stream.records):
                    stream.gradients.local, stream.gradients.in_pool = None, False
            self._leave_pool(unit)

    def release_own_sums(self) -> None:
        """Give back the full-size sums of all units but the root: from now on they take turns in the pool."""
        self.pipeline.finish()
        for unit in self._by_name.values():
            for stream in unit.trained if unit.index else ():
                if stream.gradients.local is None:
                    stream.gradients.release_own_local()
