"""From a rank's list of actions to bound calls, once per program.

    Program, stages, transport --> Compiled (this file) --> run

No schedule's name appears here: every program becomes a list of calls that take
no arguments and decide nothing. Stages of this process hand tensors to each other
directly; across ranks the messages of the list do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sixfold.pipeline.action import COMPUTE, MESSAGES, Action, Kind
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program import Program
from sixfold.pipeline.stage import Stage
from sixfold.pipeline.stage_run import LossTail, StageRun
from sixfold.pipeline.tokens import TokenCount
from sixfold.pipeline.transport import Lane, Links, Receipt

__all__ = ["EXECUTED", "Compiled", "Goal"]

Entry = tuple[int, int, Action]  # rank, position in that rank's list, action
EXECUTED = frozenset({Kind.F, Kind.B, Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD}) | MESSAGES
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_FORWARD_ONLY = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD})


class Goal:
    """What a run of a program is for.

    Attributes:
        train: gradients are made, not only outputs.
        loss_fn: None keeps the outputs of the last stage instead.
    """

    def __init__(self, *, train: bool, loss_fn: Callable[[Any, Any], Any] | None, scale: str = "sum") -> None:
        self.train, self.loss_fn, self.scale = train, loss_fn, scale


class Compiled:
    """A program as this process runs it.

    Args:
        number: of the program and what it is run for, by which ranks notice that they run different ones.
    Attributes:
        calls: to be made in order, with no arguments.
        entries: the action behind each call.
        tail: of the last stage, None where another rank has it.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transport: Links | None,
        goal: Goal,
        *,
        lookahead: int,
        dynamic_shapes: bool,
        number: int,
    ) -> None:
        self.program = program
        self._transport = transport
        self._goal = goal
        self._lane: Lane | None = None
        self._runs = {index: StageRun(stage, program.microbatches, goal.train) for index, stage in stages.items()}
        self.tail: LossTail | None = None
        self.tokens: TokenCount | None = None
        self._join_stages()
        if transport is not None:
            self._lane = transport.lane(
                program.placement,
                program.microbatches,
                backward=goal.train,
                number=number,
                dynamic_shapes=dynamic_shapes,
            )
            entries = _post_ahead([e for e in program.entries() if e[0] == transport.rank], lookahead)
        else:
            entries = [entry for entry in _merged(program) if entry[2].kind not in MESSAGES]
        if not goal.train:
            entries = [entry for entry in entries if entry[2].kind in _FORWARD_ONLY]
        self.calls: list[Callable[[], object]] = []
        self.entries: list[Entry] = []
        self._last_backward = {e[2].stage: e[1] for e in entries if e[2].kind is Kind.B}
        for entry in entries:
            for call in self._bind(entry):
                self.calls.append(call)
                self.entries.append(entry)

    def begin(self, inputs: list[tuple[Tensor, ...]], targets: list[Any], kwargs: list[Mapping[str, Any]]) -> None:
        """Fill the slots for a step; ``inputs`` is [] where another rank has stage 0."""
        for run in self._runs.values():
            run.begin(kwargs)
        if 0 in self._runs:
            self._runs[0].inbox[:] = inputs
        if self.tail is not None:
            self.tail.begin(targets)
        if self._lane is not None:
            self._lane.begin([[(t.shape, t.dtype) for t in tensors] for tensors in inputs])
        if self.tokens is not None:
            self.tokens.begin()

    def clear(self) -> None:
        """Drop every tensor of a step, whether it went through or not."""
        for run in self._runs.values():
            run.begin(run.kwargs)
        if self.tail is not None:
            self.tail.begin([])
        if self.tokens is not None:
            self.tokens.clear()

    def _join_stages(self) -> None:
        """Say where the results of each local stage go when it is not into an outbox."""
        last = self.program.stages - 1
        for index, run in self._runs.items():
            if index == last:
                self.tail = LossTail(run, self._goal.loss_fn, self._goal.scale, self._goal.train)
                run.deliver = self.tail.keep if self._goal.loss_fn is None else self.tail.loss
            elif index + 1 in self._runs:
                run.deliver = run.to_stage(self._runs[index + 1])
            if index == 0:
                run.deliver_gradients = _drop
            elif index - 1 in self._runs:
                run.deliver_gradients = self._runs[index - 1].take_gradients
        if self._goal.train and self._goal.scale == "token":
            self.tokens = TokenCount(self.program, self._runs, self.tail, self._transport)

    def _bind(self, entry: Entry) -> list[Callable[[], object]]:
        """The calls of one action."""
        _, position, action = entry
        run = self._runs[action.stage]
        k = -1 if action.microbatch is None else action.microbatch  # -1: a kind without one
        handle = run.stage.data_parallel
        if action.kind in MESSAGES:
            return [self._message(action, run, k)]
        if action.kind is Kind.F:
            return [partial(run.forward, k)]
        if action.kind is Kind.B:
            calls: list[Callable[[], object]] = [partial(run.backward, k)]
            if handle is not None and position == self._last_backward[action.stage]:
                calls.insert(0, handle.before_last_backward)
            if (after_backward := getattr(handle, "after_backward", None)) is not None:
                calls.append(partial(after_backward, k))
            return calls
        calls = []
        if action.kind is Kind.REDUCE_GRAD and self.tokens is not None:
            calls.append(partial(self.tokens.divide, run.index, action))
        if handle is not None:
            slots = {Kind.UNSHARD: handle.unshard, Kind.RESHARD: handle.reshard, Kind.REDUCE_GRAD: handle.reduce_grad}
            calls.append(slots[action.kind])
        return calls

    def _message(self, action: Action, run: StageRun, k: int) -> Callable[[], object]:
        assert self._lane is not None, "one process has no messages"
        if action.kind in _RECEIVES:
            into = "inbox" if action.kind is Kind.RECV_F else "gradients"
            return partial(_ask, self._lane.receiver(action), run, into, k)
        out = "outbox" if action.kind is Kind.SEND_F else "gradient_outbox"
        return partial(_send, self._lane.sender(action), run, out, k)


