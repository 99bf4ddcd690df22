"""From a program to the calls of this process, once per program.

    Program, stages, links --> Compiled (this file) --> runner

A rank's list is compiled alone, over a lane of its links. Where several ranks are in this thread (no group),
their calls are merged in an order in which every message is there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from sixfold.pipeline.compiler.overlap_streams import SideStream, make_side, on_the_side, side_by_side
from sixfold.pipeline.compiler.token_scaling import TokenCount
from sixfold.pipeline.compiler.wiring import BatchRows, Call, Goal, Wiring
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.measured.action_times import ActionTimer
from sixfold.pipeline.microbatches.cut_batch import Values
from sixfold.pipeline.program.action import MESSAGES, Action, Kind
from sixfold.pipeline.program.entry_times import in_turns
from sixfold.pipeline.program.lowering import post_ahead, posted_order
from sixfold.pipeline.program.program import Program, Weights
from sixfold.pipeline.simulation.simulate import Event, Timeline, measured
from sixfold.pipeline.stage.compute import StageRun, WeightGradients, WholeBackward
from sixfold.pipeline.stage.distributed_data_parallel import Replicas
from sixfold.pipeline.stage.stage import Stage
from sixfold.pipeline.stage.weight_versions import Versions
from sixfold.pipeline.transport.acknowledgements import acknowledgements
from sixfold.pipeline.transport.protocol import Lane, Links

__all__ = ["Compiled", "CompiledBatch", "StepResult", "step_device"]

_EVERY = slice(None)


@dataclass(frozen=True)
class StepResult:
    """What a step returns.

    Attributes:
        losses: m detached scalars, as ``loss_fn`` returned them (sums with ``scale="token"``). [] on a rank without the
            last stage.
        outputs: m outputs of the last stage, from ``forward`` and with ``keep_outputs``. [] on other ranks.
        events: with ``profile``, what this process did: (rank, action, begin, end) in seconds of its
            ``time.perf_counter``. A SEND lasts until it has started, a RECV until its message is there. An overlap
            stands there as its parts.
        ranks, weights: those of the program.
    """

    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    events: tuple[Event, ...] = ()
    ranks: int = 0
    weights: Weights = Weights.FLUSHED

    @cached_property
    def timeline(self) -> Timeline | None:
        """Of the events, where they are those of all ranks; ``gather_timeline`` makes it of several.

        Made when it is first asked for: a step pays for the readings of its clock alone.
        """
        return _timeline_of(self.events, self.ranks, self.weights)


class Compiled(ABC):
    """A program as this process runs it.

    Args:
        program: that is bound; of an endless one enough batches to show all that its microbatches need.
        stages: of the ranks that are here, by index.
        links: of each rank that is here.
        number: of the program and what it is run for, by which ranks notice that they run different ones.
        stores: of a stage, what makes its weight gradients.
        versions: of the weights of each stage, where batches overlap.
    Attributes:
        program: whose entries the calls are.
        calls: to be made in order, with no arguments.
        entries: per call its rank, and what it is.
        goal: what it is run for.
        runs: the stages that are here, by index.
        tail: of the last stage, None where another process has it.
        steps: whether it has STEPs.
        recording: where times are taken, whether those of the step that begins are.
    """

    program: Program
    calls: list[Callable[[], object]]
    entries: list[tuple[int, Call]]
    steps: bool
    recording = True

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        links: Mapping[int, Links],
        goal: Goal,
        *,
        slots: int,
        number: int,
        dynamic_shapes: bool | Literal["announced"],
        stores: Callable[[Stage], WeightGradients],
        versions: Mapping[int, Versions] | None = None,
    ) -> None:
        self.goal = goal
        self._source = program.placement[0]
        self._lanes: dict[int, Lane] = {}
        self._wirings: dict[int, Wiring] = {}
        for rank, mine in links.items():
            self._lanes[rank] = lane = mine.lane(
                program.placement, slots, backward=goal.train, number=number, dynamic_shapes=dynamic_shapes
            )
            here = {stage: stages[stage] for stage in program.stages_of(rank)}
            tells = dynamic_shapes != "announced"
            self._wirings[rank] = Wiring(program, rank, here, lane, goal, stores, slots, versions, tells=tells)
        self.runs: dict[int, StageRun] = {i: r for wiring in self._wirings.values() for i, r in wiring.runs.items()}
        self.tail = next((wiring.tail for wiring in self._wirings.values() if wiring.tail is not None), None)

    @abstractmethod
    def renew(self) -> None:
        """Shapes of this step may differ from those of the one before."""

    @abstractmethod
    def begin(
        self, inputs: list[Values], targets: list[Any], kwargs: list[Mapping[str, Any]], keep: bool, rows: BatchRows
    ) -> None:
        """Fill the slots for a step; ``inputs`` is [] where another process has stage 0."""

    @abstractmethod
    def result(self) -> StepResult:
        """What the step made."""

    @abstractmethod
    def clear(self, *, failed: bool = False) -> None:
        """The calls went through, or failed: drop every tensor that is not in flight."""

    def _fill(
        self,
        slots: slice,
        inputs: list[Values],
        targets: list[Any],
        kwargs: list[Mapping[str, Any]],
        keep: bool,
        rows: BatchRows,
    ) -> None:
        """Lay a batch into ``slots``, and tell the edges of it."""
        for run in self.runs.values():
            run.kwargs[slots] = kwargs
        if 0 in self.runs:
            self.runs[0].inbox[slots] = inputs
        if self.tail is not None:
            self.tail.targets[slots] = targets
            self.tail.keep = keep
        for wiring in self._wirings.values():
            wiring.rows[slots.start or 0] = rows
        for rank, lane in self._lanes.items():
            first = rank == self._source
            lane.begin([[signature(value) for value in values] for values in inputs] if first else None)

    def _timed(self, timer: ActionTimer | None, rank: int, call: Call) -> Callable[[], object]:
        if timer is None or not call.main:
            return call.run
        return timer.timed(call.run, rank, call.action, self.runs[call.action.stage].stage.device)


class CompiledBatch(Compiled):
    """A program that ends with its batch.

    Args: as of ``Compiled``, and
        profile: note when each action begins and ends.
        stores: None: I makes all gradients.
        overlap: how the parts of an OVERLAP_F_B run, "order" or "streams".
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        links: Mapping[int, Links],
        goal: Goal,
        *,
        lookahead: int,
        dynamic_shapes: bool | Literal["announced"],
        number: int,
        profile: bool = False,
        stores: Callable[[Stage], WeightGradients] | None = None,
        overlap: str = "order",
    ) -> None:
        super().__init__(
            program,
            stages,
            links,
            goal,
            slots=program.microbatches,
            number=number,
            dynamic_shapes=dynamic_shapes,
            stores=stores or WholeBackward,
        )
        self.program = program
        self._links = links
        self.steps = any(action.kind is Kind.STEP for _, _, action in program.entries())
        self._sides: dict[int, SideStream] = {}
        if overlap == "streams" and goal.train:
            self._sides = {rank: side_of(wiring) for rank, wiring in self._wirings.items()}
        self.tokens = self._token_count()
        rows = {rank: self._bound(wiring, lookahead) for rank, wiring in self._wirings.items()}
        for rank, lane in self._lanes.items():
            if goal.train and (prove := getattr(lane, "acknowledges", None)) is not None:
                for received, sent in acknowledgements(program, rank):
                    prove(received, sent)
        if len(rows) == 1:
            self.entries = [(rank, call) for rank, entries in rows.items() for calls in entries for call in calls]
        else:
            self.entries = merged(post_ahead(program, lookahead), rows)
        self._looks = 0
        self._timer = ActionTimer() if profile else None
        self.calls = [self._run_of(rank, call) for rank, call in self.entries]
        if self.tokens is not None:
            self.tokens.order(c.action.stage for _, c in self.entries if c.action.kind is Kind.REDUCE_GRAD)

    def deferred_anew(self) -> bool:
        """Whether ``deferred`` was not asked for since a stage's layers were looked for."""
        looks = sum(getattr(run.store, "looks", 0) for run in self.runs.values())
        looks, self._looks = self._looks, looks
        return looks != self._looks

    def deferred(self) -> dict[int, float]:
        """Of each stage whose backward is split the share of its trainable numbers whose gradients the first W made."""
        shares = {}
        for index, run in self.runs.items():
            waited = getattr(run.store, "waited", None)
            trained = sum(p.numel() for p in run.stage.parameters() if p.requires_grad)
            if waited is not None and trained:
                shares[index] = min(1.0, waited / trained)
        return shares

    def renew(self) -> None:
        """See Compiled."""
        for lane in self._lanes.values():
            lane.renew()

    def begin(
        self, inputs: list[Values], targets: list[Any], kwargs: list[Mapping[str, Any]], keep: bool, rows: BatchRows
    ) -> None:
        """See Compiled."""
        self._fill(_EVERY, inputs, targets, kwargs, keep, rows)
        if self.tokens is not None:
            self.tokens.begin([inputs, kwargs])
        if self._timer is not None:
            self._timer.begin(self.recording)

    def result(self) -> StepResult:
        """See Compiled."""
        events = () if self._timer is None else self._timer.events()
        losses: list[Tensor] = []
        outputs: list[Any] = []
        if (tail := self.tail) is not None:
            losses = list(tail.losses) if self.goal.loss_fn is not None else []
            outputs = list(tail.outputs) if tail.keep or not losses else []
        return StepResult(losses=losses, outputs=outputs, events=events, ranks=len(self.program.ranks))

    def commit(self) -> None:
        """The calls went through: gradients are final. A backward of the caller's follows."""
        if self.tokens is not None:
            self.tokens.clear(failed=False)

    def clear(self, *, failed: bool = False) -> None:
        """Drop every tensor of a step, whether it went through or not."""
        for wiring in self._wirings.values():
            wiring.clear()
        if failed:
            for lane in self._lanes.values():
                lane.clear()
        if self.tokens is not None:
            self.tokens.clear(failed=failed)

    def _run_of(self, rank: int, call: Call) -> Callable[[], object]:
        run = self._timed(self._timer, rank, call)
        return partial(self._sides[rank].run, run) if call.side else run

    def _bound(self, wiring: Wiring, lookahead: int) -> list[list[Call]]:
        actions = self.program.ranks[wiring.rank]
        order = posted_order(actions, lookahead)
        rows = [wiring.bind([(position, actions[position])], self.tokens) for position in order]
        entries = [actions[position] for position in order]
        rows = handed_on(entries, rows)
        if (side := self._sides.get(wiring.rank)) is not None:
            rows = side_by_side(entries, rows, wiring.runs, wiring.slots, side, on_the_side(actions))
        together = getattr(self._lanes[wiring.rank], "together", None)
        return rows if together is None else in_batches(rows, *together)

    def _token_count(self) -> TokenCount | None:
        if not (self.goal.train and self.goal.scale == "token"):
            return None
        source = self.program.placement[-1]
        rank, links = next(iter(self._links.items()))
        control = links.control if len(self._links) == 1 else None
        batch = self._wirings[rank].facts.batch
        return TokenCount(self.runs, self.tail, batch, control, rank, links.ranks, source, steps=self.steps)


