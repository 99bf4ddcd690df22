"""What no schedule of a placement can beat.

    Costs, placement, m --> lower_bound (this file) --> plan

Torch-free. Each bound holds for every order, with any amount of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from sixfold.pipeline.costs import Costs

__all__ = ["least_memory", "lower_bound"]


def lower_bound(costs: Costs, placement: Sequence[int], microbatches: int) -> float:
    """A makespan that no schedule of ``placement`` can go below; weight gradients may come last.

    The largest, over ranks, of two chains:

    - the first microbatch reaches the rank, which then does all its work;
    - it reaches the rank, which does all its F and I; the last of those is an I, of some stage s,
      and then the input gradients of the stages before s and stage 0's weight gradient remain;

    and of one microbatch on its way down and up alone. All O(stages).
    """
    stages = range(len(placement))
    hop = [0.0] + [costs.hop if placement[s] != placement[s - 1] else 0.0 for s in stages[1:]]
    reached = list(accumulate((costs.forward[s - 1] + hop[s] for s in stages[1:]), initial=0.0))
    # home[s]: from the end of stage s's I to the end of everything that only waits for it
    home = [costs.backward_weight[0]]
    for s in stages[1:]:
        home.append(hop[s] + costs.backward_input[s - 1] + home[-1])
    one_microbatch = reached[-1] + costs.forward[-1] + costs.backward_input[-1] + home[-1]
    bounds = [one_microbatch]
    for rank in set(placement):
        own = [s for s in stages if placement[s] == rank]
        head = min(reached[s] for s in own)
        urgent = microbatches * sum(costs.forward[s] + costs.backward_input[s] for s in own)
        late = microbatches * sum(costs.backward_weight[s] for s in own)
        bounds.append(head + urgent + max(late, min(home[s] for s in own)))
    return max(bounds)


def least_memory(activation: Sequence[float], placement: Sequence[int]) -> float:
    """Activations that any schedule must hold on some rank: one microbatch on all stages of the rank.

    A rank's F of a later stage comes before the W of its earlier ones for each microbatch, so all of
    them are held when its last F ends; running microbatches one after another needs no more.
    """
    return max(sum(a for a, r in zip(activation, placement, strict=True) if r == rank) for rank in set(placement))
