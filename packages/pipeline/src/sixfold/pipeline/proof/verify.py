"""The proof that a program is right and cannot hang.

    Program --> positions, rules (this file) --> unit_rules, deadlock --> Report, or ScheduleError and a picture

Torch-free. [Note: rendezvous] A SEND and its RECV are treated as one event at
which both ranks arrive. That is the strictest transport there is: what gets
through here cannot hang on NCCL or gloo, whatever they buffer. It also pairs the
k-th SEND of a directed edge with the k-th RECV: two messages that cross block
each other in this model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import le, lt, ne

from sixfold.pipeline.errors import ScheduleError, number
from sixfold.pipeline.program.action import MESSAGES, PER_STAGE, Action, Kind
from sixfold.pipeline.program.counterexample import broken, check_size, grid, missing
from sixfold.pipeline.program.program import Program, Weights, program_given
from sixfold.pipeline.proof.deadlock import Wait, deadlock, progress, shortest_cycle
from sixfold.pipeline.proof.unit_rules import check_gathers, check_one_reduction, check_reductions, check_steps
from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.memory import activation_share, peak_activations, weight_versions

__all__ = ["Report", "verify"]

_LOCAL = "both its stages are on this rank; no message goes there"
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_TURN = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}  # of the actions of a stage on a microbatch
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
        ScheduleError: one action and the rule it breaks, or the shortest ``cycle`` of waits; a grid shows where.
    Cost: O(actions) for a right program.
    """
    program_given(program)
    if transport not in ("rendezvous", "buffered"):
        raise ScheduleError(f"transport is {transport!r}; it is 'rendezvous' or 'buffered'")
    if memory_cap is not None and not (memory_cap := number("memory_cap", memory_cap)) > 0:
        raise ScheduleError(f"memory_cap is {memory_cap}; it is > 0")
    if costs is not None and len(costs.forward) != program.stages:
        raise ScheduleError(f"costs are for {len(costs.forward)} stages; the program has {program.stages}")
    check_size(program)
    found = _Found(program)
    _check_compute(found)
    _check_messages(found)
    _check_per_stage(found)
    _check_waits(found, transport)
    peaks = peak_activations(
        program,
        costs.activation if costs is not None and costs.activation is not None else activation_share(program),
        inputs=costs.input if costs is not None else None,
        input_share=costs.input_share if costs is not None else 0.0,
        deferred=costs.deferred if costs is not None else None,
        cap=memory_cap,
    )
    crossings = sum(a != b for a, b in pairwise(program.placement))
    stepless = Kind.STEP not in found.kinds and program.weights is Weights.FLUSHED  # nothing to look for
    versions = (1,) * len(program.ranks) if stepless else weight_versions(program)
    return Report(2 * program.microbatches * crossings, peaks, versions)


