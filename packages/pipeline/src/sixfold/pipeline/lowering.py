"""Lowering: from compute actions to compute and messages.

    schedules/*, text, CSV --> lower (this file) --> passes, verify, run

Torch-free. Each tensor that goes from one rank to another gets a SEND directly after the
action that makes it, and a RECV in its consumer's list.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from sixfold.pipeline.action import MESSAGES, Action, Kind
from sixfold.pipeline.counterexample import check_size
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program import Program

__all__ = ["lower"]

# Names of their own: Python 3.11 needs a quarter of a microsecond to find Kind.F, once per action in the loop below.
_F, _SEND_F, _RECV_F, _SEND_B, _RECV_B = Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B
_TAKES_GRADIENT = frozenset({Kind.B, Kind.I})


def lower(program: Program) -> Program:
    """Add the messages between ranks, and a REDUCE_GRAD to each stage that has none.

    A SEND stands directly after the action that made its tensor. The RECV goes into
    its rank's list at the moment at which the peer sends, so both ends of an edge
    name their messages in one order; its place is where the receive is *posted*,
    and its consumer waits for it. The result equals torch 2.13's lowering.

    Raises:
        ScheduleError: the program has messages already or lacks forwards, or its order does not let every rank through.
    Cost: O(actions + ranks * time steps).
    """
    from sixfold.pipeline.passes import reduce_grad  # passes names lower among its own

    _check_actions(program)
    check_size(program)
    m, stages, placement = program.microbatches, program.stages, program.placement
    # Of each (stage, microbatch): whether the input of F, and the gradient that B or I takes, was made or announced.
    inputs, gradients = bytearray(m * stages), bytearray(m * stages)
    inputs[:m] = gradients[(stages - 1) * m :] = b"\1" * m
    crosses = [a != b for a, b in pairwise(placement)] + [False]
    rows: list[list[Action]] = [[] for _ in program.ranks]
    cursor = [0] * len(program.ranks)
    left = [rank for rank, actions in enumerate(program.ranks) if actions]
    while left:
        moved = False
        for rank in left:  # one action per rank and sweep, as torch does, so that RECVs land in the same places
            entry = program.ranks[rank][cursor[rank]]
            parts = entry.parts or (entry,)
            for part in parts:
                there = inputs if part.kind is _F else gradients if part.kind in _TAKES_GRADIENT else None
                if there is not None and not there[part.stage * m + part.microbatch]:  # type: ignore[operator]
                    break
            else:
                cursor[rank] += 1
                moved = True
                row = rows[rank]
                row.append(entry)
                for part in parts:
                    stage, kind, k = part.stage, part.kind, part.microbatch
                    if kind is _F and stage + 1 < stages:
                        inputs[(stage + 1) * m + k] = 1  # type: ignore[operator]
                        if crosses[stage]:
                            row.append(Action(stage, _SEND_F, k))
                            rows[placement[stage + 1]].append(Action(stage + 1, _RECV_F, k))
                    elif kind in _TAKES_GRADIENT and stage:
                        gradients[(stage - 1) * m + k] = 1  # type: ignore[operator]
                        if crosses[stage - 1]:
                            row.append(Action(stage, _SEND_B, k))
                            rows[placement[stage - 1]].append(Action(stage - 1, _RECV_B, k))
        if not moved:
            raise _stuck(program, left[0], cursor[left[0]])
        left = [rank for rank in left if cursor[rank] < len(program.ranks[rank])]
    return reduce_grad(replace(program, ranks=tuple(map(tuple, rows))))


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


def _stuck(program: Program, rank: int, position: int) -> ScheduleError:
    entry = program.ranks[rank][position]
    return ScheduleError(
        f"rank {rank} [{position}] {entry}: its input is never made; verify(program) shows why",
        rank=rank,
        position=position,
        action=entry,
    )
