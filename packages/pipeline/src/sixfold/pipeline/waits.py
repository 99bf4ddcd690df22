"""Who waits for whom: the core of the deadlock proof.

    waits of every rank --> stuck ranks, shortest cycle (this file) --> verify

Torch-free. [Note: waits] A wait is ``(position, peer, need)`` in a rank's list:
the rank cannot pass ``position`` before ``peer`` has done its entries 0..need.
A tensor that is taken from the peer's entry j needs j. A rendezvous of our entry
i with the peer's entry j is two waits, i needing j - 1 and j needing i - 1: both
must have *arrived*. So one form serves compute-only programs, buffered messages
and rendezvous, and a program is free of deadlock iff every rank gets through.
"""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Wait", "meet", "run_to_the_end", "shortest_cycle"]

Wait = tuple[int, int, int]  # position, peer, need


def meet(messages: list[list[int]]) -> bool:
    """Whether ranks that go through their lists and wait at each message for its other end all get through.

    The rendezvous of ``run_to_the_end`` in half the time; it does not say who is stuck.

    Args:
        messages: per rank; each number occurs twice, on two ranks.
    """
    at = [0] * len(messages)
    standing: dict[int, int] = {}  # message -> the rank that waits there
    ready = list(range(len(messages)))
    while ready:
        rank = ready.pop()
        mine, here = messages[rank], at[rank]
        while here < len(mine):
            other = standing.pop(mine[here], None)
            if other is None:
                standing[mine[here]] = rank
                break
            here += 1
            at[other] += 1
            ready.append(other)
        at[rank] = here
    return not standing


def run_to_the_end(waits: list[list[Wait]], lengths: list[int]) -> list[int]:
    """Let every rank go as far as its waits allow.

    Args:
        waits: per rank, ascending in position.
        lengths: entries in each rank's list.
    Returns:
        entries done per rank; equal to ``lengths`` iff nothing hangs.
    Cost: O(waits), since a rank is looked at again only when the one it waits for moved.
    """
    done, cursor = [0] * len(lengths), [0] * len(lengths)
    sleepers: list[list[int]] = [[] for _ in lengths]
    ready = list(range(len(lengths)))
    while ready:
        rank = ready.pop()
        mine, at = waits[rank], cursor[rank]
        while at < len(mine) and done[mine[at][1]] > mine[at][2]:
            at += 1
        cursor[rank] = at
        reached = mine[at][0] if at < len(mine) else lengths[rank]
        if reached != done[rank]:
            done[rank] = reached
            ready += sleepers[rank]
            sleepers[rank] = []
            ready.append(rank)  # arriving here may be all that the wait here asked of us
        elif at < len(mine):
            sleepers[mine[at][1]].append(rank)
    return done


def shortest_cycle(waits: list[list[Wait]], done: list[int]) -> list[tuple[int, Wait]]:
    """The fewest waits that block each other, in the order in which each waits for the next.

    From one wait the search goes rank by rank and keeps for each rank only the
    furthest entry that must be done: a prefix maximum, so a start costs O(ranks^2),
    not O(entries).

    Args:
        waits: as in ``run_to_the_end``.
        done: its result, with at least one rank stuck.
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
