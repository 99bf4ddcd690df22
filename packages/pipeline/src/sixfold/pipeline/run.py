"""The executor: runs any program of forwards, backwards, messages and slots, whoever made it.

    Program, Stages, group --> compile --> calls, in order (this file) --> gradients, losses

The interpreter is one loop over bound calls. What is around it: microbatches in,
results out, and one error or time-out on every rank when something fails.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sixfold.pipeline.action import Action, Kind
from sixfold.pipeline.compile import EXECUTED, Compiled, Goal, step_device
from sixfold.pipeline.errors import PipelineTimeout, ScheduleError, number, whole
from sixfold.pipeline.faults import Record, Records, Store, report
from sixfold.pipeline.passes import lower, reduce_grad
from sixfold.pipeline.program import Program
from sixfold.pipeline.split import input_microbatches, keyword_microbatches, target_microbatches
from sixfold.pipeline.stage import Stage
from sixfold.pipeline.transport import Links, Transport, over
from sixfold.pipeline.verify import verify
from sixfold.pipeline.watchdog import PeerLost

__all__ = ["PipelineRunner", "StepResult"]

_GRACE_S = 0.5  # for the other ranks to write where they stand
_REMEMBERED = 64  # program objects looked up by identity

LossFn = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class StepResult:
    """What a step returns; the lists are empty but on the rank of the last stage.

    Attributes:
        losses: m detached scalars, as ``loss_fn`` returned them (sums with ``scale="token"``).
        outputs: m outputs of the last stage, from ``forward`` only.
    """

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


class PipelineRunner:
    """Runs programs on the stages of this rank.

    All ranks of the group make their runner together and make the same calls.
    Gradients are accumulated into ``.grad`` (or by ``data_parallel``) in microbatch
    order, with the bits of a single process that runs the same microbatches.

    Args:
        program: compute-only programs are lowered here.
        stages: those that the program places on this rank, any order.
        group: rank r of the program is group rank r; None runs all stages in this process.
        loss_fn: ``loss_fn(output, target)`` -> scalar; needed where the last stage is.
        scale: "mean" divides each loss by m before its backward, "sum" does not, "token" takes
            (sum, count) from ``loss_fn`` and divides the step's gradients once by the total count.
        timeout_s: deadline of every wait for another rank.
        store: for ranks to tell each other where they stand after a failure.
        lookahead: compute actions by which a receive is posted before its place.
        profile: not supported, and refused: ``simulate`` times a program on paper, torch.profiler a step.
        dynamic_shapes: shapes may differ in every step and microbatch without notice.
        edges: ``edges(source, destination)`` makes the group of a directed edge; None makes a
            communicator per edge. One shared NCCL communicator serialises both directions.
    Raises:
        ScheduleError: the stages are not the program's, the ranks have different programs, the program is not
            right (``verify``, where a SEND never waits), or it has other actions than F, B, messages and slots.
        PipelineTimeout: a rank of the group did not make its runner in time, or cannot be connected to.
    """

    def __init__(
        self,
        program: Program,
        stages: Sequence[Stage],
        group: dist.ProcessGroup | Transport | None = None,
        loss_fn: LossFn | None = None,
        *,
        scale: str = "mean",
        timeout_s: float = 600.0,
        store: Store | None = None,
        lookahead: int = 2,
        profile: bool = False,
        dynamic_shapes: bool = False,
        edges: Callable[[int, int], dist.ProcessGroup] | None = None,
    ) -> None:
        if scale not in ("mean", "sum", "token"):
            raise ScheduleError(f"scale is {scale!r}; it is 'mean', 'sum' or 'token'")
        if scale == "token" and any(stage.data_parallel is not None for stage in stages):
            raise ScheduleError("scale='token' divides .grad, which data_parallel owns; use 'sum' and divide there")
        if scale == "token" and isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
            raise ScheduleError(
                "scale='token' divides the gradients of stages; loss_fn has parameters: make it part of the last stage"
            )
        if loss_fn is not None and not callable(loss_fn):
            raise ScheduleError(f"loss_fn is {loss_fn!r}; it is called with the last stage's output and the target")
        if profile:
            raise ScheduleError("profile is not supported: simulate times a program on paper, torch.profiler a step")
        timeout_s = number("timeout_s", timeout_s)
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ScheduleError(f"timeout_s is {timeout_s:g}; it is finite and > 0")
        lookahead = whole("lookahead", lookahead, least=0)
        self._rank = 0 if group is None else group.rank() if isinstance(group, dist.ProcessGroup) else group.rank
        self._stages = {stage.index: stage for stage in stages}
        self._loss_fn, self._scale = loss_fn, scale
        self._lookahead, self._dynamic_shapes = lookahead, dynamic_shapes
        self._compiled: dict[tuple[Program, str], Compiled] = {}
        self._by_identity: dict[tuple[int, str], tuple[Program, Compiled]] = {}
        self._broken: str | None = None
        self._transport: Links | None = None
        self._records: Records | None = None
        self._program = program
        self._check_program(program, stages, group)
        if group is not None:
            self._join(group, store, timeout_s, edges)

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        program: Program | None = None,
    ) -> StepResult:
        """Forward and backward of one batch; gradients are added to what is there.

        Args:
            inputs: where stage 0 is: a tensor, cut along dim 0, or a list of m tensors or tuples. With scale="mean"
                each microbatch counts 1/m, so m divides the rows of a tensor; those of a list may differ.
            targets: where the last stage is: likewise; None gives ``loss_fn`` None.
            kwargs: m dicts for the modules of all local stages; they are never sent.
            program: for this step, the same on all ranks; compiled once and kept.
        Raises:
            ScheduleError: an argument, a stage or ``loss_fn`` failed here or on the rank it names.
            PipelineTimeout: another rank did not answer before the deadline.
        """
        goal = Goal(train=True, loss_fn=self._loss_fn, scale=self._scale)
        with torch.enable_grad():
            return self._run(program, "step", goal, inputs, targets, kwargs)

    def evaluate(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        program: Program | None = None,
    ) -> StepResult:
        """Losses of one batch without gradients; nothing of it remains. Arguments as in ``step``.

        A tensor of any number of rows from m on is cut; the mean of losses of unequal microbatches is not that of rows.
        """
        goal = Goal(train=False, loss_fn=self._loss_fn, scale=self._scale)
        with torch.no_grad():
            return self._run(program, "evaluate", goal, inputs, targets, kwargs)

    def forward(self, inputs: Any = None) -> StepResult:
        """Outputs of the last stage, on its rank, without gradients; nothing else remains."""
        with torch.no_grad():
            return self._run(None, "forward", Goal(train=False, loss_fn=None), inputs, None, None)

    def _run(
        self,
        program: Program | None,
        mode: str,
        goal: Goal,
        inputs: Any,
        targets: Any,
        kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> StepResult:
        if self._broken is not None:
            raise ScheduleError(f"this runner failed before ({self._broken}); make a new one")
        program = self._program if program is None else program
        compiled: Compiled | None = None
        at = -1  # the call that runs, for errors; set-up and the checks of arguments come before the first
        try:
            compiled = self._compile(program, mode, goal)
            self._begin(compiled, mode, inputs, targets, kwargs)
            at = 0
            for call in compiled.calls:
                call()
                at += 1
        except Exception as error:
            self._fail(compiled, at, error)
        tail = compiled.tail
        result = StepResult() if tail is None else StepResult(losses=tail.losses, outputs=tail.outputs)
        compiled.clear()
        return result

    def _begin(
        self,
        compiled: Compiled,
        mode: str,
        inputs: Any,
        targets: Any,
        kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        m = compiled.program.microbatches
        equal = mode == "step" and self._scale == "mean"
        if compiled.tail is not None and mode != "forward" and self._loss_fn is None:
            raise ScheduleError(f"{mode} needs the runner's loss_fn on the rank of the last stage")
        compiled.begin(
            input_microbatches(inputs, m, equal=equal) if 0 in self._stages else [],
            target_microbatches(targets, m, equal=equal) if compiled.tail is not None else [],
            keyword_microbatches(kwargs, m),
        )

    def _compile(self, program: Program, mode: str, goal: Goal) -> Compiled:
        """The bound calls of ``program``; equal programs share them and what was agreed about their shapes."""
        known = self._by_identity.get((id(program), mode))
        if known is not None:
            return known[1]
        compiled = self._compiled.get((program, mode))
        if compiled is None:
            if program != self._program:
                self._check_program(program, tuple(self._stages.values()), self._transport)
            number = self._number_of(program, mode)
            self._agree_on(number, program, mode)
            compiled = Compiled(
                _complete(program),
                self._stages,
                self._transport,
                goal,
                lookahead=self._lookahead,
                dynamic_shapes=self._dynamic_shapes,
                number=number,
            )
            self._compiled[program, mode] = compiled
        if len(self._by_identity) >= _REMEMBERED:
            self._by_identity.clear()
        self._by_identity[id(program), mode] = (program, compiled)  # the reference keeps the id from being reused
        return compiled

    def _check_program(
        self, program: Program, stages: Sequence[Stage], group: dist.ProcessGroup | Transport | Links | None
    ) -> None:
        for rank, position, action in program.entries():
            if action.kind not in EXECUTED:
                split = " (split backward)" if action.kind in (Kind.I, Kind.W) else ""
                raise ScheduleError(
                    f"rank {rank} [{position}] {action}: PipelineRunner does not run {action.kind}{split}; "
                    "give it a program whose compute actions are F and B, such as one_f_one_b or interleaved",
                    rank=rank,
                    position=position,
                    action=action,
                )
        ranks = len(program.ranks)
        if (
            group is not None
            and (size := group.size() if isinstance(group, dist.ProcessGroup) else group.ranks) != ranks
        ):
            raise ScheduleError(f"the program has {ranks} ranks, the group {size}; they are equal")
        wanted = tuple(range(program.stages)) if group is None else program.stages_of(self._rank)
        given = tuple(sorted(stage.index for stage in stages))
        if given != wanted:
            where = "this process" if group is None else f"rank {self._rank}"
            raise ScheduleError(f"stages {given} were given; the program places {wanted} on {where}", rank=self._rank)
        verify(program, transport="buffered")  # one that lacks a backward would lose its gradient

    def _join(
        self,
        group: dist.ProcessGroup | Transport,
        store: Store | None,
        timeout_s: float,
        edges: Callable[[int, int], dist.ProcessGroup] | None,
    ) -> None:
        transport = over(group, edges) if isinstance(group, dist.ProcessGroup) else group
        backend = dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else "gloo"
        begin = time.monotonic()
        try:
            self._transport = transport.join(step_device(self._stages, backend), timeout_s)
        except (RuntimeError, TimeoutError) as error:  # torch's DistStoreError too: a peer did not come
            message = f"rank {self._rank} waited {timeout_s:g} s for all {transport.ranks} ranks to make their runner"
            if time.monotonic() - begin < timeout_s:
                message = f"rank {self._rank} has no connection to all {transport.ranks} ranks: {error}"
            raise PipelineTimeout(message, rank=self._rank) from error
        self._records = Records(store or self._transport.store, self._transport.key, self._rank, transport.ranks)

    def _number_of(self, program: Program, mode: str) -> int:
        """Equal on ranks that run the same program for the same call; below 2**56."""
        text = f"{mode} {self._scale} {program.microbatches} {program}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def _agree_on(self, mine: int, program: Program, mode: str) -> None:
        """All ranks are about to run the same program for the first time."""
        if self._transport is None:
            return
        everyone = self._transport.control.gather(mine)
        for rank, theirs in enumerate(everyone):
            if theirs != mine:
                raise ScheduleError(
                    f"rank {self._rank} was given another program to {mode} than rank {rank}: here it is "
                    f"{program.name or 'unnamed'} with m={program.microbatches} and scale={self._scale!r}; "
                    "all ranks make the same calls",
                    rank=self._rank,
                )

    def _fail(self, compiled: Compiled | None, at: int, error: Exception) -> NoReturn:
        """Turn the failure of one call into one error here and on every other rank."""
        rank, position, action = self._rank, None, None
        place = "the start of the step" if at < 0 else "the end of the step"
        if compiled is not None:
            if 0 <= at < len(compiled.entries):
                rank, position, action = compiled.entries[at]
                place = _place(compiled, rank, position, action)
            compiled.clear()
        if isinstance(error, PeerLost):
            self._time_out(compiled, place, error)
        words = str(error) if isinstance(error, ScheduleError) else f"{type(error).__name__}: {error}"
        if self._transport is not None and self._records is not None:
            self._records.write(Record(place, error=words))
            self._transport.close()
            self._broken = words
        if isinstance(error, ScheduleError) and action is None:
            raise error
        message = f"rank {rank} failed at {place}: {words}"
        raise ScheduleError(message, rank=rank, position=position, action=action) from error

    def _time_out(self, compiled: Compiled | None, place: str, error: PeerLost) -> NoReturn:
        """A message did not come: find out what the other ranks know, and say it."""
        assert self._transport is not None and self._records is not None, "only a group has peers"
        peer, position = error.peer, None
        if compiled is not None and error.action is not None:
            program = compiled.program
            if error.action.kind is Kind.REDUCE_GRAD:  # it waits for the count of the last stage
                peer = program.placement[-1]
            else:
                peer = program.placement[error.action.peer_stage]
            position = program.ranks[self._rank].index(error.action)
            place = _place(compiled, self._rank, position, error.action)
        mine = Record(place, peer)
        self._records.write(mine)
        self._transport.close()
        others = self._records.others(_GRACE_S)
        for rank, theirs in others.items():
            if theirs.error is not None:
                self._broken = f"rank {rank} failed at {theirs.place}: {theirs.error}"
                raise ScheduleError(self._broken, rank=rank) from error
        heard = self._records.has_store
        line = report(self._rank, self._transport.ranks, mine, others, heard, self._records.deaf)
        self._broken = line
        raise PipelineTimeout(line, rank=self._rank, position=position, action=error.action) from error


def _complete(program: Program) -> Program:
    """``program`` with its messages and a REDUCE_GRAD per stage."""
    if not program.lowered:
        return lower(program)
    if any(action.kind is Kind.REDUCE_GRAD for _, _, action in program.entries()):
        return program
    return reduce_grad(program)


def _place(compiled: Compiled, rank: int, position: int, action: Action) -> str:
    return f"[{position}/{len(compiled.program.ranks[rank])}] {action}"
