"""Lowering: from compute actions to compute, messages and reductions.

    schedules/*, text, CSV --> lower, reduce_grad (this file) --> passes, verify, compiler

Torch-free. Each tensor that goes from one rank to another gets a SEND directly after the
action that makes it, and a RECV in its consumer's list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.program.action import BACKWARD_ENDS, COMPUTE, MESSAGES, Action, Kind
from sixfold.pipeline.program.counterexample import check_size
from sixfold.pipeline.program.entry_times import turns
from sixfold.pipeline.program.program import Program, program_given

__all__ = ["lower", "post_ahead", "posted_order", "reduce_grad"]

# Names of their own: Python 3.11 needs a quarter of a microsecond to find Kind.F, once per action in the loop below.
_F, _SEND_F, _RECV_F, _SEND_B, _RECV_B = Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B
_TAKES_GRADIENT = frozenset({Kind.B, Kind.I})
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)


def lower(program: Program) -> Program:
    """Add the messages between ranks, and a REDUCE_GRAD to each stage that has none.

    A SEND stands directly after the action that made its tensor. The RECV goes into its rank's list when the peer
    sends, so both ends of an edge name their messages in one order. There the receive is *posted*. Its consumer waits
    for it. The result equals torch 2.13's lowering.

    Raises:
        ScheduleError: the program has messages already or lacks forwards, or its order does not let every rank through.
    Cost: O(actions).
    """
    program_given(program)
    _check_actions(program)
    check_size(program)
    placement = program.placement
    crosses = [a != b for a, b in pairwise(placement)] + [False]
    rows: list[list[Action]] = [[] for _ in program.ranks]
    lists = list(map(iter, program.ranks))
    for rank in turns(program):  # ranks take turns as in torch, so that RECVs land in the same places
        row, entry = rows[rank], next(lists[rank])
        row.append(entry)
        for part in entry.parts or (entry,):
            stage, kind = part.stage, part.kind
            if kind is _F:
                if crosses[stage]:
                    row.append(Action(stage, _SEND_F, part.microbatch))
                    rows[placement[stage + 1]].append(Action(stage + 1, _RECV_F, part.microbatch))
            elif kind in _TAKES_GRADIENT and stage and crosses[stage - 1]:
                row.append(Action(stage, _SEND_B, part.microbatch))
                rows[placement[stage - 1]].append(Action(stage - 1, _RECV_B, part.microbatch))
    return reduce_grad(replace(program, ranks=tuple(map(tuple, rows))))


def reduce_grad(program: Program) -> Program:
    """Add a REDUCE_GRAD after the last B or W of each stage that has none, once per STEP where there are STEPs.

    It stands behind the SEND of that backward, which a neighbour waits for.
    """
    rows = (_with_reductions(actions, program.stages_of(rank)) for rank, actions in enumerate(program.ranks))
    return replace(program, ranks=tuple(map(tuple, rows)))


def _with_reductions(actions: tuple[Action, ...], stages: Iterable[int]) -> Iterable[Action]:
    kinds = {action.kind for action in actions}
    wanted = set(stages)
    if Kind.REDUCE_GRAD in kinds:
        wanted -= {action.stage for action in actions if action.kind is Kind.REDUCE_GRAD}
    row: list[Action] = []  # from the end
    due = set(wanted)  # stages whose last backward, seen from the end, is still to come
    held: list[Action] = []  # SENDs directly behind the entry to come: they stay next to it
    for position in range(len(actions) - 1, -1, -1):
        entry = actions[position]
        if not due and Kind.STEP not in kinds:
            return (*actions[: position + 1], *held, *reversed(row))
        if entry.kind is Kind.STEP and entry.stage in wanted:
            due.add(entry.stage)
        if entry.kind in _SENDS:
            held.append(entry)
            continue
        for part in reversed(entry.parts or (entry,)):
            if part.kind in BACKWARD_ENDS and part.stage in due:
                due.remove(part.stage)
                row.append(Action(part.stage, Kind.REDUCE_GRAD))
        row += held
        held = []
        row.append(entry)
    return reversed(row + held)


def post_ahead(program: Program, lookahead: int = 2) -> Program:
    """Post each receive up to ``lookahead`` compute actions before its place, as the runner does.

    Receives keep their order, so every edge keeps its own; a RECV_B stays behind its stage's SEND_F of the microbatch,
    which fixes its shape. Posting blocks nobody: a runner, which waits at a message's consumer, gets through as before;
    ``verify``, whose ranks meet at a RECV, may refuse the result.

    Raises:
        ScheduleError: ``lookahead`` is below zero or no whole number.
    """
    whole("lookahead", lookahead, least=0)
    rows = (tuple(actions[at] for at in posted_order(actions, lookahead)) for actions in program.ranks)
    return replace(program, ranks=tuple(rows))


def posted_order(actions: Sequence[Action], lookahead: int) -> list[int]:
    """Positions of a rank's list in the order of ``post_ahead``."""
    order: list[int] = []
    for position, entry in enumerate(actions):
        at, passed = len(order), 0
        while at and entry.kind in _RECEIVES:
            before = actions[order[at - 1]]
            own = (before.stage, before.microbatch) == (entry.stage, entry.microbatch)
            if before.kind in _RECEIVES or (own and before.kind is Kind.SEND_F):
                break
            passed += before.kind in COMPUTE
            if passed > lookahead:
                break
            at -= 1
        order.insert(at, position)
    return order


def _check_actions(program: Program) -> None:
    m, stages = program.microbatches, program.stages
    numbered = _TAKES_GRADIENT | {Kind.F}
    for rank, position, entry in program.entries():
        for part in entry.parts or (entry,):
            k, rule = part.microbatch, ""
            if not 0 <= part.stage < stages:
                rule = f"stages are 0..{stages - 1}"
            elif part.kind in numbered:
                if k is None or not 0 <= k < m:
                    rule = f"microbatches are 0..{m - 1}"
            elif part.kind in MESSAGES:
                rule = "the program has messages; lower takes compute actions only"
            if rule:
                message = f"rank {rank} [{position}] {entry}: {rule}"
                raise ScheduleError(message, rank=rank, position=position, action=entry)
