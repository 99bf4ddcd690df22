"""Improving an order: tabu search over critical blocks, as for job shops.

    Shop, order --> better order (this file) --> plan

Torch-free. [Note: critical blocks] A makespan is the length of a longest chain of operations without
idle time between them. On each rank the chain is a *block* of neighbours in the list, and only a change inside
a block can shorten the makespan: moving an operation behind, or before, another of its block (Balas and
Vazacopoulos 1998; Nowicki and Smutnicki 1996). A move is priced from the moved operations alone, with the old
times before and after them; the cheapest is made even if it is worse than nothing, and
what it undid is forbidden for a while, so that the search leaves a local optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import NamedTuple

from sixfold.pipeline.plan.shop import ROUNDING, Order, Shop, Times

__all__ = ["improved"]

_REACH = 6  # places that a move may go
_FORBIDDEN = 12  # moves for which an undone pair is forbidden, plus up to _SPREAD
_SPREAD = 8
_PATIENCE = 1500  # moves without a better order before starting again from a shaken best


class _Move(NamedTuple):
    """On ``rank``, positions ``begin``.. become ``operations``."""

    rank: int
    begin: int
    operations: list[int]


def improved(shop: Shop, order: Order, enough: float, random: Random, go_on: Callable[[], bool]) -> tuple[float, Order]:
    """The best order found from ``order`` until ``go_on()`` is false or its makespan is at most ``enough``.

    Args:
        order: right, within the cap, and not hanging; it is not changed.
        go_on: asked before each move; it holds the clock.
    Returns:
        (makespan, order).
    """
    order = [list(row) for row in order]
    times = shop.play(order)
    assert times is not None, "tabu search starts from an order that runs"
    best, best_order = times.makespan, [list(row) for row in order]
    forbidden: dict[tuple[int, int], int] = {}
    turn = since = 0
    while best > enough + ROUNDING and go_on():
        turn += 1
        move = _cheapest(shop, order, times, best, forbidden, turn, random)
        if move is None or turn - since > _PATIENCE:
            order, forbidden, since = [list(row) for row in best_order], {}, turn
            times = _shaken(shop, order, random)
            continue
        row, (_, begin, operations) = order[move.rank], move
        old = row[begin : begin + len(operations)]
        for pair in pairwise(old):
            forbidden[pair] = turn + _FORBIDDEN + random.randrange(_SPREAD)
        row[begin : begin + len(operations)] = operations
        after = shop.play(order)
        if after is None:  # a move that the cheap test let through closes a cycle
            row[begin : begin + len(operations)] = old
            forbidden[operations[0], operations[1]] = turn + 4 * _FORBIDDEN
            continue
        times = after
        if times.makespan < best - ROUNDING:
            best, best_order, since = times.makespan, [list(row) for row in order], turn
    return best, best_order


def _cheapest(
    shop: Shop,
    order: Order,
    times: Times,
    best: float,
    forbidden: dict[tuple[int, int], int],
    turn: int,
    random: Random,
) -> _Move | None:
    """The allowed move with the smallest estimated makespan, ties by chance."""
    tail = _tails(shop, order, times)
    held = [_held(shop, row) for row in order]
    cheapest: tuple[float, _Move] | None = None
    for move in _moves(shop, order, times, tail, random):
        level = held[move.rank][move.begin]
        for operation in move.operations:
            level += shop.memory[operation]
            if level > shop.memory_cap:
                break
        else:
            price = _estimate(shop, order[move.rank], times, tail, move)
            taboo = any(forbidden.get(pair, 0) > turn for pair in pairwise(move.operations))
            if taboo and price >= best - ROUNDING:
                continue
            price += random.random() * 1e-3 * best
            if cheapest is None or price < cheapest[0]:
                cheapest = (price, move)
    return cheapest[1] if cheapest else None


def _moves(shop: Shop, order: Order, times: Times, tail: list[float], random: Random) -> list[_Move]:
    """Moves inside the blocks of one critical chain that keep stages ascending and, nearly surely, close no cycle."""
    position = {operation: at for row in order for at, operation in enumerate(row)}
    found = []
    for rank, first, last in _blocks(shop, order, times, position, random):
        row = order[rank]
        for here in range(first, last):
            found += [
                _Move(rank, here, [*row[here + 1 : to + 1], row[here]]) for to in _later(shop, row, tail, here, last)
            ]
        for here in range(first + 2, last + 1):  # a move by one place is a move of the other by one
            found += [
                _Move(rank, to, [row[here], *row[to:here]])
                for to in _earlier(shop, row, times, here, first)
                if to < here - 1
            ]
    return found


def _later(shop: Shop, row: list[int], tail: list[float], here: int, last: int) -> list[int]:
    """Positions behind which the operation at ``here`` may go."""
    moved, places = row[here], []
    user = shop.user[moved]
    after_user = tail[user] + shop.duration[user] - ROUNDING if user >= 0 else 0.0
    for to in range(here + 1, min(last, here + _REACH) + 1):
        other = row[to]
        if other == user or shop.bound_together(moved, other) or tail[other] + shop.duration[other] < after_user:
            break
        places.append(to)
    return places


def _earlier(shop: Shop, row: list[int], times: Times, here: int, first: int) -> list[int]:
    """Positions before which the operation at ``here`` may go."""
    moved, places = row[here], []
    source = shop.source[moved]
    arrival = times.end[source] - ROUNDING if source >= 0 else 0.0
    for to in range(here - 1, max(first, here - _REACH) - 1, -1):
        other = row[to]
        if other == source or shop.bound_together(other, moved) or times.end[other] < arrival:
            break
        places.append(to)
    return places


def _blocks(
    shop: Shop, order: Order, times: Times, position: dict[int, int], random: Random
) -> list[tuple[int, int, int]]:
    """(rank, first, last position) of each block of one critical chain, chosen at random among equals."""
    latest = [row[-1] for row in order if row and times.end[row[-1]] >= times.makespan - ROUNDING]
    operation = random.choice(latest)
    blocks = []
    rank, last = shop.rank[operation], position[operation]
    while True:
        at, start = position[operation], times.start[operation]
        causes = []
        if at > 0 and times.end[order[rank][at - 1]] >= start - ROUNDING:
            causes.append(order[rank][at - 1])
        source = shop.source[operation]
        if source >= 0 and source not in causes and times.end[source] + shop.lag[operation] >= start - ROUNDING:
            causes.append(source)
        cause = random.choice(causes) if causes and start > ROUNDING else None
        if cause is None or at == 0 or cause != order[rank][at - 1]:
            if last > at:
                blocks.append((rank, at, last))
            if cause is None:
                return blocks
            rank, last = shop.rank[cause], position[cause]
        operation = cause


def _estimate(shop: Shop, row: list[int], times: Times, tail: list[float], move: _Move) -> float:
    """Longest chain through the moved operations, with the old times around them."""
    begin, operations = move.begin, move.operations
    now = times.end[row[begin - 1]] if begin else 0.0
    ends: dict[int, float] = {}
    for operation in operations:
        source = shop.source[operation]
        if source >= 0:
            now = max(now, ends.get(source, times.end[source]) + shop.lag[operation])
        now += shop.duration[operation]
        ends[operation] = now
    behind = begin + len(operations)
    rest = tail[row[behind]] + shop.duration[row[behind]] if behind < len(row) else 0.0
    longest = 0.0
    tails: dict[int, float] = {}
    for operation in reversed(operations):
        user = shop.user[operation]
        if user >= 0:
            rest = max(rest, tails.get(user, tail[user]) + shop.duration[user] + shop.lag[user])
        tails[operation] = rest
        longest = max(longest, ends[operation] + rest)
        rest += shop.duration[operation]
    return longest


def _tails(shop: Shop, order: Order, times: Times) -> list[float]:
    """Per operation, the longest chain from its end to the end of the step."""
    user, lag, duration = shop.user, shop.lag, shop.duration
    following = [-1] * shop.size
    for row in order:
        for operation, behind in pairwise(row):
            following[operation] = behind
    tail = [0.0] * shop.size
    for operation in reversed(times.sequence):
        longest = 0.0
        behind = following[operation]
        if behind >= 0:
            longest = tail[behind] + duration[behind]
        behind = user[operation]
        if behind >= 0:
            through = tail[behind] + duration[behind] + lag[behind]
            if through > longest:
                longest = through
        tail[operation] = longest
    return tail


def _held(shop: Shop, row: list[int]) -> list[float]:
    """Activations held before each position."""
    held, levels = 0.0, []
    for operation in row:
        levels.append(held)
        held += shop.memory[operation]
    return levels


def _shaken(shop: Shop, order: Order, random: Random, swaps: int = 10) -> Times:
    """Swap some random neighbours of ``order`` in place, staying right, within the cap and free of cycles."""
    times = shop.play(order)
    assert times is not None, "the best order runs"
    for _ in range(50 * swaps):
        row = random.choice([row for row in order if len(row) > 1])
        at = random.randrange(len(row) - 1)
        first, second = row[at], row[at + 1]
        if shop.bound_together(first, second):
            continue
        row[at], row[at + 1] = second, first
        after = shop.play(order) if shop.fits([row]) else None
        if after is None:
            row[at], row[at + 1] = first, second
            continue
        times = after
        if (swaps := swaps - 1) == 0:
            break
    return times
