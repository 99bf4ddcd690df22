"""What happens at each event of a step: when to gather, when a unit's gradients are done, when to reduce.

    hooks/, wrapper/, optimizers/ --> Engine (this file) --> gather.py, reduce.py

Knows events, not modules. What is true of one backward alone is backward.py's, with the rule by which units end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from sixfold.fsdp.buffers.flat_buffer import ParamAndGradBuffer
from sixfold.fsdp.buffers.flat_tensor import ParamRecord
from sixfold.fsdp.buffers.reduction_sizes import OPEN
from sixfold.fsdp.buffers.unit import Unit
from sixfold.fsdp.collectives.comm import Ranks
from sixfold.fsdp.collectives.host_messages import Control
from sixfold.fsdp.config import ShardingStrategy
from sixfold.fsdp.engine.backward import Backward, CallContext, old_graph, refuse_graph
from sixfold.fsdp.engine.gather import Gathering
from sixfold.fsdp.engine.interruptions import Interruptions, interruptible
from sixfold.fsdp.engine.rank_agreement import OrderCheck
from sixfold.fsdp.engine.reduce import ReducePolicy, Reduction, StageState
from sixfold.fsdp.engine.transforms import refuse_transforms
from sixfold.fsdp.errors import FsdpError
from sixfold.fsdp.faults.deadlines import Faults
from sixfold.fsdp.parameter_access.guard import UnitGuard, guard_of, written_in_place
from sixfold.fsdp.parameter_access.main_parameters import MainParameter, MainParameters
from sixfold.fsdp.parameter_access.saved_weights import SavedViews, SavedWeights
from sixfold.fsdp.torch_private import calling_frame, in_backward, runs_anywhere, step_frame


class Engine:
    """The events of one model: what each starts, and what it waits for."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        ranks: Ranks,
        strategy: ShardingStrategy,
        grad_reduce: str,
        gathering: Gathering,
        reduction: Reduction,
        faults: Faults,
        order_check: OrderCheck,
        control: Control,
    ) -> None:
        self.units = units
        self.ranks = ranks
        self.shards_optimizer = strategy.shards_optimizer
        self._shards_grads = strategy.shards_grads
        self.gathering = gathering
        self._here = gathering.pipeline.ready
        self.reduction = reduction
        self.faults = faults
        self.control = control
        self._order_check = order_check
        self.records: dict[nn.Parameter, ParamRecord] = {
            record.parameter: record for unit in units for record in unit.records
        }
        self.numbered = tuple(self.records.values())
        self._gathers = any(not one.weights.whole_here for unit in units for one in unit.flat_buffers)
        self._trained = [flat_buffer for unit in units for flat_buffer in unit.trained]
        self._trainable = [record for flat_buffer in self._trained for record in flat_buffer.records]
        self._by_name = {unit.name: unit for unit in units}
        self._holds_others = {0, *(outer.index for unit in units for outer in unit.around)}
        self.reduce_policy = ReducePolicy(grad_reduce, shards_grads=strategy.shards_grads, tree=reduction.tree)
        self.interruptions = Interruptions(units, gathering, reduction, faults, alone=ranks.size == 1)
        self._stepped = False
        self._calls: list[CallContext] = []
        self._caller = threading.RLock()  # held by the thread whose root call runs
        self.running: list[Unit] = []  # units whose forward runs, outermost first
        self._backward: Backward | None = None  # that runs
        self._touched: set[int] = set()  # units with something to reduce
        self._forgotten: dict[int, set[ParamRecord]] = {}  # by unit, since a backward came to it last
        self._outstanding = [0] * len(units)  # forward calls of this step that had no backward, of all root calls
        self._joint = True  # [Note: several calls, one backward]
        self.weights = 0  # how often main weights changed
        self.stepping = False  # inside optimizer.step(): a closure may run the model. It may have raised meanwhile
        self._step_frame: FrameType | None = None  # torch's, of that step
        self.state_dict_asked = ""  # "names": by full_state_dict, "values": by a state_dict() in one process
        self.registered: list[tuple[dict[str, Any], str, nn.Parameter]] = []  # where, name, parameter
        self.main_parameters = MainParameters(self.numbered)
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # whose steps are ours
        self.guards: list[UnitGuard] = []  # by unit, once its start values are there
        self.saved_views = SavedViews()
        self._saved = [SavedWeights(unit, self._saved_needed, self._old_graph, self.saved_views) for unit in units]
        self._saving: list[SavedWeights] = []  # of calls that run, the innermost last

    # ---- forward

    @property
    def in_call(self) -> bool:
        """A root call of this thread runs."""
        if self._calls:
            self._take_turn()
            self._caller.release()
        return bool(self._calls)

    @property
    def calls_run(self) -> bool:
        """A root call runs, of whatever thread."""
        return bool(self._calls)

    def _take_turn(self) -> None:
        """This thread calls: no other does, and what an interrupt left of an earlier call is cleared."""
        if not self._caller.acquire(blocking=False):
            raise FsdpError(
                "two threads call the model at once, and each would free weights that the other reads; call it "
                "from one thread at a time",
                step=self.faults.step,
                op="gather",
            )
        while self._calls and self._calls[-1].left_by_interrupt():
            self.end_call()

    def begin_call(self, stage: StageState | None, *, by_hook: bool = False) -> CallContext:
        """A root call, entry or stage call begins: the root unit is gathered, the step counted.

        ``by_hook``: torch calls no hook at the end of a call that KeyboardInterrupt ends.
        """
        self.faults.check()
        self._take_turn()
        try:
            context = self._begin_call(stage)
        except BaseException:
            self._caller.release()
            raise
        context.frame = calling_frame() if by_hook else None
        return context

    def _begin_call(self, stage: StageState | None) -> CallContext:
        if self._gathers:
            refuse_transforms(None, self.faults.step)
        if in_backward() == -1 and not self._calls:
            self.end_raised_step()
            self.interruptions.before_use()
            self._notice_edits()
        training = torch.is_grad_enabled()
        if training and in_backward() == -1 and not self._calls:
            self._leave_backward()
            self._begin_step()
            self.reduce_policy.driven = stage is not None
            self.running.clear()
        context = CallContext(len(self.units), training, self.weights)
        self._use(self.units[0], training)
        self._calls.append(context)
        self.guards[0].reveal()
        return context

    @interruptible("gather")
    def _notice_edits(self) -> None:
        """Gathered copies are stale if a user wrote to main weights."""
        if self.main_parameters.look():
            self._order_check.edited()
            self.main_changed(frozen=True)
        self.main_parameters.copied()

    @interruptible("gather")
    def _begin_step(self) -> None:
        if self._stepped:
            self._next_step()
        elif self.gathering.begin_step(stepped=False):
            self.weights += 1

    def end_call(self) -> None:
        """The innermost root call is over, also by an exception."""
        self._calls.pop().frame = None
        if not self._calls:
            self.guards[0].hide()
            for unit in self.running:  # interrupted
                self.guards[unit.index].interrupted()
            self.running.clear()
            while self._saving:
                self._saving.pop().pop()
        self._caller.release()

    def _next_step(self) -> None:
        self._stepped = False
        self.reduce_policy.new_batch()
        self.faults.step += 1  # before anything below waits: a rank that is lost meanwhile is lost in this step
        self._outstanding = [0] * len(self.units)
        if self.gathering.begin_step(stepped=True):
            self.weights += 1
        for saved in self._saved:
            saved.next_step()
        self.saved_views.clear()
        self._order_check.next_step()

    def before_forward(self, unit: Unit) -> None:
        """``unit``'s forward is about to run."""
        if self.faults.failed is not None:
            return
        if in_backward() != -1:  # recompute: it finds its unit gathered, or gathers it
            self._use(unit, True)
            self.guards[unit.index].reveal()
            return
        self.running.append(unit)
        if not self._calls:
            raise FsdpError(
                "a unit's module was called directly, and its weights may not be here; call the "
                "FullyShardedDataParallel object, or model.entry(child) for a part of it",
                unit=unit.name,
                op="gather",
            )
        self._use(unit, self._calls[-1].training)
        saved = self._saved[unit.index]
        if saved.push():
            self._saving.append(saved)
        self.guards[unit.index].begin_call(learns=saved.learns)

    def after_forward(self, unit: Unit) -> CallContext | None:
        """``unit``'s forward ended; returns the call to count its backward in (None in a recompute)."""
        guard = self.guards[unit.index]
        if in_backward() != -1:
            guard.hide()
            return None
        if self._saving and self._saving[-1] is self._saved[unit.index]:
            self._saving.pop().pop()
        if self.running and self.running[-1] is unit:
            self.running.pop()
            guard.end_call()
        else:
            guard.hide()
        return self._calls[-1] if self._calls else None

    @interruptible("gather")
    def _use(self, unit: Unit, in_step: bool) -> None:
        if self._gathers:
            refuse_transforms(unit.name, self.faults.step)
        self.interruptions.refuse()
        if in_step:
            self._order_check.use(unit)
        busy = self.running or unit.around
        if self._backward is not None and unit.index in self._holds_others:
            busy = [*busy, *self._backward.opened_inside(unit)]
        self.gathering.use(unit, busy, in_step=in_step)

    # ---- backward

    def _saved_needed(self, unit: Unit) -> None:
        """Autograd unpacks weights of ``unit``. [Note: ways out]"""
        if self.faults.failed is not None:
            return
        here = unit.name in self._here
        if not here or self._saved[unit.index].entered != in_backward():
            self._saved[unit.index].found = True  # also where it happens to be here still
        if not here:
            self._use(unit, True)

    def _old_graph(self, unit: Unit) -> FsdpError:
        return old_graph(unit, self.faults.step)

    def count_call(self, unit: Unit, context: CallContext) -> None:
        """Outputs of ``unit`` have a graph: a backward of ``context`` may come."""
        context.outstanding[unit.index] += 1
        self._outstanding[unit.index] += 1

    def before_backward(self, unit: Unit, context: CallContext | None, weights: int) -> bool:
        """The first gradient of an output of ``unit`` is here; ``context`` is the call to count down, if any.

        Returns whether it was counted down: a backward that accumulates nothing (``autograd.grad`` of inputs) uses
        weights and makes no gradient of them. ``weights`` is what ``self.weights`` was in the forward.
        """
        if self.faults.failed is not None:
            return False
        if weights != self.weights or torch.is_grad_enabled():
            refuse_graph(unit, self.units, changed=weights != self.weights, step=self.faults.step)
        backward = self._backward or self._begin_backward()
        task = self._saved[unit.index].entered = in_backward()
        if task != backward.task:
            backward.ask(task, self._trainable, driven=self.reduce_policy.driven)
        self._use(unit, True)
        if not backward.makes_gradients:
            return False
        if context is not None:
            context.outstanding[unit.index] -= 1
            self._outstanding[unit.index] = max(self._outstanding[unit.index] - 1, 0)
        others = self._outstanding if self._joint and not self.reduce_policy.driven else None
        done, begins = backward.open(unit, context, others, touched=unit.index in self._touched)
        for one in done:
            self._put(one)
        if begins:
            self._touched.add(unit.index)
            self._forgotten.pop(unit.index, None)
        return True

    def _begin_backward(self) -> Backward:
        refuse_transforms(None, self.faults.step, functions=self._gathers)
        self._backward = Backward(self.reduce_policy.reducing(self.units))
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _leave_backward(self) -> None:
        """A backward that raised is over: what it reduced is a microbatch of its own."""
        if self._backward is not None and in_backward() == -1:
            self._backward = None
            self.reduce_policy.backwards += 1

    def deliver(self, record: ParamRecord, gradient: Tensor) -> None:
        """Autograd finished ``record``'s gradient."""
        if self.faults.failed is not None:
            return
        flat_buffer = record.flat_buffer
        if flat_buffer.unit not in self._here:
            raise FsdpError(
                f"the gradient of {record.name} came while its unit's weights were not gathered: a tensor left the "
                "unit in this step for the first time, and not through its outputs. Return it in a tuple, list or "
                'dict, or use BufferConfig(gathered_bytes="all"). Where several calls share one autocast block, its '
                "cache of cast weights is that tensor: give each call a block of its own, or "
                "autocast(cache_enabled=False)",
                unit=flat_buffer.unit,
                step=self.faults.step,
                op="reduce",
            )
        policy = self.reduce_policy
        if policy.tree and policy.driven and not policy.each_microbatch:
            policy.keep(self._by_name[flat_buffer.unit], record, gradient)
            return
        if flat_buffer.gradients.state not in OPEN:
            self._acquire(flat_buffer)
        flat_buffer.gradients.add(record, gradient, self.reduction.wide)  # where it raises, zero_grad drops the sum

    @interruptible("reduce")
    def _acquire(self, flat_buffer: ParamAndGradBuffer) -> None:
        unit = self._by_name[flat_buffer.unit]
        backward = self._backward or self._begin_backward()
        self._touched.add(unit.index)
        self.reduction.acquire(flat_buffer, pooled=self._shards_grads and unit.index in backward.reduces)

    def deliver_deferred(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """A driven program brings a gradient that autograd did not deliver: the same local sum."""
        self.faults.check()
        record = self.records.get(parameter)
        if record is None or not record.flat_buffer.trainable:
            what = "frozen" if record is not None else "not of this model"
            raise FsdpError(f"accumulate: the parameter of shape {tuple(parameter.shape)} is {what}")
        if self.reduce_policy.each_microbatch:
            raise FsdpError(
                f"{record.name}: accumulate() brings its gradient after a backward with fused=True, which was "
                "reduced at its end; make the handle with fused=False, or wrap with grad_reduce='last'",
                unit=record.flat_buffer.unit,
                op="reduce",
            )
        self._add_deferred(record, gradient)

    @interruptible("reduce")
    def _add_deferred(self, record: ParamRecord, gradient: Tensor) -> None:
        self._touched.add(self._by_name[record.flat_buffer.unit].index)
        if record.flat_buffer.gradients.state not in OPEN:
            self.reduction.acquire(record.flat_buffer, pooled=False)
        record.flat_buffer.gradients.add(record, gradient, self.reduction.wide)

    @interruptible("reduce")
    def _end_backward(self) -> None:
        """Autograd's final callback. [Note: when a unit's backward is done]"""
        backward, self._backward = self._backward, None
        if self.faults.failed is not None or backward is None:
            return
        policy, opened = self.reduce_policy, [unit for unit, _ in backward.opened]
        apart = not backward.joint and any(self._outstanding[unit.index] for unit in opened)
        for unit in opened:
            if unit.index and unit.index in backward.reduces:
                self._put(unit)
        self._put_touched([unit for unit in policy.left_over(self.units) if unit.index in backward.reduces])
        if not policy.driven and opened:
            policy.backwards += 1
            self._learn_calls(apart)
            if policy.final:
                self._order_check.gradients_done()
                self.reduction.finish(policy.over)  # main gradients are final: user code may look at them
                self._order_check.settle()

    def _learn_calls(self, apart: bool) -> None:
        """[Note: several calls, one backward] A unit called by several root calls (loss1 + loss2) delivers all its
        gradients in the backward of the first call, so closing it after that of the last would reduce zeros. With
        micro-batches in flight each call has a backward of its own. Which of the two comes cannot be known before
        the backward ends; the last one's answer is taken for the next. It decides traffic, never sums. A graph that
        was dropped looks like one in flight, and is not looked at: ranks drop theirs at different moments.
        """
        if self._joint and apart and self._shards_grads:
            self.reduction.release_own_sums()  # units that stayed open took full-size sums of their own
        self._joint = not apart

    # ---- when to reduce

    @interruptible("reduce")
    def _put(self, unit: Unit, *, inside_step: bool = False) -> None:
        self._touched.discard(unit.index)
        if not unit.trained:
            return
        if inside_step:
            self._order_check.reduce_in_step(unit)
        else:
            self._order_check.reduce(unit, self.reduction.not_finite)
        self.reduction.put(unit, self.reduce_policy.leaf_of(unit))

    def _put_touched(self, units: Sequence[Unit], *, inside_step: bool = False) -> None:
        for unit in units:
            if unit.index in self._touched:
                self._put(unit, inside_step=inside_step)

    def end_microbatch(self, stage: StageState, microbatch: int) -> None:
        """No more gradients of ``microbatch`` come in ``stage``: with ``grad_sum="tree"`` it is reduced now."""
        if not self.reduce_policy.tree or self.faults.failed is not None:
            return
        for record, gradient in self.reduce_policy.end_microbatch(stage, microbatch):
            self._add_deferred(record, gradient)
        self._put_touched([*stage.units, *([] if stage.root is None else [stage.root])])
        stage.over.add(microbatch)
        stage.microbatch = microbatch + 1

    def reduce_stage(self, stage: StageState) -> None:
        """The stage makes no more gradients in this step; after the last stage, neither does the root unit."""
        self.faults.check()
        self._put_touched(stage.units)
        stage.last, stage.done = False, True
        if self.reduce_policy.all_done:
            self._put_touched(self.units[:1])

    # ---- end of a step

    @interruptible("reduce")
    def finish_grad_sync(self, *, inside_step: bool = False) -> None:
        """Reduce what is local and wait for all. Inside ``optimizer.step()`` no exchange stands before a reduction."""
        self.faults.check()
        refuse_transforms(None, self.faults.step)
        self.end_raised_step()
        self.interruptions.before_use()
        self._put_touched(self.units, inside_step=inside_step)
        self._order_check.gradients_done(inside_step=inside_step)
        self.reduction.finish(self.reduce_policy.over)
        self.reduce_policy.end_step()
        self._order_check.compare()
        self.faults.check()  # [Note: flag before abort]

    def check(self) -> None:
        """Raise if a fault ended this model, or if ranks did different things."""
        self.faults.check()
        self._order_check.compare()

    def before_save(self) -> None:
        """Collective: whole tensors are about to be read.

        Raises:
            FsdpError: a parameter was written to in a call of its unit, and the state would not show it.
        """
        self.faults.check()
        refuse_transforms(None, self.faults.step)
        self.end_raised_step()
        self.interruptions.gather_anew()
        written = None if self.gathering.versions is None else self.gathering.versions.look()
        guard = None if written is None else guard_of(written)
        if guard is not None:
            raise written_in_place(guard, self.units[0].module)
        self._order_check.before_save()

    @interruptible("reduce")
    def before_step(self, *, widen: bool) -> None:
        """An optimizer of this model is about to step; ``widen``: over all main gradients at once."""
        self.finish_grad_sync(inside_step=True)
        self.gathering.settle()
        self.faults.check()  # [Note: flag before abort]
        for flat_buffer in self._trained if widen else ():
            flat_buffer.gradients.main.widen()
        self.main_parameters.adopt()
        self._step_frame = step_frame()
        self.stepping = True
        self.main_parameters.show(nn.Parameter)

    @interruptible("reduce")
    def after_step(self) -> None:
        """Main weights changed."""
        self.stepping, self._step_frame = False, None
        self.main_parameters.show(MainParameter)
        self.main_parameters.adopt()
        for flat_buffer in self._trained:
            flat_buffer.gradients.main.narrow()
        self.main_changed(frozen=False)
        self._stepped = True

    def end_raised_step(self) -> None:
        """A step that an exception ended is over, and may have changed any weight: torch calls no hook after it.

        It counts as a step, because it may have raised on this rank alone.
        """
        if self._step_frame is not None and not runs_anywhere(self._step_frame):
            self.after_step()

    @interruptible("gather")
    def main_changed(self, *, frozen: bool) -> None:
        """Gathered copies are stale, and graphs that hold them are of no more use."""
        self.gathering.invalidate(frozen=frozen)
        self.main_parameters.settle()
        self.weights += 1

    @interruptible("reduce")
    def forget(self, record: ParamRecord) -> None:
        """``.grad = None`` of one of the module's parameters: what ``discard_local`` does for all, one by one."""
        if self.faults.failed is not None or not record.flat_buffer.trainable:
            return
        unit = self._by_name[record.flat_buffer.unit]
        if self.reduction.pipeline.flying(unit.name):
            self.reduction.pipeline.finish()
        record.flat_buffer.gradients.forget(record)
        if record.main is not None:
            record.main.grad = None
        gone = self._forgotten.setdefault(unit.index, set())
        gone.add(record)
        if len(gone) == sum(len(one.records) for one in unit.trained):
            self.reduction.drop(unit, gone)
            self._touched.discard(unit.index)
            self._outstanding[unit.index] = 0

    @interruptible("reduce")
    def discard_local(self, parameters: Collection[nn.Parameter] | None = None) -> None:
        """Forget gradients that are not main gradients yet, of some ``parameters`` or of all.

        The same on all ranks: units are touched or not by what was asked, not by what lies here.
        """
        self.faults.check()
        refuse_transforms(None, self.faults.step)
        self.end_raised_step()
        self._leave_backward()
        self.interruptions.start_over()
        if parameters is not None and self.reduce_policy.tree:
            self.reduction.finish(self.reduce_policy.over)  # the others keep what they have
        self.reduce_policy.end_step()
        self.reduce_policy.new_batch()
        self._outstanding = [0] * len(self.units)
        records = set(self.records.values() if parameters is None else [self.records[one] for one in parameters])
        self.reduction.discard(records)
        with torch._C.DisableTorchFunctionSubclass():
            for record in records:  # an exception between autograd and our hook leaves it
                record.parameter.grad = None
        self._touched -= {
            unit.index for unit in self.units if all(records.issuperset(one.records) for one in unit.trained)
        }