def side_of(wiring: Wiring) -> SideStream:
    """The side stream of a rank's device.

    Raises:
        ScheduleError: a stage in an overlap is sharded by an object that counts on one stream.
    """
    actions = wiring.program.ranks[wiring.rank]
    for part in (part for entry in on_the_side(actions) for part in entry.parts):
        handle = wiring.runs[part.stage].stage.data_parallel
        if handle is not None and not isinstance(handle, Replicas):
            raise ScheduleError(
                f"stage {part.stage} has data_parallel, which orders its gathers for one compute stream; make the "
                "runner with overlap='order'"
            )
    return make_side(next((run.stage.device for run in wiring.runs.values() if run.stage.device is not None), None))


def _timeline_of(events: tuple[Event, ...], ranks: int, weights: Weights = Weights.FLUSHED) -> Timeline | None:
    """Events of all ranks, from the first on; None if some are of other processes."""
    if not events or len({rank for rank, *_ in events}) != ranks:
        return None
    first = min(begin for *_, begin, _ in events)
    return measured([(rank, action, begin - first, end - first) for rank, action, begin, end in events], weights)


def handed_on(entries: Sequence[Action], rows: list[list[Call]]) -> list[list[Call]]:
    """Let each part of an overlap hand on its result at its own end: its SEND comes in front of the next part.

    In a list the SENDs stand behind the whole overlap. They keep their order, and so does every edge.

    Args:
        entries: a rank's list.
        rows: the calls of each entry.
    """
    rows = [list(calls) for calls in rows]
    for at, entry in enumerate(entries):
        makers = [part for part in entry.parts if part.kind is not Kind.W]
        told = [(part.stage, part.microbatch, part.kind is Kind.F) for part in makers]
        behind, least = at + 1, 0
        while told and behind < len(entries) and (send := entries[behind]).kind in MESSAGES:
            if send.kind in (Kind.RECV_F, Kind.RECV_B):  # posted ahead to here
                behind += 1
                continue
            if (sent := (send.stage, send.microbatch, send.kind is Kind.SEND_F)) not in told[least:]:
                break
            least = told.index(sent)
            before = {makers[least], *entries[at + 1 : behind]}
            place = 1 + max((i for i, call in enumerate(rows[at]) if call.action in before), default=-1)
            rows[at][place:place] = rows[behind]
            rows[behind] = []
            behind += 1
    return rows


