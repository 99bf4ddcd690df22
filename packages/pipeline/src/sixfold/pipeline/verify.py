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

from sixfold.pipeline.action import COMPUTE, MESSAGES, PER_STAGE, Action, Kind
from sixfold.pipeline.costs import Costs
from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.memory import activation_share, peak_activations, weight_versions
from sixfold.pipeline.program import Program
from sixfold.pipeline.waits import Wait, run_to_the_end, shortest_cycle

__all__ = ["Report", "verify"]

_SHOWN_LINKS = 50  # of a cycle, so that a report stays below 60 lines
_REDUCED_TWICE = "gradients are reduced once per step"
_REDUCED_EARLY = "a backward of the stage comes after it in this step"
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
    _check_slots(program, where)
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
    unnumbered = PER_STAGE | {Kind.STEP}
    stages = program.stages
    for rank, actions in enumerate(program.ranks):
        for position, entry in enumerate(actions):
            for action in entry.parts or (entry,):
                stage, k = action.stage, action.microbatch
                if not 0 <= stage < stages:
                    raise _broken(rank, position, action, f"stages are 0..{stages - 1}")
                if placement[stage] != rank:
                    raise _broken(rank, position, action, f"stage {stage} is on rank {placement[stage]}")
                if action.kind in unnumbered:
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


def _check_slots(program: Program, where: _Where) -> None:
    """UNSHARD, RESHARD and REDUCE_GRAD of each stage."""
    for rank, actions in enumerate(program.ranks):
        kinds = {action.kind for action in actions}
        if Kind.UNSHARD in kinds or Kind.RESHARD in kinds:
            _check_gathers(program, rank)
        if Kind.STEP in kinds and Kind.REDUCE_GRAD in kinds:
            _check_reductions(program, rank)
        elif Kind.REDUCE_GRAD in kinds:
            _check_one_reduction(program, rank, where)


def _check_gathers(program: Program, rank: int) -> None:
    """A stage that is ever unsharded is so at each of its compute actions, and resharded as often."""
    actions = program.ranks[rank]
    slotted = {action.stage for action in actions if action.kind is Kind.UNSHARD}
    gathered = dict.fromkeys(program.stages_of(rank), 0)
    for position, entry in enumerate(actions):
        for action in entry.each():
            if action.kind is Kind.UNSHARD:
                gathered[action.stage] += 1
            elif action.kind is Kind.RESHARD:
                gathered[action.stage] -= 1
                if gathered[action.stage] < 0:
                    raise _broken(rank, position, action, "the stage is not unsharded")
            elif action.kind in COMPUTE and action.stage in slotted and not gathered[action.stage]:
                raise _broken(rank, position, action, "the stage is not unsharded at this compute action")
    for stage, count in gathered.items():
        if count:
            raise _missing(rank, Action(stage, Kind.RESHARD))


def _check_one_reduction(program: Program, rank: int, where: _Where) -> None:
    """Without STEPs: at most one REDUCE_GRAD per stage, behind its last backward."""
    m, reduced = program.microbatches, set[int]()
    for position, action in enumerate(program.ranks[rank]):
        if action.kind is not Kind.REDUCE_GRAD:
            continue
        if action.stage in reduced:
            raise _broken(rank, position, action, _REDUCED_TWICE)
        reduced.add(action.stage)
        own = slice(action.stage * m, (action.stage + 1) * m)
        if max(max(where[kind][own]) for kind in (Kind.B, Kind.I, Kind.W)) > position:
            raise _broken(rank, position, action, _REDUCED_EARLY)


def _check_reductions(program: Program, rank: int) -> None:
    """With STEPs: the same between one STEP of a stage and the next; read from the end."""
    behind: dict[int, str] = {}  # per stage, what a REDUCE_GRAD here would break
    for position in range(len(program.ranks[rank]) - 1, -1, -1):
        for action in program.ranks[rank][position].each():
            if action.kind is Kind.STEP:
                behind.pop(action.stage, None)
            elif action.kind in (Kind.B, Kind.I, Kind.W):
                behind[action.stage] = _REDUCED_EARLY
            elif action.kind is Kind.REDUCE_GRAD:
                if action.stage in behind:
                    raise _broken(rank, position, action, behind[action.stage])
                behind[action.stage] = _REDUCED_TWICE


def _message_waits(program: Program, where: _Where, transport: str) -> list[list[Wait]]:
    """Waits of a lowered program; see [Note: waits]."""
    m, placement, buffered = program.microbatches, program.placement, transport == "buffered"
    # Per kind: the list of the other end's positions, and how far from ours its stage is.
    ends = {
        Kind.SEND_F: (where[Kind.RECV_F], 1),
        Kind.RECV_F: (where[Kind.SEND_F], -1),
        Kind.SEND_B: (where[Kind.RECV_B], -1),
        Kind.RECV_B: (where[Kind.SEND_B], 1),
    }
    if buffered:
        del ends[Kind.SEND_F], ends[Kind.SEND_B]
    waits: list[list[Wait]] = []
    for actions in program.ranks:
        mine: list[Wait] = []
        for position, action in enumerate(actions):
            if (end := ends.get(action.kind)) is not None:
                k = action.microbatch
                assert k is not None, f"{action} has no microbatch"
                peer = action.stage + end[1]
                at = end[0][peer * m + k]
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
