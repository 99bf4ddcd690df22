"""What happens at each event of a step: when to gather, when a unit's gradients are done, when to reduce.

    hooks.py, stage.py, shard.py, optim.py --> Engine (this file) --> gather.py, reduce.py

Knows events, not modules. [Note: when a unit's backward is done] Autograd runs ready nodes latest-forward-first,
so when the gradient of another unit's output arrives, every node of the units after it has run. That moment is
the same on all ranks, also where one rank leaves a parameter unused, so it orders the collectives; counting
delivered gradients would not. Units around the new one, and units called again earlier in the same forward,
stay open. What is left closes when backward ends, and ``finish_grad_sync`` relies on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffer import ParamRecord
from sixfold.fsdp.checks import OrderDigest, odd_ranks
from sixfold.fsdp.comm import Ranks
from sixfold.fsdp.config import ShardingStrategy
from sixfold.fsdp.control import Control, Rows, exchange
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults import Faults
from sixfold.fsdp.gather import Gathering
from sixfold.fsdp.reduce import Reduction
from sixfold.fsdp.units import Unit

_OPS = ("gather", "reduce")
_USE, _REDUCE = range(2)
in_backward: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside


class Driven(Enum):
    """How a driven program reduces. SPLIT_OR_FUSED until the first unit's backward ends; if gradients were missing
    then, AWAITED until its micro-batch ends and tells whether ``accumulate`` brings them."""

    SPLIT_OR_FUSED = "auto"
    AWAITED = "awaited"
    LAST = "last"
    MICROBATCH = "microbatch"


class CallContext:
    """One root call: how many forward calls of each unit wait for their backward.

    ``training`` is that of the root call: a reentrant checkpoint inside it runs its forward without grad.
    """

    __slots__ = ("outstanding", "training")

    def __init__(self, units: int, training: bool) -> None:
        self.outstanding = [0] * units
        self.training = training


class StageState:
    """What the engine knows of a stage of a driven program."""

    def __init__(self, name: str, units: Sequence[Unit]) -> None:
        self.name = name
        self.units = tuple(units)
        self.last = False  # its last backward of this step runs
        self.done = False  # its reduce_grad was called in this step


class Engine:
    """The events of one model: what each starts, and what it waits for."""

    def __init__(
        self,
        units: Sequence[Unit],
        ranks: Ranks,
        strategy: ShardingStrategy,
        gathering: Gathering,
        reduction: Reduction,
        faults: Faults,
        control: Control,
        *,
        checks: str,
        grad_reduce: str,
    ) -> None:
        self.units = units
        self.ranks = ranks
        self.strategy = strategy
        self._shards_grads = strategy.shards_grads
        self.gathering = gathering
        self.reduction = reduction
        self.faults = faults
        self.control = control
        self.records: dict[nn.Parameter, ParamRecord] = {
            record.parameter: record for unit in units for buffer in unit.buffers for record in buffer.records
        }
        self._by_name = {unit.name: unit for unit in units}
        self._checks = checks if ranks.size > 1 else "off"
        self._grad_reduce = grad_reduce
        self.step = 0
        self.failed: FsdpError | None = None
        self.no_sync_depth = 0
        self.last_microbatch = True
        self.stages: list[StageState] = []
        self._stepped = False
        self._driven = False
        self._driven_mode: Driven | None = None
        self._deferred = False  # a gradient came through accumulate()
        self._calls: list[CallContext] = []
        self._running: list[Unit] = []  # units whose forward runs, outermost first
        self._open: list[tuple[Unit, CallContext | None]] = []
        self._touched: set[int] = set()  # units with something to reduce
        self._callback = False
        self._digest = OrderDigest()
        self._comparing: tuple[int, Callable[[], Rows]] | None = None

    # ---- waiting and faults

    def wait(self, work: Any, unit: str | None, op: str, *, on_host: bool = False) -> None:
        """Wait for a Work with the deadline."""
        try:
            self.faults.wait(work, unit, self.step, op, on_host=on_host)
        except FsdpError as error:
            self.failed = error
            raise

    def alive(self) -> None:
        """Raise if an earlier fault ended this model."""
        if self.failed is not None:
            raise FsdpError(f"this model ended with an earlier fault: {self.failed}; make a new one", step=self.step)

    def _fail(self, message: str, unit: int | None, op: str, ranks: Sequence[int]) -> FsdpError:
        name = None if unit is None else self.units[unit].name
        self.failed = FsdpError(message, unit=name, step=self.step, op=op, ranks=ranks)
        return self.failed

    def _check(self, unit: Unit, op: int, *, finite: bool = True) -> None:
        """[Note: two channels] Before a collective, in ``checks="unit"``: are all ranks about to do the same?"""
        nbytes = unit.gathered_bytes
        row = [self.step, unit.index, op, nbytes, int(finite)]
        rows = exchange(self.control, row, lambda work: self.wait(work, unit.name, _OPS[op], on_host=True))
        common, odd = odd_ranks([one[:4] for one in rows])
        if odd:
            does = "; ".join(
                f"rank {rank} is at {_OPS[rows[rank][2]]} of {self.units[rows[rank][1]].name or '(root)'} "
                f"in step {rows[rank][0]}"
                for rank in odd
            )
            raise self._fail(
                f"ranks disagree: most are at {_OPS[common[2]]} of {self.units[common[1]].name or '(root)'}, {does}. "
                "Every rank must use the same units in the same order",
                common[1],
                _OPS[common[2]],
                odd,
            )
        bad = tuple(rank for rank, one in enumerate(rows) if not one[4])
        if bad:
            raise self._fail(
                "gradient is not finite; no main gradient was touched. Look at that rank's batch",
                unit.index,
                "reduce",
                bad,
            )

    def _compare_digests(self) -> None:
        """``checks="order"``: the answer to the last step's digest."""
        if self._comparing is None:
            return
        step, finish = self._comparing
        self._comparing = None
        _, odd = odd_ranks(finish())
        if odd:
            raise self._fail(
                f"ranks used units in different orders in step {step}; run with checks='unit' to see which",
                None,
                "check",
                odd,
            )

    # ---- forward

    def begin_call(self, stage: StageState | None) -> CallContext:
        """A root call, entry or stage call begins: the root unit is gathered, the step counted."""
        self.alive()
        training = torch.is_grad_enabled()
        if training and in_backward() == -1 and not self._calls:
            if self._stepped:
                self._next_step()
            self._driven = stage is not None
            self._callback = False  # also after a backward that raised
            self._open.clear()
            self._running.clear()
        context = CallContext(len(self.units), training)
        self._calls.append(context)
        self._use(self.units[0], training)
        return context

    def end_call(self) -> None:
        """The innermost root call is over, also by an exception."""
        self._calls.pop()

    def _next_step(self) -> None:
        self._stepped = False
        self.gathering.order.next_step()
        if self._checks == "order":
            self._compare_digests()
            digest = self._digest.take()
            finish = self.control.start([digest], lambda work: self.wait(work, None, "check", on_host=True))
            self._comparing = self.step, finish
        self.step += 1

    def before_forward(self, unit: Unit) -> None:
        """``unit``'s forward is about to run."""
        if self.failed is not None:
            return
        if in_backward() != -1:  # recompute: it finds its unit gathered, or gathers it
            self._use(unit, True)
            return
        self._running.append(unit)
        if not self._calls:
            raise FsdpError(
                "a unit's module was called directly, and its weights may not be here; call the "
                "FullyShardedDataParallel object, or model.entry(child) for a part of it",
                unit=unit.name,
                op="gather",
            )
        self._use(unit, self._calls[-1].training)

    def after_forward(self, unit: Unit) -> CallContext | None:
        """``unit``'s forward ended; returns the call to count its backward in (None in a recompute)."""
        if in_backward() != -1:
            return None
        if self._running and self._running[-1] is unit:
            self._running.pop()
        return self._calls[-1] if self._calls else None

    def _use(self, unit: Unit, record: bool) -> None:
        if record:
            if self._checks == "unit":
                self._check(unit, _USE)
            elif self._checks == "order":
                self._digest.add(unit.index, _USE)
        busy = self._running or unit.around
        if not unit.index:
            # A stage's output carries the hooks of its last unit and of the root: when the root's comes second, that
            # unit's backward is about to run, and a prefetch must not take its slot.
            busy = [*busy, *(opened for opened, _ in self._open)]
        self.gathering.use(unit, busy, record=record)

    # ---- backward

    def before_backward(self, unit: Unit, context: CallContext | None) -> None:
        """The first gradient of an output of ``unit`` is here; ``context`` is the call to count down, if any."""
        if self.failed is not None:
            return
        if not self._callback:
            self._callback = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if context is not None:
            context.outstanding[unit.index] -= 1
        self._use(unit, True)
        if unit.index:
            self._close_done(unit)
        if all(opened is not unit for opened, _ in self._open):
            self._open.append((unit, context))
            self._touched.add(unit.index)

    def _close_done(self, unit: Unit) -> None:
        """[Note: when a unit's backward is done]"""
        still: list[tuple[Unit, CallContext | None]] = []
        for opened, context in self._open:
            waits = context is not None and context.outstanding[opened.index] > 0
            if waits or opened is unit or opened.index == 0 or opened in unit.around:
                still.append((opened, context))
            else:
                self._close(opened)
        self._open = still

    def deliver(self, record: ParamRecord, gradient: Tensor) -> None:
        """Autograd finished ``record``'s gradient."""
        if self.failed is not None:
            return
        unit = self._by_name[record.buffer.unit]
        if not self.gathering.ready(unit):
            raise FsdpError(
                f"the gradient of {record.name} came while its unit's weights were not here: another unit took its "
                "slot, or the unit's output is no tensor, list, tuple or dict of tensors. Return such a value, or use "
                'BufferConfig(gathered_bytes="all")',
                unit=unit.name,
                step=self.step,
                op="reduce",
            )
        if record.buffer.local is None:
            self._touched.add(unit.index)
            self.reduction.acquire(record.buffer, unit.index != 0 and self._shards_grads and self._reduces(unit))
        self.reduction.accumulate(record, gradient)

    def deliver_deferred(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A driven program brings a gradient that autograd did not deliver: the same local sum."""
        self.alive()
        record = self.records.get(parameter)
        if record is None or not record.buffer.trainable:
            what = "frozen" if record is not None else "not of this model"
            raise FsdpError(f"accumulate: the parameter of shape {tuple(parameter.shape)} is {what}")
        if self._grad_reduce == "microbatch":
            raise FsdpError(
                f"{record.name}: a split backward delivered its gradient, and grad_reduce is 'microbatch', which "
                "reduces in fused backwards; use 'auto' or 'last'",
                unit=record.buffer.unit,
                op="reduce",
            )
        self._deferred = True
        if self._driven_mode is Driven.MICROBATCH:
            self._driven_mode = Driven.LAST
        self._touched.add(self._by_name[record.buffer.unit].index)
        if record.buffer.local is None:
            self.reduction.acquire(record.buffer, pooled=False)
        self.reduction.accumulate(record, gradient)

    def _end_backward(self) -> None:
        """Autograd's final callback. [Note: when a unit's backward is done]"""
        self._callback = False
        if self.failed is not None:
            return
        opened, self._open = self._open, []
        for unit, _ in opened:
            if unit.index:
                self._close(unit)
        if self._driven:
            if len(self.stages) == 1 and 0 in self._touched:
                self._close(self.units[0])
            if self._driven_mode is Driven.MICROBATCH:
                self._put_touched(self.units if len(self.stages) == 1 else self.units[1:])
        elif self._reduces(self.units[0]):
            self._put_touched(self.units)

    # ---- when to reduce

    def _reduces(self, unit: Unit) -> bool:
        """Gradients of ``unit`` are to be reduced in the backward that runs now."""
        if self._driven:
            if self._mode() is Driven.MICROBATCH:
                return unit.index != 0 or len(self.stages) == 1
            stage = unit.stage
            return isinstance(stage, StageState) and stage.last
        if self.no_sync_depth:
            return False
        return self._shards_grads or self.last_microbatch

    def _mode(self) -> Driven:
        if self._driven_mode is None:
            if self._grad_reduce != "auto":
                self._driven_mode = Driven(self._grad_reduce)
            else:
                one = self.strategy.shards_grads and len(self.stages) == 1 and not self._deferred
                self._driven_mode = Driven.SPLIT_OR_FUSED if one else Driven.LAST
        return self._driven_mode

    def _close(self, unit: Unit) -> None:
        """All gradients of ``unit`` that this backward makes are in its local sum."""
        if self._driven and self._mode() is Driven.SPLIT_OR_FUSED and unit.trainable is not None:
            fused = self._on_any_rank(all(record.filled for record in unit.trainable.records), unit)
            self._driven_mode = Driven.MICROBATCH if fused else Driven.AWAITED
        if self._reduces(unit):
            self._put(unit)

    def _on_any_rank(self, mine: bool, unit: Unit) -> bool:
        """Whether ``mine`` is true anywhere. A rank may leave a parameter unused; if each chose by itself how to
        reduce, their collectives would part ways. Two messages in the life of a model. [Note: two channels]"""
        rows = exchange(self.control, [int(mine)], lambda work: self.wait(work, unit.name, "check", on_host=True))
        return any(row[0] for row in rows)

    def _put(self, unit: Unit, *, check: bool = True) -> None:
        self._touched.discard(unit.index)
        if unit.trainable is None:
            return
        if self._checks == "unit" and check:
            self._check(unit, _REDUCE, finite=self.reduction.finite(unit))
        elif self._checks == "order":
            self._digest.add(unit.index, _REDUCE)
        self.reduction.put(unit)

    def _put_touched(self, units: Sequence[Unit], *, check: bool = True) -> None:
        for unit in units:
            if unit.index in self._touched:
                self._put(unit, check=check)

    # ---- driven programs (seams: "The program drives the sharding")

    def add_stage(self, stage: StageState) -> None:
        """A stage handle was made; a second one of a stage takes the place of the first."""
        self.stages = [*(one for one in self.stages if one.name != stage.name), stage]
        for unit in stage.units:
            unit.stage = stage
        self._driven_mode = None

    def after_backward(self) -> None:
        """All backward actions of one micro-batch on a stage ran."""
        if self._driven_mode is Driven.AWAITED:
            split = self._on_any_rank(self._deferred, self.units[0])
            self._driven_mode = Driven.LAST if split else Driven.MICROBATCH
            if not split:
                self._put_touched(self.units)
                self.reduction.release_own_sums()

    def reduce_stage(self, stage: StageState) -> None:
        """The stage makes no more gradients in this step; after the last stage, neither does the root unit."""
        self.alive()
        self._put_touched(stage.units)
        stage.last, stage.done = False, True
        if all(one.done for one in self.stages):
            self._put_touched(self.units[:1])

    # ---- end of a step

    def finish_grad_sync(self, *, inside_step: bool = False) -> None:
        """Reduce what is local and wait for all. Inside ``optimizer.step()`` no control message is sent."""
        self.alive()
        self._put_touched(self.units, check=not inside_step)
        self.reduction.pipeline.finish()
        for stage in self.stages:
            stage.last = stage.done = False
        if self._driven_mode is Driven.AWAITED:
            self._driven_mode = None
        if not inside_step:
            self._compare_digests()

    def before_step(self) -> None:
        """An optimizer of this model is about to step."""
        self.finish_grad_sync(inside_step=True)
        self.gathering.settle()

    def after_step(self) -> None:
        """Main weights changed."""
        self.gathering.invalidate(frozen=False)
        self._stepped = True

    def discard_local(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Forget gradients that are not main gradients yet, of some ``parameters`` or of all.

        The same on all ranks: units are touched or not by what was asked, not by what lies here.
        """
        if self.failed is not None:
            return
        records = set(self.records.values() if parameters is None else [self.records[one] for one in parameters])
        self.reduction.discard(records)
        self._touched -= {
            unit.index for unit in self.units if unit.trainable is None or records.issuperset(unit.trainable.records)
        }
