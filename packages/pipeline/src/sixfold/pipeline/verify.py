"""The proof that a program is right and cannot hang.

    Program --> rules, waits (this file) --> Report, or ScheduleError with a counter-example

Torch-free. [Note: rendezvous] A SEND and its RECV are treated as one event at
which both ranks arrive. That is the strictest transport there is: what gets
through here cannot hang on NCCL or gloo, whatever they buffer. It also pairs the
k-th SEND of a directed edge with the k-th RECV: two messages that cross block
each other in this model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from sixfold.pipeline.action import MESSAGES, PER_STAGE, Action, Kind
from sixfold.pipeline.costs import Costs
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.memory import activation_share, peak_activations, weight_versions
from sixfold.pipeline.program import Program
from sixfold.pipeline.waits import Wait, run_to_the_end, shortest_cycle

__all__ = ["Report", "verify"]

_SHOWN_LINKS = 50  # of a cycle, so that a report stays below 60 lines
_PARTNER = {
    Kind.SEND_F: Kind.RECV_F,
    Kind.RECV_F: Kind.SEND_F,
    Kind.SEND_B: Kind.RECV_B,
    Kind.RECV_B: Kind.SEND_B,
}


@dataclass(frozen=True)
class Report:
    """What ``verify`` learned of a right program.

    Attributes:
        messages: tensors that go from one rank to another in one run of the program.
        peak_activations: per rank; 1/v per stage without costs.
        weight_versions: per rank.
    """

    messages: int
    peak_activations: tuple[float, ...]
    weight_versions: tuple[int, ...]


def verify(
    program: Program,
    *,
    memory_cap: float | None = None,
    costs: Costs | None = None,
    transport: str = "rendezvous",
) -> Report:
    """Prove that ``program`` computes every gradient once and that no rank waits for ever.

    Args:
        memory_cap: most activations a rank may hold, in the unit of ``costs.activation``.
        costs: only its memory part is used.
        transport: "rendezvous", or "buffered" where a SEND never waits.
    Returns:
        what the program sends and holds.
    Raises:
        ScheduleError: one action and the rule it breaks, or the shortest ``cycle`` of waits.
    Cost: O(actions) for a right program.
    """
    if transport not in ("rendezvous", "buffered"):
        raise ScheduleError(f"transport is {transport!r}; it is 'rendezvous' or 'buffered'")
    where = _positions(program)
    _check_compute(program, where)
    _check_messages(program, where)
    _check_slots(program)
    waits = _message_waits(program, where, transport) if program.lowered else _compute_waits(program, where)
    lengths = [len(actions) for actions in program.ranks]
    done = run_to_the_end(waits, lengths)
    if done != lengths:
        raise _deadlock(program, shortest_cycle(waits, done))
    if transport == "buffered":
        _check_fifo(program, where)
    share = costs.activation if costs is not None and costs.activation is not None else activation_share(program)
    peaks = peak_activations(
        program,
        share,
        inputs=costs.input if costs is not None else None,
        input_share=costs.input_share if costs is not None else 0.0,
        cap=memory_cap,
    )
    crossings = sum(a != b for a, b in pairwise(program.placement))
    return Report(2 * program.microbatches * crossings, peaks, weight_versions(program))


# Position of every numbered action in its rank's list: kind -> stage * m + microbatch -> position, or -1.
_Where = dict[Kind, list[int]]


def _positions(program: Program) -> _Where:
    m, placement = program.microbatches, program.placement
    where: _Where = {kind: [-1] * (m * program.stages) for kind in Kind}
    for rank, actions in enumerate(program.ranks):
        for position, entry in enumerate(actions):
            for action in entry.parts or (entry,):
                stage, k = action.stage, action.microbatch
                if not 0 <= stage < program.stages:
                    raise _broken(rank, position, action, f"stages are 0..{program.stages - 1}")
                if placement[stage] != rank:
                    raise _broken(rank, position, action, f"stage {stage} is on rank {placement[stage]}")
                if action.kind in PER_STAGE or action.kind is Kind.STEP:
                    continue
                if k is None or not 0 <= k < m:
                    raise _broken(rank, position, action, f"microbatches are 0..{m - 1}")
                row = where[action.kind]
                if row[stage * m + k] >= 0:
                    raise _broken(rank, position, action, f"it is already at [{row[stage * m + k]}]; each runs once")
                row[stage * m + k] = position
    return where


def _check_compute(program: Program, where: _Where) -> None:
    """Each (stage, microbatch): one F, then one B or one I and a later W; RECOMPUTE between them."""
    forward, full, inputs, weights = (where[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    again = where[Kind.RECOMPUTE]
    m = program.microbatches
    for index, f in enumerate(forward):
        stage, k = divmod(index, m)
        rank = program.placement[stage]
        if f < 0:
            raise _missing(rank, Action(stage, Kind.F, k))
        b, i, w = full[index], inputs[index], weights[index]
        if b >= 0 and (i >= 0 or w >= 0):
            extra = Action(stage, Kind.I if i >= 0 else Kind.W, k)
            raise _broken(rank, i if i >= 0 else w, extra, "the microbatch has a B; it is either B or I and W")
        if b < 0 and i < 0:
            raise _missing(rank, Action(stage, Kind.I if w >= 0 else Kind.B, k))
        if b < 0 and w < 0:
            raise _missing(rank, Action(stage, Kind.W, k))
        back = b if b >= 0 else i
        if back <= f:
            raise _broken(rank, f, Action(stage, Kind.F, k), f"its backward is at [{back}]; F comes before it")
        if b < 0 and w <= i:
            raise _broken(rank, w, Action(stage, Kind.W, k), f"its I is at [{i}]; W comes after I")
        if again[index] >= 0 and not f < again[index] < back:
            raise _broken(
                rank, again[index], Action(stage, Kind.RECOMPUTE, k), f"it stands between F [{f}] and backward [{back}]"
            )


def _check_messages(program: Program, where: _Where) -> None:
    """Each tensor between ranks is sent after it was made and received before it is used; none goes within a rank."""
    m, placement, lowered = program.microbatches, program.placement, program.lowered
    made = {Kind.F: where[Kind.F], Kind.B: [max(b, i) for b, i in zip(where[Kind.B], where[Kind.I], strict=True)]}
    for kind, sent, got, ahead in ((Kind.F, Kind.SEND_F, Kind.RECV_F, 1), (Kind.B, Kind.SEND_B, Kind.RECV_B, -1)):
        send_at, receive_at, compute_at = where[sent], where[got], made[kind]
        for stage in range(program.stages):
            peer = stage + ahead
            exists = 0 <= peer < program.stages
            crosses = exists and placement[peer] != placement[stage]
            for k in range(m):
                here, there = stage * m + k, peer * m + k
                if not (crosses and lowered):
                    _refuse_stray(program, where, Action(stage, sent, k), exists)
                    if exists:
                        _refuse_stray(program, where, Action(peer, got, k), exists)
                    else:
                        edge = Action(program.stages - 1 - stage, got, k)
                        _refuse_stray(program, where, edge, exists)
                    if exists and not crosses and compute_at[there] <= compute_at[here]:
                        rule = f"its input is made at [{compute_at[here]}] by stage {stage}"
                        raise _broken(placement[peer], compute_at[there], Action(peer, kind, k), rule)
                    continue
                rank, other = placement[stage], placement[peer]
                send, receive = Action(stage, sent, k), Action(peer, got, k)
                if send_at[here] < 0:
                    raise _missing(rank, send)
                if receive_at[there] < 0:
                    raise _missing(other, receive)
                if send_at[here] <= compute_at[here]:
                    raise _broken(rank, send_at[here], send, f"its tensor is made at [{compute_at[here]}]")
                if receive_at[there] >= compute_at[there]:
                    raise _broken(other, receive_at[there], receive, f"its tensor is used at [{compute_at[there]}]")


def _refuse_stray(program: Program, where: _Where, message: Action, exists: bool) -> None:
    assert message.microbatch is not None, f"{message} has no microbatch"
    position = where[message.kind][message.stage * program.microbatches + message.microbatch]
    if position >= 0:
        rule = "both its stages are on this rank; no message goes there" if exists else "there is no stage at its end"
        raise _broken(program.placement[message.stage], position, message, rule)


def _check_slots(program: Program) -> None:
    """UNSHARD, RESHARD and REDUCE_GRAD of each stage."""
    for rank, actions in enumerate(program.ranks):
        slotted = {action.stage for action in actions if action.kind is Kind.UNSHARD}
        gathered = dict.fromkeys(program.stages_of(rank), 0)
        left = _backwards_left(actions)
        reduced: set[int] = set()
        for position, entry in enumerate(actions):
            for action in entry.each():
                stage = action.stage
                if action.kind is Kind.UNSHARD:
                    gathered[stage] += 1
                elif action.kind is Kind.RESHARD:
                    gathered[stage] -= 1
                    if gathered[stage] < 0:
                        raise _broken(rank, position, action, "the stage is not unsharded")
                elif action.kind is Kind.STEP:
                    reduced.discard(stage)
                elif action.kind is Kind.REDUCE_GRAD:
                    if stage in reduced:
                        raise _broken(rank, position, action, "gradients are reduced once per step")
                    if left[position].get(stage):
                        raise _broken(rank, position, action, "a backward of the stage comes after it in this step")
                    reduced.add(stage)
                elif action.kind not in MESSAGES and stage in slotted and not gathered[stage]:
                    raise _broken(rank, position, action, "the stage is not unsharded at this compute action")
        for stage, count in gathered.items():
            if count:
                raise _missing(rank, Action(stage, Kind.RESHARD))


def _backwards_left(actions: tuple[Action, ...]) -> dict[int, dict[int, int]]:
    """For the position of each REDUCE_GRAD: backwards of its stage between it and the stage's next STEP."""
    left: dict[int, dict[int, int]] = {}
    ahead: dict[int, int] = {}
    for position in range(len(actions) - 1, -1, -1):
        for action in actions[position].each():
            if action.kind is Kind.STEP:
                ahead[action.stage] = 0
            elif action.kind in (Kind.B, Kind.I, Kind.W):
                ahead[action.stage] = ahead.get(action.stage, 0) + 1
            elif action.kind is Kind.REDUCE_GRAD:
                left[position] = {action.stage: ahead.get(action.stage, 0)}
    return left


