"""The machine with a clock: when each entry of every rank's list runs.

    lists, durations, hops --> play (this file) --> simulate
                               turns, in_turns  --> lower, compile

Torch-free. A rank runs its list in order; an entry begins when its rank is free and its inputs are there. With
``deadlock.progress``, the machine without a clock that proves, it is all that runs programs without ranks outside of
``job_shop``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.action import Action, Kind
from sixfold.pipeline.program.program import Program

__all__ = ["Entry", "in_turns", "play", "stuck", "turns"]

Entry = tuple[int, int, Action]  # rank, position in that rank's list, action


def play(
    placement: Sequence[int],
    lists: Sequence[Sequence[Action]],
    lasts: Callable[[Kind, int], float],
    overlap: Callable[[Action], float],
    hop: Callable[[int, int], float],
    *,
    sent: bool = False,
) -> tuple[list[list[float]], list[list[float]]]:
    """Run the lists as far as they go.

    Args:
        placement: rank of each stage.
        lists: per rank, of any entries.
        lasts: time of an entry of that kind on that stage.
        overlap: time of an OVERLAP_F_B, which begins when the inputs of all its parts are there and hands on all its
            results at its end.
        hop: time of a message from one rank to another.
        sent: a tensor for another rank leaves with its SEND, and not with the action that made it.
    Returns:
        per rank the starts and the ends of its entries; fewer than its list has if it hangs.
    Cost: O(entries), since a rank is looked at again only when what it waits for was made.
    """
    of, width = _table(placement, lasts, hop, sent), 2 * len(placement)
    arrival: dict[int, float] = {}  # of each tensor, at the stage that takes it
    sleepers: dict[int, list[int]] = {}
    starts: list[list[float]] = [[] for _ in lists]
    ends: list[list[float]] = [[] for _ in lists]
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        row, begun, ended = lists[rank], starts[rank], ends[rank]
        now = ended[-1] if ended else 0
        for at in range(len(ended), len(row)):
            entry, missing = row[at], -1
            if not entry.parts:
                time, taken, given, lag = of[entry.kind][entry.stage]
                if taken >= 0:
                    tensor = taken + width * entry.microbatch  # type: ignore[operator]
                    there = arrival.get(tensor)
                    if there is None:
                        missing = tensor
                    elif there > now:
                        now = there
            else:
                time, given = overlap(entry), -1
                for part in entry.parts:
                    taken = of[part.kind][part.stage][1]
                    if taken >= 0:
                        tensor = taken + width * part.microbatch  # type: ignore[operator]
                        there = arrival.get(tensor)
                        if there is None:
                            missing = tensor
                        elif there > now:
                            now = there
            if missing >= 0:
                sleepers.setdefault(missing, []).append(rank)
                break
            begun.append(now)
            now += time
            ended.append(now)
            if given >= 0:
                tensor = given + width * entry.microbatch  # type: ignore[operator]
                arrival[tensor] = now + lag
                if tensor in sleepers:
                    ready += sleepers.pop(tensor)
            for part in entry.parts:
                _, _, given, lag = of[part.kind][part.stage]
                if given >= 0:
                    tensor = given + width * part.microbatch  # type: ignore[operator]
                    arrival[tensor] = now + lag
                    ready += sleepers.pop(tensor, ())
    return starts, ends


_Row = list[tuple[float, int, int, float]]


def _table(
    placement: Sequence[int], lasts: Callable[[Kind, int], float], hop: Callable[[int, int], float], sent: bool
) -> dict[Kind, _Row]:
    """Per kind and stage: time, number of the tensor that it takes, of the one that it gives, and that one's hop.

    -1 for none. The numbers are those of microbatch 0; microbatch k's are k * 2 * stages more.
    """
    last = len(placement) - 1
    table: dict[Kind, _Row] = {}
    for kind in Kind:
        forward = kind is Kind.F or kind is Kind.SEND_F
        gradient = kind is Kind.B or kind is Kind.I or kind is Kind.SEND_B
        message = kind is Kind.SEND_F or kind is Kind.SEND_B
        row: _Row = []
        for s, rank in enumerate(placement):
            time = 0.0 if kind is Kind.OVERLAP_F_B else lasts(kind, s)
            taken = given = -1
            lag = 0.0
            if forward and not message and s:
                taken = 2 * s
            elif gradient and not message and s < last:
                taken = 2 * s + 1
            to = s + 1 if forward else s - 1 if gradient else -1
            if 0 <= to <= last:
                far = placement[to] != rank
                if message if sent and far else not message:
                    given, lag = 2 * to + gradient, hop(rank, placement[to]) if far else 0
            row.append((time, taken, given, lag))
        table[kind] = row
    return table


def in_turns(program: Program) -> list[Entry]:
    """All ranks' lists as one, in an order in which every input is there; ranks take turns, one entry each.

    In a lowered program a tensor for another rank is there once it was sent; a RECV only has its place in its list.

    Raises:
        ScheduleError: the lists wait for each other.
    Cost: O(entries).
    """
    lists = [enumerate(actions) for actions in program.ranks]
    return [(rank, *next(lists[rank])) for rank in turns(program)]


def turns(program: Program) -> list[int]:
    """Whose turn it is: the ranks of ``in_turns``."""
    # In turn t rank r sees what ranks before it made in this turn and what the others made in the turns before.
    starts, _ = play(program.placement, program.ranks, _one_turn, _one_turn, _turns_apart, sent=program.lowered)
    if (entry := stuck(program.ranks, starts)) is not None:
        message = f"rank {entry[0]} [{entry[1]}] {entry[2]}: its input is never made; verify(program) shows why"
        raise ScheduleError(message, rank=entry[0], position=entry[1], action=entry[2])
    taken: list[list[int]] = [[] for _ in range(1 + int(max((row[-1] for row in starts if row), default=0)))]
    for rank, row in enumerate(starts):
        for turn in row:
            taken[turn].append(rank)  # type: ignore[call-overload]  # whole numbers, as all times are
    return list(chain.from_iterable(taken))


def _one_turn(*entry: object) -> int:
    return 1


def _turns_apart(source: int, destination: int) -> int:
    return -1 if source < destination else 0


def stuck(lists: Sequence[Sequence[Action]], times: Sequence[Sequence[float]]) -> Entry | None:
    """The first entry that never ran, of the first rank that has one."""
    for rank, (row, mine) in enumerate(zip(lists, times, strict=True)):
        if len(mine) < len(row):
            return rank, len(mine), row[len(mine)]
    return None