def in_batches(rows: list[list[Call]], begin: Callable[[], object], end: Callable[[], object]) -> list[list[Call]]:
    """The calls with messages that follow each other put between ``begin`` and ``end``."""
    made: list[list[Call]] = []
    last: Call | None = None  # of an open batch
    for calls in rows:
        made.append([])
        for call in calls:
            message = call.action.kind in MESSAGES and call.awaits is None
            if message and last is None:
                made[-1].append(replace(call, run=begin, main=False))
            elif last is not None and not message:
                made[-1].append(replace(last, run=end, main=False))
            last = call if message else None
            made[-1].append(call)
    if last is not None:
        made[-1].append(replace(last, run=end, main=False))
    return made


def merged(posted: Program, rows: Mapping[int, list[list[Call]]]) -> list[tuple[int, Call]]:
    """The calls of all ranks in an order in which every message was sent before it is waited for; ranks take turns.

    Args:
        posted: the lists in the order in which they are run.
        rows: per rank the calls of each entry there.
    Raises:
        ScheduleError: there is no such order.
    """
    return [(rank, call) for rank, position, _ in in_turns(posted) for call in rows[rank][position]]


def signature(value: Any) -> object:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else value


def step_device(stages: Mapping[int, Stage], backend: str) -> torch.device:
    """Where this rank's stages compute: with their parameters, else where the group's back end works."""
    for stage in stages.values():
        if stage.device is not None:
            return stage.device
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
