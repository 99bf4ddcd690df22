"""What no schedule can beat, on a placement or on any, within a cap.

    Costs, placement or ranks, m, cap --> lower_bound, lower_bound_of_any (this file) --> plan

Torch-free.

[Note: lower bound] It holds for every program that ``verify`` accepts: any order, B or I and W, overlaps of any
parts, RECOMPUTE and STEP. Such a program runs as *blocks*, single actions or OVERLAP_F_B, one at a time on each rank. A
block that has the parts P begins when the inputs of all are there, takes at least f * sum of their times with
f = min(1, overlap), and hands on all its results at its end. So with every time multiplied by f:

(a) a chain of actions that take each other's results lasts at least the sum of its times and of the hops between ranks,
    also where two of them are parts of one block, since that lasts at least the sum of both;
(b) what a rank does takes it at least the sum of its times, one block after another.

From these, for a rank r with the stages S_r: nothing on r begins before the first microbatch has reached its first
stage in S_r (a), ``head``. From then on it does all its work (b): T >= head + F's and I's + W's. Now look at the block
that ends last among those of r with an F or a part that makes an input gradient (I or B), at time E >= head + F's and
I's (b). It holds an I or B of some s in S_r, since the backward of each F in it is there too or comes later. If s > 0,
that gradient still goes through I's or B's of stages s - 1 to 0 and stage 0's W, ``home`` (a): T >= E + home(s). If
s = 0, stage 0's W is either still to come (T >= E + W) or is in that block or the B, besides the F's and I's:
T >= E >= head + F's and I's + W. And one microbatch alone goes up and down (a).

[Note: memory bound] Take a rank r and one of its stages s. A microbatch's activation is held from the start of its F
to the end of its W or B. That is at least the chain from that F up to the last stage and back to s, ``life``. From I
to W it is held without what I freed. (Inside a block let the parts run one after another, each f times its time:
lists, results and memory stay what they are.) No moment has more than the cap on r, and none before ``head`` has
anything, so cap * (T - head) >= the sum of sizes times lives over all microbatches. A microbatch with RECOMPUTE is
cheaper, since until then only the stage's input is held; but it makes r work F longer. So for some number x_s of
recomputed ones both hold: T >= work bound + sum x_s F_s, and cap * (T - head) >= sum of (m - x_s) full and x_s cheap.
The least T of all fractions x_s is a bound. The cheapest memory per time is recomputed first. What I adds until W
(``Costs.deferred``) is not counted: a program of B's holds none of it.

[Note: any placement] Order the ranks by the first stage that they hold: the i-th is reached after F's of at least i
stages and at least i messages, ``head_i``. It works at most T - head_i, and what it does is the work of whole stages.
So the works of the ranks, each rounded down to a sum of stages' works, must reach that of all stages.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from sixfold.pipeline.simulation.costs import Costs
from sixfold.pipeline.simulation.memory import with_rounding

__all__ = ["least_memory", "lower_bound", "lower_bound_of_any"]

_SUMS = 1000  # of stages' works that are told apart; with more of them works are not rounded down


def lower_bound(costs: Costs, placement: Sequence[int], microbatches: int, memory_cap: float = math.inf) -> float:
    """A makespan that no program of ``placement`` can go below under ``costs`` within the cap.

    The proofs are [Note: lower bound] and [Note: memory bound]. The largest, over ranks, of three:

    - the first microbatch reaches the rank, which then does all its work;
    - it reaches the rank, which does all its F and I; the last of those is an I, of some stage s,
      and then the input gradients of the stages before s and stage 0's weight gradient remain;
    - it reaches the rank, whose cap must then hold every microbatch for as long as it needs to go up and down;

    and of one microbatch on its way up and down alone. O(stages log stages). With ``overlap`` below one every time is
    multiplied by it, since all work may be in overlaps.
    """
    times = _Times(costs, placement)
    stages = range(len(placement))
    sizes = _sizes(costs, placement)
    bounds = [times.one_microbatch]
    for rank in set(placement):
        own = [s for s in stages if placement[s] == rank]
        head = min(times.reached[s] for s in own)
        urgent = microbatches * sum(times.forward[s] + times.backward_input[s] for s in own)
        late = microbatches * sum(times.backward_weight[s] for s in own)
        work = head + urgent + max(late, min(times.home[s] for s in own))
        bounds.append(_within(memory_cap, work, head, 1, [_held(costs, times, sizes, s) for s in own], microbatches))
    return max(bounds)


def lower_bound_of_any(costs: Costs, ranks: int, microbatches: int, memory_cap: float = math.inf) -> float:
    """A makespan that no program on ``ranks`` ranks can go below, wherever its stages are.

    The proof is [Note: any placement]; the cap counts for all ranks together. Each rank holds one stage at least.
    """
    stages = range(len(costs.forward))
    apart = _Times(costs, [0] * len(stages))  # all on one rank: no messages
    hop = _least_hop(costs, ranks) if ranks > 1 else 0.0
    heads = [apart.reached[i] + i * hop for i in range(ranks)]
    works = [apart.forward[s] + apart.backward_input[s] + apart.backward_weight[s] for s in stages]
    least = (microbatches * sum(works) + sum(heads)) / ranks
    sums = _sums(works)
    if sums is not None:
        need = sum(works) * (1 - 1e-12)
        ends = sorted({head + microbatches * part for head in heads for part in sums})
        low, high = 0, len(ends) - 1
        while low < high:
            middle = (low + high) // 2
            parts = ((ends[middle] * (1 + 1e-12) - head) / max(1, microbatches) for head in heads)
            reached = sum(sums[at - 1] if (at := bisect_right(sums, part * (1 + 1e-12))) else 0.0 for part in parts)
            low, high = (low, middle) if reached >= need else (middle + 1, high)
        least = max(least, ends[low])
    sizes = _sizes(costs, [0] * len(stages)) if costs.activation is not None else [0.0] * len(stages)
    held = [_held(costs, apart, sizes, s) for s in stages]
    return max(apart.one_microbatch, _within(memory_cap, least, sum(heads) / ranks, ranks, held, microbatches))


class _Times:
    """Times of the stages in blocks, and of chains through them.

    Attributes, per stage:
        reached: when the first microbatch can begin it; ``home``: from the end of its I to the end of all that waits
            for that; ``life``: from the start of its F to the end of its I.
    """

    def __init__(self, costs: Costs, placement: Sequence[int]) -> None:
        stages = range(len(placement))
        factor = min(1.0, costs.overlap)
        self.forward, self.backward_input, self.backward_weight = (
            [factor * time for time in row] for row in (costs.forward, costs.backward_input, costs.backward_weight)
        )
        up = [0.0] + [_hop(costs, placement[s - 1], placement[s]) for s in stages[1:]]
        down = [0.0] + [_hop(costs, placement[s], placement[s - 1]) for s in stages[1:]]
        self.reached = list(accumulate((self.forward[s - 1] + up[s] for s in stages[1:]), initial=0.0))
        self.home = [self.backward_weight[0]]
        for s in stages[1:]:
            self.home.append(down[s] + self.backward_input[s - 1] + self.home[-1])
        self.life = [0.0] * len(placement)
        for s in reversed(stages):
            above = self.life[s + 1] + up[s + 1] + down[s + 1] if s + 1 < len(placement) else 0.0
            self.life[s] = self.forward[s] + above + self.backward_input[s]
        self.one_microbatch = self.life[0] + self.backward_weight[0]


_Held = tuple[float, float, float]  # size times time of a microbatch, what RECOMPUTE saves of it, and its time


def _held(costs: Costs, times: _Times, sizes: Sequence[float], s: int) -> _Held:
    size, kept = sizes[s], min(sizes[s], costs.input[s] if costs.input is not None else 0.0)
    after = (1.0 - costs.input_share) * times.backward_weight[s]
    again = times.forward[s] + times.backward_input[s]  # from RECOMPUTE's start to I's end at least
    cheap = size * (again + after) + kept * max(0.0, times.life[s] - again)
    full = size * (times.life[s] + after)
    return full, max(0.0, full - cheap), times.forward[s]


def _within(cap: float, work: float, head: float, ranks: int, held: Sequence[_Held], microbatches: int) -> float:
    """The least T with T >= work + recomputing / ranks and cap * ranks * (T - head) >= what is held meanwhile."""
    room = with_rounding(cap) * ranks
    total = microbatches * sum(full for full, _, _ in held)
    if not math.isfinite(room) or room <= 0 or not math.isfinite(total):
        return work
    by_memory = head + total / room
    for _, saved, time in sorted(held, key=lambda one: -one[1] / one[2] if one[2] else -math.inf):
        if by_memory <= work:
            break
        gain, price = microbatches * saved / room, microbatches * time / ranks
        if gain <= 0:
            continue
        part = min(1.0, (by_memory - work) / (gain + price))
        by_memory, work = by_memory - part * gain, work + part * price
    return max(by_memory, work)


def _sizes(costs: Costs, placement: Sequence[int]) -> list[float]:
    if costs.activation is not None:
        return list(costs.activation)
    return [1.0 / list(placement).count(rank) for rank in placement]


def _sums(works: Sequence[float]) -> list[float] | None:
    """Every sum of some of ``works``, ascending; None if they are too many."""
    sums = {0.0}
    for work in works:
        sums |= {round(known + work, 12) for known in sums}
        if len(sums) > _SUMS:
            return None
    return sorted(sums)


def _hop(costs: Costs, source: int, destination: int) -> float:
    return costs.between(source, destination)


def _least_hop(costs: Costs, ranks: int) -> float:
    return min(_hop(costs, a, b) for a in range(ranks) for b in range(ranks) if a != b)


def least_memory(activation: Sequence[float], placement: Sequence[int]) -> float:
    """Activations that any schedule without RECOMPUTE must hold on some rank: one microbatch on all its stages.

    A rank's F of a later stage comes before the W of its earlier ones for each microbatch, so all of
    them are held when its last F ends; running microbatches one after another needs no more.
    """
    return max(sum(a for a, r in zip(activation, placement, strict=True) if r == rank) for rank in set(placement))
