"""Improving an order: tabu search over critical blocks, as for job shops.

    JobShop, order --> better order (this file) --> plan

Torch-free. [Note: critical blocks] A makespan is the length of a *critical chain*: operations without idle time
between them, from the start of the step to its end. Where the chain stays on a rank it is a *block* of neighbours in
that rank's list, and only a change inside a block can shorten the makespan. So a *move* takes one operation of a block
behind, or before, another of it (Balas and Vazacopoulos 1998; Nowicki and Smutnicki 1996). A move is priced from the
operations that it touches alone, with the old times before and after them.

[Note: taboo] Each turn makes the cheapest move, even one that makes the order worse: that is how the search leaves a
local optimum. So that the next turn does not take it back, neighbours that a move parted may not become neighbours
again for some turns, unless that gives the best order so far (Glover's aspiration).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import NamedTuple

from sixfold.pipeline.job_shop.job_shop import ROUNDING, JobShop, Order, Times

__all__ = ["improved"]

_REACH = 6  # places that a move may go
_TABOO_TURNS, _MORE_TURNS = 12, 8  # parted neighbours stay apart for the first, plus less than the second by chance
_PATIENCE = 1500  # turns without a better order before starting again from a shaken best

_Taboo = dict[tuple[int, int], int]  # (a, b) -> the turn before which b may not come right behind a


class _Move(NamedTuple):
    """``operations`` take their places in ``rank``'s list, from ``begin`` on, in this new order."""

    rank: int
    begin: int
    operations: list[int]


def improved(
    shop: JobShop, order: Order, enough: float, random: Random, go_on: Callable[[], bool]
) -> tuple[float, Order]:
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
    taboo: _Taboo = {}
    turn = fresh = 0  # fresh: the turn of the last better order, or new start
    while best > enough + ROUNDING and go_on():
        turn += 1
        move = _cheapest(shop, order, times, best, taboo, turn, random)
        if move is None or turn - fresh > _PATIENCE:
            order, taboo, fresh = [list(row) for row in best_order], {}, turn
            times = _shaken(shop, order, random, go_on)
            continue
        row, (_, begin, operations) = order[move.rank], move
        places = slice(begin, begin + len(operations))
        old, row[places] = row[places], operations
        for pair in pairwise(old):
            taboo[pair] = turn + _TABOO_TURNS + random.randrange(_MORE_TURNS)
        after = shop.play(order)
        if after is None:  # ``_later`` and ``_earlier`` let a move through that closes a cycle: not again soon
            row[places] = old
            taboo[operations[0], operations[1]] = turn + 4 * _TABOO_TURNS
            continue
        times = after
        if times.makespan < best - ROUNDING:
            best, best_order, fresh = times.makespan, [list(row) for row in order], turn
    return best, best_order


def _cheapest(
    shop: JobShop,
    order: Order,
    times: Times,
    best: float,
    taboo: _Taboo,
    turn: int,
    random: Random,
) -> _Move | None:
    """The move with the smallest estimated makespan that is within the cap and not taboo, ties by chance."""
    tail = _tails(shop, order, times)
    held = [_held(shop, row) for row in order]
    cheapest: tuple[float, _Move] | None = None
    for move in _moves(shop, order, times, tail, random):
        if not _fits(shop, held[move.rank][move.begin], move.operations):
            continue
        price = _estimate(shop, order[move.rank], times, tail, move)
        forbidden = any(taboo.get(pair, 0) > turn for pair in pairwise(move.operations))
        if forbidden and price >= best - ROUNDING:
            continue
        price += random.random() * 1e-3 * best
        if cheapest is None or price < cheapest[0]:
            cheapest = (price, move)
    return cheapest[1] if cheapest else None


def _moves(shop: JobShop, order: Order, times: Times, tail: list[float], random: Random) -> list[_Move]:
    """Moves inside the blocks of one critical chain; each stage stays ascending and, nearly surely, nothing hangs."""
    position = {operation: at for row in order for at, operation in enumerate(row)}
    found = []
    for rank, first, last in _blocks(shop, order, times, position, random):
        row = order[rank]
        for here in range(first, last):
            found += [
                _Move(rank, here, [*row[here + 1 : to + 1], row[here]]) for to in _later(shop, row, tail, here, last)
            ]
        for here in range(first + 2, last + 1):
            found += [
                _Move(rank, to, [row[here], *row[to:here]])
                for to in _earlier(shop, row, times, here, first)
                if to < here - 1  # by one place: the other's move by one place later, found above
            ]
    return found


def _later(shop: JobShop, row: list[int], tail: list[float], here: int, last: int) -> list[int]:
    """Positions behind which the operation at ``here`` may go.

    Behind ``other`` it would wait for itself if a chain led from its user to ``other``. Then the user's way to the end
    of the step would be the longer one (or as long, where the user takes no time); so such positions are left out.
    """
    moved, places = row[here], []
    user = shop.user[moved]
    after_user = tail[user] + shop.duration[user] - ROUNDING if user >= 0 else 0.0
    for to in range(here + 1, min(last, here + _REACH) + 1):
        other = row[to]
        if other == user or shop.bound_together(moved, other) or tail[other] + shop.duration[other] < after_user:
            break
        places.append(to)
    return places


def _earlier(shop: JobShop, row: list[int], times: Times, here: int, first: int) -> list[int]:
    """Positions before which the operation at ``here`` may go; the mirror image of ``_later``, with the source."""
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
    shop: JobShop, order: Order, times: Times, position: dict[int, int], random: Random
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


def _estimate(shop: JobShop, row: list[int], times: Times, tail: list[float], move: _Move) -> float:
    """Makespan after ``move``, as the longest chain through the operations that it touches.

    First their new ends, forward from the old ends before them, then their new tails, back from the old ones behind.
    """
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


def _tails(shop: JobShop, order: Order, times: Times) -> list[float]:
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


def _held(shop: JobShop, row: list[int]) -> list[float]:
    """Activations held before each position."""
    held, levels = 0.0, []
    for operation in row:
        levels.append(held)
        held += shop.memory[operation]
    return levels


def _fits(shop: JobShop, held: float, operations: list[int]) -> bool:
    """Whether ``operations`` in this order stay within the cap on a rank that holds ``held`` before them."""
    for operation in operations:
        held += shop.memory[operation]
        if held > shop.memory_cap:
            return False
    return True


def _shaken(shop: JobShop, order: Order, random: Random, go_on: Callable[[], bool], swaps: int = 10) -> Times:
    """Swap some random neighbours of ``order`` in place, staying right, within the cap and free of cycles."""
    times = shop.play(order)
    assert times is not None, "the best order runs"
    for _ in range(50 * swaps):
        if not go_on():
            break
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