class _Found:
    """Where each action stands; making it refuses actions that belong nowhere, and second ones.

    Attributes:
        kinds: that occur.
        lowered: as ``Program.lowered``.
        starts, ends: per stage * m + microbatch the position of its B or I, and of its B or W.
        per_stage: (rank, position, action) of those without a microbatch, and of the STEPs.
        messages: per rank its messages in order, as numbers; a SEND and its RECV have one number.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.kinds = {entry.kind for actions in program.ranks for entry in actions}
        if Kind.OVERLAP_F_B in self.kinds:
            self.kinds.update(part.kind for _, _, entry in program.entries() for part in entry.each())
        numbers = program.microbatches * program.stages
        self._absent = [-1] * numbers
        self._at = {kind: self._absent.copy() for kind in self.kinds - PER_STAGE - {Kind.STEP}}
        self.per_stage: list[tuple[int, int, Action]] = []
        self.messages: list[list[int]] = [self._read(rank) for rank in range(len(program.ranks))]
        local = all(a == b for a, b in pairwise(program.placement))
        self.lowered = bool(self.kinds & MESSAGES) or (local and Kind.REDUCE_GRAD in self.kinds)
        self.starts = list(map(max, self[Kind.B], self[Kind.I]))
        self.ends = list(map(max, self[Kind.B], self[Kind.W]))

    def __getitem__(self, kind: Kind) -> Sequence[int]:
        """Per stage * m + microbatch the position of its action of ``kind`` in its rank's list, or -1."""
        return self._at.get(kind, self._absent)

    def _read(self, rank: int) -> list[int]:
        program = self.program
        m, holders = program.microbatches, dict(enumerate(program.placement))
        # Of a message its number is that of the receiver's stage and microbatch; gradients come after all activations.
        backward = m * program.stages
        first = {Kind.SEND_F: m, Kind.RECV_F: 0, Kind.SEND_B: backward - m, Kind.RECV_B: backward}
        tables = {kind: (row, first.get(kind)) for kind, row in self._at.items()}
        messages: list[int] = []
        for position, action in self._flat(rank):
            stage = action.stage
            if holders.get(stage) != rank:
                on = f"stage {stage} is on rank {holders.get(stage)}"
                rule = on if stage in holders else f"stages are 0..{program.stages - 1}"
                raise broken(program, rank, position, action, rule)
            table = tables.get(action.kind)
            if table is None:
                if action.kind in PER_STAGE and action.microbatch is not None:
                    raise broken(program, rank, position, action, f"{action.kind} takes no microbatch")
                self.per_stage.append((rank, position, action))
                continue
            k = action.microbatch
            if k is None or not 0 <= k < m:
                raise broken(program, rank, position, action, f"microbatches are 0..{m - 1}")
            row, offset = table
            index = stage * m + k
            if row[index] >= 0:
                raise broken(program, rank, position, action, f"it is already at [{row[index]}]; each runs once")
            row[index] = position
            if offset is not None:
                messages.append(offset + index)
        return messages

    def _flat(self, rank: int) -> Iterable[tuple[int, Action]]:
        """(position, action) of a rank, an overlap as its parts."""
        actions = self.program.ranks[rank]
        if Kind.OVERLAP_F_B not in self.kinds and not any(entry.parts for entry in actions):
            return enumerate(actions)
        for position, entry in enumerate(actions):
            if entry.parts or entry.kind is Kind.OVERLAP_F_B:
                self._check_overlap(rank, position, entry)
        return [(position, action) for position, entry in enumerate(actions) for action in entry.parts or (entry,)]

    def _check_overlap(self, rank: int, position: int, entry: Action) -> None:
        if entry.kind is not Kind.OVERLAP_F_B or len(entry.parts) < 2:
            rule = "OVERLAP_F_B has two parts or more, and nothing else has parts"
        elif any(part.parts or part.kind not in _TURN for part in entry.parts):
            rule = "parts are F, B, I or W"
        elif (entry.stage, entry.microbatch) != (entry.parts[0].stage, None):
            rule = "its stage is that of its first part, and it has no microbatch of its own; its text says neither"
        elif any(
            _TURN[a.kind] >= _TURN[b.kind]
            for a, b in combinations(entry.parts, 2)
            if (a.stage, a.microbatch) == (b.stage, b.microbatch)
        ):
            rule = "parts are in execution order: F, then B, or I and W"
        else:
            return
        raise broken(self.program, rank, position, entry, rule)


def _ascend(before: Iterable[int], after: Iterable[int]) -> bool:
    """Whether each position of ``before`` is smaller than its pair."""
    return all(map(lt, before, after))


def _follow(before: Iterable[int], after: Iterable[int]) -> bool:
    """The same for actions of one stage, which may be parts of one overlap, whose own order ``_Found`` has checked."""
    return all(map(le, before, after))