def _ask(receipt: Receipt, run: StageRun, into: str, k: int) -> None:
    receipt.post()
    getattr(run, into)[k] = receipt


def _send(send: Callable[[Any], None], run: StageRun, out: str, k: int) -> None:
    box = getattr(run, out)
    values, box[k] = box[k], None
    send(values)


def _drop(k: int, gradients: tuple[Tensor, ...]) -> None:
    """Stage 0: its inputs' gradients are nobody's."""


def _post_ahead(entries: list[Entry], lookahead: int) -> list[Entry]:
    """Post each receive up to ``lookahead`` compute actions before its place.

    Receives keep their order, so every edge keeps its own; a RECV_B stays behind its
    stage's SEND_F of the microbatch, which fixes its shape. Posting blocks nobody, so
    the proof of ``verify`` still holds.
    """
    posted: list[Entry] = []
    for entry in entries:
        at, passed = len(posted), 0
        while at and entry[2].kind in _RECEIVES:
            before = posted[at - 1][2]
            own = (before.stage, before.microbatch) == (entry[2].stage, entry[2].microbatch)
            if before.kind in _RECEIVES or (own and before.kind is Kind.SEND_F):
                break
            passed += before.kind in COMPUTE
            if passed > lookahead:
                break
            at -= 1
        posted.insert(at, entry)
    return posted


def _merged(program: Program) -> list[Entry]:
    """All ranks' lists as one, in an order in which every input is there; ranks take turns."""
    merged: list[Entry] = []
    done: set[tuple[Kind, int, int | None]] = set()
    cursor = [0] * len(program.ranks)
    total = sum(len(actions) for actions in program.ranks)
    while len(merged) < total:
        before = len(merged)
        for rank, actions in enumerate(program.ranks):
            while cursor[rank] < len(actions):
                action = actions[cursor[rank]]
                ahead = action.stage + (-1 if action.kind is Kind.F else 1)
                needs = action.kind in (Kind.F, Kind.B) and 0 <= ahead < program.stages
                if needs and (action.kind, ahead, action.microbatch) not in done:
                    break
                done.add((action.kind, action.stage, action.microbatch))
                merged.append((rank, cursor[rank], action))
                cursor[rank] += 1
        if len(merged) == before:
            raise ScheduleError("the program does not get through; verify(program) shows why")
    return merged


def step_device(stages: Mapping[int, Stage], backend: str) -> torch.device:
    """Where this rank's stages compute: with their parameters, else where the group's back end works."""
    for stage in stages.values():
        if stage.device is not None:
            return stage.device
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
