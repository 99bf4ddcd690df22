"""Balance: who of several holders of the same data writes it, or reads it for the others.

    replicated shards and their holders --> share_out (this file) --> parts per shard

Pure integers: no tensors, no group. Whole shards go greedily to the least loaded holder. Shards are cut only where
that leaves a rank more than half a percent above the bound.

[Note: the bound proves itself] Follow from the fullest rank to every rank that holds something it was given, and so
on. All data that these ranks were given is held by them alone. So their mean load is a lower bound of the fullest
rank, for any way to share out. When the fullest is near that mean, nothing better exists.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

_TOLERANCE = 0.005


class Shared(NamedTuple):
    """Data that each of ``holders`` (ranks, ascending) has; cuts fall on multiples of ``unit`` elements."""

    elements: int
    itemsize: int
    holders: tuple[int, ...]
    unit: int = 1

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


class Part(NamedTuple):
    """Elements [start, stop) of a shard, done by ``rank``."""

    rank: int
    start: int
    stop: int


def share_out(shards: Sequence[Shared], ranks: int) -> list[list[Part]]:
    """Give every element of every shard to one of its holders, so that the fullest rank has little.

    Returns:
        For each shard its parts, ascending; almost always one. The fullest rank is within 0.5 % of the lower
        bound, as far as units allow. The same on every rank that asks, since it depends on the arguments alone.
    Cost: shards x holders, then few steps over the distinct sets of holders.
    """
    owner = _greedy(shards, ranks)
    current: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for shard, rank in zip(shards, owner, strict=True):
        current[shard.holders][rank] += shard.nbytes
    wanted = _level({holders: dict(loads) for holders, loads in current.items()}, ranks)
    members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, shard in enumerate(shards):
        members[shard.holders].append(index)
    parts = [[Part(rank, 0, shard.elements)] for shard, rank in zip(shards, owner, strict=True)]
    for holders, indices in members.items():
        _move(shards, indices, parts, {rank: wanted[holders].get(rank, 0) - current[holders][rank] for rank in holders})
    return parts


def _greedy(shards: Sequence[Shared], ranks: int) -> list[int]:
    """Fewest holders first, then the largest, each to its least loaded holder; ties to the lowest rank."""
    loads, owner = [0] * ranks, [0] * len(shards)
    for index in sorted(range(len(shards)), key=lambda i: (len(shards[i].holders), -shards[i].nbytes, i)):
        rank = min(shards[index].holders, key=lambda holder: (loads[holder], holder))
        owner[index] = rank
        loads[rank] += shards[index].nbytes
    return owner


Loads = dict[tuple[int, ...], dict[int, int]]  # bytes by set of holders and rank


def _level(loads: Loads, ranks: int) -> Loads:
    """Move bytes between holders until the fullest rank is at its bound. See [Note: the bound proves itself]."""
    total = [0] * ranks
    for by_rank in loads.values():
        for rank, nbytes in by_rank.items():
            total[rank] += nbytes
    for _ in range(20 * ranks):
        fullest = max(range(ranks), key=lambda rank: (total[rank], -rank))
        came_from = _reachable(loads, fullest)
        mean = sum(total[rank] for rank in came_from) // len(came_from)
        if total[fullest] <= mean * (1 + _TOLERANCE):
            break
        emptiest = min(came_from, key=lambda rank: (total[rank], rank))
        path: list[tuple[int, int, tuple[int, ...]]] = []
        at = emptiest
        while at != fullest:
            before, holders = came_from[at]
            path.append((before, at, holders))
            at = before
        room = min(loads[holders][giver] for giver, _, holders in path)
        amount = min(room, total[fullest] - mean, max(mean - total[emptiest], 1))
        for giver, taker, holders in path:
            loads[holders][giver] -= amount
            loads[holders][taker] = loads[holders].get(taker, 0) + amount
        total[fullest] -= amount
        total[emptiest] += amount
    return loads


def _reachable(loads: Loads, start: int) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Ranks that can take over work of ``start``, directly or through others, each with the step before it."""
    came_from: dict[int, tuple[int, tuple[int, ...]]] = {start: (start, ())}
    queue = deque([start])
    while queue:
        giver = queue.popleft()
        for holders, by_rank in loads.items():
            if by_rank.get(giver, 0):
                for taker in holders:
                    if taker not in came_from:
                        came_from[taker] = (giver, holders)
                        queue.append(taker)
    return came_from


def _move(shards: Sequence[Shared], indices: list[int], parts: list[list[Part]], change: dict[int, int]) -> None:
    """Carry out ``change`` in bytes per rank among shards of one set of holders, cutting as few as that needs."""
    for index in sorted(indices, key=lambda i: (shards[i].nbytes, i)):
        shard, rank = shards[index], parts[index][0].rank
        stop = shard.elements
        while stop and change[rank] < 0 and (taker := max(change, key=lambda r: (change[r], -r))) != rank:
            give = min(-change[rank], change[taker]) // shard.itemsize
            give = min(stop, (give + shard.unit // 2) // shard.unit * shard.unit)
            if give <= 0:
                break
            parts[index].append(Part(taker, stop - give, stop))
            stop -= give
            change[rank] += give * shard.itemsize
            change[taker] -= give * shard.itemsize
        kept = [Part(rank, 0, stop)] if stop or not shard.elements else []
        parts[index] = kept + sorted(parts[index][1:], key=lambda part: part.start)
