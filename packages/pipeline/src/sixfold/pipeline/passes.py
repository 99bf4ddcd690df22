"""Passes: from a program to a program.

    schedules/*, text, CSV --> lower, reduce_grad, strip (this file) --> verify, simulate, run

Torch-free, and none changes its argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sixfold.pipeline.action import BACKWARD_ENDS, MESSAGES, Action, Kind
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program import Program

__all__ = ["lower", "reduce_grad", "strip"]

_GRADIENT_MADE = (Kind.B, Kind.I)


def lower(program: Program) -> Program:
    """Add the messages between ranks, and a REDUCE_GRAD per stage when there is none.

    A SEND stands directly after the action that made its tensor. The RECV goes into
    its rank's list at the moment at which the peer sends, so both ends of an edge
    name their messages in one order; its place is where the receive is *posted*,
    and its consumer waits for it. The result equals torch 2.13's lowering.

    Raises:
        ScheduleError: the program has messages already, or its order does not let every rank get through.
    Cost: O(actions + ranks * time steps).
    """
    for rank, position, action in program.entries():
        if action.kind in MESSAGES:
            raise ScheduleError(
                f"rank {rank} [{position}] {action}: the program has messages; lower takes compute actions only",
                rank=rank,
                position=position,
                action=action,
            )
    rows: list[list[Action]] = [[] for _ in program.ranks]
    # What has been made or announced for a rank: its own F and B, and the RECVs that peers put into its list.
    there: set[tuple[Kind, int, int | None]] = set()
    cursor = [0] * len(program.ranks)
    left = [rank for rank, actions in enumerate(program.ranks) if actions]
    while left:
        moved = False
        for rank in left:  # one action per rank and sweep, as torch does, so that RECVs land in the same places
            entry = program.ranks[rank][cursor[rank]]
            if not all(_input_is_there(part, program, there) for part in entry.each()):
                continue
            cursor[rank] += 1
            moved = True
            rows[rank].append(entry)
            for part in entry.each():
                there.add((part.kind, part.stage, part.microbatch))
                for send, receive in _messages(part, program):
                    rows[rank].append(send)
                    rows[program.placement[receive.stage]].append(receive)
                    there.add((receive.kind, receive.stage, receive.microbatch))
        if not moved:
            rank = left[0]
            entry = program.ranks[rank][cursor[rank]]
            raise ScheduleError(
                f"rank {rank} [{cursor[rank]}] {entry}: its input is never made; verify(program) shows why",
                rank=rank,
                position=cursor[rank],
                action=entry,
            )
        left = [rank for rank in left if cursor[rank] < len(program.ranks[rank])]
    lowered = replace(program, ranks=tuple(map(tuple, rows)))
    if any(action.kind is Kind.REDUCE_GRAD for _, _, action in program.entries()):
        return lowered
    return reduce_grad(lowered)


def _input_is_there(action: Action, program: Program, there: set[tuple[Kind, int, int | None]]) -> bool:
    """Whether what ``action`` takes was received or, by a stage of its own rank, made."""
    stage, k = action.stage, action.microbatch
    if action.kind is Kind.F:
        return stage == 0 or (Kind.RECV_F, stage, k) in there or (Kind.F, stage - 1, k) in there
    if action.kind in _GRADIENT_MADE and stage < program.stages - 1:
        return (Kind.RECV_B, stage, k) in there or any((kind, stage + 1, k) in there for kind in _GRADIENT_MADE)
    return True


def _messages(action: Action, program: Program) -> Iterator[tuple[Action, Action]]:
    """The (SEND, RECV) that a compute action calls for: none or one pair."""
    stage, k = action.stage, action.microbatch
    if action.kind is Kind.F:
        peer, send, receive = stage + 1, Kind.SEND_F, Kind.RECV_F
    elif action.kind in _GRADIENT_MADE:
        peer, send, receive = stage - 1, Kind.SEND_B, Kind.RECV_B
    else:
        return
    if 0 <= peer < program.stages and program.placement[peer] != program.placement[stage]:
        yield Action(stage, send, k), Action(peer, receive, k)


def reduce_grad(program: Program) -> Program:
    """Add a REDUCE_GRAD after each stage's last B or W, once per STEP where there are STEPs.

    It stands behind the SEND of that backward, which a neighbour waits for.
    """
    rows = []
    for actions in program.ranks:
        row: list[Action] = []
        reduced: set[int] = set()  # stages whose last backward (seen from the end) has been passed
        held: list[Action] = []  # SENDs directly behind the entry to come: they stay next to it
        for entry in reversed(actions):
            if entry.kind is Kind.STEP:
                reduced.discard(entry.stage)
            if entry.kind in (Kind.SEND_F, Kind.SEND_B):
                held.append(entry)
                continue
            for part in reversed(tuple(entry.each())):
                if part.kind in BACKWARD_ENDS and part.stage not in reduced:
                    reduced.add(part.stage)
                    row.append(Action(part.stage, Kind.REDUCE_GRAD))
            row += held
            held = []
            row.append(entry)
        rows.append(tuple(reversed(row + held)))
    return replace(program, ranks=tuple(rows))


def strip(program: Program) -> Program:
    """Remove RECOMPUTE and STEP, which PyTorch's CSV has no word for."""
    ours = (Kind.RECOMPUTE, Kind.STEP)
    return replace(program, ranks=tuple(tuple(a for a in actions if a.kind not in ours) for actions in program.ranks))
