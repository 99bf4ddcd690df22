"""What no schedule of a placement can beat.

    Costs, placement, m --> lower_bound (this file) --> plan

Torch-free. Each bound holds for every order, with any amount of memory.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sixfold.pipeline.costs import Costs

__all__ = ["least_memory", "lower_bound"]


def lower_bound(costs: Costs, placement: Sequence[int], microbatches: int) -> float:
    """A makespan that no program of ``placement`` can go below under ``costs``; the proof is [Note: lower bound].

    The largest, over ranks, of two chains:

    - the first microbatch reaches the rank, which then does all its work;
    - it reaches the rank, which does all its F and I; the last of those is an I, of some stage s,
      and then the input gradients of the stages before s and stage 0's weight gradient remain;

    and of one microbatch on its way down and up alone. All O(stages). With ``overlap`` below one every time is
    multiplied by it, since all work may be in overlaps; a memory cap would raise it and is not looked at.
    """
    stages = range(len(placement))
    factor = min(1.0, costs.overlap)
    forward, backward_input, backward_weight = (
        [factor * time for time in row] for row in (costs.forward, costs.backward_input, costs.backward_weight)
    )
    hop = [0.0] + [costs.between(placement[s - 1], placement[s]) for s in stages[1:]]
    back = [0.0] + [costs.between(placement[s], placement[s - 1]) for s in stages[1:]]
    reached = list(accumulate((forward[s - 1] + hop[s] for s in stages[1:]), initial=0.0))
    # home[s]: from the end of stage s's I to the end of everything that only waits for it
    home = [backward_weight[0]]
    for s in stages[1:]:
        home.append(back[s] + backward_input[s - 1] + home[-1])
    one_microbatch = reached[-1] + forward[-1] + backward_input[-1] + home[-1]
    bounds = [one_microbatch]
    for rank in set(placement):
        own = [s for s in stages if placement[s] == rank]
        head = min(reached[s] for s in own)
        urgent = microbatches * sum(forward[s] + backward_input[s] for s in own)
        late = microbatches * sum(backward_weight[s] for s in own)
        bounds.append(head + urgent + max(late, min(home[s] for s in own)))
    return max(bounds)


def least_memory(activation: Sequence[float], placement: Sequence[int]) -> float:
    """Activations that any schedule without RECOMPUTE must hold on some rank: one microbatch on all its stages.

    A rank's F of a later stage comes before the W of its earlier ones for each microbatch, so all of
    them are held when its last F ends; running microbatches one after another needs no more.
    """
    return max(sum(a for a, r in zip(activation, placement, strict=True) if r == rank) for rank in set(placement))
