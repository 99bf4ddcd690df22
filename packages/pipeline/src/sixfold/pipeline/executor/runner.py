"""The executor: runs any program of forwards, backwards, messages and slots, whoever made it.

    Program, Stages, group --> compiler --> calls, in order (this file) --> gradients, losses

The interpreter is one loop over bound calls. What is around it: microbatches in,
results out, and one error or time-out on every rank when something fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sixfold.pipeline.compiler.compile import Compiled, CompiledBatch, StepResult, step_device
from sixfold.pipeline.compiler.compile_endless import CompiledEndless
from sixfold.pipeline.compiler.wiring import Goal
from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.executor.arguments import check_stages, check_timeout, given_stages, refusal
from sixfold.pipeline.executor.connect import connect, group_of, refuse, transport_of
from sixfold.pipeline.executor.gradient_clipping import check_norm, clip
from sixfold.pipeline.executor.partial_gradients import StepGradients
from sixfold.pipeline.executor.program_cache import ProgramCache, one_process
from sixfold.pipeline.executor.snapshot import restored, taken
from sixfold.pipeline.executor.tied_weights import Ties, tie
from sixfold.pipeline.executor.usage_checks import BufferGuard, OptimizerCheck, warn_of_empty_w
from sixfold.pipeline.failures.deadlines import PeerLost
from sixfold.pipeline.failures.report import FailureReport, Store
from sixfold.pipeline.measured.one_clock import gathered
from sixfold.pipeline.microbatches.cut_batch import (
    Values,
    input_microbatches,
    keyword_microbatches,
    rows_of,
    target_microbatches,
)
from sixfold.pipeline.microbatches.outer_graph import OuterGraph
from sixfold.pipeline.program.program import Program, Weights, program_given
from sixfold.pipeline.simulation.simulate import Timeline, measured
from sixfold.pipeline.stage.distributed_data_parallel import Replicas
from sixfold.pipeline.stage.fully_shard import shard_again
from sixfold.pipeline.stage.stage import Stage
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
        program: compute-only programs are lowered here.
        stages: those that the program places on this rank (``program.stages_of(rank)``), any order; or the only one.
        group: rank r of the program is group rank r; a mesh of one dimension is its group; None runs all stages in this
            process. Reports of what failed or did not come call ranks by their numbers among all ranks of the job.
        loss_fn: ``loss_fn(output, target)`` -> scalar; needed where the last stage is.
        scale: "mean" divides each loss by m before its backward, "sum" does not, "token" takes
            (sum, count) from ``loss_fn`` and divides the step's gradients once by the total count.
        timeout_s: deadline of every wait for another rank.
        store: for ranks to tell each other where they stand after a failure; None takes the group's.
        lookahead: compute actions by which a receive is posted before its place.
        profile: results hold when each action began and ended, of those calls that do not say ``profile=False``.
        dynamic_shapes: False: shapes may differ from a step to the next where stage 0's inputs or a rank's first output
            do, whatever joins the ranks; True: in every step and microbatch without notice; "announced": only in a step
            that all ranks call with ``new_shapes``, and then no host waits to hear whether they do.
        edges: ``edges(source, destination)`` makes the group of a directed edge; None makes an edge of shared
            memory where both ranks are on one host and have CPU tensors, else a communicator per edge, and
            "groups" always the latter. "host" is gloo's whatever the device, over host memory. "one" is a single
            communicator for all edges, which takes less memory and runs in order what it is given: messages that stand
            beside each other in a list start together, none ahead of its place (no ``lookahead``), and the program
            must pass ``verify`` as a rendezvous.
        overlap: the parts of an OVERLAP_F_B run in "order", or where stages are on a CUDA device on two "streams",
            forward beside backward; with the same bits. A program whose overlaps cannot run so is refused by name.
        debug_memory: received memory that nobody holds any more is filled with NaN, whole numbers with all bits set, so
            that a module that reads it (by an address, through numpy) is found out. Costs a pass over that memory
            for each message. Over a process group; elsewhere no memory is used again.
    Attributes:
        deferred: behind a step of a program with I and W, by stage of this rank the share of its trainable numbers
            whose gradients W made; those of other layers were made in I. For ``Costs.deferring``.
    Raises:
        ScheduleError: the stages are not the program's, the ranks have different programs, the program is not
            right (``verify``, where a SEND never waits), or a stage lacks what an action needs (an optimizer for STEP).
        PipelineTimeout: a rank of the group did not make its runner in time, or cannot be connected to.
    """

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
        self._gradients = StepGradients()
        self.deferred: dict[int, float] = {}
        self._told = False  # of a W with little to do
        self._stepped = False  # the optimizers, in the last step
        self._guard, self._optimizers = BufferGuard(), OptimizerCheck(stages)
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
            self._programs.check(program)
            self._programs.prepare(program)
            links = self._links or one_process(program)
            shard_again(stages)
            self._ties = tie(stages, program.placement.__getitem__, links, self._rank)
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
    ) -> StepResult:
        """Forward and backward of one batch; gradients are added to what is there.

        With a program whose batches overlap (its weights are "2bw" or "pipedream") a batch is one of its batches, the
        stages' optimizers step inside, and earlier stages still hold backwards of the batch when this returns;
        ``drain`` runs them. The parameters are the newest weights, which earlier stages have later.

        Where autocast is on it holds for forwards and recomputes; backwards run without.

        Args:
            inputs: where stage 0 is: a tensor, or a tuple for a stage of several inputs, cut along dim 0; or a list of
                m tensors or tuples. With scale="mean" each microbatch counts 1/m, so m divides the rows of a tensor;
                those of a list may differ. Where a tensor comes out of a graph of yours (an embedding in front of the
                pipeline), that graph's backward runs once, behind the step.
            targets: where the last stage is: likewise, or a dict of tensors; None gives ``loss_fn`` None.
            kwargs: for the modules of all local stages, never sent: a dict, whose tensors are cut along dim 0, or m.
            program: for this step, the same on all ranks; compiled once and kept.
            keep_outputs: the result holds the last stage's outputs too, detached.
            new_shapes: shapes may differ from those of the step before; the same on all ranks. What
                ``dynamic_shapes="announced"`` needs; otherwise ranks tell each other by themselves.
            profile: False: of a runner with ``profile``, this step takes no times and waits for no device.
        Raises:
            ScheduleError: an argument, a stage or ``loss_fn`` failed here or on the rank it names.
            PipelineTimeout: another rank did not answer before the deadline.
        """
        with torch.enable_grad():
            return self._run(program, "step", self._goal(), inputs, targets, kwargs, keep_outputs, new_shapes, profile)

    def tie(self) -> None:
        """Give every tied copy (``Stage(tied=)``) the value of the lowest stage again; all ranks call it."""
        self._not_broken()
        shard_again(self._stages.values())
        try:
            if self._ties is not None:
                self._ties.share()
        except BaseException as error:
            self._fail(error)

    def drain(self) -> None:
        """Run what is still in flight of a program whose batches overlap; of others nothing is. All ranks call it."""
        if self._in_flight is not None and self._in_flight.batches:
            with torch.enable_grad():
                self._run(None, "drain", self._in_flight.goal, None, None, None, profile=False)

    def state_dict(self) -> dict[str, Any]:
        """What another runner needs to go on behind this step with the same bits; ``torch.load`` reads it as it is.

        Plain tensors, numbers, texts, lists and dicts, of the stages that are here: their optimizers, the state of the
        random numbers, and where batches overlap the modules' whole state, older weights and what is in flight. Its
        tensors are those in use: save or copy them before the next step. It waits for messages that were sent.

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
        """Go on where the runner that made ``state`` stood; all ranks call it, each with what it saved.

        Load the modules before, where weights do not overlap; where they do, ``state`` holds them. Forwards of
        microbatches in flight run again.

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
    ) -> StepResult:
        """Losses of one batch without gradients; nothing of it remains. Arguments as in ``step``.

        While microbatches are in flight each stage has its newest weights, and what is in flight stays as it is.

        A tensor of any number of rows from m on is cut; the mean of losses of unequal microbatches is not that of rows.
        """
        goal = Goal(train=False, loss_fn=self._loss_fn, scale=self._scale, autocast=_autocast())
        with torch.no_grad(), self._guard.around(self._stages.values(), "evaluate"):
            return self._run(program, "evaluate", goal, inputs, targets, kwargs, keep_outputs, profile=profile)

    def forward(
        self, inputs: Any = None, *, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    ) -> StepResult:
        """Outputs of the last stage, on its rank, without gradients; nothing else remains."""
        goal = Goal(train=False, loss_fn=None, autocast=_autocast())
        with torch.no_grad(), self._guard.around(self._stages.values(), "forward"):
            return self._run(None, "forward", goal, inputs, None, kwargs)

    def check(self) -> None:
        """Call it before what a step made is used, such as before an optimizer that is not the stages'.

        Where devices work behind the host's back ``step`` returns before its messages are there, and one that never
        comes is found out later. This waits until all that the steps received is there, and sends nothing. Behind a
        value that the host read of the step (a loss, a norm) there is nothing left to wait for.

        Raises:
            ScheduleError, PipelineTimeout: the runner has failed; a message of its steps did not come in time; or
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

        All ranks call it, behind a step and in front of the optimizer. A tied parameter counts once. Where the program
        has STEPs the optimizers have stepped by then: each clips its stage's own in a ``register_step_pre_hook``.

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
                "the program's STEPs ran the optimizers inside step(), and left no gradients to clip; clip those of "
                "each stage in its optimizer's register_step_pre_hook, or run a program without STEPs"
            )
        self._meet(f"clip_grad_norm_ of {max_norm!r}, {norm_type!r}")
        max_norm, norm_type = check_norm(max_norm, norm_type)
        owned = [s.index for s in self._stages.values() if not isinstance(s.data_parallel, Replicas | None)]
        if owned:
            self._fail(ScheduleError(f"stage {owned[0]} has data_parallel, which owns its gradients; clip them there"))
        every = dict.fromkeys(p for _, stage in sorted(self._stages.items()) for p in stage.parameters())
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
        """End this runner on all ranks: what was found wrong here outside of its calls, such as by a data loader.

        Others raise ``error``'s text from the call in which they wait for this rank, or from their next one.

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
            if mode == "step" and torch.is_inference_mode_enabled():
                raise ScheduleError(
                    "step was called under torch.inference_mode, which makes no gradients; call evaluate"
                )
            compiled = self._in_flight if mode == "drain" else self._programs.get(program, mode, goal)
            assert compiled is not None, "drain looks whether something is in flight"
            if mode == "step":
                self._gradients.begin(self._stages.values())
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
                with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                    outer.backward()
        except BaseException as error:
            # What is left of the iterator says which call failed; nothing is counted while all is well.
            made = 0 if compiled is None else len(compiled.calls) - length_hint(calls or ())
            self._fail(error, compiled, -1 if calls is None else made if over else made - 1)
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
                "inputs have a graph of the caller's, and batches overlap, so that it would be gone through several "
                "times; give a list of microbatches, each with a graph of its own"
            )
        microbatches: list[Values] = []
        if 0 in self._stages:
            microbatches = input_microbatches(inputs if outer is None else outer.inputs, m, equal=equal)
        if outer is not None and outer.there:
            microbatches = outer.leaves(microbatches)
        compiled.begin(
            microbatches,
            target_microbatches(targets, m, equal=equal) if compiled.tail is not None else [],
            keyword_microbatches(kwargs, m, equal=equal, rows=rows_of(inputs, targets)),
            keep_outputs,
        )
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
