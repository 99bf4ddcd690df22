"""Layers into stages: contiguous pieces whose largest is as small as possible.

    layer costs --> layers per stage (this file) --> whoever builds the stages

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from sixfold.pipeline.errors import ScheduleError, number, whole

__all__ = ["partition"]


def partition(
    layer_costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0, allow_empty: bool = False
) -> tuple[int, ...]:
    """Cut layers into ``stages`` contiguous pieces so that the most expensive piece is as cheap as possible.

    Among the cuts with that largest piece it takes the one with the smallest sum of squared costs: the others are even
    too. Among those it takes the one with more layers in earlier stages.

    Args:
        layer_costs: (L,) cost of each layer, finite, >= 0; any unit.
        first: what the first stage does besides its layers (the embedding).
        last: what the last stage does besides its layers (head and loss); with one stage it bears both.
        allow_empty: whether a stage may have no layer; then such a stage only passes on, or embeds.
    Returns:
        number of layers of each stage; ``sum`` is L.
    Raises:
        ScheduleError: more stages than layers without ``allow_empty``, or a cost that is negative, NaN or infinite.
    Cost: O(stages * L * (layers that fit into the largest piece)).
    """
    layers = len(layer_costs)
    stages = whole("stages", stages, least=1)
    layer_costs = [number(f"layer_costs[{at}]", cost) for at, cost in enumerate(layer_costs)]
    first, last = number("first", first), number("last", last)
    _check(layer_costs, stages, first, last, allow_empty)
    prefix = [0.0, *accumulate(layer_costs)]
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    least = 0 if allow_empty else 1
    # Sums of floats in another order may differ in the last bits: a piece may be that much over.
    most = _smallest_largest(prefix, extra, least) * (1.0 + 1e-12)

    # squares[i]: smallest sum of squares of stages 0..s over layers 0..i; cut[s][i]: where stage s begins in it
    squares = [math.inf] * (layers + 1)
    squares[0] = 0.0
    cuts: list[list[int]] = []
    for stage in range(stages):
        following, cut = [math.inf] * (layers + 1), [0] * (layers + 1)
        for end in range(layers + 1):
            for begin in range(end - least, -1, -1):
                cost = prefix[end] - prefix[begin] + extra[stage]
                if cost > most:
                    break
                if squares[begin] + cost * cost < following[end] * (1.0 - 1e-12):
                    following[end], cut[end] = squares[begin] + cost * cost, begin
        squares = following
        cuts.append(cut)
    sizes = []
    end = layers
    for cut in reversed(cuts):
        sizes.append(end - cut[end])
        end = cut[end]
    return tuple(reversed(sizes))


def _smallest_largest(prefix: list[float], extra: list[float], least: int) -> float:
    """Cost of the largest piece in the best cut. ``best[end]`` is that of the stages so far over layers 0..end."""
    layers = len(prefix) - 1
    best = [math.inf] * (layers + 1)
    best[0] = 0.0
    for stage, more in enumerate(extra):
        following = [math.inf] * (layers + 1)
        for end in range(stage * least + least, layers + 1):
            # The stages before cost more with a later begin, this one less: look where they cross.
            low, high = (stage * least, end - least) if stage else (0, 0)
            while low < high:
                middle = (low + high) // 2
                if best[middle] >= prefix[end] - prefix[middle] + more:
                    high = middle
                else:
                    low = middle + 1
            for begin in (low, max(low - 1, stage * least if stage else 0)):
                following[end] = min(following[end], max(best[begin], prefix[end] - prefix[begin] + more))
        best = following
    return best[layers]


def _check(layer_costs: Sequence[float], stages: int, first: float, last: float, allow_empty: bool) -> None:
    if len(layer_costs) < stages and not allow_empty:
        raise ScheduleError(
            f"{len(layer_costs)} layers for {stages} stages: each stage needs one; use fewer stages or allow_empty=True"
        )
    for name, cost in (
        *((f"layer_costs[{at}]", cost) for at, cost in enumerate(layer_costs)),
        ("first", first),
        ("last", last),
    ):
        if not (math.isfinite(cost) and cost >= 0):
            raise ScheduleError(f"{name} is {cost}; costs are finite and >= 0")