def _message_waits(program: Program, where: _Where, transport: str) -> list[list[Wait]]:
    """Waits of a lowered program; see [Note: waits]."""
    m, placement, buffered = program.microbatches, program.placement, transport == "buffered"
    waits: list[list[Wait]] = []
    for actions in program.ranks:
        mine: list[Wait] = []
        for position, action in enumerate(actions):
            if action.kind not in _PARTNER or (buffered and action.kind in (Kind.SEND_F, Kind.SEND_B)):
                continue
            peer = action.peer_stage
            assert action.microbatch is not None, f"{action} has no microbatch"
            at = where[_PARTNER[action.kind]][peer * m + action.microbatch]
            mine.append((position, placement[peer], at if buffered else at - 1))
        waits.append(mine)
    return waits


def _compute_waits(program: Program, where: _Where) -> list[list[Wait]]:
    """Waits of a compute-only program: each action needs its input's maker on another rank."""
    m, placement = program.microbatches, program.placement
    waits: list[list[Wait]] = []
    for rank, actions in enumerate(program.ranks):
        mine: list[Wait] = []
        for position, entry in enumerate(actions):
            for action in entry.each():
                peer = action.stage + (-1 if action.kind is Kind.F else 1)
                needs_input = action.kind in (Kind.F, Kind.B, Kind.I) and 0 <= peer < program.stages
                if not needs_input or placement[peer] == rank:
                    continue
                assert action.microbatch is not None, f"{action} has no microbatch"
                index = peer * m + action.microbatch
                kinds = (Kind.F,) if action.kind is Kind.F else (Kind.B, Kind.I)
                mine.append((position, placement[peer], max(where[kind][index] for kind in kinds)))
        waits.append(mine)
    return waits


