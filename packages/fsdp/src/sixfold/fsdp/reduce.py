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
from sixfold.fsdp.buffer import ParamAndGradBuffer, ParamRecord
from sixfold.fsdp.comm import GradSum, Ranks
from sixfold.fsdp.config import MixedPrecision
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.streams import SideStream
from sixfold.fsdp.units import Unit


class GradReducePipeline:
    """Reductions in flight, first in first out.

    Args:
        units: names.
        start: starts a unit's reduction and returns what finishes it.
    """

    def __init__(self, units: Collection[str], start: Callable[[str], Callable[[], None]]) -> None:
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
        self._flying.append((unit, self._start(unit)))

    def drain(self, limit: int) -> None:
        """Finish the oldest until at most ``limit`` (>= 0) are in flight."""
        if limit < 0:
            raise FsdpError(f"drain({limit}): the limit is >= 0", op="reduce")
        while len(self._flying) > limit:
            unit, finish = self._flying.popleft()
            self._histories[unit].append("drain")
            finish()

    def finish(self) -> None:
        """Finish all."""
        self.drain(0)


class Reduction:
    """Local sums of units and their reductions."""

    def __init__(
        self,
        units: Collection[Unit],
        ranks: Ranks,
        precision: MixedPrecision,
        grad_sums: tuple[GradSum, GradSum],
        pool: TemporaryBucketAllocator,
        stream: SideStream,
        wait: Callable[[Any, str, str], None],
        divisor: float,
        device: torch.device,
    ) -> None:
        self._by_name = {unit.name: unit for unit in units}
        self._ranks = ranks
        self._shard_sum, self._outer_sum = grad_sums
        self._reduce_dtype = precision.reduce_dtype or precision.main_dtype
        self._pool = pool
        self._stream = stream
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

    def acquire(self, buffer: ParamAndGradBuffer, pooled: bool) -> None:
        """Memory for ``buffer``'s local sums; ``pooled``: the reduction follows in the same backward."""
        name = buffer.unit
        while self.pipeline.flying(name):
            self.pipeline.drain(len(self.pipeline) - 1)
        if pooled:
            needed = buffer.full_numel * buffer.main_dtype.itemsize
            slot = self._pool.allocate(name, needed)
            while slot is None and len(self.pipeline):
                self.pipeline.drain(len(self.pipeline) - 1)
                slot = self._pool.allocate(name, needed)
            if slot is not None:
                buffer.use_pool_local(slot, self._pool.memory(slot))
                return
        buffer.use_own_local()  # also when units that are not done hold the whole pool

    def put(self, unit: Unit) -> None:
        """Reduce what ``unit`` has summed locally (zeros, if other ranks have something)."""
        if unit.trainable is None:
            return
        while self.pipeline.flying(unit.name):
            self.pipeline.drain(len(self.pipeline) - 1)
        if unit.trainable.local is None:
            if self._ranks.size == 1:
                return
            self.acquire(unit.trainable, pooled=False)
        self.pipeline.put(unit.name)

    def finite(self, unit: Unit) -> bool:
        """All local sums are finite. Reads the device: for ``checks="unit"`` only."""
        if unit.trainable is None or unit.trainable.local is None:
            return True
        sums = [record.local_grad for record in unit.trainable.records if record.filled]
        return all(bool(torch.isfinite(one).all()) for one in sums if one is not None)

    def _start(self, name: str) -> Callable[[], None]:
        buffer = self._by_name[name].trainable
        assert buffer is not None, f"unit {name!r} has nothing to reduce"
        self.reductions += 1
        alone = self._ranks.size == 1
        with self._stream.enter():
            local, had = buffer.take_local(fill_zeros=not alone)
            result = buffer.result_place(local)
            sent = local if self._reduce_dtype == local.dtype else local.to(self._reduce_dtype)
            if buffer.parts == 1:
                finish_sum = self._shard_sum.everywhere(self._ranks.shard, sent, result)
            else:
                finish_sum = self._shard_sum.scatter(self._ranks.shard, sent, result)

        def finish() -> None:
            with self._stream.enter():
                total = finish_sum(lambda work: self._wait(work, name, "reduce"))
                if self._ranks.outer.size > 1:  # in main_dtype, never rounded between
                    outer = self._outer_sum.everywhere(self._ranks.outer, total, total)
                    total = outer(lambda work: self._wait(work, name, "reduce"))
                if self._divisor is not None:
                    total.div_(self._divisor)
                with torch._C.DisableTorchFunctionSubclass():
                    buffer.add_result(total, had)
                event = self._stream.mark()
            self._stream.join(event)
            if buffer.pool_slot is not None:
                self._pool.free(name)
                buffer.pool_slot = None

        return finish

    def discard(self, records: Set[ParamRecord]) -> None:
        """Forget what local sums hold of ``records``; what is in flight is finished first, and lands."""
        self.pipeline.finish()
        for record in records:
            record.filled = False
        for unit in self._by_name.values():
            buffer = unit.trainable
            if buffer is not None and buffer.local is not None and records >= set(buffer.records):
                buffer.local = None
                if buffer.pool_slot is not None:
                    self._pool.free(unit.name)
                    buffer.pool_slot = None

    def release_own_sums(self) -> None:
        """Give back the full-size sums of all units but the root: from now on they take turns in the pool."""
        self.pipeline.finish()
        for unit in self._by_name.values():
            if unit.index and unit.trainable is not None and unit.trainable.local is None:
                unit.trainable.release_own_local()