def _check_compute(found: _Found) -> None:
    """Each (stage, microbatch): one F, then one B or one I and a later W; RECOMPUTE between them."""
    program = found.program
    forward, full, inputs, weights = (found[kind] for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    again = found[Kind.RECOMPUTE]
    if Kind.RECOMPUTE not in found.kinds and min(forward) >= 0:
        if not found.kinds & {Kind.I, Kind.W} and _follow(forward, full):
            return
        if Kind.B not in found.kinds and _follow(forward, inputs) and _follow(inputs, weights):
            return
    for index, f in enumerate(forward):
        stage, k = divmod(index, program.microbatches)
        rank = program.placement[stage]
        if f < 0:
            raise missing(program, rank, Action(stage, Kind.F, k))
        b, i, w = full[index], inputs[index], weights[index]
        if b >= 0 and (i >= 0 or w >= 0):
            extra = Action(stage, Kind.I if i >= 0 else Kind.W, k)
            rule = "the microbatch has a B; it is either B or I and W"
            raise broken(program, rank, i if i >= 0 else w, extra, rule)
        if b < 0 and i < 0:
            raise missing(program, rank, Action(stage, Kind.I if w >= 0 else Kind.B, k))
        if b < 0 and w < 0:
            raise missing(program, rank, Action(stage, Kind.W, k))
        back = b if b >= 0 else i
        if back < f:
            raise broken(program, rank, f, Action(stage, Kind.F, k), f"its backward is at [{back}]; F comes before it")
        if b < 0 and w < i:
            raise broken(program, rank, w, Action(stage, Kind.W, k), f"its I is at [{i}]; W comes after I")
        if again[index] >= 0 and not f < again[index] < back:
            rule = f"it stands between F [{f}] and backward [{back}]"
            raise broken(program, rank, again[index], Action(stage, Kind.RECOMPUTE, k), rule)


def _check_messages(found: _Found) -> None:
    """Each tensor between ranks is sent after it was made and received before it is used; none goes within a rank."""
    program, placement = found.program, found.program.placement
    m, stages = program.microbatches, program.stages
    makers = {Kind.F: found[Kind.F], Kind.B: found.starts}
    for kind, sent, got, ahead in ((Kind.F, Kind.SEND_F, Kind.RECV_F, 1), (Kind.B, Kind.SEND_B, Kind.RECV_B, -1)):
        made = makers[kind]
        for stage in range(stages):
            peer = stage + ahead
            own, other = slice(stage * m, stage * m + m), slice(peer * m, peer * m + m)
            exists = 0 <= peer < stages
            if not (exists and placement[peer] != placement[stage] and found.lowered):
                rule = _LOCAL if exists else "there is no stage at its end"
                _refuse_stray(found, stage, sent, rule)
                # The receiver at the open end is the first stage of a RECV_F, the last of a RECV_B.
                _refuse_stray(found, peer if exists else stages - 1 - stage, got, rule)
                if exists and placement[peer] == placement[stage] and not _ascend(made[own], made[other]):
                    k = next(k for k in range(m) if made[peer * m + k] <= made[stage * m + k])
                    rule = f"its input is made at [{made[stage * m + k]}] by stage {stage}"
                    raise broken(program, placement[peer], made[peer * m + k], Action(peer, kind, k), rule)
                continue
            sends, receives = found[sent][own], found[got][other]
            if min(receives) < 0 or not (_ascend(made[own], sends) and _ascend(receives, made[other])):
                _explain_message(found, stage, peer, (sent, got), made)


def _explain_message(found: _Found, stage: int, peer: int, kinds: tuple[Kind, Kind], made: Sequence[int]) -> None:
    """Raise for the first microbatch whose tensor from ``stage`` to ``peer`` is not sent or received in its place."""
    program, m = found.program, found.program.microbatches
    sent, got = kinds
    rank, other = program.placement[stage], program.placement[peer]
    for k in range(m):
        send, receive = Action(stage, sent, k), Action(peer, got, k)
        here, there = found[sent][stage * m + k], found[got][peer * m + k]
        if here < 0:
            raise missing(program, rank, send)
        if there < 0:
            raise missing(program, other, receive)
        if here <= made[stage * m + k]:
            raise broken(program, rank, here, send, f"its tensor is made at [{made[stage * m + k]}]")
        if there >= made[peer * m + k]:
            raise broken(program, other, there, receive, f"its tensor is used at [{made[peer * m + k]}]")


def _refuse_stray(found: _Found, stage: int, kind: Kind, rule: str) -> None:
    if kind not in found.kinds:
        return
    program, m = found.program, found.program.microbatches
    for k, position in enumerate(found[kind][stage * m : stage * m + m]):
        if position >= 0:
            raise broken(program, program.placement[stage], position, Action(stage, kind, k), rule)


def _check_per_stage(found: _Found) -> None:
    """UNSHARD, RESHARD, REDUCE_GRAD and STEP of each stage."""
    if Kind.STEP in found.kinds:
        check_steps(found.program, found.starts, found.ends)
    if found.kinds & {Kind.UNSHARD, Kind.RESHARD}:
        for rank in range(len(found.program.ranks)):
            check_gathers(found.program, rank)
    if Kind.REDUCE_GRAD in found.kinds and Kind.STEP in found.kinds:
        for rank in range(len(found.program.ranks)):
            check_reductions(found.program, rank)
    else:
        check_one_reduction(found.program, found.per_stage, found.ends)


def _check_waits(found: _Found, transport: str) -> None:
    """Nobody waits for ever: every rank gets through its list of tensors."""
    meeting, actions = found.lowered and transport == "rendezvous", found.program.ranks
    if not found.lowered:
        lists = [_computed(found, row) for row in actions]
    elif meeting:
        lists = found.messages
    else:
        kinds = ([entry.kind for entry in row if entry.kind in MESSAGES] for row in actions)
        lists = [
            [~number if kind in _SENDS else number for kind, number in zip(row, numbers, strict=True)]
            for row, numbers in zip(kinds, found.messages, strict=True)
        ]
    reached = progress(lists)
    if reached != list(map(len, lists)):
        done = [
            len(actions[rank]) if here == len(lists[rank]) else _place(found, rank, lists[rank][here])
            for rank, here in enumerate(reached)
        ]
        waits = _message_waits(found, transport) if found.lowered else _compute_waits(found)
        raise deadlock(found.program, shortest_cycle(waits, done), rendezvous=meeting)
    if found.lowered and not meeting:
        _check_fifo(found)


def _computed(found: _Found, actions: Sequence[Action]) -> list[int]:
    """The tensors that a rank of a compute-only program takes from others and leaves for them, as ``meet`` reads them.

    The numbers are those of ``_Found.messages``.
    """
    m, placement = found.program.microbatches, found.program.placement
    # Whether the stage's input, and its output, cross ranks.
    below, above = [False, *map(ne, placement, placement[1:])], [*map(ne, placement, placement[1:]), False]
    gradients = m * len(placement)
    numbers: list[int] = []
    for entry in actions:
        left: list[int] = []  # by an overlap at the end of all its parts
        for action in entry.parts or (entry,):
            kind, stage = action.kind, action.stage
            if kind is Kind.F:
                number = stage * m + action.microbatch  # type: ignore[operator]
                if below[stage]:
                    numbers.append(number)
                if above[stage]:
                    left.append(~(number + m))
            elif kind is Kind.B or kind is Kind.I:
                number = gradients + stage * m + action.microbatch  # type: ignore[operator]
                if above[stage]:
                    numbers.append(number)
                if below[stage]:
                    left.append(~(number - m))
        numbers += left
    return numbers


def _place(found: _Found, rank: int, tensor: int) -> int:
    """Position at which ``rank`` waits for the other end of ``tensor``."""
    m, gradients = found.program.microbatches, found.program.microbatches * found.program.stages
    backward, index = divmod(tensor, gradients)
    if not found.lowered:
        return found.starts[index] if backward else found[Kind.F][index]
    if found.program.placement[index // m] == rank:
        return found[Kind.RECV_B if backward else Kind.RECV_F][index]
    return found[Kind.SEND_B][index + m] if backward else found[Kind.SEND_F][index - m]


def _message_waits(found: _Found, transport: str) -> list[list[Wait]]:
    """Waits of a lowered program; see [Note: waits]."""
    m, placement, buffered = found.program.microbatches, found.program.placement, transport == "buffered"
    # Per kind: positions of the other end, and how far from ours its stage is.
    ends = {
        Kind.SEND_F: (found[Kind.RECV_F], 1),
        Kind.RECV_F: (found[Kind.SEND_F], -1),
        Kind.SEND_B: (found[Kind.RECV_B], -1),
        Kind.RECV_B: (found[Kind.SEND_B], 1),
    }
    if buffered:
        del ends[Kind.SEND_F], ends[Kind.SEND_B]
    waits: list[list[Wait]] = []
    for actions in found.program.ranks:
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


def _compute_waits(found: _Found) -> list[list[Wait]]:
    """Waits of a compute-only program: each action needs its input's maker on another rank."""
    program, m, placement = found.program, found.program.microbatches, found.program.placement
    forward, backward = found[Kind.F], found.starts
    waits: list[list[Wait]] = []
    for rank, actions in enumerate(program.ranks):
        mine: list[Wait] = []
        for position, entry in enumerate(actions):
            for action in entry.parts or (entry,):
                kind = action.kind
                if kind is Kind.F:
                    peer, made = action.stage - 1, forward
                elif kind is Kind.B or kind is Kind.I:
                    peer, made = action.stage + 1, backward
                else:
                    continue
                if 0 <= peer < len(placement) and placement[peer] != rank:
                    assert action.microbatch is not None, f"{action} has no microbatch"
                    mine.append((position, placement[peer], made[peer * m + action.microbatch]))
        waits.append(mine)
    return waits


def _check_fifo(found: _Found) -> None:
    """On each directed edge the k-th SEND meets the k-th RECV, which buffering does not change."""
    program, m = found.program, found.program.microbatches
    last: dict[tuple[int, int], tuple[int, int, Action]] = {}
    for rank, position, action in program.entries():
        if action.kind not in (Kind.SEND_F, Kind.SEND_B):
            continue
        peer = action.peer_stage
        assert action.microbatch is not None, f"{action} has no microbatch"
        at = found[_PARTNER[action.kind]][peer * m + action.microbatch]
        edge = (rank, program.placement[peer])
        receive = Action(peer, _PARTNER[action.kind], action.microbatch)
        if edge in last and last[edge][1] > at:
            message = f"rank {rank} [{position}] {action}: rank {edge[1]} receives it at [{at}], before {last[edge][2]}"
            rule = f"{message}, which was sent first; an edge keeps its order"
            raise ScheduleError(
                "\n".join((rule, *grid(program, {(rank, position), (edge[1], at)}))),
                rank=rank,
                position=position,
                action=action,
                cycle=[(rank, position, action), (edge[1], at, receive)],
            )
        last[edge] = (position, at, receive)
