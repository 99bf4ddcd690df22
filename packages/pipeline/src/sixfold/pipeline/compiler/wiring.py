"""The stages of one rank, joined to each other, to the edges and to the loss; actions become calls.

    actions of one rank --> Wiring (this file) --> calls without arguments --> compile

Everything is decided here: plain or deferring forward, with a graph or one that is dropped, where
each result goes. A call decides nothing. Stages of one rank hand tensors to each other
directly; between ranks the messages of the list do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sixfold.pipeline.compiler.cuda_graphs import Graphed
from sixfold.pipeline.compiler.token_scaling import TokenCount
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.microbatches.cut_batch import Values
from sixfold.pipeline.program.action import BACKWARD_ENDS, MESSAGES, Action, Kind
from sixfold.pipeline.program.program import Program
from sixfold.pipeline.stage.compute import StageRun, ToNextStage, WeightGradients, WholeBackward
from sixfold.pipeline.stage.fully_shard import of_own_casts
from sixfold.pipeline.stage.loss import LossTail
from sixfold.pipeline.stage.stage import Stage
from sixfold.pipeline.stage.weight_versions import Versions
from sixfold.pipeline.transport.protocol import Lane, Receipt

__all__ = ["BatchRows", "Call", "Facts", "Goal", "Wiring"]

Run = Callable[[], object]
_BACKWARDS = frozenset({Kind.B, Kind.I, Kind.W})
_SENDS = (Kind.SEND_F, Kind.SEND_B)


@dataclass(frozen=True, slots=True)
class Goal:
    """What a run of a program is for.

    Attributes:
        train: gradients are made, not only outputs.
        loss_fn: None keeps the outputs of the last stage instead.
        scale: "mean", "sum" or "token".
        autocast: device types for which it is on where the step was called; backwards run without.
    """

    train: bool
    loss_fn: Callable[[Any, Any], Any] | None = field(hash=False)  # one that compares by value has no hash
    scale: str = "sum"
    autocast: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One thing to do.

    Attributes:
        run: does it.
        position: in its rank's list.
        entry: the action at that place, for reports.
        action: the one that this call is of: the entry, a part of it, or the RECV whose message is waited for.
        main: whether its begin and end are the action's.
        awaits: the SEND whose message must have been sent before, None where it needs none.
        side: it runs on the side stream.
    """

    run: Run
    position: int
    entry: Action
    action: Action
    main: bool = False
    awaits: Action | None = None
    side: bool = False


class BatchRows:
    """Those of a batch, for a rank that has no part of it: each stage's first message says how many there are.

    Args:
        number: None where it is not known here; below zero if it is that of a list that a tensor is not cut as.
        check: refuses what does not fit the number that is told; None where nothing is to be checked.
    """

    __slots__ = ("_check", "number")

    def __init__(self, number: int | None = None, check: Callable[[int], object] | None = None) -> None:
        self.number, self._check = number, check

    def hear(self, number: int | None) -> None:
        """The batch has so many. Raises ScheduleError."""
        if number is not None:
            self.number = number  # this rank's may be of targets, with several for each row of the batch
            if (check := self._check) is not None:
                self._check = None
                check(number)