def _check_fifo(program: Program, where: _Where) -> None:
    """On each directed edge the k-th SEND meets the k-th RECV, which buffering does not change."""
    m, last = program.microbatches, dict[tuple[int, int], tuple[int, int, Action]]()
    for rank, position, action in program.entries():
        if action.kind not in (Kind.SEND_F, Kind.SEND_B):
            continue
        peer = action.peer_stage
        assert action.microbatch is not None, f"{action} has no microbatch"
        at = where[_PARTNER[action.kind]][peer * m + action.microbatch]
        edge = (rank, program.placement[peer])
        receive = Action(peer, _PARTNER[action.kind], action.microbatch)
        if edge in last and last[edge][1] > at:
            message = f"rank {rank} [{position}] {action}: rank {edge[1]} receives it at [{at}], before {last[edge][2]}"
            raise ScheduleError(
                f"{message}, which was sent first; an edge keeps its order",
                rank=rank,
                position=position,
                action=action,
                cycle=[(rank, position, action), (edge[1], at, receive)],
            )
        last[edge] = (position, at, receive)


def _broken(rank: int, position: int, action: Action, rule: str) -> ScheduleError:
    return ScheduleError(f"rank {rank} [{position}] {action}: {rule}", rank=rank, position=position, action=action)


def _missing(rank: int, action: Action) -> ScheduleError:
    return ScheduleError(f"rank {rank}: {action} is missing; the program needs it once", rank=rank, action=action)


def _deadlock(program: Program, links: list[tuple[int, Wait]]) -> ScheduleError:
    cycle = [(rank, wait[0], program.ranks[rank][wait[0]]) for rank, wait in links]
    return ScheduleError(
        "\n".join(("deadlock: each of these waits for the next, the last for the first", *_chain(program, links))),
        rank=cycle[0][0],
        position=cycle[0][1],
        action=cycle[0][2],
        cycle=cycle,
    )


def _chain(program: Program, links: list[tuple[int, Wait]]) -> Iterator[str]:
    for rank, (position, peer, need) in links[:_SHOWN_LINKS]:
        action = program.ranks[rank][position]
        at = need + 1 if action.kind in MESSAGES else need
        yield f"  rank {rank} [{position}] {action} waits for rank {peer} [{at}] {program.ranks[peer][at]}"
    if len(links) > _SHOWN_LINKS:
        yield f"  and {len(links) - _SHOWN_LINKS} more"
