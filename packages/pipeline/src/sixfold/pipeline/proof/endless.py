"""Programs without end: what each further batch adds to the list of every rank.

    Program of S batches --> verify --> Endless: the lists of every further batch (this file) --> compiler

Torch-free. [Note: steps] Where weights are kept in versions a batch begins before the one before it has ended. A
rank's list is cut in front of its first F of each batch. What stands between two cuts is what the rank does when the
caller brings a batch. From some batch on (the second of 2BW, the p-th of PipeDream) the pieces repeat. The last piece
of a program of S batches stands for all that follow. What is left after it, when no batch comes any more, is the tail.

Three things are proved of the repeated program, else it is refused. It is right and gets through (``verify``),
wherever it ends. A step runs only forwards of its own batch, because the inputs of others are not there. And no rank
waits in one step for what another does in a later step: between two steps the caller may run a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sixfold.pipeline.errors import ScheduleError, whole
from sixfold.pipeline.passes import reduce_grad, strip
from sixfold.pipeline.program.action import BACKWARD_ENDS, MESSAGES, Action, Kind
from sixfold.pipeline.program.program import Program, Weights
from sixfold.pipeline.proof.verify import verify

__all__ = ["Endless", "Rows", "endless", "moved"]

Row = tuple[Action, ...]
Rows = tuple[Row, ...]  # of every rank

_BEGINS = (Kind.B, Kind.I)  # of these each microbatch has one per stage
_REMEDY = "give a program of one batch (steps=1), which ends with its batch, or one whose batches repeat"


@dataclass(frozen=True)
class Endless:
    """A program that goes on as long as batches come, lowered.

    Attributes:
        program: that was continued.
        batch: microbatches of one batch.
        steps: of every rank what the first, second, ... batch adds; the last one holds for all that follow, its
            numbers moved on.
        tails: what is left of every rank's list after one step, two steps, ...; the last one likewise.
    """

    program: Program
    batch: int
    steps: tuple[Rows, ...]
    tails: tuple[Rows, ...]

    def step(self, t: int) -> Rows:
        """Every rank's list of batch ``t``, counted from an empty pipeline."""
        return _at(self.steps, t, self.batch)

    def tail(self, batches: int) -> Rows:
        """Every rank's list when no batch follows the first ``batches`` >= 1."""
        return _at(self.tails, batches - 1, self.batch)

    def unrolled(self, batches: int) -> Program:
        """The program of ``batches`` batches, lowered."""
        whole("batches", batches, least=1)
        pieces = [*map(self.step, range(batches)), self.tail(batches)]
        rows = tuple(tuple(action for piece in pieces for action in piece[rank]) for rank in range(len(pieces[0])))
        return replace(self.program, ranks=rows, microbatches=batches * self.batch)

    @cached_property
    def forward(self) -> Program:
        """One batch alone, without STEPs: what ``evaluate`` and ``forward`` run the forwards of."""
        return strip(self.unrolled(1))

    @cached_property
    def in_flight(self) -> int:
        """Batches of which some stage holds a microbatch at once; so many rings of slots are enough."""
        most = 1
        program = self.unrolled(len(self.steps) + 1)
        for rank in range(len(program.ranks)):
            held: dict[int, set[int]] = {stage: set() for stage in program.stages_of(rank)}
            for action in _flat(program.ranks[rank]):
                if action.microbatch is None:
                    continue
                if action.kind is Kind.F:
                    held[action.stage].add(action.microbatch)
                    oldest = min(held[action.stage]) // self.batch
                    most = max(most, action.microbatch // self.batch - oldest + 1)
                elif action.kind in BACKWARD_ENDS:
                    held[action.stage].discard(action.microbatch)
        return most


def endless(program: Program) -> Endless | None:
    """``program`` continued; None where it ends with its one batch, or keeps no versions.

    Raises:
        ScheduleError: it is not right, or it cannot be continued: the action and the rule.
    Cost: that of ``verify`` for as many programs as there are batches before the lists repeat.
    """
    steps = max((a.microbatch or 0 for _, _, a in program.entries() if a.kind is Kind.STEP), default=-1) + 1
    verify(program, transport="buffered")
    if program.weights is Weights.FLUSHED or steps == 1:
        return None
    batch = program.microbatches // steps
    bare = tuple(tuple(a for a in row if a.kind not in MESSAGES) for row in program.ranks)
    compute = reduce_grad(replace(program, ranks=bare))
    found = [_cut(compute, rank, steps, batch) for rank in range(len(compute.ranks))]
    first = max(_repeats(pieces, batch) for pieces, _ in found)  # from this batch on all ranks repeat
    unlowered = Endless(
        program,
        batch,
        tuple(tuple(tuple(pieces[t]) for pieces, _ in found) for t in range(first + 1)),
        tuple(
            tuple(_tail(pieces, tail, n, steps, batch, first) for pieces, tail in found) for n in range(1, first + 2)
        ),
    )
    longest = _ways(unlowered.unrolled(first + 3))
    for n in range(1, first + 3):
        _prove(unlowered, n)
        for action, again in _ways(unlowered.unrolled(n)):
            if (action, again) not in longest:
                raise ScheduleError(
                    f"{action} with or without a RECOMPUTE or a W depends on how many batches follow, which its "
                    f"forward cannot know; {_REMEDY}",
                    action=action,
                )
    return _with_messages(unlowered)


def _at(pieces: tuple[Rows, ...], t: int, batch: int) -> Rows:
    last = len(pieces) - 1
    if t <= last:
        return pieces[t]
    return tuple(moved(row, t - last, batch) for row in pieces[last])


def moved(row: Sequence[Action], batches: int, batch: int) -> Row:
    """``row`` as it is ``batches`` later."""
    return tuple(_move(action, batches, batch) for action in row) if batches else tuple(row)


def _move(action: Action, batches: int, batch: int) -> Action:
    if action.parts:
        return Action.overlap(*(_move(part, batches, batch) for part in action.parts))
    if action.microbatch is None:
        return action
    return replace(action, microbatch=action.microbatch + batches * (1 if action.kind is Kind.STEP else batch))


def _flat(row: Sequence[Action]) -> Iterator[Action]:
    return (part for entry in row for part in entry.each())


def _cut(program: Program, rank: int, steps: int, batch: int) -> tuple[list[Row], Row]:
    """What ``rank`` does per batch, and what is left."""
    row, stages = program.ranks[rank], program.stages_of(rank)
    if not stages:
        return [()] * steps, ()
    cuts = [0]
    for position, entry in enumerate(row):
        for part in entry.each():
            if part.kind is Kind.F and part.microbatch is not None:
                t = part.microbatch // batch
                if t == len(cuts):
                    cuts.append(position)
                if t != len(cuts) - 1:
                    rule = f"it belongs to batch {t} but stands among the forwards of batch {len(cuts) - 1}"
                    raise _refused(program, rank, position, f"{rule}; a step has only the inputs of its own batch")
    pieces = [row[a:b] for a, b in zip(cuts, [*cuts[1:], len(row)], strict=True)]
    last = pieces[-1]
    again = moved(pieces[-2], 1, batch)
    end = len(again) if _is_whole(again, stages, batch) and last[: len(again)] == again else _whole(last, stages, batch)
    if end is None:
        rule = f"no {batch} forwards, {batch} backwards and one STEP of every stage of the rank follow it"
        raise _refused(program, rank, cuts[-1], f"{rule}, so the order of batches cannot repeat")
    return [*pieces[:-1], last[:end]], last[end:]


def _whole(row: Row, stages: Sequence[int], batch: int) -> int | None:
    """Length of the shortest beginning of ``row`` with the actions of one batch of every stage, or None."""
    per_stage = {Kind.F: batch, Kind.I: batch, Kind.W: batch, Kind.STEP: 1, Kind.REDUCE_GRAD: 1}
    wanted = {(stage, kind): number for stage in stages for kind, number in per_stage.items()}
    counts = dict.fromkeys(wanted, 0)
    left = sum(wanted.values())
    for position, entry in enumerate(row):
        for key in _counted(entry):
            counts[key] += 1
            left -= 1
            if counts[key] > wanted[key]:
                return None
        if not left:
            return position + 1
    return None


def _is_whole(row: Row, stages: Sequence[int], batch: int) -> bool:
    shortest = _whole(row, stages, batch)
    return shortest is not None and not any(True for entry in row[shortest:] for _ in _counted(entry))


def _counted(entry: Action) -> Iterator[tuple[int, Kind]]:
    """Stage and kind of what a batch has a fixed number of; a B counts as I and W."""
    for part in entry.each():
        if part.kind in (Kind.F, Kind.STEP, Kind.REDUCE_GRAD):
            yield part.stage, part.kind
        if part.kind in _BEGINS:
            yield part.stage, Kind.I
        if part.kind in BACKWARD_ENDS:
            yield part.stage, Kind.W


def _repeats(pieces: list[Row], batch: int) -> int:
    """The first batch from which on every piece is the one before it, moved on."""
    first = len(pieces) - 1
    while first > 0 and moved(pieces[first - 1], 1, batch) == pieces[first]:
        first -= 1
    return first


def _tail(pieces: list[Row], tail: Row, batches: int, steps: int, batch: int, first: int) -> Row:
    """What is left after ``batches``; after fewer than fill the pipeline it is what those have in flight."""
    shifted = moved(tail, batches - steps, batch) if tail else ()
    if batches > first or not tail:
        return shifted
    done = {(a.kind, a.stage, a.microbatch) for t in range(batches) for a in _flat(pieces[t])}
    kept: list[Action] = []
    stepped: set[int] = set()  # stages whose STEP, seen from the end, is kept
    for entry in reversed(shifted):
        parts = [a for a in entry.each() if a.microbatch is None or _due(a, done)]
        for part in parts:
            if part.kind is Kind.STEP:
                stepped.add(part.stage)
        if entry.kind is Kind.REDUCE_GRAD:
            parts = parts if entry.stage in stepped else []
            stepped.discard(entry.stage)
        if parts:
            kept.append(parts[0] if len(parts) == 1 else Action.overlap(*parts))
    return tuple(reversed(kept))


def _due(action: Action, done: set[tuple[Kind, int, int | None]]) -> bool:
    assert action.microbatch is not None, f"{action} has no number"
    return action.microbatch >= 0 and (action.kind, action.stage, action.microbatch) not in done


def _ways(program: Program) -> set[tuple[Action, bool]]:
    """How the backward of each microbatch begins, and whether its forward runs again before."""
    found = [a for row in program.ranks for a in _flat(row) if a.kind in _BEGINS or a.kind is Kind.RECOMPUTE]
    again = {(a.stage, a.microbatch) for a in found if a.kind is Kind.RECOMPUTE}
    return {(a, (a.stage, a.microbatch) in again) for a in found if a.kind in _BEGINS}


def _prove(unlowered: Endless, batches: int) -> None:
    program = unlowered.unrolled(batches)
    try:
        verify(program, transport="buffered")
    except ScheduleError as error:
        message = f"continued to {batches} batches the program is not right ({_REMEDY}): {error}"
        raise ScheduleError(
            message, rank=error.rank, position=error.position, action=error.action, cycle=error.cycle
        ) from error


def _with_messages(unlowered: Endless) -> Endless:
    """Add the messages, and refuse a rank that would wait for another's next step.

    A SEND stands behind what made its tensor. A RECV stands in front of what uses it, but never in a later step than
    its SEND: at the end of a step everything that was sent has been asked for. Receives of an edge keep the order of
    its sends.
    """
    first = len(unlowered.steps) - 1
    lowered = [_lowered(unlowered, n) for n in range(1, first + 4)]
    longest, batch = lowered[-1], unlowered.batch
    steps = [tuple(pieces[t] for pieces in longest) for t in range(first + 3)]
    last = first
    while any(tuple(moved(row, 1, batch) for row in steps[t]) != steps[t + 1] for t in range(last, first + 2)):
        last += 1
    assert last <= first + 1, f"{unlowered.program.name}: messages of batches {first}.. do not repeat"
    tails = [tuple(pieces[-1] for pieces in lowered[n - 1]) for n in range(1, last + 2)]
    return replace(unlowered, steps=tuple(steps[: last + 1]), tails=tuple(tails))


def _lowered(unlowered: Endless, batches: int) -> list[list[Row]]:
    """Per rank its pieces with their messages: a step per batch, then the tail."""
    pieces = [*map(unlowered.step, range(batches)), unlowered.tail(batches)]
    program = unlowered.program
    placement, last = program.placement, program.stages - 1
    sent: dict[tuple[int, int], list[tuple[Action, int]]] = {}  # per edge: RECV, step of its SEND
    used: dict[Action, tuple[int, int]] = {}  # RECV -> step and place there of what uses its tensor
    for rank in range(len(program.ranks)):
        for t, rows in enumerate(pieces):
            for place, entry in enumerate(rows[rank]):
                for a in entry.each():
                    if a.kind is Kind.F or a.kind in _BEGINS:
                        ahead = 1 if a.kind is Kind.F else -1
                        kind = Kind.RECV_F if a.kind is Kind.F else Kind.RECV_B
                        if 0 <= a.stage + ahead <= last and placement[a.stage + ahead] != rank:
                            edge = (rank, placement[a.stage + ahead])
                            sent.setdefault(edge, []).append((Action(a.stage + ahead, kind, a.microbatch), t))
                        used[Action(a.stage, kind, a.microbatch)] = (t, place)
    posts: dict[tuple[int, int, int], list[Action]] = {}  # rank, step, place -> RECVs in front of it
    for (_, destination), messages in sorted(sent.items()):
        latest = (batches, len(pieces[batches][destination]))
        placed = []
        for receive, t in reversed(messages):
            if used[receive][0] < t:
                raise _waits(program, receive, used[receive][0], t)
            here = used[receive] if used[receive][0] == t else (t, len(pieces[t][destination]))
            latest = min(latest, here)
            placed.append((latest, receive))
        for (t, place), receive in reversed(placed):
            posts.setdefault((destination, t, place), []).append(receive)
    return [
        [_woven(program, rank, rows[rank], t, posts) for t, rows in enumerate(pieces)]
        for rank in range(len(program.ranks))
    ]


def _woven(program: Program, rank: int, row: Row, t: int, posts: dict[tuple[int, int, int], list[Action]]) -> Row:
    woven: list[Action] = []
    for place, entry in enumerate(row):
        woven += posts.get((rank, t, place), ())
        woven.append(entry)
        for a in entry.each():
            if a.kind is Kind.F and a.stage + 1 < program.stages and program.placement[a.stage + 1] != rank:
                woven.append(Action(a.stage, Kind.SEND_F, a.microbatch))
            elif a.kind in _BEGINS and a.stage and program.placement[a.stage - 1] != rank:
                woven.append(Action(a.stage, Kind.SEND_B, a.microbatch))
    woven += posts.get((rank, t, len(row)), ())
    return tuple(woven)


def _waits(program: Program, receive: Action, here: int, there: int) -> ScheduleError:
    rank, peer = program.placement[receive.stage], program.placement[receive.peer_stage]
    return ScheduleError(
        f"rank {rank} uses the tensor of {receive} in step {here}; rank {peer} makes it in step {there}, and between "
        f"two steps the caller may wait for all ranks; {_REMEDY}",
        rank=rank,
        action=receive,
    )


def _refused(program: Program, rank: int, position: int, rule: str) -> ScheduleError:
    action = program.ranks[rank][position]
    return ScheduleError(f"rank {rank} {action}: {rule}; {_REMEDY}", rank=rank, position=position, action=action)
