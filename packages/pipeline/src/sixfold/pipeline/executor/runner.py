"""The executor: runs any program, whoever made it.

    Program, Stages, group --> compiler --> calls, in order (this file) --> gradients, losses

The interpreter is one loop over bound calls. What is around it: microbatches in,
results out, and one error or time-out on every rank when something fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, Literal, Never, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sixfold.pipeline.compiler.compile import Compiled, CompiledBatch, StepResult, step_device
from sixfold.pipeline.compiler.compile_endless import CompiledEndless
from sixfold.pipeline.compiler.wiring import BatchRows, Goal
from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.executor.arguments import check_stages, check_timeout, given_stages, refusal
from sixfold.pipeline.executor.connect import connect, group_of, refuse, transport_of
from sixfold.pipeline.executor.gradient_clipping import check_norm, clip
from sixfold.pipeline.executor.partial_gradients import StepGradients
from sixfold.pipeline.executor.program_cache import ProgramCache, one_process
from sixfold.pipeline.executor.snapshot import restored, taken
from sixfold.pipeline.executor.tied_weights import Ties, tie
from sixfold.pipeline.executor.usage_checks import BufferGuard, ModuleCheck, OptimizerCheck, warn_of_empty_w
from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.failures.report import FailureReport, Store
from sixfold.pipeline.measured.one_clock import gathered
from sixfold.pipeline.microbatches.cut_batch import Values, cut_beside, input_microbatches
from sixfold.pipeline.microbatches.outer_graph import OuterGraph, freed_graph, refuse_shared_graph
from sixfold.pipeline.program.program import Program, Weights, program_given
from sixfold.pipeline.simulation.simulate import Timeline, measured
from sixfold.pipeline.stage.distributed_data_parallel import Replicas
from sixfold.pipeline.stage.fully_shard import shard_again
from sixfold.pipeline.stage.side_effects import module_of
from sixfold.pipeline.stage.stage import Stage
from sixfold.pipeline.torch_arguments import RUNNER, naming_ours, refuse_others
from sixfold.pipeline.transport.agreement import broadcast
from sixfold.pipeline.transport.protocol import Links, Transport

__all__ = ["PipelineRunner", "StepResult"]

LossFn = Callable[[Any, Any], Any]


class PipelineRunner:
    """Runs programs on the stages of this rank.

    All ranks of the group make their runner together and make the same calls.
    Gradients are accumulated into ``.grad`` (or by ``data_parallel``) in microbatch
    order, with the bits of a single process that runs the same microbatches.

    Args:
        program: the schedule; messages are added if it has none.
        stages: the stages of this rank (``program.stages_of(rank)``) in any order, or its only one.
        group: rank r of the program is group rank r. It may be a mesh of one dimension. None runs all stages in this
            process. Errors number ranks as the job does.
        loss_fn: ``loss_fn(output, target)`` -> scalar; needed on the rank of the last stage.
        scale: "mean" divides each loss by m before its backward. "sum" does not. With "token" ``loss_fn`` returns
            (sum, count), and the step's gradients are divided once by the total count.
        timeout_s: deadline of every wait for another rank.
        store: ranks write there where they stand after a failure; None takes the group's.
        lookahead: a receive is posted so many compute actions before its place.
        profile: results say when each action began and ended. ``step(..., profile=False)`` leaves that out.
        dynamic_shapes: False: shapes may change from step to step, if stage 0's inputs or a stage's first output
            change. True: in every message. "announced": in steps that all ranks call with ``new_shapes``; no host waits
            to hear about shapes.
        edges: an edge is one direction between two ranks. None: shared memory for CPU tensors on one host, else a
            communicator per edge. "groups": always a communicator per edge. "host": gloo over host memory, whatever the
            device. "one": one communicator for all edges. It takes less memory and keeps the order of messages; it
            posts no receive early, and the program must pass ``verify`` as a rendezvous. A function
            ``edges(source, destination)``: the group that it returns.
        overlap: run the parts of an OVERLAP_F_B in "order", or on two "streams" of a CUDA device, with the same bits.
        debug_memory: fill received memory that nobody holds with NaN (integers: all bits set), so that a module that
            still reads it is found. It costs a pass over that memory per message. Only over process groups.
    Attributes:
        deferred: after a step with I and W: for each stage of this rank, the share of its trainable numbers whose
            gradients W made. I made the others. See ``Costs.deferring``.
    Raises:
        ScheduleError: the stages are not those of the program. Or ``verify`` refuses the program, or a stage lacks
            what an action needs, such as an optimizer for STEP. Ranks with different programs raise it in their first
            step.
        PipelineTimeout: a rank of the group did not make its runner in time, or cannot be reached.
    """

    @naming_ours(RUNNER)
    def __init__(
        self,
        program: Program,
        stages: Stage | Sequence[Stage],
        group: dist.ProcessGroup | DeviceMesh | Transport | None = None,
        loss_fn: LossFn | None = None,
        *,
        scale: str = "mean",
        timeout_s: float = 600.0,
        store: Store | None = None,
        lookahead: int = 2,
        profile: bool = False,
        dynamic_shapes: bool | Literal["announced"] = False,
        edges: Callable[[int, int], dist.ProcessGroup] | Literal["groups", "one", "host"] | None = None,
        overlap: Literal["order", "streams"] = "order",
        debug_memory: bool = False,
    ) -> None:
        wrong = refusal(
            program,
            stages,
            loss_fn,
            scale,
            lookahead=lookahead,
            dynamic_shapes=dynamic_shapes,
            edges=edges,
            overlap=overlap,
            debug_memory=debug_memory,
        )
        try:
            timeout_s = check_timeout(timeout_s)
        except ScheduleError as error:
            wrong, timeout_s = wrong or error, 600.0
        group = group_of(group)
        if wrong is not None:  # said behind the join, so that the others are told and do not wait
            refuse(wrong, transport_of(group, None), store, timeout_s)
        stages, lookahead = given_stages(stages), whole("lookahead", lookahead, least=0)
        for stage in stages:
            if isinstance(stage.data_parallel, Replicas):
                stage.data_parallel.timeout_s = timeout_s
        self._rank = 0 if group is None else group.rank() if isinstance(group, dist.ProcessGroup) else group.rank
        self._stages = {stage.index: stage for stage in stages}
        self._loss_fn, self._scale = loss_fn, scale
        self._profile = bool(profile)
        self._in_flight: CompiledEndless | None = None  # that ran last, and may have microbatches in flight
        self._ran: Compiled | None = None
        self._failure = FailureReport(self._rank, len(program.ranks))
        self._ties: Ties | None = None
        self._gradients = StepGradients(others=group is not None)
        self.deferred: dict[int, float] = {}
        self._told = False  # of a W with little to do
        self._stepped = False  # the optimizers, in the last step
        self._guard, self._optimizers = BufferGuard(), OptimizerCheck(stages)
        self._modules = ModuleCheck(stages)
        self._links: dict[int, Links] = {}  # of this rank; empty where all are in this process
        self._program = program
        self._here = None if group is None else self._rank  # None: all ranks are here
        transport = transport_of(group, edges, debug_memory=bool(debug_memory))
        self._ranks = len(program.ranks) if transport is None else transport.ranks
        one = bool(getattr(transport, "one", False))
        self._programs = ProgramCache(
            self._stages,
            self._here,
            self._ranks,
            self._links,
            one=one,
            lookahead=-1 if one else lookahead,  # each where it stands
            dynamic_shapes=dynamic_shapes,
            profile=self._profile,
            overlap=overlap,
        )
        if transport is not None:
            backend = dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else "gloo"
            device = step_device(self._stages, backend)
            self._links[transport.rank], self._failure = connect(transport, device, store, timeout_s)
        try:  # behind the join, so that the others are told what is wrong here, and do not wait
            if len(self._stages) != len(stages):
                check_stages(program, stages, self._here)
            self._programs.agree_on_options(edges)
            self._programs.check(program)
            self._programs.prepare(program)
            links = self._links or one_process(program)
            shard_again(stages)
            self._ties = tie(stages, program.placement, links, self._rank)
        except BaseException as error:
            self._fail(error)

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        program: Program | None = None,
        keep_outputs: bool = False,
        new_shapes: bool = False,
        profile: bool = True,
        **others: Never,
    ) -> StepResult:
        """Forward and backward of one batch; gradients are added to what is there.

        Weights "2bw" and "pipedream" let batches overlap. A step then runs one batch, and the stages' optimizers step
        inside. Earlier stages still hold backwards of the batch when this returns; ``drain`` runs them.

        Autocast around this call holds for forwards and recomputes. Backwards run without it.

        Args:
            inputs: on the rank of stage 0: a tensor, or a tuple of several, cut along dim 0. Or a list of m tensors or
                tuples. With scale="mean" m must divide the rows of a tensor; those of a list may differ. If a tensor
                comes out of a graph of yours (an embedding), that graph's backward runs once, at the end.
            targets: on the rank of the last stage: likewise, or a dict of tensors; None gives ``loss_fn`` None.
            kwargs: for the modules of this rank's stages, never sent: a dict, whose tensors are cut along dim 0, or a
                list of m dicts. Containers in a dict are made anew for each microbatch, other objects are not.
            program: for this step, the same on all ranks; compiled once and kept.
            keep_outputs: the result holds the last stage's outputs too, detached.
            new_shapes: shapes may differ from those of the step before; the same on all ranks. Only
                ``dynamic_shapes="announced"`` needs it.
            profile: False: this step of a runner with ``profile`` measures nothing and waits for no device.
        Raises:
            ScheduleError: an argument, a stage or ``loss_fn`` failed here or on the rank it names.
            PipelineTimeout: another rank did not answer before the deadline.
        """
        refuse_others("step", others)
        with torch.enable_grad():
            return self._run(program, "step", self._goal(), inputs, targets, kwargs, keep_outputs, new_shapes, profile)

    def tie(self) -> None:
        """Give every tied copy (``Stage(tied=)``) the value of the lowest stage again; all ranks call it."""
        self._not_broken()
        self._meet("tie")  # a rank that failed is heard of, though nothing is received from it
        try:
            if self._ties is not None:
                self._ties.share()
        except BaseException as error:
            self._fail(error)

    def drain(self) -> None:
        """Run what is still in flight of a program whose batches overlap; of others nothing is. All ranks call it."""
        self._not_broken()
        if self._in_flight is not None and self._in_flight.batches:
            with torch.enable_grad():
                self._run(None, "drain", self._in_flight.goal, None, None, None, profile=False)

    def state_dict(self) -> dict[str, Any]:
        """What another runner needs to continue after this step with the same bits; ``torch.load`` reads it.

        It holds the optimizers of this rank's stages and the state of the random numbers. If batches overlap, it also
        holds the modules' state, older weights and the microbatches in flight. Its tensors are those in use: save or
        copy them before the next step. It waits for messages that were sent.

        Raises:
            ScheduleError: keyword arguments or targets in flight are no such values.
            PipelineTimeout: a message that was sent did not come before the deadline.
        """
        self._not_broken()
        try:
            return taken(self._in_flight, self._stages)
        except PeerLost as error:
            self._fail(error, self._in_flight)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the runner that made ``state`` stood; all ranks call it, each with what it saved.

        Load the modules before, unless batches overlap: then ``state`` holds them. Forwards of microbatches in flight
        run again.

        Raises:
            ScheduleError: ``state`` is of other stages or another program, or lacks something, and nothing was changed;
                or this runner has microbatches in flight.
            PipelineTimeout: another rank does not load, in the first call of a runner.
        """
        self._not_broken()
        if self._in_flight is not None and self._in_flight.batches:
            raise ScheduleError("microbatches are in flight here; load the state into a new runner")
        self._begin_call()
        try:
            compiled = self._programs.get(self._program, "step", self._goal())
        except PeerLost as error:
            self._fail(error)
        endless = compiled if isinstance(compiled, CompiledEndless) else None
        with torch.enable_grad():
            restored(state, endless, self._stages)
        self._in_flight = endless if state["carried"] is not None else None

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        program: Program | None = None,
        keep_outputs: bool = False,
        profile: bool = True,
        **others: Never,
    ) -> StepResult:
        """Losses of one batch without gradients; buffers stay as they were. Arguments as in ``step``.

        Each stage uses its newest weights. Microbatches in flight stay as they are.

        A tensor needs m rows at least. If m does not divide them, the mean of the losses is not the mean over rows.
        """
        refuse_others("evaluate", others)
        goal = Goal(train=False, loss_fn=self._loss_fn, scale=self._scale, autocast=_autocast())
        with torch.no_grad(), self._guard.around(self._stages.values(), "evaluate", self._loss_fn):
            return self._run(program, "evaluate", goal, inputs, targets, kwargs, keep_outputs, profile=profile)

    def forward(
        self, inputs: Any = None, *, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> StepResult:
        """Outputs of the last stage, on its rank, without gradients; nothing else remains."""
        goal = Goal(train=False, loss_fn=None, autocast=_autocast())
        with torch.no_grad(), self._guard.around(self._stages.values(), "forward"):
            return self._run(None, "forward", goal, inputs, None, kwargs)

    def check(self) -> None:
        """Wait until all that the steps received has arrived. Call it before gradients are used on a device.

        On a device ``step`` returns before its messages have arrived, so a message that never comes is noticed later.
        This call sends nothing. If the host has read a value of the step (a loss, a norm), nothing is left to wait for.

        Raises:
            ScheduleError, PipelineTimeout: the runner has failed, or a message of its steps did not come in time. Or
                another rank of this host is known to have failed.
        """
        self._not_broken()
        ran = self._ran
        try:
            for links in self._links.values():
                links.check()
        except (PeerLost, ScheduleError) as error:
            self._fail(error, ran, -1 if ran is None else len(ran.calls))

    def agree(self, program: Program | None = None, source: int = 0) -> Program:
        """The program of rank ``source``, on all ranks, compiled for ``step``; all ranks call it.

        Args:
            program: of that rank; others may give None, and theirs is not looked at.
        Raises:
            ScheduleError: on all ranks, when the source's program cannot run.
            PipelineTimeout: a rank did not take part before the deadline.
        """
        self._not_broken()
        self._meet(f"agree from rank {source!r}")
        source = whole("source", source, least=0)
        if source >= self._ranks:
            raise ScheduleError(f"source is {source}; ranks are 0..{self._ranks - 1}")
        try:
            if self._here is not None:
                program = broadcast(program, source, self._links[self._here])
            if program is None:
                raise ScheduleError("program is None on the rank that decides; give it there")
            self._programs.get(program, "step", self._goal())
        except Exception as error:
            self._fail(error)
        return program

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over all stages is at most ``max_norm``, as torch's of the whole model.

        All ranks call it, after a step and before the optimizer. A tied parameter counts once. Parameters of a
        ``loss_fn`` that is a module, on the rank of the last stage, count too. If the program has
        STEPs, the optimizers have stepped by then: clip in a ``register_step_pre_hook`` of each optimizer.

        Returns:
            the norm before, equal on all ranks.
        Raises:
            ScheduleError: a number is not above zero, the last step ran STEPs, a stage has data_parallel, which owns
                its gradients, or a rank makes another call.
            PipelineTimeout: a rank did not take part before the deadline.
        """
        self._not_broken()
        if self._stepped:  # on all ranks
            raise ScheduleError(
                "the program's STEPs ran the optimizers inside step(), so no gradients are left to clip; clip in a "
                "register_step_pre_hook of each stage's optimizer, or run a program without STEPs"
            )
        self._meet(f"clip_grad_norm_ of {max_norm!r}, {norm_type!r}")
        max_norm, norm_type = check_norm(max_norm, norm_type)
        owned = [s.index for s in self._stages.values() if not isinstance(s.data_parallel, Replicas | None)]
        if owned:
            self._fail(ScheduleError(f"stage {owned[0]} has data_parallel, which owns its gradients; clip them there"))
        every = dict.fromkeys(p for _, stage in sorted(self._stages.items()) for p in stage.parameters())
        if self._program.stages - 1 in self._stages and (loss := module_of(self._loss_fn)) is not None:
            every |= dict.fromkeys(loss.parameters())
        copies = set() if self._ties is None else self._ties.copies()
        gather = None if self._here is None else self._links[self._here].control.gather
        try:
            return clip([p for p in every if p not in copies], every, max_norm, norm_type, gather)
        except PeerLost as error:
            self._fail(error)

    def gather_timeline(self, result: StepResult) -> Timeline | None:
        """The events of all ranks on the clock of rank 0, there; None elsewhere. All ranks call it, behind a step.

        Raises:
            ScheduleError: the runner was made without ``profile``.
            PipelineTimeout: a rank did not take part before the deadline.
        """
        self._not_broken()
        self._meet(f"gather_timeline{'' if self._profile else ' without profile'}")
        if not self._profile:
            raise ScheduleError("gather_timeline needs events; make the runner with profile=True")
        if self._here is None:
            return result.timeline
        try:
            channel = self._links[self._here].control
            clock = time.perf_counter
            events = gathered(result.events, rank=self._here, ranks=self._ranks, channel=channel, clock=clock)
        except PeerLost as error:
            self._fail(error)
        weights = Weights.FLUSHED if self._in_flight is None else Weights.PIPEDREAM  # as CompiledEndless.result says
        return None if events is None else measured(events, weights)

    def fail(self, error: BaseException) -> NoReturn:
        """End this runner on all ranks with an error of the caller's, such as one of a data loader.

        Other ranks raise its text from the call in which they wait for this rank, or from their next call.

        Raises:
            ScheduleError: ``error`` itself where it is one, else one with its text, from it.
        """
        self._not_broken()
        if isinstance(error, Exception) and not isinstance(error, ScheduleError):
            wrapped = ScheduleError(f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._fail(error, self._ran, -1)

    def _not_broken(self) -> None:
        if self._failure.broken is not None:
            raise ScheduleError(f"this runner failed before ({self._failure.broken}); make a new one")

    def _begin_call(self) -> None:
        shard_again(self._stages.values())
        for links in self._links.values():
            if (calls := getattr(links, "calls", None)) is not None:
                calls.begin()

    def _meet(self, what: str) -> None:
        """A call that is not one of a program begins, on all ranks."""
        self._begin_call()
        try:
            self._programs.meet(what)
        except (PeerLost, ScheduleError) as error:
            self._fail(error)

    def _goal(self) -> Goal:
        return Goal(train=True, loss_fn=self._loss_fn, scale=self._scale, autocast=_autocast())

    def _run(
        self,
        program: Program | None,
        mode: str,
        goal: Goal,
        inputs: Any,
        targets: Any,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        keep_outputs: bool = False,
        new_shapes: bool = False,
        profile: bool = True,
    ) -> StepResult:
        self._not_broken()
        self._begin_call()
        program = self._program if program is None else program
        compiled: Compiled | None = None
        if goal.autocast:
            # It remembers the casts of weights: those of an evaluation have no graph, and an optimizer makes them old.
            torch.clear_autocast_cache()
        ties = self._ties if goal.train else None
        calls: Iterator[Callable[[], object]] | None = None
        outer: OuterGraph | None = None
        over = False
        try:
            program_given(program)
            self._modules.look()
            if mode == "step" and torch.is_inference_mode_enabled():
                raise ScheduleError(
                    "step was called under torch.inference_mode, which makes no gradients; call evaluate"
                )
            compiled = self._in_flight if mode == "drain" else self._programs.get(program, mode, goal)
            assert compiled is not None, "drain looks whether something is in flight"
            if mode == "step":
                self._gradients.begin(self._stages.values(), self._loss_fn, inputs, (targets, kwargs))
                self._optimizers.look(steps=compiled.steps)
            if ties is not None:
                ties.begin()
            if new_shapes:
                compiled.renew()
            compiled.recording = profile
            outer = self._begin(compiled, mode, inputs, targets, kwargs, keep_outputs)
            calls = iter(compiled.calls)
            for call in calls:
                call()
            over = True
            shard_again(self._stages.values())
            if ties is not None:
                ties.add_up()
            elif self._ties is not None and not goal.train:
                self._ties.compare()
            if outer is not None:
                assert isinstance(compiled, CompiledBatch), "batches that overlap take no outer graph"
                compiled.commit()
                with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    outer.backward()
        except BaseException as error:
            # What is left of the iterator says which call failed; nothing is counted while all is well.
            made = 0 if compiled is None else len(compiled.calls) - length_hint(calls or ())
            at = -1 if calls is None else made if over else made - 1
            stage = None if compiled is None or over or at < 0 else compiled.entries[at][1].action.stage
            told = freed_graph(error, stage, {"inputs": inputs, "kwargs": kwargs, "targets": targets})
            self._fail(told or error, compiled, at)
        finally:
            if goal.autocast:
                torch.clear_autocast_cache()
        self._gradients.end()
        if (
            mode == "step"
            and isinstance(compiled, CompiledBatch)
            and (compiled.deferred_anew() or compiled is not self._ran)
        ):
            self.deferred = compiled.deferred()
            if not self._told:
                warn_of_empty_w(self.deferred)
                self._told = bool(self.deferred)
        self._ran = compiled
        if mode == "step":
            self._stepped = compiled.steps
        result = compiled.result()
        compiled.clear()
        return result

    def _begin(
        self,
        compiled: Compiled,
        mode: str,
        inputs: Any,
        targets: Any,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        keep_outputs: bool,
    ) -> OuterGraph | None:
        if mode == "drain" and isinstance(compiled, CompiledEndless):
            compiled.drain()
            return None
        if mode == "step" and self._in_flight is not compiled:
            if self._in_flight is not None and self._in_flight.batches:
                raise ScheduleError(
                    f"microbatches of {self._in_flight.endless.program.name or 'another program'} are in flight, or "
                    "autocast was switched since they began; call drain() before a step that differs"
                )
            self._in_flight = compiled if isinstance(compiled, CompiledEndless) else None
        m = compiled.program.microbatches
        equal = mode == "step" and self._scale == "mean"
        if compiled.tail is not None and mode != "forward" and self._loss_fn is None:
            raise ScheduleError(f"{mode} needs the runner's loss_fn on the rank of the last stage")
        outer = OuterGraph(inputs) if mode == "step" and 0 in self._stages else None
        if outer is not None and outer.there and isinstance(compiled, CompiledEndless):
            raise ScheduleError(
                "inputs come out of one autograd graph, and batches overlap, so its backward would run several times; "
                "give a list of microbatches, each with a graph of its own"
            )
        microbatches: list[Values] = []
        if 0 in self._stages:
            microbatches = input_microbatches(inputs if outer is None else outer.inputs, m, equal=equal)
        if outer is not None and outer.there:
            microbatches = outer.leaves(microbatches)
        if mode == "step":
            refuse_shared_graph("kwargs", kwargs, m, (list, tuple))
            if compiled.tail is not None:
                refuse_shared_graph("targets", targets, m)
        tail = compiled.tail is not None
        cut_targets, keywords, rows, check = cut_beside(inputs, targets, kwargs, m, equal=equal, tail=tail)
        compiled.begin(microbatches, cut_targets, keywords, keep_outputs, BatchRows(rows, check))
        return outer if outer is not None and outer.there else None

    def _fail(self, error: BaseException, compiled: Compiled | None = None, at: int = -1) -> NoReturn:
        """The step is over, here and on every other rank."""
        lost = isinstance(compiled, CompiledEndless) and compiled.batches > 0
        if compiled is not None:
            compiled.clear(failed=True)
        if self._ties is not None:
            self._ties.restore()
        self._gradients.failed()
        self._failure.end(error, compiled, at, lost=lost)


def _autocast() -> tuple[str, ...]:
    return tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