class Facts:
    """What one rank's list says about its microbatches, known before the first runs.

    Attributes:
        split: (stage, microbatch) whose backward is I and W.
        again: those that are recomputed.
        last: of each stage, the last B or W of each batch.
        graphs: each F or RECOMPUTE behind which a microbatch's graph is there.
        counted: the F of the last stage behind which all losses of a batch are known, and the batch.
        batches: STEPs per stage, or one.
        batch: microbatches of each.
    """

    def __init__(self, program: Program, rank: int) -> None:
        actions = program.ranks[rank]
        self.split: set[tuple[int, int | None]] = set()
        self.again: set[tuple[int, int | None]] = set()
        self.last: set[Action] = set()
        self.graphs: set[Action] = set()
        self.batches = max(1, sum(a.kind is Kind.STEP and a.stage == program.stages - 1 for a in _all(program)))
        self.batch = program.microbatches // self.batches
        newest: dict[int, Action] = {}
        losses: dict[int, Action] = {}
        for part in (part for entry in actions for part in entry.each()):
            if part.kind is Kind.F and part.stage == program.stages - 1 and part.microbatch is not None:
                losses[part.microbatch // self.batch] = part
            elif part.kind is Kind.I:
                self.split.add((part.stage, part.microbatch))
            elif part.kind is Kind.RECOMPUTE:
                self.again.add((part.stage, part.microbatch))
            elif part.kind is Kind.B or part.kind is Kind.W:
                newest[part.stage] = part
            elif part.kind is Kind.STEP and part.stage in newest:
                self.last.add(newest.pop(part.stage))
        self.last.update(newest.values())
        for part in (part for entry in actions for part in entry.each()):
            dropped = part.kind is Kind.F and (part.stage, part.microbatch) in self.again
            if part.kind in (Kind.F, Kind.RECOMPUTE) and part.microbatch is not None and not dropped:
                self.graphs.add(part)
        self.counted = {action: batch for batch, action in losses.items()}


def _all(program: Program) -> Iterable[Action]:
    return (action for _, _, action in program.entries())


class Wiring:
    """One rank's part of a program.

    Args:
        stages: of this rank, by index.
        lane: its messages.
        stores: makes the store of a stage's weight gradients.
        slots: microbatch k is in slot k modulo this; at least as many as are ever in flight.
        versions: of the stages' weights, by index; None where they are flushed.
        tells: the first message of a batch says how many rows the batch has, which may change with its shapes.
    Attributes:
        runs: the stages, by index.
        tail: the end of the last stage, None where another rank has it.
        rows: of each batch that may be in flight, by its first slot.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, Stage],
        lane: Lane,
        goal: Goal,
        stores: Callable[[Stage], WeightGradients],
        slots: int,
        versions: Mapping[int, Versions] | None = None,
        *,
        tells: bool = True,
    ) -> None:
        self.program, self.rank, self.goal, self.slots = program, rank, goal, slots
        self._lane = lane
        self._receipts: dict[tuple[Kind, int, int], Receipt] = {}  # by kind of RECV, stage and slot
        self.facts = Facts(program, rank)
        split = {stage for stage, _ in self.facts.split}
        self.runs = {
            index: StageRun(stage, slots, stores(stage) if index in split and goal.train else WholeBackward(stage))
            for index, stage in stages.items()
        }
        for run in self.runs.values():
            if run.stage.cuda_graphs and goal.train:
                run.calls[:] = [Graphed(run.stage, partial(getattr, run.store, "slot", None)) for _ in range(slots)]
        if goal.train and goal.autocast and any(stage.cuda_graphs for stage in stages.values()):
            raise ScheduleError("cuda_graphs cannot run under autocast; call step outside of it, on stages of its type")
        for run in self.runs.values() if goal.train and goal.autocast else ():
            run.calls[:] = [partial(of_own_casts, run.stage, call) for call in run.calls]
            if run.index:  # the first stage's inputs are the caller's
                run.calls[:] = [partial(_of_no_leaves, call) for call in run.calls]
        self.tail: LossTail | None = None
        self.rows: dict[int, BatchRows] = {}
        self._told_every = 0 if not tells else slots if versions is None else self.facts.batch  # microbatches
        self._versions = {} if versions is None else versions
        self._seen: dict[int, int] = {}  # STEPs of each stage that were bound
        for run in self.runs.values():
            self._join(run)

    def clear(self) -> None:
        """Drop every tensor of a step."""
        for run in self.runs.values():
            run.clear()
        if self.tail is not None:
            self.tail.clear()
        self.rows.clear()

    def bind(self, entries: Iterable[tuple[int, Action]], tokens: TokenCount | None = None) -> list[Call]:
        """The calls of a part of the list: (position, action)."""
        calls: list[Call] = []
        for position, entry in entries:
            for part in entry.each():
                if part.kind in MESSAGES:
                    calls += self._message(position, part)
                elif self.goal.train or part.kind in (Kind.F, Kind.UNSHARD, Kind.RESHARD):
                    calls += (replace(call, entry=entry) for call in self._bind(position, part, tokens))
        return calls

    # ---- joints

    def _join(self, run: StageRun) -> None:
        """Say where the results of a stage go."""
        index, goal = run.index, self.goal
        if index == self.program.stages - 1:
            share = self.facts.batch if goal.scale == "mean" else None
            self.tail = run.end = LossTail(run, goal.loss_fn, share=share, tokens=goal.scale == "token")
        elif (following := self.runs.get(index + 1)) is not None:
            run.end = ToNextStage(run, following.to_inbox)
        else:
            run.end = ToNextStage(run, run.to_outbox)
        if index == 0:
            run.hand_back = _nobodys
        elif (previous := self.runs.get(index - 1)) is not None:
            run.hand_back = run.to_gradients_of(previous)
        else:
            run.hand_back = run.to_gradient_outbox

    # ---- actions

    def _message(self, position: int, action: Action) -> list[Call]:
        run = self.runs[action.stage]
        assert action.microbatch is not None, f"{action}: a message has a microbatch"
        k = action.microbatch % self.slots
        call: Run
        if not self.goal.train and action.kind in (Kind.SEND_B, Kind.RECV_B):
            return []
        if action.kind is Kind.SEND_F:
            sender = self._lane.sender(action)
            call = partial(run.send, partial(self._tell, k, sender) if self._first(action) else sender, k)
        elif action.kind is Kind.SEND_B:
            call = partial(run.send_gradients, self._lane.sender(action), k)
        else:
            call = self.receipt(action).post
        return [Call(call, position, action, action, main=action.kind in _SENDS)]

    def receipt(self, action: Action) -> Receipt:
        """Of a RECV: one per slot, so that what was posted in one step may be waited for in the next."""
        assert action.microbatch is not None, f"{action}: a message has a microbatch"
        key = action.kind, action.stage, action.microbatch % self.slots
        if key not in self._receipts:
            self._receipts[key] = self._lane.receiver(action)
        return self._receipts[key]

    def _bind(self, position: int, action: Action, tokens: TokenCount | None) -> list[Call]:
        run = self.runs[action.stage]
        handle = run.stage.data_parallel
        if action.microbatch is None:
            calls = self._slot(run, action, tokens)
            return [Call(call, position, action, action, main=call is calls[-1]) for call in calls]
        call: Run = partial(self._work(run, action), action.microbatch % self.slots)
        if action.kind is Kind.STEP:
            call = self._versions[run.index].step if self._versions else run.step
            self._seen[run.index] = self._seen.get(run.index, 0) + 1
        if self.goal.autocast and action.kind in _BACKWARDS:
            call = partial(_without_autocast, call, self.goal.autocast)
        bound = [Call(call, position, action, action, main=True)]
        if tokens is not None and (batch := self.facts.counted.get(action)) is not None:
            bound.append(Call(partial(tokens.tell, batch, action), position, action, action))
        if tokens is not None and action in self.facts.graphs:
            bound.append(Call(partial(tokens.look, run, action.microbatch % self.slots), position, action, action))
        begins = action.kind in (Kind.B, Kind.I)
        if begins and (before_backward := getattr(handle, "before_backward", None)) is not None:
            bound.insert(0, Call(partial(before_backward, action.microbatch), position, action, action))
        if handle is not None and action in self.facts.last:
            bound.insert(0, Call(handle.before_last_backward, position, action, action))
        if action.kind in BACKWARD_ENDS and (after_backward := getattr(handle, "after_backward", None)) is not None:
            bound.append(Call(partial(after_backward, action.microbatch), position, action, action))
        if (wait := self._wait(run, action)) is not None:
            bound.insert(0, Call(wait[0], position, action, wait[1], main=True, awaits=wait[2]))
        return bound

    def _work(self, run: StageRun, action: Action) -> Callable[[int], object]:
        """What runs a compute action of one slot, with the weights that it reads."""
        work = self._plain_work(run, action)
        if not self._versions:
            return work
        versions = self._versions[run.index]
        if action.kind is Kind.F:
            return versions.forward(run.noting(work))
        return versions.last(work) if action.kind in BACKWARD_ENDS else versions.under(work)

    def _plain_work(self, run: StageRun, action: Action) -> Callable[[int], object]:
        key = action.stage, action.microbatch
        kind, split = action.kind, key in self.facts.split
        if kind is Kind.F:
            if not self.goal.train:
                return run.predict
            if key in self.facts.again:
                return run.forward_again_later
            return run.forward_deferring if split else run.forward
        if kind is Kind.RECOMPUTE:
            return run.recompute_deferring if split else run.recompute
        if kind is Kind.W:
            return run.store.backward_weight
        return run.backward if kind is Kind.B else run.backward_input

    def _wait(self, run: StageRun, action: Action) -> tuple[Run, Action, Action] | None:
        """The call that waits for what ``action`` takes from another rank, the RECV and the SEND of that message."""
        stage, k = action.stage, action.microbatch
        assert k is not None, f"{action}: it has a microbatch"
        if action.kind is Kind.F and stage and stage - 1 not in self.runs:
            receive, send = Action(stage, Kind.RECV_F, k), Action(stage - 1, Kind.SEND_F, k)
            arrive = partial(self._hear, run) if self._first(action) else run.arrive
        elif action.kind in (Kind.B, Kind.I) and stage + 1 < self.program.stages and stage + 1 not in self.runs:
            receive, send, arrive = (
                Action(stage, Kind.RECV_B, k),
                Action(stage + 1, Kind.SEND_B, k),
                run.arrive_gradients,
            )
        else:
            return None
        return partial(arrive, self.receipt(receive).wait, k % self.slots), receive, send

    def _first(self, action: Action) -> bool:
        """Whether the output that is sent or taken is of a batch's first microbatch, and says how many rows it has."""
        every, k = self._told_every, action.microbatch
        return bool(every) and k is not None and k % every == 0

    def _tell(self, k: int, sender: Callable[[Values], None], values: Values) -> None:
        sender((*values, self.rows[k].number))

    def _hear(self, run: StageRun, wait: Callable[[], Values], k: int) -> None:
        *values, rows = wait()
        run.inbox[k] = tuple(values)
        self.rows[k].hear(rows)

    def _slot(self, run: StageRun, action: Action, tokens: TokenCount | None) -> list[Run]:
        """UNSHARD, RESHARD and REDUCE_GRAD."""
        handle = run.stage.data_parallel
        calls: list[Run] = []
        if action.kind is Kind.REDUCE_GRAD and self._versions:
            calls.append(self._versions[run.index].collect)
        if action.kind is Kind.REDUCE_GRAD and tokens is not None:
            calls.append(partial(tokens.divide, run.index, self._seen.get(run.index, 0), action))
        if handle is not None:
            unit = {Kind.UNSHARD: handle.unshard, Kind.RESHARD: handle.reshard, Kind.REDUCE_GRAD: handle.reduce_grad}
            calls.append(unit[action.kind])
        return calls


def _nobodys(_: int, __: tuple[Any, ...]) -> None:
    """Stage 0: its inputs are the caller's, whose graph has their gradients."""


def _of_no_leaves(call: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
    """``call`` as in one graph, where what came from another stage is no leaf.

    Of a leaf autocast keeps the cast until it is switched off, and with it the microbatch's input; its uses then share
    one cast, and add their gradients in the lower type.
    """
    views = [t.view_as(t) if isinstance(t, torch.Tensor) and t.requires_grad else t for t in inputs]
    return call(*views, **kwargs)


def _without_autocast(call: Run, device_types: tuple[str, ...]) -> None:
    """``call`` with autocast switched off, as backwards run outside of a user's ``with``."""
    with torch.autocast(device_types[0], enabled=False):
        if len(device_types) > 1:
            _without_autocast(call, device_types[1:])
        else:
            call()
