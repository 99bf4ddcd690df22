"""Who waits for whom: the core of the deadlock proof.

    who gives and takes what --> stuck ranks (this file) --> verify
    waits of every rank --> shortest cycle, as a reader can see it (this file) --> ScheduleError

Torch-free. [Note: waits] A wait is ``(position, peer, need)`` in a rank's list:
the rank cannot pass ``position`` before ``peer`` has done its entries 0..need.
A tensor that is taken from the peer's entry j needs j. A rendezvous of our entry
i with the peer's entry j is two waits, i needing j - 1 and j needing i - 1: both
must have *arrived*. So one form serves compute-only programs, buffered messages
and rendezvous, and a program is free of deadlock iff every rank gets through.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from sixfold.pipeline.errors import ScheduleError
from sixfold.pipeline.program.counterexample import grid
from sixfold.pipeline.program.program import Program

__all__ = ["Wait", "deadlock", "progress", "shortest_cycle"]

_LINKS = 24  # of a cycle that a report shows; with the grid it has at most 60 lines

Wait = tuple[int, int, int]  # position, peer, need


def progress(lists: list[list[int]]) -> list[int]:
    """Let every rank go through its list of tensors as far as it can, without a clock.

    Args:
        lists: per rank, each tensor once at the rank that gives it and once at the one that takes it. A number n waits
            until the other end is reached as well; ``~n`` passes on and leaves n there for the other end.
    Returns:
        how far each rank gets; nothing hangs iff all get to the end.
    Cost: O(numbers).
    """
    at = [0] * len(lists)
    standing: dict[int, int] = {}  # tensor -> the rank that waits for its other end, or -1: it has been left there
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        mine, here = lists[rank], at[rank]
        while here < len(mine):
            number = mine[here]
            tensor = number if number >= 0 else ~number
            other = standing.pop(tensor, None)
            if other is None:
                if number >= 0:
                    standing[tensor] = rank
                    break
                standing[tensor] = -1
            elif other >= 0:
                at[other] += 1
                ready.append(other)
            here += 1
        at[rank] = here
    return at


def shortest_cycle(waits: list[list[Wait]], done: list[int]) -> list[tuple[int, Wait]]:
    """The fewest waits that block each other, in the order in which each waits for the next.

    From one wait the search goes rank by rank and keeps for each rank only the
    furthest entry that must be done: a prefix maximum, so a start costs O(ranks^2),
    not O(entries).

    Args:
        waits: per rank, ascending in position.
        done: entries that each rank gets through; at least one rank is stuck.
    Returns:
        (rank, wait) of each link of the cycle.
    """
    left = [[wait for wait in mine if wait[0] >= done[rank]] for rank, mine in enumerate(waits)]
    furthest = [_furthest_by_peer(mine) for mine in left]
    best: list[tuple[int, Wait]] = []
    for rank, mine in enumerate(left):
        for wait in mine:
            found = _cycle_through(rank, wait, furthest, len(best) - 1 if best else len(waits) + 1)
            if found:
                best = found
            if len(best) == 2:
                return best
    assert best, f"ranks are stuck at {done} but no cycle of waits was found"
    return best


_Furthest = dict[int, tuple[list[int], list[Wait]]]  # peer -> positions, the wait of largest need up to each


def _furthest_by_peer(mine: list[Wait]) -> _Furthest:
    table: _Furthest = {}
    for wait in mine:
        positions, largest = table.setdefault(wait[1], ([], []))
        positions.append(wait[0])
        largest.append(wait if not largest or wait[2] > largest[-1][2] else largest[-1])
    return table


def _cycle_through(rank: int, wait: Wait, furthest: list[_Furthest], limit: int) -> list[tuple[int, Wait]]:
    """The shortest cycle that starts with ``wait`` of ``rank`` and has at most ``limit`` links, or []."""
    # Per rank: furthest entry needed so far, and the chain of waits that needs it.
    needed: dict[int, tuple[int, list[tuple[int, Wait]]]] = {wait[1]: (wait[2], [(rank, wait)])}
    frontier = [wait[1]]
    for _ in range(limit - 1):
        after: dict[int, tuple[int, list[tuple[int, Wait]]]] = {}
        for at in frontier:
            need, chain = needed[at]
            for peer, (positions, largest) in furthest[at].items():
                index = bisect_right(positions, need) - 1
                if index < 0:
                    continue
                link = largest[index]
                known = max(needed.get(peer, (-1, []))[0], after.get(peer, (-1, []))[0])
                if link[2] > known:
                    after[peer] = (link[2], [*chain, (at, link)])
        if rank in after and after[rank][0] >= wait[0]:
            return after[rank][1]
        needed.update(after)
        frontier = list(after)
    return []


def deadlock(program: Program, links: Sequence[tuple[int, Wait]], *, rendezvous: bool) -> ScheduleError:
    """``links`` wait for each other: (rank, wait) in the order in which each waits for the next.

    Args:
        rendezvous: whether a wait ends at the entry behind the one that it needs done; see [Note: waits].
    """
    cycle = [(rank, wait[0], program.ranks[rank][wait[0]]) for rank, wait in links]
    lines = (
        "deadlock: each of these waits for the next, the last for the first",
        *_chain(program, links, int(rendezvous)),
        *grid(program, {(rank, position) for rank, position, _ in cycle}),
    )
    rank, position, action = cycle[0]
    return ScheduleError("\n".join(lines), rank=rank, position=position, action=action, cycle=cycle)


def _chain(program: Program, links: Sequence[tuple[int, Wait]], behind: int) -> Iterator[str]:
    for rank, (position, peer, need) in links[:_LINKS]:
        action = program.ranks[rank][position]
        at = need + behind
        yield f"  rank {rank} [{position}] {action} waits for rank {peer} [{at}] {program.ranks[peer][at]}"
    if len(links) > _LINKS:
        yield f"  and {len(links) - _LINKS} more"
