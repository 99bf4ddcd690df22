"""List scheduling: at each moment every free rank starts the action it favours most among those that can run.

    placement, favour, room --> order of each rank (this file) --> hanayo, v_half, v_min

The clock ticks in units of one stage's F; I and W take one unit, B two, messages
none. Microbatches pass each stage in ascending order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sixfold.pipeline.action import Action, Kind
from sixfold.pipeline.placement import vee
from sixfold.pipeline.program import Program

__all__ = ["Listed", "best_v", "list_schedule"]

_UNITS = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
Favour = Callable[[Kind, int], float]  # kind, stage -> smaller runs first


@dataclass(frozen=True)
class Listed:
    """Rows of actions, the time that they take, and the most stages' activations that a rank holds."""

    rows: tuple[tuple[Action, ...], ...]
    makespan: int
    peak: int


def list_schedule(
    placement: Sequence[int], microbatches: int, favour: Favour, *, split: bool, room: int | None = None, pace: int = 0
) -> Listed:
    """Schedule every microbatch through every stage.

    Args:
        split: backwards are I and W, else B.
        room: stages' activations that a rank may hold, at least its number of stages.
        pace: units between the moments from which on two microbatches may enter.
    Cost: O(makespan * ranks), a constant per action.

    [Note: room] A forward starts only if its microbatch's later stages on the rank would still fit, so that no choice
    ends in a deadlock. The last stage but one may take the last place if the rank holds something of its last stage:
    that comes back by itself, since each rank lets microbatches pass in order and backwards need no room.
    """
    ranks, last = max(placement) + 1, len(placement) - 1
    back = Kind.I if split else Kind.B
    mine = [[s for s, holder in enumerate(placement) if holder == rank] for rank in range(ranks)]
    spare = {s: len(stages) - i for stages in mine for i, s in enumerate(stages)}  # this stage and those behind it
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    favoured = [sorted(((k, s) for s in stages for k in kinds), key=lambda at: favour(*at)) for stages in mine]
    # What can run: (time from which on, microbatch), in order of both.
    ready: dict[tuple[Kind, int], deque[tuple[int, int]]] = {at: deque() for row in favoured for at in row}
    ready[Kind.F, 0].extend((pace * k, k) for k in range(microbatches))
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    free, held, peak = [0] * ranks, [0] * ranks, 0
    deep = [0] * ranks  # what a rank holds of its last stage
    left, now = microbatches * len(placement) * len(kinds), 0
    while left:
        assert now <= max(pace * microbatches, *free), f"nothing can run at {now} with room for {room}"
        for rank in (r for r in range(ranks) if free[r] <= now):
            for kind, stage in favoured[rank]:
                queue = ready[kind, stage]
                if not queue or queue[0][0] > now:
                    continue
                if kind is Kind.F:
                    places = 1 if spare[stage] == 2 and deep[rank] else spare[stage]
                    if room is not None and held[rank] + places > room:
                        continue
                    held[rank] += 1
                    deep[rank] += spare[stage] == 1
                    peak = max(peak, held[rank])
                elif kind is not Kind.I:
                    held[rank] -= 1
                    deep[rank] -= spare[stage] == 1
                _, k = queue.popleft()
                end = free[rank] = now + _UNITS[kind]
                rows[rank].append(Action(stage, kind, k))
                left -= 1
                if kind is Kind.F:
                    ready[(Kind.F, stage + 1) if stage < last else (back, last)].append((end, k))
                elif kind is not Kind.W and stage:
                    ready[back, stage - 1].append((end, k))
                if kind is Kind.I:
                    ready[Kind.W, stage].append((end, k))
                break
        now += 1
    return Listed(tuple(map(tuple, rows)), max(free), peak)


def best_v(ranks: int, microbatches: int, tries: Sequence[tuple[str, int]], room: int, name: str) -> Program:
    """The shortest of several list schedules of a V; of equally short ones the first.

    Args:
        tries: of each the order of preference, such as "F1 F0 I1 I0 W0 W1" (kinds with the chunk), and the pace.
    """
    tried = []
    for order, pace in tries:
        turn = {word: at for at, word in enumerate(order.split())}

        def favour(kind: Kind, stage: int, turn: dict[str, int] = turn) -> float:
            return turn[f"{kind.value}{int(stage >= ranks)}"]

        tried.append(list_schedule(vee(ranks), microbatches, favour, split=True, room=room, pace=pace))
    best = min(tried, key=lambda listed: listed.makespan)
    return Program(best.rows, microbatches, vee(ranks), name)
